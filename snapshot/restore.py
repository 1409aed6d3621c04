"""Going back: agree on a snapshot, have its bytes brought here, check that they fit, load them in place."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from smp_daemon.client import RecoveredShard, SmpClient
from smp_daemon.errors import HoldfastError, ProtocolError, StateMismatch, Unrecoverable
from smp_daemon.inventory import Inventory
from smp_daemon.layout import SnapshotId
from smp_daemon.plan import RestorePlan, healer, plan_restore
from smp_daemon.points import reach
from smp_daemon.slotfile import RECORD, read_format, read_stamp
from snapshot.adapter import Adapter
from snapshot.agreement import Agreement
from snapshot.state import check_fit, decode_record, decode_values
from snapshot.tensors import copy_in, read_leaf

ATTEMPTS = 3

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Restored:
    """How this rank started.

    Attributes:
        epoch: the epoch that begins.
        snapshot: what was restored, or None on a cold start.
        how: ``held``, ``mended``, ``fetched`` or ``rebuilt``; empty on a cold start.
        bytes_fetched: what came over the network for this rank's shard.
        clock: `time.monotonic` at the end of each phase: ``enter``, ``plan``, ``fetch``, ``load``.
    """

    epoch: int
    snapshot: SnapshotId | None = None
    how: str = ""
    bytes_fetched: int = 0
    clock: dict[str, float] = field(default_factory=dict)


def restore(client: SmpClient, agreement: Agreement, adapter: Adapter) -> Restored:
    """Bring the newest snapshot back that can be had. A collective call; blocks.

    A copy that turns out to be damaged is no longer counted, and planning starts again.

    Raises:
        Unrecoverable, StateMismatch: see `plan_restore` and `check_fit`. Nothing was written on any rank.
    """
    coord = adapter.coordinate()
    clock = {"enter": time.monotonic()}
    failure: HoldfastError | None = None
    for _ in range(ATTEMPTS):
        inventories, coords = _exchange(client, agreement, coord)
        plan = plan_restore(inventories, coords)
        epoch = max(inv.epoch for inv in inventories) + 1
        client.join(epoch)
        agreement.minimum([1])()  # every older writer is fenced on every node before anyone goes on
        clock["plan"] = time.monotonic()
        if plan is None:
            return Restored(epoch, clock=clock | {"fetch": clock["plan"], "load": clock["plan"]})
        reach("restore.before", plan.snapshot.step)
        shard, failure = _recover(client, plan, coord)
        if agreement.minimum([int(failure is None)])() == [1] and shard is not None:
            clock["fetch"] = time.monotonic()
            _load(shard.view, plan.snapshot, agreement, adapter)
            clock["load"] = time.monotonic()
            _heal(client, plan, coords, coord)
            return Restored(epoch, plan.snapshot, shard.how, shard.bytes_fetched, clock)
        log.warning("recovery of %s is tried again: %s", plan.snapshot, failure or "another rank failed")
    raise Unrecoverable(f"recovery failed {ATTEMPTS} times; last: {failure or 'on another rank'}") from failure


def _exchange(client: SmpClient, agreement: Agreement, coord: str) -> tuple[list[Inventory], dict[str, str]]:
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


def _recover(client: SmpClient, plan: RestorePlan, coord: str) -> tuple[RecoveredShard | None, HoldfastError | None]:
    try:
        return client.recover(plan.sources, coord), None
    except HoldfastError as error:
        return None, error


def _load(slot: memoryview, snapshot: SnapshotId, agreement: Agreement, adapter: Adapter) -> None:
    """Load a verified slot into the live job. Nothing is written unless it fits on every rank."""
    problem: HoldfastError | None = None
    try:
        form, _ = read_format(slot)
        if read_stamp(slot) != snapshot:
            raise ProtocolError(f"the slot is stamped {read_stamp(slot)}, not {snapshot}")
        record = decode_record(slot, form, snapshot)

        def tensor(name: str) -> torch.Tensor:
            offset, leaf = form.offsets[name]
            return read_leaf(slot, offset, leaf)

        early, late = decode_values(record, tensor)
        adapter.materialise({name: leaf for name, (_, leaf) in form.offsets.items() if name != RECORD})
        live = list(adapter.tensors())
        check_fit(form, live)
        adapter.check(early, late)
    except HoldfastError as error:
        problem = error
    if agreement.minimum([int(problem is None)])() != [1]:
        raise problem or StateMismatch("the snapshot does not fit the job on another rank; see its log")
    for done, item in enumerate(live):
        if done == len(live) // 2:
            reach("restore.middle", snapshot.step)
        copy_in(slot, form.offsets[item.name][0], item.tensor)
    adapter.load(early, late)


def _heal(client: SmpClient, plan: RestorePlan, coords: dict[str, str], coord: str) -> None:
    """Have lost parity computed again, on the node that took the lost one's place."""
    for group, position in plan.heal:
        if healer(plan.sources.layout, group, position) == coord and coords[coord] == client.node:
            client.heal(plan.sources, group, position)
