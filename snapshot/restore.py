"""Going back: agree on a snapshot, have its bytes brought here, check that they fit, load them in place."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smp_daemon.client import RecoveredShard, SmpClient
from smp_daemon.errors import DamagedSnapshot, HoldfastError, ProtocolError, StateMismatch, Unrecoverable
from smp_daemon.inventory import Inventory
from smp_daemon.layout import SnapshotId
from smp_daemon.logs import about, get_log
from smp_daemon.plan import RestorePlan, healer, plan_restore
from smp_daemon.points import reach
from smp_daemon.slotfile import PAGE_BYTES, RECORD, Leaf, SlotFormat, read_format, read_stamp
from snapshot.adapter import Adapter
from snapshot.agreement import Agreement
from snapshot.loading import check_ranges, load_checked
from snapshot.movers import Mover
from snapshot.replicas import is_part_of, part_of, plan_gathering
from snapshot.shares import Part, parse_part
from snapshot.state import NOTES, check_fit, decode_record, decode_values, is_of_record, place_tensors, shared_leaves
from snapshot.tensors import read_leaf

ATTEMPTS = 4
ENOUGH_FAILURES = 2
"""So often is a snapshot tried that was never promised, if it cannot be had after all."""

log = get_log(__name__)


@dataclass(slots=True)
class Restored:
    """How this rank started.

    Attributes:
        epoch: the epoch that begins.
        snapshot: what was restored, or None on a cold start.
        protected: the newest snapshot that every node knew to be protected, if it is an older one.
        whole: whether `snapshot` had all of its parity, so that it is protected as it is.
        how: ``held``, ``mended``, ``fetched`` or ``rebuilt``; empty on a cold start.
        bytes_fetched: what came over the network for this rank's shard.
        notes: what the snapshot's record says beside the state; empty if nothing.
        clock: `time.monotonic` at the end of each phase: ``enter``, ``plan``, ``fetch``, ``load``.
    """

    epoch: int
    snapshot: SnapshotId | None = None
    protected: SnapshotId | None = None
    whole: bool = True
    how: str = ""
    bytes_fetched: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    clock: dict[str, float] = field(default_factory=dict)


def restore(client: SmpClient, agreement: Agreement, adapter: Adapter, mover: Mover) -> Restored:
    """Bring the newest snapshot back that can be had. A collective call; blocks.

    A copy that turns out to be damaged is no longer counted, and planning starts again. A snapshot that failed twice,
    and was never promised, is passed over: an older one may be whole, down to the one that was promised.

    Raises:
        StateMismatch: see `check_fit`. Nothing was written on any rank.
        Unrecoverable: see `plan_restore`; or every copy turned out to be damaged, and tensors may be filled in part.
    """
    coord = adapter.coordinate()
    clock = {"enter": time.monotonic()}
    failure: HoldfastError | None = None
    failures: Counter[SnapshotId] = Counter()
    unpromised: set[SnapshotId] = set()
    for _ in range(ATTEMPTS):
        inventories, coords = exchange(client, agreement, coord)
        unpromised.update(*(inventory.unpromised for inventory in inventories))
        hopeless = {snapshot for snapshot, count in failures.items() if count >= ENOUGH_FAILURES}
        plan = plan_restore(inventories, coords, hopeless & unpromised)
        epoch = max(inv.epoch for inv in inventories) + 1
        client.join(epoch)
        agreement.minimum([1])()  # every older writer is fenced on every node before anyone goes on
        clock["plan"] = time.monotonic()
        if plan is None:
            return Restored(epoch, clock=clock | {"fetch": clock["plan"], "load": clock["plan"]})
        reach("restore.before", plan.snapshot.step)
        attempt = _Attempt(client, plan, coord)
        failure = _failure_of(attempt.recover)
        if agreement.minimum([int(failure is None)])() == [1]:
            clock["fetch"] = time.monotonic()
            failure = _load(attempt, agreement, adapter, mover)
            if agreement.minimum([int(failure is None)])() == [1]:
                clock["load"] = time.monotonic()
                heal(client, plan, coords, coord)
                known = [inventory.protected for inventory in inventories if inventory.protected is not None]
                protected = max((snapshot for snapshot in known if snapshot < plan.snapshot), default=None)
                return Restored(
                    epoch,
                    plan.snapshot,
                    protected,
                    whole=not plan.heal,
                    how=attempt.how,
                    bytes_fetched=attempt.shard.bytes_fetched,
                    notes=attempt.notes,
                    clock=clock,
                )
        failures[plan.snapshot] += 1
        text, why = "recovery of %s is tried again: %s", failure or "another rank failed"
        log.warning(text, plan.snapshot, why, extra=about(plan.snapshot))
    raise Unrecoverable(f"recovery failed {ATTEMPTS} times; last: {failure or 'on another rank'}") from failure


def exchange(client: SmpClient, agreement: Agreement, coord: str) -> tuple[list[Inventory], dict[str, str]]:
    """Every SMP's inventory, and the node of every coordinate."""
    mine = {"coord": coord, "inventory": client.inventory().to_json()}
    by_node: dict[str, Inventory] = {}
    coords: dict[str, str] = {}
    for text in agreement.gather(json.dumps(mine).encode()):
        data: Any = json.loads(text)
        inventory = Inventory.from_json(data["inventory"])
        by_node[inventory.node] = inventory
        if data["coord"] in coords:
            raise StateMismatch(f"two ranks have the coordinate {data['coord']!r}")
        coords[data["coord"]] = inventory.node
    return list(by_node.values()), coords


class _Attempt:
    """One rank's part in bringing one snapshot back. What it holds is checked while it is read."""

    shard: RecoveredShard

    def __init__(self, client: SmpClient, plan: RestorePlan, coord: str) -> None:
        self.snapshot = plan.snapshot
        self.how = ""
        self.notes: dict[str, Any] = {}
        self._client = client
        self._sources = plan.sources
        self._coord = coord

    def recover(self) -> None:
        """Have the shard here. Raises what stands against it."""
        self.shard = self._client.recover(self._sources, self._coord, check=False)
        self.how = self.shard.how

    def mend(self, units: list[int]) -> None:
        """Have damaged units mended in place. Raises `DamagedSnapshot` if that cannot be."""
        self.how = self._client.recover(self._sources, self._coord).how

    def read(self) -> tuple[SlotFormat, dict[str, Any]]:
        """The slot's format and its record, and all tensors checked that belong to the record.

        Raises:
            DamagedSnapshot: they cannot be mended.
            ProtocolError: they are not what a trainer wrote.
        """
        slot = self.shard.view
        check_ranges(self.shard, [(0, min(slot.nbytes, PAGE_BYTES))], self.mend)
        header = min(8 + int.from_bytes(slot[:8], "little"), slot.nbytes)
        check_ranges(self.shard, [(0, header)], self.mend)
        form, _ = read_format(slot)
        own = [(offset, leaf.bytes) for name, (offset, leaf) in form.offsets.items() if is_of_record(name)]
        check_ranges(self.shard, own, self.mend)
        if read_stamp(slot) != self.snapshot:
            raise ProtocolError(f"the slot is stamped {read_stamp(slot)}, not {self.snapshot}")
        record = decode_record(slot, form, self.snapshot)
        self.notes = record.get(NOTES) or {}
        return form, record


def _failure_of(work: Callable[[], None]) -> HoldfastError | None:
    """Why `work` failed, or None."""
    try:
        work()
    except HoldfastError as error:
        return error
    return None


def _load(attempt: _Attempt, agreement: Agreement, adapter: Adapter, mover: Mover) -> HoldfastError | None:
    """Load a slot into the live job, checking it on the way. Nothing is written unless it fits on every rank.

    Returns why it failed on this rank: the copy is damaged, and another must be found.
    """
    made = False
    problem: HoldfastError | None = None
    try:
        form, record = attempt.read()

        def tensor(name: str) -> torch.Tensor:
            offset, leaf = form.offsets[name]
            return read_leaf(attempt.shard.view, offset, leaf)

        early, late, fixed = decode_values(record, tensor)
        shared = shared_leaves(record)
        held = [name for name in form.offsets if is_part_of(name, shared)]
        whole = {name: leaf for name, (_, leaf) in form.offsets.items() if name != RECORD and name not in held}
        adapter.check(early, late, fixed)
        adapter.materialise(whole | shared)
        made = True
        live = list(adapter.tensors())
        check_fit(form, live, shared)
    except HoldfastError as error:
        problem = error
    damaged = isinstance(problem, DamagedSnapshot)
    fits, whole_everywhere = agreement.minimum([int(problem is None or damaged), int(not damaged)])()
    if made and not (fits and whole_everywhere):
        adapter.withdraw()
    if not fits:
        raise problem or StateMismatch("the snapshot does not fit the job on another rank; see its log")
    if not whole_everywhere:
        return problem
    gathering = plan_gathering(agreement, adapter.replica_set(), held, shared)
    tensors = {item.name: item.tensor for item in live}
    pieces = place_tensors(form, _own(tensors, held, shared))

    def midway() -> None:
        reach("restore.middle", attempt.snapshot.step)

    failure = _failure_of(lambda: load_checked(mover, pieces, attempt.shard, attempt.mend, midway=midway))
    if agreement.minimum([int(failure is None)])() == [1]:
        if gathering is not None:
            gathering.fill(agreement, tensors)
        adapter.load(early, late, fixed)
    return failure


def _own(
    tensors: Mapping[str, torch.Tensor], held: Sequence[str], shared: Mapping[str, Leaf]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Live tensors, or parts of them, by the names under which they stand in this rank's slot."""
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in shared)
    for name in held:
        part = parse_part(name)
        yield (name, tensors[name] if part is None else part_of(tensors[part[0]], Part(*part)))


def heal(client: SmpClient, plan: RestorePlan, coords: dict[str, str], coord: str) -> None:
    """Have lost parity computed again, on the node that took the lost one's place."""
    for group, position in plan.heal:
        if healer(plan.sources.layout, group, position) == coord and coords[coord] == client.node:
            client.heal(plan.sources, group, position)
