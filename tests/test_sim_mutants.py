"""Deliberately broken builds: the simulation must notice each within a few seeds, or it guards nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from holdfast.chaos.sim.run import simulate
from holdfast.chaos.sim.seams import installed
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.plan import candidates
from holdfast.smp_daemon.storage.codings import Codings
from holdfast.smp_daemon.storage.holdings import Holdings
from holdfast.smp_daemon.storage.parity import ParityGathering
from holdfast.smp_daemon.storage.pool import SlotPool, SlotState
from holdfast.smp_daemon.storage.store import Store
from holdfast.snapshot.step.copier import CopyJob
from holdfast.snapshot.step.ledger import Ledger

_accumulate = ParityGathering.accumulate
_restored = Ledger.restored


def _ignore_keep(self: SlotPool, keep: Any, before: Any) -> list[Any]:
    return [s for s in self.slots if s.state is SlotState.SEALED and s.snapshot is not None and s.snapshot < before]


def _settle_at_once(self: Store, snapshot: Any) -> None:
    with self.changed:
        progress = self._progress.get(snapshot)
        if progress is not None and progress.outcome is SnapshotOutcome.PENDING:
            progress.outcome = SnapshotOutcome.PROTECTED
            self.board.post(snapshot.step, SnapshotOutcome.PROTECTED)
            self.changed.notify_all()


def _forget_the_older(slots: int, snapshot: Any, older: Any, **more: Any) -> Ledger:
    return _restored(slots, snapshot, None, **more)


def _oldest_first(inventories: Any, protected: Any) -> list[Any]:
    return sorted(candidates(inventories, None))


def _accumulate_badly(self: ParityGathering, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
    _accumulate(self, stripe, position, unit, unit_digest)
    if self.complete and unit.nbytes:
        self._unit(stripe)[:1] = bytes([self._unit(stripe)[0] ^ 1])


MUTANTS: dict[str, tuple[int, list[tuple[Any, str, Any]]]] = {
    "the plan ignores what is protected": (70, [("holdfast.smp_daemon.shared.plan", "candidates", _oldest_first)]),
    "the slot of the protected snapshot is freed": (40, [(SlotPool, "outdated", _ignore_keep)]),
    "what was protected is given up for what was restored": (0, [(Ledger, "restored", _forget_the_older)]),
    "what is sealed counts as protected": (0, [(Store, "_settle", _settle_at_once)]),
    "no epoch is checked and none fences": (
        0,
        [
            (Store, "check_epoch", lambda self, epoch: None),
            (Store, "join", lambda self, epoch, start=None: None),
        ],
    ),
    "a bit of parity is wrong": (0, [(ParityGathering, "accumulate", _accumulate_badly)]),
    "parity is never committed": (0, [(Codings, "_commit_parity", lambda self, coding, gathering: None)]),
    "the next step does not wait for the copy": (100, [(CopyJob, "fence", lambda job, patience_s, deadline_s: True)]),
    "lost parity is not repaired": (76, [("holdfast.smp_daemon.local", "repair_parity", lambda *arguments: 0)]),
    "digests are not compared": (
        2336,
        [
            (Holdings, "damaged_units", lambda self, key: []),
            ("holdfast.smp_daemon.shared.client.RecoveredShard", "matches", lambda self, unit: True),
        ],
    ),
}
"""By name: the first seed to try, and what is replaced by what."""

SEEDS = 16


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_build_is_noticed(name: str) -> None:
    first, changes = MUTANTS[name]
    with ExitStack() as stack:
        for target, attribute, new in changes:
            whole = isinstance(target, str)
            stack.enter_context(patch(f"{target}.{attribute}", new) if whole else patch.object(target, attribute, new))
        assert any(simulate(seed).violations for seed in range(first, first + SEEDS)), "no seed notices it"
