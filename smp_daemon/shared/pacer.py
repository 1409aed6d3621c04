"""When encoding may send: a cap on bytes per second, pauses for trainers that communicate, and turns among the groups.

Pure: the caller brings the clock and does the waiting.
"""

from __future__ import annotations

from holdfast.smp_daemon.shared.errors import ConfigError

BURST_S = 0.1
"""How far one may run ahead of the rate: work comes in units, and a timer is late by milliseconds."""

MAX_TURNS = 64
"""More would leave each too little of the interval."""


class Pacer:
    """Says how long to wait so that no more than `rate` bytes a second go by; a rate of 0 means no limit."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    def wait_s(self, count: int, now: float) -> float:
        """Account for `count` bytes that are about to go at `now` (seconds); how long to wait before they may."""
        if not self.rate:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S)
        wait = max(0.0, self._free_at - now)
        self._free_at += count / self.rate
        return wait


class Patience:
    """Says how long to wait for others who ask for quiet: no longer than `most_s`, and then not until all were content.

    So one who never stops asking delays the work at hand once, and does not stop it.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None

    def wait_s(self, asked_s: float, now: float) -> float:
        """How long to wait at `now` (seconds) before asking again; 0: go on.

        Args:
            asked_s: how long they want quiet from now on; 0: nobody does.
        """
        if asked_s <= 0:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return min(asked_s, max(0.0, self._since + self._most_s - now))


def turn_delay_s(group: int, turns: int, interval_s: float) -> float:
    """How long after its seal a snapshot of `group` is encoded, so that not all groups load the network at once.

    The first half of the interval between two snapshots is shared out among `turns` turns; the other half is spare, for
    whoever has the last one. Groups whose numbers differ by a multiple of `turns` send at the same time.
    """
    return group % turns / turns * interval_s / 2


def parse_turns(text: str) -> int:
    """A number of turns; `smp_daemon.service.Settings` says how many there may be.

    Raises:
        ConfigError: it is no whole number.
    """
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no number of turns: use 1 to {MAX_TURNS}, 1 for all groups at once") from error
