"""When encoding may send: a cap on bytes per second, and pauses for trainers that communicate.

Pure: the caller passes the time and does the waiting.
"""

from __future__ import annotations

BURST_S = 0.1
"""How far sending may run ahead of the rate, in seconds: work comes in units, and timers are late by milliseconds."""


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
