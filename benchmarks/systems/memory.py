"""holdfast: `Alone` survives the death of processes; with `Protected` each rank is a node, and any one may be lost.

The hook is the public one with default options, except that the loop decides when a snapshot is due. Each node has its
own SMP process, on loopback.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.systems.common import DEADLINE_S, Memory, files_below, until
from holdfast import InMemorySnapshot, __version__
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.interval.rule import IntervalRule
from holdfast.snapshot.step.orders import CopyState, SnapshotCopy


@dataclass(frozen=True)
class _Taken:
    """A snapshot, and the copy that makes it."""

    snapshot: SnapshotId | None
    copy: SnapshotCopy | None


class OnDemand(IntervalRule):
    """Lets the loop decide which steps are followed by a snapshot."""

    due = False

    def is_due(self, step: int, encodes: bool) -> bool:
        return self.due


class Alone:
    """Snapshots in the memory of one node, which holds all ranks."""

    name = "holdfast"
    version = __version__
    _options = "none"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._node = self._node_of(rank)
        self._base = folder / self._node
        self._counts = self._node_of(rank - 1) != self._node or rank == 0
        os.environ |= {
            "HOLDFAST_JOB": "stall",
            "HOLDFAST_NODE": self._node,
            "HOLDFAST_ARENA": str(self._base),
            "HOLDFAST_EVERY": "1",
        }
        self._newest = self._before = _Taken(None, None)
        self._accepted = False
        files = partial(files_below, self._base)
        self._memory = Memory(
            files if self._counts else tuple,
            lambda: [self._snap._session.rank.client.pid] if self._entered() else [],
            tuple if self._counts else files,
        )
        self._enter()

    def save(self, step: int) -> None:
        self._on_demand.due = True
        self._accepted = False

    def poll(self) -> None:
        """Tell the hook that a step is over and the next forward begins, which it otherwise detects by itself; take a
        snapshot if one is due."""
        taken = self._snap.statistics.taken
        self._snap.after_step()
        self._snap.begin()
        self._snap._session.loop.on_forward(self._snap.step, ())
        if self._snap.statistics.taken > taken:
            session = self._snap._session
            self._before = self._newest
            self._newest = _Taken(SnapshotId(session.progress.epoch, session.progress.step), session.protecting.newest)
            self._accepted = True
        self._on_demand.due = False

    def accepted(self) -> bool:
        """Whether the newest snapshot was begun.

        The hook never waits for a free slot: it skips the step, or gives the snapshot up. Snapshots before all memory
        is reserved do not count, as measurements begin after that.
        """
        if self._snap._session.protecting.layouts.is_reserving:
            return False
        return self._accepted and self._newest.copy is not None and self._newest.copy.error is None

    def revoke(self) -> None:
        if self._accepted:
            self._newest = self._before

    def before_step(self) -> None:
        self._snap.before_step()

    def survives_kill(self) -> bool:
        copy = self._newest.copy
        return copy is not None and copy.state is CopyState.SEALED

    def done(self) -> bool:
        newest = self._newest.snapshot
        outcome = self._snap._session.rank.client.outcome(newest) if newest else SnapshotOutcome.PENDING
        if outcome is SnapshotOutcome.FAILED:
            raise RuntimeError(f"{newest} failed")
        return self.survives_kill() and outcome is SnapshotOutcome.PROTECTED

    def wait(self) -> None:
        until(self.done, "a snapshot")

    def restore(self) -> None:
        """Leave and enter the hook, which restores as in a restarted trainer."""
        for part in (self._snap, self._snap._session, self._snap._session.protecting):
            object.__setattr__(part._options, "keep", True)  # users pass it before they enter
        self._snap.__exit__(None, None, None)
        self._enter()

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def processor_s(self) -> float:
        return self._memory.processor_s()

    def close(self) -> None:
        self._snap.__exit__(None, None, None)
        shutil.rmtree(self._base, ignore_errors=True)

    def _node_of(self, rank: int) -> str:
        return "node0"

    def _entered(self) -> bool:
        return self._counts and hasattr(self, "_snap")

    def _enter(self) -> None:
        self._snap = InMemorySnapshot(
            self._model, self._optimizer, protect=self._options, deadline_s=DEADLINE_S, strict=True
        )
        self._on_demand = OnDemand()
        self._snap.__enter__()
        self._snap._session.intervals.rule = self._on_demand
        self._snap._session.loop.boundary.remove()


class Protected(Alone):
    """Snapshots in the memory of several nodes with one rank each, and one parity."""

    name = "holdfast, protected"
    _options = "auto"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        self.protect: str | None = f"{world - 1}+1"
        os.environ["HOLDFAST_HOST"] = f"127.0.0.{11 + rank}"
        super().__init__(model, optimizer, rank, world, folder)

    def _node_of(self, rank: int) -> str:
        return f"node{rank}"
