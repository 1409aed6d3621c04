"""From the live state at a boundary to a `CopyJob`: what is copied later, what at once, what not again.

Everything here runs in the training thread, except `Capture.over`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from smp_daemon.errors import HoldfastError
from smp_daemon.layout import SnapshotId
from smp_daemon.slotfile import Leaf, SlotFormat
from snapshot.adapter import Adapter
from snapshot.agreement import Agreement
from snapshot.copier import CopyJob
from snapshot.frozen import FrozenChanged, versions
from snapshot.manifest import Manifest
from snapshot.movers import Mover, Piece
from snapshot.replicas import ALONE, agree_on_shares
from snapshot.state import (
    Misfit,
    Placed,
    Values,
    capture_early,
    capture_late,
    encode_record,
    place,
    place_tensors,
    plan_format,
)


class Capture:
    """Takes one rank's state at boundaries.

    Attributes:
        notes: asked for plain values that stand in the record beside the state, if it gives some.
    """

    def __init__(self, adapter: Adapter, agreement: Agreement, mover: Mover, job: str, coord: str) -> None:
        self._adapter = adapter
        self._agreement = agreement
        self._mover = mover
        self._job = job
        self._coord = coord
        self._sharing = ALONE
        self._placed: Placed | None = None
        self._leaves: frozenset[Leaf] = frozenset()
        self._early: Values
        self._versions: list[int] = []
        self._thawed = False
        self._staging, self._late_staging = Staging(), Staging()
        self.notes: Callable[[], dict[str, Any] | None] = lambda: None

    def plan(self, snapshot: SnapshotId) -> SlotFormat:
        """The slot format for the state as it is now; used from now on. Walks the state. A collective call.

        Raises:
            ConfigError, StateMismatch: something in it cannot be captured; the message names it.
        """
        self._sharing = agree_on_shares(self._agreement, self._adapter.replica_set(), self._adapter.tensors())
        manifest = Manifest(self._adapter, self._sharing)
        early, late = capture_early(self._adapter), capture_late(self._adapter)
        self._adapter.verify()
        record = encode_record(snapshot, self._coord, early, late, manifest.fixed, self.notes())
        leaves = [*manifest.leaves, *early.leaves, *late.leaves]
        form = plan_format(self._job, self._coord, leaves, len(record))
        self._leaves = frozenset(leaves)
        self._place(manifest, form)
        return form

    @property
    def leaf_names(self) -> frozenset[str]:
        """What this rank's slots hold, by name; parts of what replicas share among them."""
        return frozenset(leaf.name for leaf in self._leaves)

    def begin(self, snapshot: SnapshotId, keep: tuple[SnapshotId, ...], protected: SnapshotId | None) -> CopyJob:
        """The state as it is now, to be copied from now on.

        Raises:
            Misfit: call `plan` again.
            StateMismatch: something cannot be represented just now; the message names its path.
        """
        placed = self._current()
        self._early = capture_early(self._adapter)
        self._check_leaves(self._early)
        staged = self._staging.take(placed.at_once)
        self._mover.mark()
        once = () if self._thawed else placed.once
        self._versions = versions(once)
        early = place_tensors(placed.form, self._early.tensors.items())
        return CopyJob(
            snapshot,
            self._coord,
            keep,
            protected,
            placed.form,
            placed.moving,
            placed.moving_bytes,
            staged,
            early,
            once,
            tuple(self._versions),
            settling=placed.settling,
            release=[partial(self._staging.give_back, staged)],
        )

    def finalise(self, job: CopyJob) -> None:
        """The next forward begins, or the next ``optim.step()``: hand over what has only settled now."""
        if job.finalised.is_set() or self._placed is None:
            return
        placed = self._placed
        try:
            late = capture_late(self._adapter)
            self._check_leaves(late)
            if placed.settling or placed.settled:
                placed = self._current()  # they may have become others since the boundary
        except HoldfastError as error:
            job.abort(error)
            return
        tensors = list(late.tensors.items())
        job.settling = placed.settling
        if self._thawed or versions(placed.once) != self._versions:
            self._thawed = True
            job.once = ()
            pieces = [Piece(piece.tensor.detach().clone(), piece.offset, piece.bytes) for piece in placed.once]
        else:
            pieces = []
        settled = self._late_staging.take(placed.settled)
        job.release.append(partial(self._late_staging.give_back, settled))
        self._mover.settle()
        fixed = placed.manifest.fixed
        record = partial(encode_record, job.snapshot, self._coord, self._early, late, fixed, self.notes())
        job.finalise((*place_tensors(job.form, tensors), *pieces, *settled), record)

    def over(self, job: CopyJob) -> None:
        """The job has been sealed, or given up. Called from any thread."""
        for release in job.release:
            release()
        if isinstance(job.error, FrozenChanged):
            self._thawed = True

    def _current(self) -> Placed:
        if self._placed is None:
            raise Misfit("there is no layout yet")
        if not self._placed.manifest.is_current():
            manifest = Manifest(self._adapter, self._sharing)
            if set(manifest.leaves) != set(self._placed.manifest.leaves):
                raise Misfit("the state has grown, shrunk or changed its shape")
            self._place(manifest, self._placed.form)
        return self._placed

    def _place(self, manifest: Manifest, form: SlotFormat) -> None:
        self._placed = place(manifest, form)
        self._staging, self._late_staging = Staging(), Staging()

    def _check_leaves(self, values: Values) -> None:
        if new := [leaf.name for leaf in values.leaves if leaf not in self._leaves]:
            raise Misfit(f"there is no room for {', '.join(new)}")


class Staging:
    """Copies of what may change at any moment, in memory that is used again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[Piece, ...]] = []

    def take(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Copies of the tensors as they are now; always of the same tensors."""
        if not pieces:
            return ()
        with self._lock:
            staged = self._free.pop() if self._free else None
        if staged is None:
            staged = tuple(Piece(torch.empty_like(p.tensor.detach()), p.offset, p.bytes) for p in pieces)
        with torch.no_grad():
            torch._foreach_copy_([piece.tensor for piece in staged], [piece.tensor for piece in pieces])
        return staged

    def give_back(self, staged: tuple[Piece, ...]) -> None:
        """What `take` gave is no longer needed."""
        if staged:
            with self._lock:
                self._free.append(staged)
