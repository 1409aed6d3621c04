"""Rehearses a restart of a plain loop in its first two turns."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.resume.comparison import late_values
from holdfast.snapshot.state import rng, streams
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import Tree


class Rehearsal:
    """What the first two turns of a plain loop tell of a restart. Used by the training thread.

    After a restart of step s everything is as ``optim.step()`` of s left it, and the code before a loop's first forward
    runs again. That code must draw from the generators that the code between step s and the next forward drew from, and
    must not change values that the snapshot holds as they were at that forward. The first turn of a new job shows what
    that code does; the second, what the code between two steps does.
    """

    def __init__(self, adapter: Adapter, more: Callable[[], Tree]) -> None:
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
        """A step has ended: note how the generators are, and what optimizers have."""
        states = rng.capture()
        self._before, self._torch = self._generators(states), bytes(states["torch"])
        self._given = self._sizes()

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
        still_there = self._generators(rng.capture()).keys()  # those that do not count any more are not
        return sorted((drew ^ self._drew) & still_there)

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

    def grew(self) -> bool:
        """Whether an optimizer was given parameters since `note`."""
        return self._sizes() != self._given

    def exchanged(self) -> list[str]:
        """The parameters in whose place the modules have other tensors at the moment."""
        tables = (module.named_parameters() for module in self._adapter.modules())
        return [name for table in tables for name, held in table if not isinstance(held, torch.nn.Parameter)]

    def _sizes(self) -> list[int]:
        """How many parameters each group of each optimizer has."""
        groups = (group for each in self._adapter.optimizers() for group in getattr(each, "param_groups", ()))
        return [len(group["params"]) for group in groups]

    def _late(self) -> dict[str, object]:
        try:
            return late_values(self._adapter)
        except HoldfastError:
            return {}  # they cannot be captured: the first snapshot raises this, too

    def _generators(self, captured: Tree) -> dict[str, str]:
        states = captured | rng.states(self._adapter.generators()) | self._more()
        return streams.digests(states)
