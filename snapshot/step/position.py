"""Where a loop is by its own count: turns, if it says where they begin, and places in its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE, Clocks
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.data import ELSEWHERE, Data

DATA = "data"
"""Name of a source of batches, unless the loop gives one."""

NO_TURN = (
    "a loop over snap.steps(%d) makes no turn at any start, since an earlier one has counted to %d: the numbers are "
    "those of the whole training. Count on, as by `for epoch in range(n): for step in snap.steps((epoch + 1) * %d)`"
)

log = get_log(__name__)


def says_where_steps_begin(held: Tree) -> bool:
    """Whether a loop that left this position counted turns, or went through data. A plain loop does neither, and what
    it draws after entering belongs to its first step."""
    return held.get("turn") is not None or bool(held.get("data"))


class Position:
    """The position of one rank's loop. Used by the training thread.

    Attributes:
        declared: whether the loop says where its steps begin.
        is_in_steps: whether a loop over step numbers is under way.
        next_turn: number of the turn that begins next.
        sources: sources of batches, by name.
    """

    def __init__(self, step: int, held: Tree, block: Tree, clock: Clocks = MACHINE) -> None:
        """
        Args:
            step: how many steps the state has behind it.
            held: `tree` of the earlier run; empty if there was none.
            block: the block of the script that the loop is in, for `tree`.
            clock: by what reading data is timed.
        """
        self.declared = self.is_in_steps = self._in_data = False
        self.sources: dict[str, Data] = {}
        # Whether some pass, in this process or an earlier one, has ended with gradients that no step used; None: none
        # has ended yet.
        self._leaves: bool | None = held.get("leaves")
        self._block = block
        self._clock = clock
        self._turn: int | None = held.get("turn")
        self._count = self._counted_to = 0  # of the loop over step numbers that began last; of those that are over
        self._began_with_data = self._turn is None and bool(held.get("data"))
        self.next_turn = self.number(step)
        self._held: dict[str, Any] = dict(held.get("data", {}))  # places of sources that the loop has not named yet

    def number(self, step: int) -> int:
        """How many turns the state has behind it, or steps if the loop does not count turns."""
        return step if self._turn is None else self._turn

    @property
    def is_moved_up(self) -> bool:
        """Whether the earlier run's steps began as a batch was read, and this loop's begin as a turn does."""
        return self._began_with_data and self._turn is not None

    @property
    def epoch(self) -> int:
        """How many passes over the source that is called `DATA` are finished, or over the one that was named first."""
        known: dict[str, Any] = {**self.sources, **self._held}
        place = known[DATA] if DATA in known else next(iter(known.values()), {"epoch": 0})
        return place.epoch() if isinstance(place, Data) else int(place.get("epoch", 0))

    def declare(self, step: int) -> None:
        """Note that the loop says where its steps begin."""
        if not self.declared:
            self.declared = True
            self.next_turn = max(self.next_turn, step)

    def turn_begins(self) -> None:
        """The next turn of a loop that counts turns begins."""
        self._turn = self.next_turn
        self.next_turn += 1

    def counts_to(self, count: int) -> None:
        """A loop over step numbers is about to begin. Raises `ConfigError` if it would make no turn at any start."""
        if 0 < count <= self._counted_to:
            raise ConfigError(NO_TURN % (count, self._counted_to, count))
        self._count = count

    def steps_begin(self) -> None:
        """A loop over step numbers has begun."""
        self.is_in_steps = True

    def batch_begins(self) -> None:
        """The next batch of a source is given."""
        self._in_data = True

    @property
    def is_under_way(self) -> bool:
        """Whether a loop over step numbers, or over a source, has begun and not reached its end."""
        return self.is_in_steps or self._in_data

    def pass_over(self, resumed: bool, unused: bool) -> str:
        """A source has no more batches. Others that are read beside it, as by ``zip``, need not reach their end.

        ``enumerate(snap.data(loader))`` begins at 0 again when a restart goes on in the middle of a pass, so a step at
        every fourth batch would be another one. `snapshot.script.carried` finds that in the source of the script; where
        there is none, a pass that ends otherwise than before tells.

        Args:
            resumed: whether the pass went on in its middle after a restart, in a loop that may count anew.
            unused: whether gradients were computed that no step has used.

        Returns why the restart has gone wrong; empty if it has not.
        """
        self._in_data = False
        if len(self.sources) > 1 or self._turn is not None:
            return ""
        before, self._leaves = self._leaves, bool(self._leaves) or unused
        if not (unused and resumed) or before:
            return ""
        text = (
            "a pass that went on in its middle after a restart ends with gradients that no step has used, as if its "
            "batches were counted from 0 again: write `for i, batch in snap.data(loader).enumerate():`, which goes on "
            "counting"
        )
        if before is None:
            log.warning("%s", text)  # perhaps all passes end so, and the next one uses them
            return ""
        return text

    def steps_over(self) -> None:
        """The loop over step numbers has reached its end: its last turn is over. It need not have read to the end of a
        pass."""
        self.is_in_steps = self._in_data = False
        self._counted_to = max(self._counted_to, self._count)
        self._count_last_turn()

    def last_turn_ended(self, *, goes_on: bool) -> None:
        """The last turn is over: the snapshot that is kept goes on with the next one.

        Args:
            goes_on: whether the loop was left before its end: it also goes on in the pass that was left.
        """
        if goes_on:
            for data in self.sources.values():
                data.resume_pass()
        self._count_last_turn()

    def _count_last_turn(self) -> None:
        if self._turn is not None:
            self._turn = self.next_turn

    def data(self, source: Any, name: str, make: Callable[[Tree | None], Data]) -> Data:
        """The source of that name. A new one is made, from the place that the earlier run saved, if there is one.

        Raises:
            ConfigError: see `SnapshotHook.data`.
        """
        known = self.sources.get(name)
        if known is None:
            held = self._held.pop(name, None)
            if held == ELSEWHERE:
                raise ConfigError(
                    f"data({name!r}) was read by another number of ranks, so its place cannot be found again: cut "
                    "batches with `holdfast.integrations.batches.GlobalBatches` where the number of ranks may change"
                )
            known = self.sources[name] = make(held)
            known.clock = self._clock.monotonic
        elif known.source is not source:
            known.source = source
        return known

    def tree(self) -> Tree:
        """The position as plain values, for the next run."""
        places = {name: data.state() for name, data in self.sources.items()} | self._held
        return {"turn": self._turn, "data": places, "block": self._block, "leaves": self._leaves}
