"""Judges from outside whether the promise was kept, by the states of the trainers and by what happened to nodes.

The oracle shares no code with planning, coding or recovery. It knows from the trainers the bytes of every snapshot. It
knows which snapshots the job was told are protected, which nodes were lost since, and which bits were flipped. From
these it derives what must come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from holdfast.smp_daemon.shared.plain import decode_digested
from holdfast.smp_daemon.shared.runs import GIVE_UP_ENV, RUN_ENV
from tests.proof.sim.memory import MemoryPath
from tests.proof.sim.runs import InReach, JobRuns, Snapshot

NONE: Snapshot = (0, 0)
"""Older than any snapshot."""


class Content(Protocol):
    """A rank's whole state. Two states are equal only if every bit is the same."""

    def missing(self, slot: bytes) -> str:
        """Name something in which a slot differs from this state; empty if there is nothing."""
        ...

    def differing(self, other: Any) -> list[str]:
        """The names of the parts that differ."""
        ...

    def lacking(self, other: Any) -> list[str]:
        """The names of the parts that the other state has and this one has not."""
        ...

    def of_a_new_rank(self, others: Collection[Any], before: Any, beside: Collection[Any]) -> Content:
        """The state with which a rank joins a snapshot that it did not take. Called on the first rank's state.

        Args:
            others: the states of all ranks in that snapshot.
            before: the state of the new rank when it was last there; None if it never was.
            beside: the states of the other ranks at that time.
        """
        ...


class Oracle:
    """Records what happens in a run, and calls `violate` with the name of a check and what it found.

    Attributes:
        checks: how often each check has looked at something.
        runs: the runs of the job.
        run: the run that the newest start goes on with, or must go on with if it has not told yet.
    """

    def __init__(self, violate: Callable[[str, str], None]) -> None:
        self._violate = violate
        self._unwanted: set[Snapshot] = set()
        self._gone: set[Snapshot] = set()
        self._contents: dict[Snapshot, dict[str, Content]] = {}
        self._losses: list[tuple[str, str]] = []  # node, and run; no run: of all runs
        self._away: set[str] = set()
        self._names: list[str] = []
        self._newest_life = 0
        self._moved = False
        self._losses_before: dict[Snapshot, int] = {}
        self._flips: Counter[Snapshot] = Counter()
        self._layouts: dict[int, list[dict[str, Any]]] = {}
        self._varies = False
        self._parents: dict[int, Snapshot] = {}
        self._first_states: dict[tuple[str, int, str], Content] = {}
        self._sealed: set[tuple[Snapshot, str]] = set()
        self._promises: dict[str, Snapshot] = {}
        self._told: Snapshot | None = None
        self.runs = JobRuns()
        self.run = ""
        self.checks: Counter[str] = Counter()

    @property
    def promised(self) -> Snapshot | None:
        """The newest snapshot of `run` that the job was told is protected."""
        return self._promises.get(self.run)

    # ------------------------------------------------------------------ what the oracle is told

    def captured(self, snapshot: Snapshot, coord: str, content: Content, *, begins: bool = True) -> None:
        """A trainer takes a snapshot of its state.

        `begins`: whether a step begins there. Otherwise the trainer has yet to notice, and to give the snapshot up.
        """
        snapshot = (snapshot[0], snapshot[1])
        known = self._contents.setdefault(snapshot, {})
        self._losses_before.setdefault(snapshot, len(self._losses))
        if coord in known:
            self._violate("named", f"two trainers write {coord} of snapshot {snapshot}: the older is not fenced")
        known[coord] = content
        key = (self.runs.of(snapshot[0]), snapshot[1], coord)
        usual = content if self._varies or not begins else self._first_states.setdefault(key, content)
        self.checks["exact"] += usual is not content
        if usual != content:
            self._violate(
                "exact", f"{coord} begins step {snapshot[1]} with other {_some(content, usual)} than the first time"
            )

    def goes_back(self, snapshot: Snapshot) -> None:
        """The trainers agree to go on from this snapshot: from now on its parity may be made."""
        self._unwanted.discard((snapshot[0], snapshot[1]))

    def wanted(self, snapshot: Snapshot, protected: bool) -> None:
        """All ranks take this snapshot, and agree whether it is to be protected."""
        if not protected:
            self._unwanted.add((snapshot[0], snapshot[1]))

    def sealed(self, snapshot: Snapshot | None) -> None:
        """The job was told that this snapshot is the newest one sealed on every node, and there is a slot to keep it.

        None: there is no such snapshot, or perhaps no slot.
        """
        snapshot = None if snapshot is None else (snapshot[0], snapshot[1])
        if snapshot is not None and self._contents.get(snapshot) and not self._is_sealed(snapshot):
            self._violate("sealed", f"the job is told that {snapshot} is sealed, and not all of it is")
        self._told = snapshot

    def protected(self, snapshot: Snapshot) -> None:
        """The job was told that this snapshot is protected on every node."""
        snapshot = (snapshot[0], snapshot[1])
        run = self.runs.of(snapshot[0])
        self._promises[run] = max(snapshot, self._promises.get(run, NONE))

    def node_lost(self, name: str) -> None:
        """Everything that this node held is gone."""
        self._losses.append((name, ""))

    def moved(self, away: Collection[str]) -> None:
        """Something was done to machines, memory or runs. From now on these nodes, with what they hold, are out of
        reach."""
        self._moved = True
        self._away = set(away)

    def repaired(self, snapshot: Snapshot | None, places: dict[str, str]) -> None:
        """All trainers went on from this snapshot and no fault struck since, so what was lost of it is rebuilt.

        That holds only if each lost node has a replacement to itself. If its ranks moved to the node of others, that
        node holds two units of a stripe until the next snapshot is protected.

        Args:
            places: the node of each coordinate.
        """
        if snapshot is None or self._flips[snapshot[0], snapshot[1]]:
            return
        for layout in self._layouts.get(snapshot[0], []):
            names = {node["name"] for node in layout["nodes"]}
            taken: set[str] = set()
            if {shard["coord"] for node in layout["nodes"] for shard in node["shards"]} != places.keys():
                return  # with other ranks, each reads what it needs, and nothing is repaired
            for node in layout["nodes"]:
                here = {places[shard["coord"]] for shard in node["shards"]}
                if len(here) != 1 or here & taken or not (here == {node["name"]} or here.isdisjoint(names)):
                    return
                taken |= here
        self.protected(snapshot)
        self._losses_before[snapshot[0], snapshot[1]] = len(self._losses)

    def all_lost(self) -> None:
        """No node is left that knows of the job: it starts from scratch unless storage knows it, and nobody can
        tell."""
        self._promises.clear()
        self._flips.clear()
        self._told = None

    def changes(self) -> None:
        """The job's state or ranks change, so steps that are done again may begin with other states."""
        self._varies = True

    def stored(self, snapshot: Snapshot) -> None:
        """An SMP has seen that this snapshot is complete on storage."""
        self.runs.persisted((snapshot[0], snapshot[1]))

    def bit_flipped(self, snapshot: Snapshot) -> None:
        """A bit of this snapshot's stored bytes or parity was flipped."""
        self._flips[snapshot[0], snapshot[1]] += 1

    def committed(self, path: MemoryPath, kind: str, data: Any) -> None:
        """An SMP has written a record into its arena."""
        self.runs.committed(path, kind, data)
        if kind == "layout":
            layouts = self._layouts.setdefault(int(data["epoch"]), [])
            if data not in layouts:
                layouts.append(data)
        if kind == "shard":
            self._committed_shard(path, data)
        if kind == "parity":
            self._committed_parity((data["snapshot"][0], data["snapshot"][1]))

    def _committed_parity(self, snapshot: Snapshot) -> None:
        self.checks["unasked"] += 1
        regrouped = any(layout["revision"] for layout in self._layouts.get(snapshot[0], []))
        if snapshot in self._unwanted and not regrouped and snapshot not in self._parents.values():
            self._violate("unasked", f"{snapshot} is only to be sealed, and parity is made of it")

    def _committed_shard(self, path: MemoryPath, data: Any) -> None:
        snapshot: Snapshot = (data["snapshot"][0], data["snapshot"][1])
        coord = str(data["coord"])
        if any(path.parent.glob(f"{path.with_suffix('').name}.taken-*.own")):
            return  # its trainer has taken the slot since it was marked as sealed, so the record does not count
        if (snapshot, coord) not in self._sealed:
            self._sealed.add((snapshot, coord))
            self.checks["epoch"] += 1
            epoch = decode_digested((path.parent / "node.json").read_bytes())["epoch"]
            if epoch != snapshot[0]:
                self._violate("epoch", f"{coord} of {snapshot} is sealed on a node that is in epoch {epoch}")
        content = self._contents.get(snapshot, {}).get(coord)
        slot = path.with_suffix("").read_bytes()
        self.checks["sealed"] += 1
        if content is None:
            self._violate("sealed", f"{coord} of {snapshot} is sealed, and no trainer ever had it")
        elif missing := content.missing(slot):
            self._violate("sealed", f"{coord} of {snapshot} is sealed, and its trainer had other {missing}")

    def given_up(self, snapshot: Snapshot, what: str) -> None:
        """An SMP frees a sealed slot of a shard because the trainers said that they no longer need it."""
        self._given_up((snapshot[0], snapshot[1]), what)
        if self.runs.of(snapshot[0]) != self.run:
            return  # of a run that was left
        if self.promised is None or self._flips[self.promised] or not self.must_survive():
            return
        self.checks["kept"] += 1
        if (snapshot[0], snapshot[1]) == self.promised:
            self._violate("kept", f"{what} of {snapshot}, the newest protected snapshot, is given up")

    def _given_up(self, snapshot: Snapshot, what: str) -> None:
        newest = self._newest_sealed()
        self._gone.add(snapshot)
        if newest is None or self._told != newest:
            return
        self.checks["held"] += 1
        if snapshot == newest:
            self._violate("held", f"{what} of {snapshot}, the newest that is sealed on every node, is given up")

    def _newest_sealed(self) -> Snapshot | None:
        """The newest snapshot after the promised one that is sealed on every node and intact, and was not given up.

        Intact means that no node was lost since it began, and no bit of it was flipped. None if there is none, or
        nodes went or came: then more than processes was lost.
        """
        if self._moved:
            return None
        found = [
            snapshot
            for snapshot in self._contents
            if snapshot not in self._gone
            and self.runs.of(snapshot[0]) == self.run
            and (self.promised is None or snapshot > self.promised)
            and not self._flips[snapshot]
            and self._losses_before[snapshot] == len(self._losses)
            and self._is_sealed_by_all(snapshot)
        ]
        return max(found, default=None)

    def _is_sealed_by_all(self, snapshot: Snapshot) -> bool:
        """Whether all shards of the epoch's layout are sealed. False if the epoch began with no layout, or several."""
        began = [layout for layout in self._layouts.get(snapshot[0], []) if not layout["revision"]]
        coords = {shard["coord"] for layout in began for node in layout["nodes"] for shard in node.get("shards", ())}
        return len(began) == 1 and bool(coords) and all((snapshot, coord) in self._sealed for coord in coords)

    # ------------------------------------------------------------------ what the oracle judges

    def restored(
        self,
        coord: str,
        epoch: int,
        snapshot: Snapshot | None,
        content: Content | None,
        persisted: bool = False,
        *,
        alone: bool = False,
    ) -> None:
        """A trainer goes on from this snapshot, or begins from nothing.

        Args:
            epoch: the epoch that begins.
            persisted: whether the snapshot was read from storage.
            alone: whether no fault has struck in this life and none of an earlier life lasts, apart from lost nodes.
        """
        self._check_crash(coord, epoch, None if snapshot is None else (snapshot[0], snapshot[1]), alone)
        seen = self.runs.reach.get(self.run)
        stored = seen.stored if seen is not None else None
        if stored is not None and (persisted or snapshot is None):
            self.checks["persisted"] += 1
            if snapshot is None or (snapshot[0], snapshot[1]) < stored:
                self._violate("persisted", f"{coord} is restored from {snapshot}, although {stored} is stored")
        if snapshot is not None:
            snapshot = (snapshot[0], snapshot[1])
            self._parents[epoch] = snapshot
            known = self._expected(coord, snapshot)
            self.checks["complete"] += 1
            if content is not None and known is not None and (lacking := content.lacking(known)):
                self._violate("complete", f"{coord} is restored from {snapshot} without {', '.join(lacking[:4])}")
            self.checks["restored"] += 1
            if content != known:
                self._violate("restored", f"{coord} is restored from {snapshot} with other {_some(content, known)}")
        if self.promised is None or not self.must_survive():
            return
        self.checks["promise"] += 1
        if snapshot is None or snapshot < self.promised:
            self._violate("promise", f"{coord} is restored from {snapshot}, although {self.promised} was protected")

    def enters(
        self,
        arenas: Collection[MemoryPath],
        noted: Collection[str],
        found: Collection[str],
        wanted: str,
        gone: set[str],
    ) -> None:
        """The trainers of a start decide what to go on with; see `JobRuns.enters`."""
        self._names = [arena.parent.name for arena in arenas]
        self.runs.enters(arenas, noted, found, wanted, gone)
        own = self.runs.own()
        self.run = own.pop() if len(own) == 1 else ""

    def begins(self, coord: str, epoch: int, run: str, life: int, snapshot: Snapshot | None) -> None:
        """A trainer says which run it goes on with, or begins, from which snapshot. Called after `restored`."""
        self.checks["named"] += 1
        first = self.runs.begins(epoch, run, life)
        if first != life:
            self._violate("named", f"{coord} begins an epoch in life {life} that has its name since life {first}")
        self.checks["own run"] += 1
        if snapshot is None:
            self._begins_anew(coord, run, life)
        else:
            of, own = self.runs.of(snapshot[0]), self.runs.own()
            if of not in own:
                self._violate(
                    "own run", f"{coord} goes on with run {of}, and must go on with {' or '.join(own) or 'none'}"
                )
            if of != run:
                self._violate("own run", f"{coord} says that it goes on with run {run}, and restored one of {of}")
        if self._moved and life > self._newest_life:
            self._leave_others(run, snapshot)
        self.run, self._newest_life = run, life

    def _leave_others(self, run: str, snapshot: Snapshot | None) -> None:
        """What is held of other runs may go, and so may newer snapshots of this run that could not be restored."""
        for other in self.runs.known():
            if other != run:
                self._losses.extend((name, other) for name in self._names)
        promised, floor = self._promises.get(run), self.runs.reach.get(run, InReach()).floor
        if snapshot is not None and promised is not None and snapshot < promised:
            del self._promises[run]
            if floor is not None and floor <= snapshot:
                self._promises[run] = floor

    def _begins_anew(self, coord: str, run: str, life: int) -> None:
        if self.runs.is_known(run, life):
            self._violate("own run", f"{coord} begins from nothing, and calls it run {run}, which began earlier")
        self.checks["nothing"] += 1
        if left := self.runs.left():
            self._violate("nothing", f"{coord} begins from nothing, although something is left of {', '.join(left)}")

    def _check_crash(self, coord: str, epoch: int, snapshot: Snapshot | None, alone: bool) -> None:
        newest = self._newest_sealed()
        if alone and newest is not None:
            self.checks["crash"] += 1
            if (snapshot or NONE) < newest:
                self._violate("crash", f"{coord} is restored from {snapshot}, although {newest} was sealed everywhere")
        self._gone |= {each for each in self._contents if (snapshot or NONE) < each and each[0] < epoch}
        self._told = None

    def _expected(self, coord: str, snapshot: Snapshot) -> Content | None:
        shards = self._contents.get(snapshot, {})
        if coord in shards or not shards:
            return shards.get(coord)
        there: Mapping[str, Content] = {}
        earlier = self._parents.get(snapshot[0])
        while coord not in there and earlier is not None:
            there = self._contents.get(earlier, {})
            earlier = self._parents.get(earlier[0])
        beside = [content for other, content in there.items() if other != coord]
        return shards[min(shards)].of_a_new_rank(shards.values(), there.get(coord), beside)

    def check_floor(self, coord: str, snapshot: Snapshot | None, floor: Snapshot | None) -> None:
        """Whatever was lost, a snapshot that a surviving node knows to be protected is never undone.

        If the job goes on from something newer than `promised` and no survivor knows of that promise, the survivors may
        keep an older snapshot instead. The promise then becomes the newest one that they know of.
        """
        restored = None if snapshot is None else (snapshot[0], snapshot[1])
        if restored is not None and self.promised is not None and (floor or NONE) < self.promised < restored:
            del self._promises[self.run]
            if floor is not None:
                self._promises[self.run] = floor
        if floor is None:
            return
        self.checks["floor"] += 1
        if restored is None or restored < floor:
            self._violate(
                "floor", f"{coord} is restored from {snapshot}, although a node knows that {floor} was protected"
            )

    def check_same(self, restored: Iterable[Snapshot | None]) -> None:
        """All trainers of a life go on from the same snapshot."""
        found = list(restored)
        self.checks["together"] += len(found) > 1
        if len(set(found)) > 1:
            self._violate("together", f"trainers go on from different snapshots: {sorted(map(str, set(found)))}")

    def unrecoverable(self, reason: str) -> None:
        """In a life without faults, the trainers were told that nothing can be restored."""
        self.checks["recoverable"] += 1
        newest = self._newest_sealed()
        if newest is not None and not self._may_have_been_promised():
            self._violate("crash", f"{newest} was sealed everywhere, yet: {reason}")
        found = [self._why_not_lost(run) for run in sorted(self.runs.own()) or [self.run]]
        must = [each for each in found if each is not None]
        if len(must) == len(found):
            self._violate(must[0][0], f"{must[0][1]}, yet: {reason}")
        self._check_told(reason)

    def _why_not_lost(self, run: str) -> tuple[str, str] | None:
        """Why a run must come back: the name of a check, and what was promised. None: it may be lost."""
        seen = self.runs.reach.get(run, InReach())
        if seen.stored is not None:
            return "persisted", f"{seen.stored} is stored"
        protected = max(self._promises.get(run, NONE), seen.floor or NONE)
        if protected == NONE and (seen.persisted or seen.uncertain):
            return None
        if (protected != NONE and not self._stands(protected)) or self._may_have_been_promised():
            return None
        return "recoverable", f"{protected} was protected and little enough was lost"

    def refused(self, reason: str) -> None:
        """In a life without faults, the trainers were told that the user has to choose a run or to give one up."""
        runs, own = self.runs, self.runs.own()
        self._check_told(reason)
        stands = self.promised is not None and self.must_survive()
        for run in own:
            if len(own) == 1 and (stored := runs.reach[run].stored) is not None:
                self._violate("persisted", f"{stored} is stored, yet: {reason}")
        unclear = runs.wanted and any(runs.reach[run].uncertain for run in own)
        if len(own) == 1 and not unclear and (stands or not runs.others_have_state()):
            self._violate("told", f"nobody has to choose: run {own} goes on, yet: {reason}")
        if not own and not runs.wanted:
            self._violate("told", f"there is no run to choose, yet: {reason}")

    def of_another_size(self, reason: str) -> None:
        """In a life without faults, a job of another number of ranks was told that only its own number is restored from
        storage."""
        self.checks["recoverable"] += 1
        if self.promised is not None and self.must_survive():
            self._violate("recoverable", f"{self.promised} was protected and little enough was lost, yet: {reason}")

    def _check_told(self, reason: str) -> None:
        self.checks["told"] += 1
        if GIVE_UP_ENV not in reason and RUN_ENV not in reason:
            self._violate("told", f"the start is refused, and the user does not learn what to do: {reason}")

    def must_survive(self) -> bool:
        """Whether the losses since the promised snapshot began are within the promise."""
        return self.promised is None or self._stands(self.promised)

    def _may_have_been_promised(self) -> bool:
        """Whether too much is lost of a younger snapshot that the survivors may take for protected.

        All its shards were sealed. If a node that was not done with it is lost, nobody can know that it was not. Going
        back further could then break a promise, so failing is right.
        """
        younger = [
            each for each in self._flips if self._flips[each] and (self.promised is None or each > self.promised)
        ]
        return any(self._is_sealed(each) and not self._stands(each) for each in younger)

    def _is_sealed(self, snapshot: Snapshot) -> bool:
        shards = self._contents.get(snapshot, {})
        return bool(shards) and all((snapshot, coord) in self._sealed for coord in shards)

    def _stands(self, snapshot: Snapshot) -> bool:
        """Whether the parity of a snapshot makes up for everything that was lost of it since it began."""
        own = ("", self.runs.of(snapshot[0]))
        since = [name for name, run in self._losses[self._losses_before.get(snapshot, 0) :] if run in own]
        layouts = self._layouts.get(snapshot[0], [])
        regrouped = any(layout["revision"] for layout in layouts)
        flips = self._flips[snapshot]
        for layout in layouts:
            names = [node["name"] for node in layout["nodes"]]
            for group in layout["groups"]:
                members = {names[index] for index in group}
                lost = sum(1 for name in since if regrouped or name in members or name not in names)
                lost += sum(1 for name in self._away if regrouped or name in members)
                if lost + flips > min(layout["parity"], len(group) - 1):
                    return False
        return True

    def survivable(self) -> int:
        """How many nodes may be lost at once now, whichever they are."""
        layouts = self._layouts.get(self.promised[0], []) if self.promised else []
        return min((min(at["parity"], len(group) - 1) for at in layouts for group in at["groups"]), default=0)

    def check_arena(self, arena: MemoryPath, slots: int, parities: int) -> None:
        """At rest, sealed slots are intact except for flipped bits, and no memory is held without a purpose."""
        seen: set[str] = set()
        free: Counter[tuple[str, int]] = Counter()
        for path in sorted(arena.glob("*.*.safetensors")) + sorted(arena.glob("*.*.parity")):
            pool = path.name.rsplit(".", 2)[0]
            record = path.with_name(path.name + ".json")
            if not record.exists():
                free[pool, parities if path.name.endswith(".parity") else slots] += 1
                continue
            data = decode_digested(record.read_bytes())
            snapshot: Snapshot = (data["snapshot"][0], data["snapshot"][1])
            self.checks["once"] += 1
            if f"{pool} {snapshot}" in seen:
                self._violate("once", f"{arena.name} holds {pool} of {snapshot} twice")
            seen.add(f"{pool} {snapshot}")
            if data["kind"] == "shard" and not self._flips[snapshot]:
                self.checks["whole"] += 1
                content = self._contents.get(snapshot, {}).get(data["coord"])
                missing = content.missing(path.read_bytes()) if content is not None else "shards"
                if missing:
                    self._violate("whole", f"{path.name} is sealed, and its trainer had other {missing}")
        for (pool, wanted), count in free.items():
            self.checks["memory"] += 1
            if count > wanted:
                self._violate("memory", f"{arena.name} keeps {count} free slots of {pool}, and {wanted} were asked for")


def _some(content: Content | None, known: Content | None) -> str:
    if content is None or known is None:
        return "shards"
    return ", ".join(content.differing(known)[:4])
