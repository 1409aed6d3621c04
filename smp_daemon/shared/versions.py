"""Which versions of holdfast can work together. docs/operating.md is for operators; this is the rule in the code.

Each process speaks a range of protocols, and says which: a trainer in its `Hello`, peers and commands in every request
to an SMP. Two processes can work together if their ranges overlap. Fields with defaults may be added within a protocol,
as a receiver ignores fields that it does not know. Any other change to the messages, or to the memory that a trainer
and an SMP share, needs a new protocol.

The files in an arena have a format number of their own. An SMP takes over an arena only if it reads that format.
"""

from __future__ import annotations

from importlib.metadata import version

from holdfast.smp_daemon.shared.errors import VersionMismatch

RELEASE = version("holdfast-train")

PROTOCOL_VERSION = 5
"""The newest protocol that this version speaks."""

OLDEST_PROTOCOL = 5
"""The oldest protocol that this version speaks: that of the release before, so that a job can be upgraded node by
node."""

ARENA_FORMAT = 3
"""Format of the files in an arena: records, layouts, slots and the board."""

UNSAID = (5, 5)
"""Protocols of a sender that names none: that of the first release."""

Range = tuple[int, int]


def spoken() -> Range:
    """The oldest and the newest protocol that this process speaks."""
    return OLDEST_PROTOCOL, PROTOCOL_VERSION


def check_range(who: str, said: Range, release: str = "") -> None:
    """Raises `VersionMismatch` unless this process and `who`, which speaks `said`, have a protocol in common."""
    oldest, newest = spoken()
    if said[0] <= newest and oldest <= said[1]:
        return
    theirs = f"holdfast {release}" if release else "another version of holdfast"
    older = "older" if said[1] < oldest else "newer"
    raise VersionMismatch(
        f"{who} runs {theirs}, which speaks {_text(said)}; the other side runs holdfast {RELEASE}, which speaks "
        f"{_text((oldest, newest))}. The first is {older} by more than one release: install the same version on both "
        "(docs/operating.md)"
    )


def _text(said: Range) -> str:
    return f"protocol {said[0]}" if said[0] == said[1] else f"protocols {said[0]} to {said[1]}"
