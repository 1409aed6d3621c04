"""Builds of holdfast that are broken on purpose, each in one place. Chaos scenarios must notice every one of them.

`apply` breaks this process; trainers import `tests.proof.mutants.trainer`, and SMPs run as
``python -m tests.proof.mutants``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.proof.chaos.scenario import Scenario, choose

ENV = "HOLDFAST_MUTANT"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken build.

    Attributes:
        what: what the build does wrong.
        scenario: name of the scenario that shows it.
        sign: the check of `tests.proof.chaos.checks.PROMISES` that must notice it.
        says: a pattern that the message of this check must match.
        hook: options of the hook, in addition to the scenario's.
        break_it: makes the change; imports the modules that it changes.
        in_smp: whether SMPs are broken. Other SMPs need not import torch, which takes seconds.
        in_trainer: whether trainers are broken.
    """

    what: str
    scenario: str
    sign: str
    break_it: Callable[[], None]
    in_smp: bool = False
    in_trainer: bool = True
    says: str = ""
    hook: Mapping[str, object] = field(default_factory=dict)

    def shown_by(self) -> Scenario:
        """The scenario with this mutant's options of the hook."""
        (found,) = choose(self.scenario)
        return replace(found, hook={**found.hook, **self.hook})


def apply(name: str) -> None:
    """Turn this process into the mutant called `name`."""
    MUTANTS[name].break_it()


def applied() -> str:
    """Name of the mutant that this process should be; empty if none."""
    return os.environ.get(ENV, "")


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace a function or method."""
    assert hasattr(owner, name), f"{owner} has no {name}: the mutant breaks nothing"
    setattr(owner, name, value)


# ---------------------------------------------------------------------- also used by the simulation


def forgetting_what_was_promised(plan_restore: Callable[..., Any]) -> Callable[..., Any]:
    """A `plan_restore` that plans as if no SMP knew of a protected snapshot."""
    return lambda inventories, *rest: plan_restore([replace(each, protected=None) for each in inventories], *rest)


def one_node_behind(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """An `exchange` that hides the newest snapshot from one node, if there is an older one."""

    def behind(client: Any, agreement: Any, coord: str, options: Any) -> Any:
        entered = exchange(client, agreement, coord, options)
        held = sorted({snapshot for inventory in entered.inventories for snapshot, _ in inventory.shards})
        if client.node != min(entered.coords.values()) or len(held) < 2:
            return entered
        older = [
            replace(each, protected=None, shards=frozenset(shard for shard in each.shards if shard[0] != held[-1]))
            for each in entered.inventories
        ]
        return replace(entered, inventories=older)

    return behind


# ---------------------------------------------------------------------- the training side


def _no_fence() -> None:
    from holdfast.snapshot.copy.witness import Witness
    from holdfast.snapshot.step.orders import SnapshotCopy

    _replace(SnapshotCopy, "fence", lambda self, patience_s, deadline_s: True)
    _replace(Witness, "check", lambda self, slot: None)  # it would notice that the copy mixes two steps


def _sealed_before_it_is_copied() -> None:
    from holdfast.snapshot.step.copier import Copier

    fill = Copier._fill

    def early(self: Copier, job: Any, slot: memoryview) -> None:
        fill(self, job, slot)
        middle = slot.nbytes // 2
        slot[middle : middle + 64] = bytes(64)  # as if the copy had not got that far

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
    from holdfast.smp_daemon.shared.records import Unit

    _replace(Unit, "matches", lambda self: True)


def _every_rank_plans_alone() -> None:
    from holdfast.snapshot.resume import restore

    exchange: Any = vars(restore)["exchange"]

    def alone(client: Any, agreement: Any, coord: str, options: Any) -> Any:
        entered = exchange(client, agreement, coord, options)
        return replace(entered, inventories=[each for each in entered.inventories if each.node == client.node])

    _replace(restore, "exchange", alone)


def _what_was_promised_is_forgotten() -> None:
    from holdfast.snapshot.resume import restore

    _replace(restore, "plan_restore", forgetting_what_was_promised(vars(restore)["plan_restore"]))


def _lost_parity_is_not_repaired() -> None:
    from holdfast.smp_daemon.recovery import reconciler
    from holdfast.smp_daemon.shared.failpoints import failpoint

    def repair_parity(store: Any, sources: Any, key: Any, go_on: Any) -> int:
        failpoint("repair_parity.done", sources.snapshot.step)
        return 0

    _replace(reconciler, "repair_parity", repair_parity)


# ---------------------------------------------------------------------- the SMP


def _protected_as_soon_as_sealed() -> None:
    from holdfast.smp_daemon.storage.codings import Codings

    _replace(Codings, "is_done", lambda self, coding, everyone: True)


def _a_drained_node_goes_too_early() -> None:
    from holdfast.smp_daemon.coding import moving
    from holdfast.smp_daemon.coding.regroup import Drained

    _replace(moving, "moved", lambda inventories: Drained(None, (), 0))


def _the_protected_slot_is_freed() -> None:
    from holdfast.smp_daemon.storage.store import Store

    release = Store._release
    _replace(Store, "_release", lambda self, keep, parities, before: release(self, (), (), before))


def _parity_of_nothing() -> None:
    from holdfast.smp_daemon.storage.parity import ParityGathering

    accumulate = ParityGathering.accumulate

    def zeros(self: ParityGathering, stripe: int, position: int, unit: memoryview, digest: int) -> None:
        accumulate(self, stripe, position, memoryview(bytes(unit.nbytes)), digest)

    _replace(ParityGathering, "accumulate", zeros)


def _units_are_not_checked_on_arrival() -> None:
    from holdfast.smp_daemon.answers import PeerConversation

    _replace(PeerConversation, "_check_arrival", lambda self, request, found: None)


def _the_arena_is_left_behind() -> None:
    from holdfast.smp_daemon.storage.store import Store

    _replace(Store, "retire", lambda self: None)


def _a_new_smp_forgets() -> None:
    from holdfast.smp_daemon.storage.store import Store

    _replace(Store, "_adopt", lambda self: None)


def _never_ends() -> None:
    from holdfast.smp_daemon.service import Smp

    stop = Smp.stop
    _replace(Smp, "stop", lambda self, *, remove=False: None if remove else stop(self))


def _one_node_is_behind() -> None:
    from holdfast.snapshot.resume import restore

    _replace(restore, "exchange", one_node_behind(vars(restore)["exchange"]))


def _protected_slots_are_written_to() -> None:
    from holdfast.smp_daemon.shared.board import SnapshotOutcome
    from holdfast.smp_daemon.storage.pool import SlotState
    from holdfast.smp_daemon.storage.store import Store

    settle = Store.post_if_protected
    spoilt: set[Any] = set()

    def spoil(self: Store, snapshot: Any) -> None:
        settle(self, snapshot)
        progress = self.outcomes._progress.get(snapshot)
        is_protected = progress is not None and progress.outcome is SnapshotOutcome.PROTECTED
        if not self.node.endswith("1") or not is_protected or snapshot in spoilt:
            return
        spoilt.add(snapshot)
        for pool in self.arena.shards.values():
            if slot := pool.find(snapshot, SlotState.SEALED):
                view = pool.view(slot)
                middle = view.nbytes // 2
                view[middle : middle + 1] = bytes([view[middle] ^ 1])

    _replace(Store, "post_if_protected", spoil)


def _storage_is_not_looked_at() -> None:
    from holdfast.smp_daemon.shared.client import SmpClient
    from holdfast.smp_daemon.shared.inventory import Persisted

    _replace(SmpClient, "persisted", lambda self, *deadline_s: Persisted(""))


def _signals_are_not_heard() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _replace(signal, "signal", lambda number, handler: None)


def _told_too_early_and_forgotten() -> None:
    _protected_as_soon_as_sealed()
    _what_was_promised_is_forgotten()


def _an_error_that_nobody_expects() -> None:
    from holdfast.smp_daemon.storage.job_state import JobState

    goes_on = JobState.goes_on

    def raising(self: JobState, epoch: int, coord: str) -> None:
        goes_on(self, epoch, coord)
        if epoch > 1 and coord == "dp0":
            raise ZeroDivisionError("a bug")

    _replace(JobState, "goes_on", raising)


MUTANTS: dict[str, Mutant] = {
    "no-fence": Mutant(
        "the optimizer does not wait for the copy, and nobody looks whether it is torn",
        "a-copy-is-held",
        "result",
        _no_fence,
    ),
    "sealed-too-early": Mutant(
        "a slot is sealed before all of it is copied",
        "restored-and-killed-again",
        "result",
        _sealed_before_it_is_copied,
    ),
    "no-random-generators": Mutant(
        "random generators are not restored",
        "killed-in-a-copy",
        "returns",
        _random_generators_are_left_alone,
        says="the random generator of torch",
    ),
    "no-schedule": Mutant("schedules are not restored", "killed-in-a-copy", "result", _schedules_are_left_alone),
    "no-tracked-values": Mutant(
        "state tracked by name is not restored",
        "killed-in-a-copy",
        "returns",
        _tracked_values_are_left_alone,
        says="tracked 'seen'",
    ),
    "no-digests": Mutant(
        "digests are not compared at restore",
        "a-bit-in-a-shard",
        "result",
        _digests_are_not_compared,
        in_smp=True,
    ),
    "every-rank-alone": Mutant(
        "ranks do not agree on what to restore", "a-node-in-a-copy", "returns", _every_rank_plans_alone
    ),
    "promise-forgotten": Mutant(
        "beyond parity, the job starts anew",
        "beyond-one-parity",
        "refuses",
        _what_was_promised_is_forgotten,
        says="as if nothing had happened",
    ),
    "no-healing": Mutant(
        "a lost node's parity is not computed again",
        "another-as-soon-as-repaired",
        "returns",
        _lost_parity_is_not_repaired,
        in_smp=True,
        says="Unrecoverable",
    ),
    "protected-too-early": Mutant(
        "a snapshot counts as protected before it is encoded",
        "a-node-after-a-seal",
        "returns",
        _protected_as_soon_as_sealed,
        in_smp=True,
        says="Unrecoverable",
    ),
    "protected-slot-freed": Mutant(
        "the protected slot is freed for the next copy",
        "killed-in-a-copy",
        "returns",
        _the_protected_slot_is_freed,
        in_smp=True,
        says="Unrecoverable",
    ),
    "parity-of-nothing": Mutant(
        "zeros are accumulated into parity",
        "a-node",
        "returns",
        _parity_of_nothing,
        in_smp=True,
        says="Unrecoverable",
    ),
    "unchecked-on-arrival": Mutant(
        "a unit that comes for parity is not compared with its digest",
        "bits-flip-in-flight",
        "returns",
        _units_are_not_checked_on_arrival,
        in_smp=True,
        says="Unrecoverable|does not match its digest",
    ),
    "gone-too-early": Mutant(
        "a node that is drained goes before others hold what it holds",
        "announced-and-then-not",
        "returns",
        _a_drained_node_goes_too_early,
        in_smp=True,
        in_trainer=False,
        says="Unrecoverable",
    ),
    "arena-left-behind": Mutant(
        "the arena stays when the job is over", "pause", "leaks", _the_arena_is_left_behind, in_smp=True
    ),
    "a-new-smp-forgets": Mutant(
        "a new SMP does not take over its arena", "all-smps-and-a-trainer", "again", _a_new_smp_forgets, in_smp=True
    ),
    "an-smp-stays": Mutant(
        "an SMP does not end with the job", "pause", "ends", _never_ends, in_smp=True, says="did not end within"
    ),
    "told-too-early": Mutant(
        "a snapshot counts as protected before it is encoded, and that is forgotten at a restart",
        "a-node-after-a-seal",
        "kept",
        _told_too_early_and_forgotten,
        in_smp=True,
    ),
    "one-is-behind": Mutant(
        "one rank restores an older snapshot",
        "terminated",
        "together",
        _one_node_is_behind,
        hook={"generations": 2},
    ),
    "spoilt-in-its-slot": Mutant(
        "what is protected is written to", "killed-in-a-copy", "whole", _protected_slots_are_written_to, in_smp=True
    ),
    "not-persisted": Mutant(
        "nobody looks at what is persisted", "every-node-lost", "persisted", _storage_is_not_looked_at
    ),
    "deaf-smp": Mutant(
        "an SMP does not hear SIGTERM", "smp-terminated", "smps", _signals_are_not_heard, in_smp=True, in_trainer=False
    ),
    "a-bug": Mutant(
        "a thread of an SMP meets an error", "killed-in-a-copy", "expected", _an_error_that_nobody_expects, in_smp=True
    ),
}
