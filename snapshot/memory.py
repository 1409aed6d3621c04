"""Checkpoints in memory: snapshots that are written and found on demand, not at every boundary of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import HoldfastError, failure_of
from holdfast.smp_daemon.shared.identity import Run, next_epoch
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.smp_daemon.shared.plan import RestorePlan, newest_protected, newest_whole
from holdfast.smp_daemon.shared.runs import own_inventories
from holdfast.smp_daemon.shared.slotfile import SlotFormat, write_stamp
from holdfast.smp_daemon.shared.starts import Start
from holdfast.snapshot.collective.agreement import Agreement, default_agreement
from holdfast.snapshot.connect import connect, job_from_environment
from holdfast.snapshot.copy.devices import DeviceEngines
from holdfast.snapshot.copy.tensors import leaf_of
from holdfast.snapshot.resume.arrange import parse_protect
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import Entered, Reach, check_nothing_is_left, exchange, reach_of
from holdfast.snapshot.resume.reserve import lay_out, node_turn, together
from holdfast.snapshot.state.record import place_tensors, plan_format

SLOTS = 3
"""For the snapshot written last, the one being written, and, after a restart, the one before: the last may not be
protected if the job died while writing it."""


class Memory:
    """One rank's checkpoints in the memory of the nodes, written one at a time. The constructor is a collective call.

    The previous checkpoint is kept until the next one is protected on every node. Not thread-safe.

    Attributes:
        coord: this rank's coordinate. ranks: number of ranks. client: the connection to its SMP.
        agreement: collectives with the other ranks.
    """

    def __init__(
        self,
        job: str | None,
        suffix: str,
        arena: str | Path | None,
        *,
        start: bool,
        protect: str = "auto",
        deadline_s: float = 120.0,
        agreement: Agreement | None = None,
    ) -> None:
        """
        Args:
            job: the job whose memory is used; default: the id of the training run with `suffix` added, so that an
                `InMemorySnapshot` of the same run is not disturbed.
            arena, start, protect: as for `holdfast.InMemorySnapshot`.
            deadline_s: how long a write waits until it is protected, in seconds.
            agreement: with which ranks; default: with all of the job.

        Raises:
            ConfigError: an argument, or the set-up of the machine, is wrong.
        """
        self._protection, self._deadline_s = parse_protect(protect), deadline_s
        self.job = job or f"{job_from_environment()}{suffix}"
        self.agreement = agreement or default_agreement()
        self.coord = f"rank{self.agreement.rank}"
        with ExitStack() as undo:  # if anything fails, the other ranks must not wait for this one
            undo.callback(self.agreement.close)
            self.ranks = len(self.agreement.gather(self.coord.encode()))
            self.client = connect(arena_path(self.job, arena), self.job, start=start)
            undo.pop_all()
        self._engine = DeviceEngines()
        self._run: Run | None = None  # set once an epoch has begun to write in
        self._was_laid_out = False  # in this epoch, or an attempt was made: the next one needs another epoch
        self._capacity = self._planned = 0  # bytes of a slot (0: there are none), and of the record planned for

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the lowest rank on its node. A collective call."""
        nodes = self.agreement.gather(self.client.node.encode())
        return nodes.index(self.client.node.encode()) == self.agreement.rank

    def find(self) -> tuple[dict[str, str], list[Inventory]]:
        """The node of every rank, in order, and what the SMPs hold of the job's run. A collective call. Raises as
        `exchange` and `own_run`."""
        entered, _, inventories = self._find()
        return entered.coords, inventories

    def _find(self) -> tuple[Entered, Reach, list[Inventory]]:
        entered = exchange(self.client, self.agreement, self.coord, StartOptions.of_run())
        reach = reach_of(entered.inventories, (), entered.options)  # this memory is not persisted
        return entered, reach, own_inventories(entered.inventories, reach.run)

    def recover(self, plan: RestorePlan, coord: str) -> tuple[RecoveredShard, SlotFormat]:
        """Have this node hold a shard, and read its header. Blocks; raises `HoldfastError`."""
        shard = self.client.recover(plan.sources, coord)
        return shard, believe_slot(shard.view, Claim.of_shard(plan.snapshot, coord, plan.sources.layout))

    def close(self, *, keep: bool = True) -> None:
        """Release the slots and all connections. ``keep=False`` also gives up all checkpoints and ends the SMPs: a
        collective call."""
        try:
            if not keep and self.is_first_of_node:
                self.client.finish(self.client.inventory().epoch)
        finally:
            self._engine.close()
            self.client.close()
            self.agreement.close()

    def begin(self) -> Run:
        """Begin an epoch to write in, with the first call: every older writer of the job is fenced on all nodes before
        anyone writes. Returns the run. A collective call.

        Raises:
            HoldfastError: as `find` and `check_nothing_is_left`.
        """
        if self._run is None:
            entered, reach, inventories = self._find()
            self._kept = newest_whole(inventories)
            self._protected = newest_protected(inventories)
            if self._kept is None:
                check_nothing_is_left(reach, (), promised=self._protected is not None)
            now_s = entered.now_s
            run = reach.begun(entered.drawn, now_s) if self._kept is None else reach.continued(now_s)
            self._epoch = next_epoch(max(inventory.epoch for inventory in entered.inventories), entered.drawn)
            self._step = self._kept.step if self._kept else 0
            self.client.join(self._epoch, Start(self._epoch, self._step, run=run))
            self.agreement.everywhere()
            self._run = run
        return self._run

    def write(self, find: Callable[[], tuple[Mapping[str, torch.Tensor], bytes]]) -> SnapshotId:
        """Copy tensors and a record, which `find` returns, into a slot, and wait until every node has protected its
        own. A collective call; blocks. The previous snapshot is kept until then, and freed afterwards.

        Raises:
            HoldfastError: a rank could not, or its `find` failed; the previous snapshot is still there.
        """
        run = self.begin()

        def plan() -> tuple[Mapping[str, torch.Tensor], bytes, SlotFormat]:
            try:
                tensors, record = find()
            except HoldfastError:
                raise
            except Exception as error:  # the other ranks wait for this one
                raise HoldfastError(f"what is to be kept could not be had: {error!r}") from error
            self._engine.cover({tensor.device for tensor in tensors.values()})
            form = partial(plan_format, self.job, self.coord, [leaf_of(*item) for item in tensors.items()], run=run.id)
            if form(self._planned).record[1] < len(record):  # else, if only its length differs, the layout stays
                self._planned = len(record)
            return tensors, record, form(self._planned)

        tensors, record, form = together(self.agreement, plan)
        self._reserve(form, run)
        self._step += 1
        snapshot = SnapshotId(self._epoch, self._step)
        problem = failure_of(lambda: self._write(snapshot, form, tensors, record), HoldfastError)
        if not self.agreement.everywhere(problem is None):
            raise problem or HoldfastError("another rank could not write its part; see its error")
        self._kept = self._protected = snapshot
        return snapshot

    def _reserve(self, form: SlotFormat, run: Run) -> None:
        """Make sure that there is a layout into which `form` fits on every rank."""
        if self.agreement.everywhere(form.total_bytes == self._capacity):
            return
        self._epoch += self._was_laid_out
        self._was_laid_out, self._capacity = True, 0
        client, agreement = self.client, self.agreement
        layout, _ = lay_out(
            client,
            agreement,
            self.job,
            self._epoch,
            self.coord,
            form.total_bytes,
            self._protection,
            SLOTS,
            run=run,
        )
        turn = partial(node_turn, client)
        together(agreement, lambda: client.configure(layout))
        together(agreement, lambda: self._engine.prepare(client.slots(layout.epoch, self.coord), turn))
        self._capacity = form.total_bytes

    def _write(
        self, snapshot: SnapshotId, form: SlotFormat, tensors: Mapping[str, torch.Tensor], record: bytes
    ) -> None:
        keep = {each for each in (self._kept, self._protected) if each is not None}
        taken = self.client.take(self.coord, keep)
        slot, transfer = taken.view, self._engine.mark()
        try:
            slot[: len(form.header)] = form.header
            write_stamp(slot, snapshot)
            transfer.copy(place_tensors(form, tensors.items()), slot, lambda count: True)
            transfer.finish()
            offset, capacity = form.record
            slot[offset : offset + capacity] = record.ljust(capacity)
            self.client.seal(snapshot, self.coord, taken, keep, self._protected)
        except BaseException:
            transfer.settle()  # nothing may write to a slot that is taken again
            self.client.give_back(taken)
            raise
        outcome = self.client.await_outcome(snapshot, self._deadline_s)
        if outcome is not SnapshotOutcome.PROTECTED:
            raise HoldfastError(f"{snapshot} is not protected: {outcome.name.lower()}")
