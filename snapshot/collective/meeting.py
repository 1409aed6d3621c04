"""Ranks that have lost each other meet again: through the job's store, after a step that all know in advance.

A rank that has lost the others announces a step that lies ahead of it. Once all ranks have announced one, they meet
after the latest of these steps. Each rank has time to read it, because ranks that wait for each other in every step are
never more than one step apart. Nobody waits before that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.smp_daemon.shared.system import MACHINE, Clocks

LEAD_STEPS = 3
"""How many steps ahead the first meeting lies. Each meeting that fails doubles it."""

MOST_DOUBLINGS = 8
MEETING_DEADLINE_S = 15.0
"""How long training waits for the others at a meeting."""

LOOK_EVERY_S = 0.02
"""How often a rank at a meeting looks into the store, in seconds."""


class RendezvousStore(Protocol):
    """The part of `torch.distributed.Store` that meetings use."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value under a key, for good."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value stored under a key."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are set. Does not wait for them."""
        ...


class Meeting:
    """One rank's part in all meetings of a group. Methods raise what the store raises. Not thread-safe."""

    def __init__(self, store: RendezvousStore, rank: int, size: int, clock: Clocks = MACHINE) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._clock = clock
        self._round = 0
        self._failed = 0
        self._said = False
        self._at: int | None = None

    def come(self, step: int) -> str | None:
        """Called after every step while the others are lost. Blocks at a meeting, for `MEETING_DEADLINE_S` at most.

        Returns:
            The name of the round if all ranks are here now. None if the meeting lies ahead, or if not all ranks have
            come to it; then there will be another.
        """
        kind = f"round {self._round}"
        if not self._said:
            self._store.set(f"{kind} of {self._rank}", str(step + (LEAD_STEPS << min(self._failed, MOST_DOUBLINGS))))
            self._said = True
        if self._at is None:
            keys = self._keys(kind)
            if not self._store.check(keys):
                return None
            self._at = max(int(self._store.get(key)) for key in keys)
        if step < self._at:
            return None
        self._round, self._said, self._at = self._round + 1, False, None
        self._failed += 1  # until `went_well` is called
        return kind if self._all_here(f"{kind} here", MEETING_DEADLINE_S) else None

    def went_well(self) -> None:
        """The ranks that met continue together."""
        self._failed = 0

    def come_last(self, deadline_s: float) -> str | None:
        """The job has ended well on this rank: wait until it has on all ranks, for `deadline_s` at most. Called once;
        returns the same as `come`."""
        return "end" if self._all_here("end", deadline_s) else None

    def _keys(self, kind: str) -> list[str]:
        return [f"{kind} of {rank}" for rank in range(self._size)]

    def _all_here(self, kind: str, deadline_s: float) -> bool:
        limit = self._clock.monotonic() + deadline_s
        over = f"{kind} over"
        if self._store.check([over]):
            return False
        self._store.set(f"{kind} of {self._rank}", "")
        keys: Sequence[str] = self._keys(kind)
        while not self._store.check(list(keys)):
            if self._clock.monotonic() > limit or self._store.check([over]):
                self._store.set(over, "")  # ranks that come later must not wait for those that have gone
                return False
            self._clock.sleep(LOOK_EVERY_S)
        return True
