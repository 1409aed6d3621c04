"""What the first two turns of a plain loop tell of a restart.

After a restart of step s everything is as ``optim.step()`` of s left it, and the code before a loop's first forward
runs again. That code must draw from the generators that the code between step s and the next forward drew from, and
must not change values that the snapshot holds as they were at that forward. The first turn of a new job shows what that
code does; the second, what the code between two steps does.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.resume.comparison import late_values
from holdfast.snapshot.state import rng, streams
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import Tree


class Rehearsal:
    """Follows what is drawn and changed before the forwards that begin steps. Used by the training thread."""

    def __init__(self, adapter: Adapter, more: Callable[[], Tree] = dict) -> None:
        """Notes how everything is as the loop is entered, but for values; see `note_values`.

        Args:
            more: returns the states of generators that the script keeps, by name.
        """
        self._adapter = adapter
        self._more = more
        self.note()
        self._amount: int | None = None  # of numbers that the first turn drew from torch's generator
        self._values: dict[str, object] = {}
        self._drew: set[str] | None = None  # the generators that the first turn drew from
        self._changed: set[str] | None = None  # the values that the first turn changed

    def note(self) -> None:
        """A step has ended: note how the generators are."""
        states = rng.capture()
        self._before, self._torch = self._generators(states), bytes(states["torch"])

    def note_values(self) -> None:
        """Note how values are: as the loop is entered, or as the first step ends."""
        self._values = self._late()

    def drawn(self) -> list[str]:
        """The generators that were drawn from since `note`."""
        now = self._generators(rng.capture())
        return sorted(name for name in now if now[name] != self._before.get(name))

    def uneven(self) -> list[str]:
        """The generators that were drawn from since `note` and not before the first step, or the other way round. The
        first call is at the first step."""
        drew = set(self.drawn())
        if self._drew is None:
            self._drew = drew
        return sorted(
            (drew ^ self._drew) & self._generators(rng.capture()).keys()
        )  # those that do not count any more are not there

    def amounts(self) -> tuple[int, int] | None:
        """How many numbers were drawn from torch's generator before the first step and since `note`, if these are not
        alike. The first call is at the first step."""
        first, amount = self._amount, rng.numbers_between(self._torch, rng.capture()["torch"])
        if first is None:
            self._amount = amount
        return None if first is None or amount is None or amount == first else (first, amount)

    def moved(self) -> list[str]:
        """The values that have changed since `note_values`, if they have before the first step, too. The first call is
        at the first step."""
        now = self._late()
        changed = {name for name in now.keys() | self._values.keys() if now.get(name) != self._values.get(name)}
        if self._changed is None:
            self._changed = changed
            return []
        return sorted(changed & self._changed)

    def _late(self) -> dict[str, object]:
        try:
            return late_values(self._adapter)
        except HoldfastError:
            return {}  # they cannot be captured: the first snapshot raises this, too

    def _generators(self, captured: Tree) -> dict[str, str]:
        states = captured | rng.states(self._adapter.generators()) | self._more()
        return streams.digests(states)
