"""The hook in the training process: takes a snapshot at the boundary, copies it while the next step runs.

::

    optim.step() of s ──► after_step: settle outcomes, capture, hand over ─┐
    forward, backward of s+1      on_forward: last small values            │ copy thread: begin, copy, seal
    optim.step() of s+1 ◄─ before_step: wait for the copy, report outcomes ┘ SMP: digest, encode, post

Calls into `SnapshotHook` come from the training thread only.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from smp_daemon.board import Outcome
from smp_daemon.client import SmpClient
from smp_daemon.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from smp_daemon.layout import Layout, SnapshotId
from smp_daemon.paths import arena_path, socket_path
from smp_daemon.slotfile import SlotFormat
from smp_daemon.spawn import start_smp
from snapshot.adapter import Adapter
from snapshot.agreement import Agreement, Result, default_agreement
from snapshot.arrange import RankInfo, arrange, coordinate_key, parse_domains, parse_protect, shortfalls
from snapshot.boundary import Boundary
from snapshot.copier import Copier, CopyJob
from snapshot.ledger import Ledger
from snapshot.restore import Restored, restore
from snapshot.state import Capture, capture_early, capture_late, encode_record, fits, plan_format

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Statistics:
    """Counters since the hook was entered.

    Attributes:
        taken, protected, failed, skipped: snapshots begun, protected job-wide, failed; steps without a free slot.
        stall_s: time that the training thread spent in the hook.
    """

    taken: int = 0
    protected: int = 0
    failed: int = 0
    skipped: int = 0
    stall_s: float = 0.0


class SnapshotHook:
    """Protects one rank's state; see `holdfast.InMemorySnapshot` for the options."""

    def __init__(
        self,
        adapter: Adapter,
        *,
        job: str | None = None,
        every: int = 1,
        protect: str = "auto",
        domains: str | None = None,
        slots: int = 3,
        start: bool = True,
        keep: bool = False,
        strict: bool = False,
        arena: Path | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: a snapshot is taken every 1 or more steps")
        if not 2 <= slots <= 16:
            raise ConfigError(f"slots={slots}: a shard has 2 to 16 slots")
        self._adapter = adapter
        self._job = job or job_from_environment()
        self._every = every
        self._protection = parse_protect(protect)
        self._domain_text = os.environ.get("HOLDFAST_DOMAINS", "") if domains is None else domains
        self._start = start
        self._keep = keep
        self._strict = strict
        self._arena = arena_path(self._job, arena)
        self._deadline_s = deadline_s
        self._ledger = Ledger(slots)
        self._form: SlotFormat | None = None
        self._copy: CopyJob | None = None
        self._outcomes: Result | None = None
        self._copies: dict[SnapshotId, CopyJob] = {}
        self._layout: Layout | None = None
        self._misfit = False
        self._enabled = True
        self.statistics = Statistics()

    # ------------------------------------------------------------------ for the user

    @property
    def step(self) -> int:
        """How many optimizer steps the state has behind it: where the loop goes on; 0 on a cold start."""
        return self._step

    @property
    def restored(self) -> Restored:
        """How this rank started."""
        return self._restored

    @property
    def protected_step(self) -> int | None:
        """The newest step whose snapshot is protected on every node, as far as the ranks have agreed."""
        return self._ledger.protected.step if self._ledger.protected else None

    def drain(self, deadline_s: float) -> bool:
        """Block until this node has protected every snapshot taken so far, at most `deadline_s`.

        Not needed in a training loop; for planned stops, and after a forward of the next step has begun. True if
        all are protected as far as this node can tell; the other ranks learn of it with the next step. False if some
        failed, are not done yet, or the SMP is gone. Never raises for that.
        """
        limit = time.monotonic() + deadline_s
        outcomes = []
        for snapshot, copy in list(self._copies.items()):
            self._finalise(copy)
            if not copy.done.wait(limit - time.monotonic()) or copy.error is not None:
                return False
            try:
                outcomes.append(self._client.await_outcome(snapshot, max(0.0, limit - time.monotonic())))
            except (SmpUnavailable, DeadlineExceeded):
                return False
        return all(outcome is Outcome.PROTECTED for outcome in outcomes)

    def __enter__(self) -> Self:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call.

        Raises:
            HoldfastError: set-up errors always raise, whatever `strict` says.
        """
        self._agreement: Agreement = default_agreement()
        self._coord = self._adapter.coordinate()
        self._domains = parse_domains(self._domain_text, self._coord)
        self._client = self._connect()
        try:
            self._restored = restore(self._client, self._agreement, self._adapter)
        except BaseException:
            self._client.close()
            self._agreement.close()
            raise
        self._epoch = self._restored.epoch
        self._step = self._restored.snapshot.step if self._restored.snapshot else 0
        self._ledger = Ledger(self._ledger.slots, protected=self._restored.snapshot)
        self._copier = Copier(self._client, self._reattach)
        self._boundary = Boundary(self._adapter.optimizer(), self._adapter.modules(), self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """If the block ended well, finish the job: SMPs end and their memory is free (unless ``keep``).

        After an exception everything stays, for the restart.
        """
        self._boundary.remove()
        if self._copy is not None:
            self._finalise(self._copy)
        try:
            self._copier.close(self._deadline_s)
            if kind is None and self._enabled:
                self._finish()
        except HoldfastError as failure:
            if self._strict and kind is None:
                raise
            log.error("the SMP of this node was left running (`holdfast gc` removes it): %s", failure)
        finally:
            self._client.close()
            self._agreement.close()

    # ------------------------------------------------------------------ the boundary

    def before_step(self) -> None:
        """The fence: nothing that is still being copied may change."""
        began = time.perf_counter()
        if self._copy is not None:
            self._finalise(self._copy)
            if not self._copy.copied.wait(self._deadline_s):
                self._copy.abort(DeadlineExceeded(f"the copy of {self._copy.snapshot} took over {self._deadline_s} s"))
        if self._enabled and self._ledger.pending:
            self._outcomes = self._agreement.minimum(self._report())
        self.statistics.stall_s += time.perf_counter() - began

    def after_step(self) -> None:
        """The boundary: settle what became of earlier snapshots, and take the next."""
        began = time.perf_counter()
        self._step += 1
        try:
            if self._enabled:
                self._settle()
                if self._step % self._every == 0:
                    self._take()
        except HoldfastError as error:
            if self._strict or self._layout is None:
                raise
            self._enabled = False
            log.error("no more snapshots are taken: %s", error)
        self.statistics.stall_s += time.perf_counter() - began

    def on_forward(self) -> None:
        """The next step begins: schedules and options have settled."""
        if self._copy is not None and not self._copy.finalised.is_set():
            began = time.perf_counter()
            self._finalise(self._copy)
            self.statistics.stall_s += time.perf_counter() - began

    # ------------------------------------------------------------------ inside

    def _connect(self) -> SmpClient:
        try:
            return SmpClient(self._arena, self._job)
        except SmpUnavailable:
            if not self._start:
                raise
        self._start_smp()
        return SmpClient(self._arena, self._job)

    def _reattach(self) -> None:
        """The SMP went away, and with it what it had not sealed. Go on with its successor, or start one."""
        try:
            self._client.reconnect()
        except SmpUnavailable:
            if not self._start:
                raise
            self._start_smp()
            self._client.reconnect()
        self._client.join(self._epoch)
        if self._layout is not None:
            self._client.configure(self._layout)

    def _start_smp(self) -> None:
        node = os.environ.get("HOLDFAST_NODE") or _host_name()
        host = os.environ.get("HOLDFAST_HOST", "127.0.0.1")
        try:
            start_smp(self._job, node, self._arena, host=host, insecure=os.environ.get("HOLDFAST_INSECURE") == "1")
        except ConfigError:
            if not socket_path(self._arena).exists():
                raise  # else another rank of this node was faster, and its SMP serves

    def _report(self) -> list[int]:
        """What the ranks take the minimum of: the outcome of each pending snapshot, and whether the format holds."""
        outcomes = [self._outcome(snapshot) for snapshot in self._ledger.pending]
        return [*outcomes, int(not self._misfit)]

    def _outcome(self, snapshot: SnapshotId) -> Outcome:
        copy = self._copies.get(snapshot)
        return self._client.outcome(snapshot) if copy and copy.error is None else Outcome.FAILED

    def _settle(self) -> None:
        if self._outcomes is None:
            return
        *outcomes, fits_everywhere = self._outcomes()
        self._outcomes = None
        results = [Outcome(value) for value in outcomes]
        self.statistics.protected += results.count(Outcome.PROTECTED)
        self.statistics.failed += results.count(Outcome.FAILED)
        self._ledger = self._ledger.settle(results)
        failed = [copy.error for copy in self._copies.values() if copy.error is not None]
        if failed and self._strict:
            raise failed[0]
        self._copies = {s: copy for s, copy in self._copies.items() if s in self._ledger.pending}
        if not fits_everywhere:
            self._form = None
            self._misfit = False

    def _take(self) -> None:
        if not self._ledger.may_begin:
            self.statistics.skipped += 1
            return
        capture = self._capture()
        if self._form is None and capture is not None:
            self._configure(capture)
        snapshot = SnapshotId(self._epoch, self._step)
        keep, protected = self._ledger.keep, self._ledger.protected
        self._ledger = self._ledger.begin(snapshot)
        self.statistics.taken += 1
        form = self._fitting_form(capture) if capture is not None else None
        if capture is None or form is None:
            self._misfit = capture is not None  # and without a copy job this snapshot counts as failed
            self._copy = None
            return
        self._early_values = capture.values
        self._copy = CopyJob(snapshot, self._coord, keep, protected, form, capture.stable, capture.early)
        self._copies[snapshot] = self._copy
        self._copier.submit(self._copy)

    def _capture(self) -> Capture | None:
        """The state at this boundary, or None if it cannot be captured just now: the other ranks go on taking part.

        Where the ranks are about to agree on a layout there is no going on without it, and the error is raised.
        """
        try:
            return capture_early(self._adapter)
        except HoldfastError as error:
            if self._strict or self._form is None:
                raise
            if self._copy is not None:
                log.error("no snapshot of step %d: %s", self._step, error)
            return None

    def _fitting_form(self, capture: Capture) -> SlotFormat | None:
        late, late_values = capture_late(self._adapter)
        record = encode_record(SnapshotId(self._epoch, self._step), self._coord, capture.values, late_values)
        if self._form is not None and fits(self._form, capture.leaves(late), len(record)):
            return self._form
        return None

    def _configure(self, capture: Capture) -> None:
        """Agree on a layout for the state as it is now, and reserve it. A collective call.

        Every change of layout is an epoch of its own; what was snapshot before stays until the new is protected.
        """
        late, late_values = capture_late(self._adapter)
        self._adapter.verify()
        record = encode_record(SnapshotId(self._epoch, self._step), self._coord, capture.values, late_values)
        form = plan_format(self._job, self._coord, capture.leaves(late), len(record))
        if self._layout is not None:
            self._epoch += 1
            self._client.join(self._epoch)
        mine = RankInfo.of(self._coord, self._client.inventory(), form.total_bytes, self._domains)
        everyone = [
            RankInfo.from_json(json.loads(text)) for text in self._agreement.gather(json.dumps(asdict(mine)).encode())
        ]
        layout = arrange(self._job, self._epoch, everyone, self._protection, self._ledger.slots)
        problem: HoldfastError | None = None
        try:
            self._client.configure(layout)
        except HoldfastError as error:
            problem = error
        if self._agreement.minimum([int(problem is None)])() != [1]:
            raise problem or ConfigError("another rank's SMP could not reserve its memory; see that rank's error")
        if layout.coords[0] == self._coord:
            for shortfall in shortfalls(layout):
                log.warning("%s", shortfall)
        self._layout = layout
        self._form = form

    def _finalise(self, job: CopyJob) -> None:
        if job.finalised.is_set():
            return
        try:
            late, values = capture_late(self._adapter)
            record = encode_record(job.snapshot, self._coord, self._early_values, values)
            if late.keys() - job.form.offsets.keys() or len(record) > job.form.record[1]:
                raise HoldfastError(f"the schedule's state grew while {job.snapshot} was taken")
            job.finalise(late, record)
        except HoldfastError as error:
            job.abort(error)

    def _finish(self) -> None:
        if self._copy is not None:
            self._copy.done.wait(self._deadline_s)
        if self._keep:
            if self._ledger.pending:
                self._client.await_outcome(self._ledger.pending[-1], self._deadline_s)
            return
        ranks = [json.loads(t) for t in self._agreement.gather(json.dumps([self._coord, self._client.node]).encode())]
        on_this_node = [coord for coord, node in ranks if node == self._client.node]
        if min(on_this_node, key=coordinate_key) == self._coord:
            self._client.finish(self._epoch)


def job_from_environment() -> str:
    """The job id that the launcher gave: ``HOLDFAST_JOB``, torchrun's run id, or Slurm's job id.

    Raises:
        ConfigError: none is set.
    """
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = os.environ.get("HOLDFAST_JOB") or (torchrun if torchrun != "none" else os.environ.get("SLURM_JOB_ID"))
    if not job:
        raise ConfigError(
            "this training run has no id: set HOLDFAST_JOB, the same for every rank and every restart of the run, "
            "or pass job="
        )
    return job


def _host_name() -> str:
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename)
    return name[:64].lstrip("._-") or "node"
