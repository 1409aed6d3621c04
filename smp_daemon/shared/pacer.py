"""When encoding may send: a cap on bytes per second, pauses for trainers that communicate, and turns among the groups.

Pure: the caller passes the time and does the waiting.
"""

from __future__ import annotations

from holdfast.smp_daemon.shared.errors import ConfigError

BURST_S = 0.1
"""How far sending may run ahead of the rate, in seconds: work comes in units, and timers are late by milliseconds."""

MAX_TURNS = 64
"""Limit on turns: with more, each would get too little of the interval."""


class Pacer:
    """Computes how long to wait so that at most `rate` bytes are sent per second; a rate of 0 means no limit."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    def wait_s(self, count: int, now: float) -> float:
        """Account for `count` bytes to be sent at `now` (seconds). Returns how long to wait before sending them."""
        if not self.rate:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S)
        wait = max(0.0, self._free_at - now)
        self._free_at += count / self.rate
        return wait


class Patience:
    """Computes how long to wait for trainers that ask for quiet: at most `most_s`, and then no more until a moment at
    which none of them asks.

    So a trainer that never stops asking delays the work once, but does not stop it.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None

    def wait_s(self, asked_s: float, now: float) -> float:
        """How long to wait from `now` (seconds) before calling again; 0: continue.

        Args:
            asked_s: how long trainers want quiet from now on; 0: none does.
        """
        if asked_s <= 0:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return min(asked_s, max(0.0, self._since + self._most_s - now))


def turn_delay_s(group: int, turns: int, interval_s: float) -> float:
    """How long after its seal a snapshot of `group` is encoded, so that not all groups load the network at once.

    The first half of the interval between two snapshots is divided into `turns` turns. The second half is spare time
    for the groups with the last turn. Groups whose numbers differ by a multiple of `turns` send at the same time.
    """
    return group % turns / turns * interval_s / 2


def parse_turns(text: str) -> int:
    """Parse a number of turns. `smp_daemon.node.core.Settings` checks its range.

    Raises:
        ConfigError: the text is not an integer.
    """
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a number of turns: use 1 to {MAX_TURNS}, 1 for all groups at once"
        ) from error
