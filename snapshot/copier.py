"""The copy thread: writes snapshots into slots while the next step runs, and has them sealed.

The training thread hands over a `CopyJob` at the boundary, waits for `copied` before ``optim.step()`` changes what
is being copied, and never talks to the SMP itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from smp_daemon.client import SmpClient
from smp_daemon.errors import DeadlineExceeded, HoldfastError, SmpUnavailable
from smp_daemon.layout import SnapshotId
from smp_daemon.points import reach
from smp_daemon.slotfile import SlotFormat, write_stamp
from snapshot.adapter import LiveTensor
from snapshot.tensors import copy_out

FINAL_DEADLINE_S = 3600.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CopyJob:
    """One snapshot on its way into a slot.

    Attributes:
        small: copies made at the boundary; `late` and `record` are added by `finalise`.
        copied: set once nothing of the live state is read any more, whatever became of the copy.
        done: set once it is sealed, or has failed with `error`.
    """

    snapshot: SnapshotId
    coord: str
    keep: tuple[SnapshotId, ...]
    protected: SnapshotId | None
    form: SlotFormat
    stable: tuple[LiveTensor, ...]
    small: dict[str, torch.Tensor]
    record: bytes = b""
    error: HoldfastError | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    finalised: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def finalise(self, late: dict[str, torch.Tensor], record: bytes) -> None:
        """Hand over what was still open when the copy began."""
        self.small |= late
        self.record = record
        self.finalised.set()

    def abort(self, error: HoldfastError) -> None:
        """Give the snapshot up; what was written of it will not be sealed."""
        self.error = self.error or error
        self.finalised.set()


class Copier:
    """A thread that works off copy jobs, one after another."""

    def __init__(self, client: SmpClient, reattach: Callable[[], None]) -> None:
        """`reattach` is called, in the copy thread, before the first job after the SMP went away."""
        self._client = client
        self._reattach = reattach
        self._attached = True
        self._failing = False
        self._queue: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-copy", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Begin `job` as soon as the one before it is done. Returns at once."""
        self._queue.put(job)

    def close(self, deadline_s: float) -> None:
        """Finish what was submitted and end the thread. Raises `DeadlineExceeded` if that takes too long."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the copy thread did not end within {deadline_s:.0f} s")

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._attached:
                    self._reattach()
                    self._attached = True
                self._copy(job)
                self._failing = False
            except HoldfastError as error:
                self._attached = self._attached and not isinstance(error, SmpUnavailable | DeadlineExceeded)
                if not self._failing:  # once, until it works again
                    log.error("no snapshot of %s: %s", job.snapshot, error)
                self._failing = True
                job.abort(error)
            except Exception as error:  # a bug of ours must not kill the thread that the training loop waits for
                log.exception("snapshot of %s failed", job.snapshot)
                job.abort(HoldfastError(f"{type(error).__name__}: {error}"))
            finally:
                job.copied.set()
                job.done.set()

    def _copy(self, job: CopyJob) -> None:
        slot = self._client.begin(job.snapshot, job.coord, job.keep, job.protected)
        step = job.snapshot.step
        reach("copy.before", step)
        slot[: len(job.form.header)] = job.form.header
        write_stamp(slot, job.snapshot)
        for done, live in enumerate(job.stable):
            if done == len(job.stable) // 2:
                reach("copy.middle", step)
            copy_out(live.tensor, slot, job.form.offsets[live.name][0])
            if job.error:
                break
        job.copied.set()
        reach("copy.done", step)
        if not job.finalised.wait(FINAL_DEADLINE_S):
            raise DeadlineExceeded(f"no step followed {job.snapshot} within {FINAL_DEADLINE_S:.0f} s")
        if job.error:
            self._client.abandon(job.snapshot, job.coord)
            raise job.error
        for name, tensor in job.small.items():
            copy_out(tensor, slot, job.form.offsets[name][0])
        offset, capacity = job.form.record
        slot[offset : offset + capacity] = job.record.ljust(capacity)
        self._client.seal(job.snapshot, job.coord)
