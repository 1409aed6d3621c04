"""Which versions of holdfast may meet. docs/upgrades.md is for operators; here is what the code goes by.

A trainer, an SMP and its peers each speak a range of protocols, and say which: a trainer in its `Hello`, whoever asks
an SMP in every request. They may meet if the ranges have one in common. Fields that have defaults may be added within a
protocol: who does not know one passes over it. Whatever else changes in what is said, or in what a trainer and an SMP
have mapped in common, is a new one.

What lies in an arena has a number of its own: an SMP takes over what it can read, and nothing else.
"""

from __future__ import annotations

from importlib.metadata import version

from holdfast.smp_daemon.shared.errors import VersionMismatch

RELEASE = version("holdfast-train")

PROTOCOL_VERSION = 4
"""The newest that is spoken here."""

OLDEST_PROTOCOL = 4
"""The oldest that is understood here: that of the release before this one, so that a job can be upgraded node by node.
The first release knows nothing of ranges: one that does not understand 4 must begin its frames with another magic."""

ARENA_FORMAT = 1
"""Of what lies in an arena: records, layouts, slots and the board."""

FIRST_FORMAT = 1
"""Of an arena that does not say."""

UNSAID = (4, 4)
"""What is spoken by whoever says nothing of it, as the first release does."""

Range = tuple[int, int]


def spoken() -> Range:
    """(oldest, newest) of this process."""
    return OLDEST_PROTOCOL, PROTOCOL_VERSION


def check_range(who: str, said: Range, release: str = "") -> None:
    """Whether this process and `who` may talk. Raises `VersionMismatch`."""
    oldest, newest = spoken()
    if said[0] <= newest and oldest <= said[1]:
        return
    theirs = f"holdfast {release}" if release else "another version of holdfast"
    older = "older" if said[1] < oldest else "newer"
    raise VersionMismatch(
        f"{who} is of {theirs} and speaks {_text(said)}; it met holdfast {RELEASE}, which speaks "
        f"{_text((oldest, newest))}. It is {older} by more than one release: install the same on both "
        "(docs/upgrades.md)"
    )


def _text(said: Range) -> str:
    return f"protocol {said[0]}" if said[0] == said[1] else f"protocols {said[0]} to {said[1]}"
