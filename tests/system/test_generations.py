"""Going back further than the newest snapshot: older generations are kept, chosen, and left behind in a safe order."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ConfigError, InMemorySnapshot, Repeated
from holdfast.cli.status import gather
from holdfast.planner.costs import Assumptions, assume
from holdfast.planner.plan import Targets, memory
from holdfast.planner.survival import Code
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import plan_restore, whole_snapshots
from holdfast.smp_daemon.shared.starts import Choice
from holdfast.snapshot.resume.choice import StartOptions, agree
from holdfast.snapshot.step.ledger import Ledger, SnapshotState
from tests.smp_kit import Crash, playground

PROTECTED, FAILED, PENDING = SnapshotState.PROTECTED, SnapshotState.FAILED, SnapshotState.PENDING


def at(step: int, epoch: int = 1) -> SnapshotId:
    return SnapshotId(epoch, step)


# ---------------------------------------------------------------------- which are kept


@given(st.integers(3, 5), st.integers(1, 4), st.lists(st.lists(st.sampled_from(SnapshotState), min_size=8, max_size=8)))
def test_the_newest_protected_snapshots_are_kept_as_many_as_asked_for(
    slots: int, generations: int, run: list[list[SnapshotState]]
) -> None:
    ledger = Ledger(slots + generations - 1, generations=generations)
    protected: list[SnapshotId] = []
    for step, results in enumerate(run):
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
        said = dict(zip(ledger.pending, results, strict=False))
        ledger = ledger.settle(results[: len(said)])
        protected += [snapshot for snapshot, outcome in said.items() if outcome is PROTECTED]
        assert len(ledger.keep) <= slots + generations - 1
        assert list(ledger.keep) == sorted(set(ledger.keep))
        assert set(protected[-generations:]) <= set(ledger.keep)
        assert set(ledger.keep) - {ledger.sealed} <= {*protected[-generations:], *ledger.pending}


def test_what_was_passed_over_stays_until_something_newer_is_protected() -> None:
    ledger = Ledger.after(4, at(4), at(4), generations=2, earlier=[at(3)], abandoned=[at(5), at(6)])
    assert set(ledger.keep) == {at(4), at(5), at(6)} and ledger.protected == at(4)
    begun = ledger.begin(at(5, 2))
    assert set(begun.settle([PENDING]).keep) == {at(4), at(5), at(6), at(5, 2)}
    assert set(begun.settle([FAILED]).keep) == {at(4), at(5), at(6)}
    assert begun.settle([PROTECTED]).keep == (at(4), at(5, 2))


@given(st.integers(3, 9), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_a_slot_is_free_whatever_was_found(slots: int, generations: int, old: int, new: int, older: bool) -> None:
    before, after = [at(i) for i in range(old)], [at(20 + i) for i in range(new)]
    kept = before[-1] if before and older else None
    slots += generations - 1
    ledger = Ledger.after(slots, at(15), kept, generations=generations, earlier=before, abandoned=after)
    assert ledger.may_begin and at(15) in ledger.keep
    assert not new or at(20 + new - 1) in ledger.keep, "the newest of all goes last"


def test_without_more_generations_nothing_is_other_than_before() -> None:
    assert Ledger.after(3, at(5), at(4), earlier=[at(3), at(4)]) == Ledger(3, at(4), at(5))
    assert Ledger.after(3, None, None) == Ledger(3)


def test_memory_grows_by_a_slot_of_shards_and_parity_for_each() -> None:
    costs, code = assume(Assumptions(step_s=12.0, state_bytes=7e9)), Code(7, 1, (8,), 0.0, 0.0)
    three, four, five = (memory(costs, code, 3, generations=k) for k in (1, 2, 3))
    assert three == pytest.approx(7e9 * 3 * 8 / 7)
    assert four - three == pytest.approx(three / 3) and five - four == pytest.approx(three / 3)
    with pytest.raises(ConfigError, match="generations is 9"):
        Targets(generations=9)


@pytest.mark.parametrize("options", [{"generations": 0}, {"generations": 9}, {"restore_step": 0}])
def test_start_options_out_of_range_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_"):
        StartOptions(**options)


@pytest.mark.parametrize("name", ["max_repeats", "restore_step", "require", "block", "protect_every"])
def test_ranks_that_were_started_with_different_options_are_told(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"HOLDFAST_RESTORE_STEP.*rank 2: .*{name}=4"):
        agree([StartOptions(), StartOptions(), StartOptions(**{name: 4})])  # type: ignore[arg-type]


# ---------------------------------------------------------------------- one process


def life(steps: int, history: dict[int, list[torch.Tensor]] | None = None, **options: Any) -> int:
    """Enter, take `steps` steps, each protected, and crash; returns the first step. Fills or checks `history`."""
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    seen = history if history is not None else {}
    began = -1
    with pytest.raises(Crash):
        with InMemorySnapshot(model, optim, max_repeats=0, **options) as snap:
            began = snap.step
            for step in range(began, began + steps + 1):
                now = [p.detach().clone() for p in model.parameters()]
                assert all(torch.equal(*pair) for pair in zip(now, seen.setdefault(step, now), strict=True)), step
                model(torch.ones(2, 4)).sum().backward()
                snap.drain(60)
                if step == began + steps:
                    raise Crash
                optim.step()
                optim.zero_grad()
    return began


def held(arena: Path) -> list[int]:
    with closing(SmpClient(arena / "test", "test")) as client:
        return sorted({snapshot.step for snapshot, _ in client.inventory().shards})


def test_an_older_generation_is_restored_and_the_newer_stay_until_there_is_another(arena: Path) -> None:
    history: dict[int, list[torch.Tensor]] = {}
    assert life(6, history, generations=3) == 0
    assert held(arena)[-3:] == [4, 5, 6]
    assert len(list((arena / "test").glob("*.safetensors"))) == 3 + 2
    [(_, overview)] = gather(arena)
    assert [snapshot.step for snapshot in overview.older][:2] == [5, 4]
    with pytest.raises(ConfigError, match=r"RESTORE_STEP=9: .* holds steps 6, 5, 4"):
        life(0, generations=3, restore_step=9)
    assert life(0, history, generations=3, restore_step=4) == 4, "bit for bit, as the history says"
    assert {4, 5, 6} <= set(held(arena)), "nothing was taken since"
    assert life(0, history, generations=3) == 6, "whoever does not ask for it gets the newest"
    assert life(0, history, generations=3, restore_step=4) == 4
    branch = {4: history[4]}
    assert life(1, branch, generations=3, restore_step=4) == 4
    assert life(2, branch, generations=3, restore_step=4) == 5, "the same command once more goes on"
    assert life(1, branch, generations=3) == 7, "and so does one without it"
    assert 6 not in held(arena) or branch[6] is not history.get(6)


def test_a_choice_holds_however_often_it_fails_before_it_comes_further(arena: Path) -> None:
    assert life(3, generations=2) == 0
    for _ in range(3):
        assert life(0, generations=2, restore_step=2) == 2
    assert life(1, generations=2, restore_step=2) == 2
    assert life(0, generations=2, restore_step=2) == 3


def test_a_job_that_goes_in_a_circle_is_told_which_older_snapshot_to_take(
    arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert life(3, generations=2) == 0
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        assert life(0, generations=2) == 3
    with pytest.raises(Repeated, match=r"HOLDFAST_RESTORE_STEP=2 .*steps 3, 2"):
        InMemorySnapshot(model, optim, max_repeats=2, generations=2).__enter__()
    monkeypatch.setenv("HOLDFAST_RESTORE_STEP", "2")
    with InMemorySnapshot(model, optim, max_repeats=2, generations=2) as snap:
        assert snap.step == 2


def test_memory_that_does_not_suffice_for_generations_is_told(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY", f"{4 * 8192}B")
    with pytest.raises(ConfigError, match=r"fewer slots .*HOLDFAST_GENERATIONS"):
        life(1, generations=2)


# ---------------------------------------------------------------------- several nodes


def test_an_older_generation_of_a_lost_node_is_computed_from_parity() -> None:
    with playground() as ground:
        smps, run = ground.job([[3000], [2000], [2500]], slots=4)
        first = run.protect(1)
        kept: list[SnapshotId] = [first]
        for step in (2, 3, 4):
            snapshot = run.snapshot(step)
            for trainer in run:
                trainer.write(snapshot, kept[-2:], kept[-1])
            run.seal(snapshot)
            assert run.outcomes(snapshot) == {SnapshotOutcome.PROTECTED}
            kept.append(snapshot)
        older = kept[-2]
        lost = smps[1]
        lost.lose()
        rest = [trainer.client.inventory() for trainer in run if trainer.coord != "dp1"]
        assert whole_snapshots(rest)[:2] == [kept[-1], older]
        plan = plan_restore(rest, run.trainers, choice=Choice(older, 2))
        assert plan is not None and plan.snapshot == older and plan.decoded == ("dp1",)
        for trainer in run:
            if trainer.coord != "dp1":
                trainer.client.join(2)
        shard = run["dp0"].client.recover(plan.sources, "dp1")
        assert shard.how == "rebuilt" and bytes(shard.view) == run["dp1"].image(older)
