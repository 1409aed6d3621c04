"""Writes snapshots on demand, as checkpoints are written, instead of at every boundary of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import HoldfastError, failure_of
from holdfast.smp_daemon.shared.identity import next_epoch
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plan import newest_protected, newest_whole
from holdfast.smp_daemon.shared.slotfile import SlotFormat, write_stamp
from holdfast.smp_daemon.shared.starts import Start
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.devices import DeviceEngines
from holdfast.snapshot.copy.tensors import leaf_of
from holdfast.snapshot.resume.arrange import Protection
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import check_nothing_is_left, find_own
from holdfast.snapshot.resume.reserve import await_slots, lay_out, node_turn
from holdfast.snapshot.state.record import place_tensors, plan_format

SLOTS = 3
"""For the snapshot written last, the one being written, and, after a restart, the one before: the last may not be
protected if the job died while writing it."""


class SlotWriter:
    """Writes one rank's snapshots of named tensors, one at a time. Making one is a collective call.

    The previous snapshot is kept until the next one is protected on every node.

    A writer begins an epoch: every older writer of the same job is fenced on all nodes before anyone writes.

    Not thread-safe.
    """

    def __init__(
        self,
        client: SmpClient,
        agreement: Agreement,
        job: str,
        coord: str,
        protection: Protection,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: how long a write waits for its snapshot to be protected."""
        self._client = client
        self._agreement = agreement
        self._job = job
        self._coord = coord
        self._protection = protection
        self._deadline_s = deadline_s
        entered, reach, inventories = find_own(client, agreement, coord, StartOptions.of_run())
        self._kept = newest_whole(inventories)
        self._protected = newest_protected(inventories)
        if self._kept is None:
            check_nothing_is_left(reach, (), promised=self._protected is not None)
        now_s = entered.now_s
        self._run = reach.begun(entered.drawn, now_s) if self._kept is None else reach.continued(now_s)
        self.epoch = next_epoch(max(inventory.epoch for inventory in entered.inventories), entered.drawn)
        self._step = self._kept.step if self._kept else 0
        client.join(self.epoch, Start(self.epoch, self._step, run=self._run))
        agreement.everywhere()
        self._layout: Layout | None = None
        self._capacity = 0
        self._engine = DeviceEngines()

    def write(self, tensors: Mapping[str, torch.Tensor], record: bytes) -> SnapshotId:
        """Copy tensors and a record into a slot, and wait until every node has protected its own. A collective call;
        blocks. The previous snapshot is kept until then, and freed afterwards.

        Raises:
            HoldfastError: a rank could not; the previous snapshot is still there.
        """
        leaves = [leaf_of(name, tensor) for name, tensor in tensors.items()]
        self._engine.cover({tensor.device for tensor in tensors.values()})
        form = plan_format(self._job, self._coord, leaves, len(record), self._run.id)
        self._reserve(form)
        self._step += 1
        snapshot = SnapshotId(self.epoch, self._step)
        problem = failure_of(lambda: self._write(snapshot, form, tensors, record), HoldfastError)
        if not self._agreement.everywhere(problem is None):
            raise problem or HoldfastError("another rank could not write its part; see its error")
        self._kept = self._protected = snapshot
        return snapshot

    def close(self) -> None:
        """Release the slots. No collective call; what was written stays."""
        self._engine.close()

    def _reserve(self, form: SlotFormat) -> None:
        """Make sure that there is a layout into which `form` fits on every rank."""
        fits = self._layout is not None and form.total_bytes == self._capacity
        if self._agreement.everywhere(fits):
            return
        if self._layout is not None:
            self.epoch += 1
            self._client.join(self.epoch)
        client, agreement = self._client, self._agreement
        layout, _ = lay_out(
            client,
            agreement,
            self._job,
            self.epoch,
            self._coord,
            form.total_bytes,
            self._protection,
            SLOTS,
            run=self._run,
        )
        turn = partial(node_turn, client)
        await_slots(client, agreement, layout, self._coord, lambda slots: self._engine.prepare(slots, turn))
        self._layout = layout
        self._capacity = form.total_bytes

    def _write(
        self, snapshot: SnapshotId, form: SlotFormat, tensors: Mapping[str, torch.Tensor], record: bytes
    ) -> None:
        keep = {each for each in (self._kept, self._protected) if each is not None}
        taken = self._client.take(self._coord, keep)
        slot, transfer = taken.view, self._engine.mark()
        try:
            slot[: len(form.header)] = form.header
            write_stamp(slot, snapshot)
            transfer.copy(place_tensors(form, tensors.items()), slot, lambda count: None)
            transfer.finish()
            offset, capacity = form.record
            slot[offset : offset + capacity] = record.ljust(capacity)
        except BaseException:
            transfer.settle()  # nothing may write to a slot that is taken again
            self._client.give_back(taken)
            raise
        try:
            self._client.seal(snapshot, self._coord, taken, keep, self._protected)
        except HoldfastError:
            self._client.give_back(taken)
            raise
        outcome = self._client.await_outcome(snapshot, self._deadline_s)
        if outcome is not SnapshotOutcome.PROTECTED:
            raise HoldfastError(f"{snapshot} is not protected: {outcome.name.lower()}")
