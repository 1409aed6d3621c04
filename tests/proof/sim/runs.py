"""Which runs of the job there are, what of them is in reach of a start, and which one it must go on with.

This is derived from the records that SMPs write and from what happened to machines, without the code that decides it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.proof.sim.memory import MemoryPath

Snapshot = tuple[int, int]
"""(epoch, step); later ones are greater."""

KEPT = 2
"""Older snapshots of a run may go from storage once so many have been whole there."""

SAME_TIME_S = 2
"""Runs that never met, and began within this time of each other, may be confused."""


@dataclass(slots=True)
class InReach:
    """What is in reach of one run.

    Attributes:
        declared: the number of its newest declaration: when it began, or was chosen.
        begun_s: the time of that.
        follows: the runs whose place it took.
        floor: the newest snapshot of it that a node knows to be protected.
        has_state: whether any part of a snapshot of it is there, or was promised.
        persisted: whether storage has, or had, a whole snapshot of it. `stored`: the newest that it has.
        uncertain: whether storage may know an older declaration, or hold something that nobody has seen whole.
    """

    declared: int = 0
    begun_s: int = 0
    follows: set[str] = field(default_factory=set)
    floor: Snapshot | None = None
    has_state: bool = False
    persisted: bool = False
    stored: Snapshot | None = None
    uncertain: bool = False


class JobRuns:
    """All runs of one history.

    Attributes:
        stored: by run, the snapshots that storage must have whole.
        over: the runs that the user has ever given up.
        reach: what was in reach of the newest start, by run.
        gone: the runs that were given up, as far as that start knew.
        wanted: the run that the user chose for it; empty: none.
    """

    def __init__(self) -> None:
        self.stored: dict[str, set[Snapshot]] = {}
        self.over: set[str] = set()
        self.reach: dict[str, InReach] = {}
        self.gone: set[str] = set()
        self.wanted = ""
        self._spoilt: set[Snapshot] = set()
        self._whole: dict[str, set[Snapshot]] = {}  # by run, all that storage ever had whole
        self._records: dict[MemoryPath, dict[MemoryPath, tuple[str, Any]]] = {}  # by arena
        self._declared: dict[tuple[str, int], int] = {}
        # By run, those that were given up as it began or went on, and how many declarations there were by then.
        self._over_of: dict[str, dict[str, int]] = {}
        self._starts: dict[int, tuple[str, int]] = {}

    # ------------------------------------------------------------------ what happens

    def committed(self, path: MemoryPath, kind: str, data: Any) -> None:
        """An SMP has written a record."""
        self._records.setdefault(path.parent, {})[path] = (kind, data)
        if (run := _run_of(kind, data)) is not None:
            self._declared.setdefault((run["id"], run["begun_s"]), len(self._declared))
            for each in run.get("over", ()):
                self._over_of.setdefault(run["id"], {}).setdefault(each, len(self._declared))

    def persisted(self, snapshot: Snapshot) -> None:
        """An SMP has seen that a snapshot is complete on storage."""
        run = self.of(snapshot[0])
        whole = self._whole.setdefault(run, set())
        whole.add(snapshot)
        self.stored[run] = {each for each in sorted(whole)[-KEPT:] if each not in self._spoilt}

    def spoilt(self, run: str, snapshot: Snapshot) -> None:
        """A persisted snapshot can no longer be read; also if an SMP is yet to look whether it is complete."""
        self._spoilt.add(snapshot)
        self.stored.get(run, set()).discard(snapshot)

    def damaged(self, path: MemoryPath) -> None:
        """A record can no longer be read."""
        self._records.get(path.parent, {}).pop(path, None)

    def begins(self, epoch: int, run: str, life: int) -> int:
        """A start begins an epoch of a run. Returns the number of the life that took this epoch first."""
        return self._starts.setdefault(epoch, (run, life))[1]

    def is_known(self, run: str, life: int) -> bool:
        """Whether an earlier life than this one belongs to the run."""
        return any(run == known and began < life for known, began in self._starts.values())

    def of(self, epoch: int) -> str:
        """The run of an epoch, as the start said that began it; empty if none did."""
        start = max((each for each in self._starts if each <= epoch), default=None)
        return "" if start is None else self._starts[start][0]

    def known(self) -> list[str]:
        """All runs that ever restored or took a snapshot, the oldest first."""
        return list(dict.fromkeys(run for run, _ in self._starts.values()))

    def enters(
        self,
        arenas: Collection[MemoryPath],
        noted: Collection[str],
        found: Collection[str],
        wanted: str,
        gone: Collection[str],
    ) -> None:
        """The trainers of a start know what these nodes hold, and decide what to go on with.

        Args:
            noted: runs that storage knows of, whether it has a snapshot of them or not.
            found: runs of which storage has any snapshot, whole or not.
            wanted, gone: the runs that the user chose and gave up.
        """
        self.reach, self.wanted, self.gone = {}, wanted, set(gone)
        for kind, data in self._records_in(arenas):
            self._note(kind, data)
        for run in sorted({*noted, *found, *self.stored}):
            declared = [(number, begun_s) for (known, begun_s), number in self._declared.items() if known == run]
            seen = self.reach.setdefault(run, InReach())
            seen.persisted = run in self.stored
            seen.uncertain = len(declared) > 1 or (run in found and not seen.persisted)
            seen.stored = max(self.stored.get(run, ()), default=None)
            seen.has_state |= seen.persisted
            seen.declared, seen.begun_s = max([*declared, (seen.declared, seen.begun_s)])
        for run in self.reach:
            # What was given up as a run began or went on stays so, unless it was chosen again since.
            self.gone |= {
                each
                for each, noted in self._over_of.get(run, {}).items()
                if each not in self.reach or self.reach[each].declared < noted
            }
        if wanted not in gone:
            self.gone.discard(wanted)

    def floors(self, arenas: Collection[MemoryPath]) -> dict[str, Snapshot]:
        """By run, the newest snapshot that an SMP of these nodes knows to be protected."""
        found: dict[str, Snapshot] = {}
        for kind, data in self._records_in(arenas):
            if kind == "node" and data["protected"]:
                snapshot = (data["protected"][0], data["protected"][1])
                found[self.of(snapshot[0])] = max(snapshot, found.get(self.of(snapshot[0]), snapshot))
        return found

    def _records_in(self, arenas: Collection[MemoryPath]) -> Iterator[tuple[str, Any]]:
        """Kind and content of the records that are there."""
        for arena in arenas:
            for path, record in self._records.get(arena, {}).items():
                if path.exists():
                    yield record

    def _note(self, kind: str, data: Any) -> None:
        if kind == "node":
            self.gone |= set(data.get("given_up", ()))
        run = _run_of(kind, data)
        if run is not None:
            seen = self.reach.setdefault(run["id"], InReach())
            if (number := self._declared[run["id"], run["begun_s"]]) >= seen.declared:
                seen.declared, seen.begun_s = number, run["begun_s"]
            seen.follows |= set(run["follows"])
            if kind == "node" and data["protected"]:
                seen.floor = max((data["protected"][0], data["protected"][1]), seen.floor or (0, 0))
                seen.has_state = True
        if kind in ("shard", "parity"):
            self.reach.setdefault(data["run"], InReach()).has_state = True

    # ------------------------------------------------------------------ what must follow

    def own(self) -> set[str]:
        """The runs that the newest start may go on with: by the rule the one that was begun last, or was chosen. None:
        it begins one. Several: it is ambiguous."""
        choices = {run: seen for run, seen in self.reach.items() if run not in self.gone}
        if self.wanted:
            return {self.wanted} & choices.keys()
        if not choices:
            return set()
        newest = max(choices, key=lambda run: choices[run].declared)
        found = {newest} | {run for run in choices if self._may_be_confused(newest, run)}
        if choices[newest].uncertain and len(choices) > 1:
            found.add(max(choices.keys() - {newest}, key=lambda run: choices[run].declared))
        return found

    def _may_be_confused(self, newest: str, run: str) -> bool:
        one, other = self.reach[newest], self.reach[run]
        met = run in one.follows or newest in other.follows
        return not met and one.begun_s - other.begun_s < SAME_TIME_S

    def left(self) -> list[str]:
        """The runs in reach of which something was promised or persisted, and that the user has never given up."""
        return [
            run
            for run, seen in self.reach.items()
            if run not in self.over and (seen.floor is not None or seen.persisted)
        ]

    def others_have_state(self) -> bool:
        """Whether there is state in reach of a run that the newest start may not go on with."""
        own = self.own()
        return any(seen.has_state for run, seen in self.reach.items() if run not in own | self.gone)


def _run_of(kind: str, data: Any) -> Any:
    """The run that a record declares; None if it declares none."""
    if kind == "layout":
        return data["run"]
    start = data["record"]["start"] if kind == "node" else None
    return None if start is None else start["run"]
