"""Builds of holdfast that are broken on purpose, each in one place: chaos must notice every one of them.

`apply` breaks this process; trainers import `tests.mutants.trainer`, and SMPs are run as ``python -m tests.mutants``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.chaos.scenario import Scenario, choose

ENV = "HOLDFAST_MUTANT"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken build.

    Attributes:
        what: what it does wrong.
        scenario: the name of the one that shows it.
        sign: part of the problem that must be reported.
        break_it: does the damage; imports what it changes.
        in_smp: whether SMPs are broken, too. Others need not import torch for it, which takes them seconds.
    """

    what: str
    scenario: str
    sign: str
    break_it: Callable[[], None]
    in_smp: bool = False

    def shown_by(self) -> Scenario:
        """The scenario."""
        (found,) = choose(self.scenario)
        return found


def apply(name: str) -> None:
    """Break this process as the mutant called `name` does."""
    MUTANTS[name].break_it()


def applied() -> str:
    """The mutant that this process is to be, or an empty text."""
    return os.environ.get(ENV, "")


def _replace(owner: Any, name: str, value: Any) -> None:
    """Put something else in the place of a function or method."""
    assert hasattr(owner, name), f"{owner} has no {name}: the mutant breaks nothing"
    setattr(owner, name, value)


# ---------------------------------------------------------------------- the training side


def _no_fence() -> None:
    from holdfast.snapshot.copy.witness import Witness
    from holdfast.snapshot.step.copier import CopyJob

    _replace(CopyJob, "fence", lambda self, patience_s, deadline_s: True)
    _replace(Witness, "check", lambda self, slot: None)  # it would see that the copy is of two steps


def _sealed_before_it_is_copied() -> None:
    from holdfast.snapshot.step.copier import Copier

    fill = Copier._fill

    def early(self: Copier, job: Any, slot: memoryview) -> None:
        fill(self, job, slot)
        middle = slot.nbytes // 2
        slot[middle : middle + 64] = bytes(64)  # as if the copy had not come that far

    _replace(Copier, "_fill", early)


def _random_generators_are_left_alone() -> None:
    from holdfast.snapshot.state import rng

    _replace(rng, "restore", lambda state: None)


def _schedules_are_left_alone() -> None:
    import torch

    _replace(torch.optim.lr_scheduler.LRScheduler, "load_state_dict", lambda self, state: None)


def _tracked_values_are_left_alone() -> None:
    from holdfast.snapshot.state import tracked

    _replace(tracked, "load", lambda pieces, values: None)


def _digests_are_not_compared() -> None:
    from holdfast.smp_daemon.shared.client import RecoveredShard

    _replace(RecoveredShard, "matches", lambda self, unit: True)


def _every_rank_plans_alone() -> None:
    from holdfast.snapshot.resume import restore

    exchange = restore.exchange

    def alone(client: Any, agreement: Any, coord: str) -> Any:
        inventories, coords = exchange(client, agreement, coord)
        return [inventory for inventory in inventories if inventory.node == client.node], coords

    _replace(restore, "exchange", alone)


def _what_was_promised_is_forgotten() -> None:
    from holdfast.snapshot.resume import restore

    plan_restore: Any = vars(restore)["plan_restore"]

    def plan(inventories: Any, *rest: Any) -> Any:
        return plan_restore([replace(inventory, protected=None) for inventory in inventories], *rest)

    _replace(restore, "plan_restore", plan)


def _lost_parity_is_not_repaired() -> None:
    from holdfast.snapshot.resume import restore

    _replace(restore, "repair_parity", lambda client, plan, coords, coord: None)


# ---------------------------------------------------------------------- the SMP


def _protected_as_soon_as_sealed() -> None:
    from holdfast.smp_daemon.storage.codings import Codings

    _replace(Codings, "is_done", lambda self, coding, everyone: True)


def _the_protected_slot_is_freed() -> None:
    from holdfast.smp_daemon.storage.store import Store

    release = Store._release
    _replace(Store, "_release", lambda self, keep, before: release(self, (), before))


def _parity_of_nothing() -> None:
    from holdfast.smp_daemon.storage.parity import ParityGathering

    accumulate = ParityGathering.accumulate

    def zeros(self: ParityGathering, stripe: int, position: int, unit: memoryview, digest: int) -> None:
        accumulate(self, stripe, position, memoryview(bytes(unit.nbytes)), digest)

    _replace(ParityGathering, "accumulate", zeros)


def _units_are_not_checked_on_arrival() -> None:
    from holdfast.smp_daemon.shared.records import digest
    from holdfast.smp_daemon.storage.parity import ParityGathering

    accumulate = ParityGathering.accumulate

    def unchecked(self: ParityGathering, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
        accumulate(self, stripe, position, unit, digest(unit))
        self._digests[stripe][position] = unit_digest

    _replace(ParityGathering, "accumulate", unchecked)


def _the_arena_is_left_behind() -> None:
    from holdfast.smp_daemon.storage.store import Store

    _replace(Store, "retire", lambda self: None)


def _a_new_smp_forgets() -> None:
    from holdfast.smp_daemon.storage.store import Store

    _replace(Store, "_adopt", lambda self: None)


def _never_ends() -> None:
    from holdfast.smp_daemon.service import Smp

    _replace(Smp, "finish", lambda self: None)


MUTANTS: dict[str, Mutant] = {
    "no-fence": Mutant(
        "the optimizer does not wait for the copy, and nobody looks whether it is torn",
        "a-copy-is-held",
        "",
        _no_fence,
    ),
    "sealed-too-early": Mutant(
        "a slot is sealed before all of it is copied", "restored-and-killed-again", "", _sealed_before_it_is_copied
    ),
    "no-random-generators": Mutant(
        "random generators are not restored", "killed-in-a-copy", "loss of rank", _random_generators_are_left_alone
    ),
    "no-schedule": Mutant("schedules are not restored", "killed-in-a-copy", "", _schedules_are_left_alone),
    "no-tracked-values": Mutant(
        "state tracked by name is not restored", "killed-in-a-copy", "", _tracked_values_are_left_alone
    ),
    "no-digests": Mutant(
        "digests are not compared at restore",
        "bits-in-a-shard-that-is-restored",
        "",
        _digests_are_not_compared,
        in_smp=True,
    ),
    "every-rank-alone": Mutant(
        "ranks do not agree on what to restore", "a-node-in-a-copy", "", _every_rank_plans_alone
    ),
    "promise-forgotten": Mutant(
        "beyond parity, the job starts anew",
        "beyond-one-parity",
        "as if nothing had happened",
        _what_was_promised_is_forgotten,
    ),
    "no-healing": Mutant(
        "a lost node's parity is not computed again", "another-as-soon-as-repaired", "", _lost_parity_is_not_repaired
    ),
    "protected-too-early": Mutant(
        "a snapshot counts as protected before it is encoded",
        "a-node-after-a-seal",
        "",
        _protected_as_soon_as_sealed,
        in_smp=True,
    ),
    "protected-slot-freed": Mutant(
        "the protected slot is freed for the next copy",
        "killed-in-a-copy",
        "",
        _the_protected_slot_is_freed,
        in_smp=True,
    ),
    "parity-of-nothing": Mutant("zeros are accumulated into parity", "a-node", "", _parity_of_nothing, in_smp=True),
    "unchecked-on-arrival": Mutant(
        "a unit that comes for parity is not compared with its digest",
        "bits-flip-in-flight",
        "",
        _units_are_not_checked_on_arrival,
        in_smp=True,
    ),
    "arena-left-behind": Mutant(
        "the arena stays when the job is over", "pause", "left behind", _the_arena_is_left_behind, in_smp=True
    ),
    "a-new-smp-forgets": Mutant(
        "a new SMP does not take over its arena", "smp-and-trainer", "", _a_new_smp_forgets, in_smp=True
    ),
    "an-smp-stays": Mutant("an SMP does not end with the job", "pause", "", _never_ends, in_smp=True),
}
