"""Turns the live state, as a step begins, into a `SnapshotCopy`: what to copy beside the step, and what at once.

Everything here runs in the training thread, except what a `CopyOrder` calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.smp_daemon.shared.belief import Claim
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import HoldfastError, IncompleteSnapshot, ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor
from holdfast.snapshot.copy.errors import GivenUp, LayoutChanged, within_memory
from holdfast.snapshot.copy.witness import StateChanged, Witness
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.completeness import check_complete
from holdfast.snapshot.state.digests import digest_of
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.manifest import Manifest
from holdfast.snapshot.state.record import (
    BEGAN,
    EARLY,
    LATE,
    LOOP,
    Placed,
    Values,
    capture_tree,
    decode_values,
    encode_record,
    parse_record,
    place,
    place_tensors,
    plan_format,
)
from holdfast.snapshot.state.replicas import ALONE, agree_on_shares
from holdfast.snapshot.step.orders import CopyOrder, Due, Live, SnapshotCopy
from holdfast.snapshot.step.reading import read_back

log = get_log(__name__)


class Capture:
    """Captures one rank's state as steps begin.

    A record lists what the slot holds. That both fit together is checked three times, in the trainer: for a new layout
    the record is read as a restart would read it; `Manifest.late` compares the two for each snapshot; and the first
    snapshot of a layout is read back from its slot once it is sealed.
    """

    def __init__(
        self,
        adapter: Adapter,
        agreement: Agreement,
        engine: CopyEngine,
        job: str,
        coord: str,
        loop: Callable[[], Tree] = dict,
        notes: Callable[[], dict[str, Any] | None] = lambda: None,
        run: str = UNNAMED.id,
        system: System = MACHINE,
    ) -> None:
        """
        Args:
            loop: returns the place of the loop; called as a step begins. See `SnapshotHook`.
            notes: returns plain values to put in the record beside the state, or None.
            run: id of the run that the snapshots belong to.
        """
        self._adapter = adapter
        self._system = system
        self._agreement = agreement
        self._engine = engine
        self._job = job
        self._coord = coord
        self._loop = loop
        self._notes = notes
        self._run = run
        self._sharing = ALONE
        self._form: SlotFormat | None = None
        self._read_form: SlotFormat | None = None  # a slot of this format was read back; the sealing thread sets it
        self._placed: Placed | None = None
        self._tensors: frozenset[Leaf] = frozenset()
        self._leaves: frozenset[Leaf] = frozenset()
        self._early: Values | HoldfastError = LayoutChanged("nothing was marked")
        self._devices: set[torch.device] = set()
        self._restless: set[str] = set()
        self._roams = False
        self._staging = Staging()

    def plan(self, snapshot: SnapshotId) -> SlotFormat:
        """Make the slot format for the state as it is now, and use it from now on. Walks the state. A collective call.

        Raises:
            ConfigError, StateMismatch: a part of the state cannot be captured; the message names it.
        """
        self._sharing = agree_on_shares(self._agreement, self._adapter.replica_set(), self._adapter.tensors())
        manifest = Manifest(self._adapter, self._sharing)
        marked = self._adapter.early()
        early = capture_tree(marked | {LOOP: self._loop()}, EARLY)
        try:
            late = capture_tree(manifest.late() | {BEGAN: read_state(marked)}, LATE)
            self._adapter.verify()
            record = encode_record(snapshot, self._coord, early, late, manifest.fixed, self._notes())
            self._rehearse(parse_record(record, snapshot), early.tensors | late.tensors, manifest)
        except (LayoutChanged, IncompleteSnapshot, ProtocolError) as error:
            raise StateMismatch(f"this state cannot be restored: {error}") from error
        leaves = [*manifest.leaves, *early.leaves, *late.leaves]
        form = plan_format(self._job, self._coord, leaves, len(record), self._run)
        self._leaves, self._tensors = frozenset(leaves), frozenset(manifest.leaves)
        self._form = form
        self._devices |= manifest.devices
        self._place(manifest, form)
        return form

    def _rehearse(self, record: dict[str, Any], tensors: dict[str, torch.Tensor], manifest: Manifest) -> None:
        """Read a record as a restart of this job would. Raises what `restore` would."""
        early, late, fixed = decode_values(record, tensors.__getitem__)
        check_complete(fixed, late, manifest.whole.keys())
        self._adapter.check(early, late, fixed)

    def mark(self) -> None:
        """Before data is read for the next step: capture what reading changes. Errors are raised by `begin`."""
        try:
            self._early = capture_tree(self._adapter.early(), EARLY)
        except HoldfastError as error:
            self._early = error

    def begin(self, due: Due, *, declared: bool) -> SnapshotCopy:
        """Capture the state as it is now, to be copied from now on. A collective call, in which replicas begin to
        compare what they share.

        Args:
            declared: whether the loop has said that the step begins. If not, the record also holds what `read_state`
                returns, so that a restart can tell whether it has come to the same place.

        Raises:
            LayoutChanged: call `plan` again; or the state cannot be captured in this way.
            GivenUp: a CUDA graph is being captured, or a device has no memory left for copies.
            StateMismatch: a value cannot be represented just now; the message names its path.
        """
        alike = self._compare_replicas(due.snapshot)  # before anything can fail here: the other ranks take part
        if isinstance(self._early, HoldfastError):
            raise self._early
        if self._engine.capturing():
            raise GivenUp("the step begins within the capture of a CUDA graph: begin the step before the capture")
        began = None if declared else read_state(self._adapter.early())
        # A batch was read since `mark`, which the loop describes now.
        early = self._early | capture_tree({LOOP: self._loop()}, EARLY)
        placed = self._current()
        late = capture_tree(placed.manifest.late() | {BEGAN: began}, LATE)
        self._adapter.watch()
        self._check_leaves(early)
        self._check_leaves(late)
        staged = self._staging.take(placed.at_once)
        transfer = self._engine.mark()
        values = [*early.tensors.items(), *late.tensors.items()]
        fixed = placed.manifest.fixed
        order = CopyOrder(
            due,
            self._coord,
            placed.form,
            (*staged, *place_tensors(placed.form, values)),
            partial(encode_record, due.snapshot, self._coord, early, late, fixed, self._notes()),
            transfer,
            declared,
            alike,
            partial(self._staging.give_back, staged),
            None if self._read_form is placed.form else self._reading(placed, due.snapshot),
        )
        witness = Witness(self._engine, placed.subjects, due.snapshot.step)
        live = Live(placed.moving, placed.moving_bytes, witness, placed.manifest.reshaped)
        return SnapshotCopy(order, live, self._system)

    def _reading(self, placed: Placed, snapshot: SnapshotId) -> Callable[[RecoveredShard], None]:
        form, leaves = placed.form, placed.manifest.whole  # not the manifest, which keeps tensors alive

        def read(shard: RecoveredShard) -> None:
            if self._read_form is not form:
                read_back(shard, Claim(self._run, snapshot, self._coord, form.total_bytes), leaves)
                self._read_form = form

        return read

    def _compare_replicas(self, snapshot: SnapshotId) -> Callable[[], None]:
        """Begin to compare a sample of the state that replicas share, as it is now. A collective call that returns at
        once.

        Returns a function, for any thread, that blocks for the outcome and raises `ReplicasDiffer` unless all hold the
        same.
        """
        if not self._sharing.sets:
            return lambda: None
        try:
            if self._engine.capturing():
                raise GivenUp("within the capture of a CUDA graph")
            sample = self._engine.sample(self._current().shared, snapshot.step)
        except HoldfastError:  # `begin` raises it again; the others learn that this replica compares nothing
            sample = None
        return self._sharing.compare(self._agreement, sample)

    def copy_at_once(self, changed: StateChanged) -> None:
        """Tensors have changed during their copy: from now on copy them as a step begins, and log it. That takes as
        much memory again, and the time of the copy."""
        self._restless.update(changed.names)
        length = 0
        if self._placed is not None:
            length = sum(piece.bytes for piece in self._placed.moving if piece.name in self._restless)
            self._place(self._placed.manifest, self._placed.form)
        log.warning(
            "%s: from now on such tensors are copied at once as a step begins, which takes %.1f MB more memory and "
            "holds up the loop for that copy",
            changed,
            length / 1e6,
        )

    def let_go(self) -> None:
        """The copy is done. If the job sometimes gives its tensors other memory, drop what refers to the old memory."""
        if self._roams:
            self._placed = None
            self._engine.forget()

    def _current(self) -> Placed:
        if self._form is None:
            raise LayoutChanged("there is no layout yet")
        if self._placed is not None:
            moved = self._placed.manifest.has_moved()
            self._roams = self._roams or moved
            if not moved and self._placed.manifest.holds_the_same():
                return self._placed
        manifest = Manifest(self._adapter, self._sharing)
        if frozenset(manifest.leaves) != self._tensors:
            raise LayoutChanged("the state has grown, shrunk or changed its shape")
        if not manifest.devices <= self._devices:
            raise LayoutChanged("state has come to a device that the slots were not registered with")
        return self._place(manifest, self._form)

    def _place(self, manifest: Manifest, form: SlotFormat) -> Placed:
        self._engine.cover(manifest.devices)
        self._placed = place(manifest, form, self._restless)
        self._staging = Staging()
        return self._placed

    def _check_leaves(self, values: Values) -> None:
        if new := [leaf.name for leaf in values.leaves if leaf not in self._leaves]:
            raise LayoutChanged(f"there is no room for {some(new, between=', ')}")


def read_state(early: Tree) -> Tree:
    """Digests of what `Adapter.early` gives: state that reading data changes, such as random generators and
    iterators."""
    found: Tree = {}
    for kind, part in early.items():
        if kind == "streams":
            continue  # streams of absent ranks, from which nobody draws
        if isinstance(part, dict):
            found |= {f"{kind} {name}": digest_of(value) for name, value in part.items()}
        else:
            found[kind] = digest_of(part)
    return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: CUDA's kernels for lists of tensors do not know all types, and take those of 16 bits
    through others, which changes the bits of a NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_INTEGERS[plain.itemsize]) if plain.itemsize in _INTEGERS else plain


class Staging:
    """Copies of tensors that may change at any moment, in memory that is used again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_free`: the sealing thread gives copies back
        self._free: list[tuple[SlotTensor, ...]] = []

    def take(self, pieces: Sequence[SlotTensor]) -> tuple[SlotTensor, ...]:
        """Copy the tensors as they are now. Every call must give the same tensors. Raises `GivenUp` if there is no
        memory."""
        if not pieces:
            return ()
        with self._lock:
            staged = self._free.pop() if self._free else None
        if staged is None:
            with within_memory("what may change at any moment"):
                staged = tuple(SlotTensor(torch.empty_like(p.tensor), p.offset, p.bytes, p.name) for p in pieces)
        with torch.no_grad():
            torch._foreach_copy_([_bits(piece.tensor) for piece in staged], [_bits(piece.tensor) for piece in pieces])
        return staged

    def give_back(self, staged: tuple[SlotTensor, ...]) -> None:
        """Take back what `take` returned, for a later call."""
        if staged:
            with self._lock:
                self._free.append(staged)
