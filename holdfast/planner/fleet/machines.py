"""Which places of a job have a machine, and who comes next."""

from __future__ import annotations

from collections import deque


class Machines:
    """Spares stand by; a broken machine is repaired and then stands by, or takes the place that waits longest.

    Attributes:
        empty: places without a machine.
        spares: machines that stand by.
    """

    def __init__(self, spares: int) -> None:
        self.empty: set[int] = set()
        self.spares = spares
        self._waiting: deque[int] = deque()

    def breaks(self, place: int) -> bool:
        """The machine at `place` is gone. Whether a spare takes over; if not, the place waits for a repair."""
        self.empty.add(place)
        if self.spares:
            self.spares -= 1
            return True
        self._waiting.append(place)
        return False

    def repaired(self) -> int | None:
        """A machine is back. The place that it takes, None if none waits."""
        if self._waiting:
            return self._waiting.popleft()
        self.spares += 1
        return None

    def arrives(self, place: int) -> None:
        """The place has a machine again."""
        self.empty.remove(place)
