"""The control plane under simulated faults, and the simulation itself."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.optim import optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.smp_daemon.shared.plain import encode_digested
from holdfast.smp_daemon.shared.plan import newest_protected
from holdfast.smp_daemon.storage.store import Store
from holdfast.snapshot.resume import restore
from holdfast.snapshot.state.adapter import entered
from tests.proof.sim import __main__ as command
from tests.proof.sim.campaign import again
from tests.proof.sim.checks import CHECKS
from tests.proof.sim.memory import Disk, MemoryFiles, MemoryPath
from tests.proof.sim.moves import DAMAGES, damaged
from tests.proof.sim.oracle import Oracle
from tests.proof.sim.plan import (
    KINDS_OF_STATE,
    LATE,
    MANY_RANKS,
    MOVES,
    POINTS_HERE,
    DrawnFault,
    DrawnState,
    Gap,
    draw,
    with_many_ranks,
    with_modules,
    with_runs,
)
from tests.proof.sim.run import order_of, play, simulate
from tests.proof.sim.runs import JobRuns
from tests.proof.sim.scheduler import Scheduler
from tests.proof.sim.seams import installed
from tests.proof.sim.shrink import shrink, tell
from tests.proof.sim.tasks import SimProcess
from tests.proof.sim.threads import Condition, Event, Lock, SimpleQueue, ThreadPoolExecutor
from tests.proof.sim.trainer import Bytes, SimAdapter
from tests.proof.sim.turns import ORDERS, Recorder, Replayed, Uniform
from tests.proof.sim_mutants import MUTANTS, noticed
from tests.proof.sim_mutants import SEEDS as SEEDS_OF_MUTANTS

SEEDS = range(40)


@pytest.fixture
def simulation() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 10))
@pytest.mark.proves("any-instruction")
def test_the_promise_holds_for_every_seed(simulation: None, first: int) -> None:
    for seed in range(first, first + 10):
        assert not simulate(seed).violations, command.replay(seed)


@pytest.mark.proves("exact-or-given-up")
@pytest.mark.parametrize("first", range(0, 60, 15))
def test_the_promise_holds_for_state_of_every_class(simulation: None, first: int) -> None:
    states = Counter[str]()
    for seed in range(first, first + 15):
        report = play(with_modules(draw(seed), random.Random(f"state {seed}")))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"
        states += report.states
    assert len(states) > 20


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_runs_that_meet_are_never_mixed_and_none_begins_from_nothing(simulation: None, first: int) -> None:
    checks, moves = Counter[str](), Counter[str]()
    for seed in range(first, first + 20):
        plan = with_runs(draw(seed), random.Random(f"runs {seed}"))
        report = play(plan)
        assert not report.violations, f"seed {seed}: {report.violations[0]}"
        checks += report.checks
        moves += Counter({move: report.faults[move] for move in MOVES})
    assert checks["own run"] and checks["nothing"] and checks["told"]
    assert len(moves) > 8


def test_all_moves_are_drawn_and_leave_the_other_seeds_alone() -> None:
    plans = [draw(seed) for seed in range(1200)]
    moved = [plan for plan in plans if plan.moves]
    assert {move for plan in moved for gap in plan.gaps for move in gap.moves} == set(MOVES)
    assert 50 < len(moved) < 150
    assert all(plan.state is None and not plan.flip_chance for plan in moved)


def test_all_runs_that_a_history_has_are_of_different_states(simulation: None) -> None:
    """A run that is begun anew has other weights, so its bytes cannot be taken for those of the one before."""
    lives = [SimAdapter("dp0", 40, "seed", life, lambda snapshot, content: None) for life in (1, 2)]
    assert lives[0].live != lives[1].live


def _state(seed: int) -> DrawnState:
    state = with_modules(draw(seed), random.Random(f"state {seed}")).state
    assert state is not None
    return state


def test_every_class_of_state_is_drawn() -> None:
    drawn = {kind for seed in range(60) for kind in _state(seed).kinds}
    assert drawn == {*KINDS_OF_STATE, LATE}


def test_large_worlds_are_drawn_and_hold(simulation: None) -> None:
    sizes = {nodes * mates for nodes, mates in MANY_RANKS}
    plan = with_many_ranks(draw(3), random.Random(3))
    assert max(sizes) == 64
    assert len(plan.ranks) in sizes
    assert not play(plan).violations


@pytest.mark.parametrize("how", DAMAGES)
def test_a_file_that_was_cut_off_to_nothing_can_be_damaged_again(how: str) -> None:
    assert not damaged(b"", how, 0.5)


@pytest.mark.parametrize(
    "seed",
    [3468, 117012, 2002339, 4033424, 3004051, 3019640, 3034749, 3050267, 10016284, 11047624, 507044, 604770, 977277],
)
def test_what_was_found_stays_mended(simulation: None, seed: int) -> None:
    """Each of these seeds is described in ``benchmarks/results``."""
    assert not simulate(seed).violations, command.replay(seed)


@pytest.mark.proves("never-older")
def test_what_does_not_fit_together_at_first_is_looked_at_again(
    simulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when SMPs regroup while they are asked: the first look finds a protected snapshot incomplete."""
    exchange = vars(restore)["exchange"]
    torn: list[object] = []

    def see_the_first_torn(client: Any, agreement: Any, coord: str, options: Any = None) -> Any:
        entered = exchange(client, agreement, coord, options)
        if (
            agreement not in torn
            and newest_protected(entered.inventories)
            and (not options or options.restore_step is None)
        ):
            torn.append(agreement)
            nothing = [replace(each, shards=frozenset(), parities=frozenset()) for each in entered.inventories]
            entered = replace(entered, inventories=nothing)
        return entered

    monkeypatch.setattr(restore, "exchange", see_the_first_torn)
    for seed in range(40):
        assert not simulate(seed).violations, command.replay(seed)
    assert len(torn) > 10


@pytest.mark.parametrize("seed", [1, 6])
def test_a_seed_does_the_same_every_time(simulation: None, seed: int) -> None:
    first: list[str] = []
    second: list[str] = []
    assert simulate(seed, first.append) == simulate(seed, second.append)
    assert first == second
    assert len(first) > 10


def test_what_a_seed_does_depends_neither_on_the_process_nor_on_what_ran_before() -> None:
    assert again(range(20)) == []


def test_who_is_killed_leaves_nothing_on_torch(simulation: None) -> None:
    making, hooks = _BaseDataLoaderIter.__init__, dict(optimizer._global_optimizer_pre_hooks)
    killed = sum(simulate(seed).faults["kill-trainer"] for seed in range(1_000_000, 1_000_008))
    assert killed and not entered
    assert _BaseDataLoaderIter.__init__ is making and optimizer._global_optimizer_pre_hooks == hooks


def test_different_seeds_do_different_things() -> None:
    assert len({draw(seed) for seed in range(50)}) == 50


def test_a_command_says_how_often_each_point_was_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert command.main(["--seeds", "3", "--first", "2", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert written["seeds"] == 3
    assert set(POINTS_HERE) <= set(written["points"])
    assert written["points"]["seal.done"]["hits"] > 0
    assert set(written["checks"]) == set(CHECKS)
    assert "3 seeds from 2: 0 " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_a_command_that_would_run_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([option, "0"])
    assert f"{option} 0: give 1 or more" in capsys.readouterr().err


def test_whoever_asks_the_machine_what_time_it_is_is_found(simulation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(self: Store, epoch: int, start: object = None) -> None:
        time.monotonic()

    monkeypatch.setitem(join.__globals__, "__name__", "holdfast.smp_daemon.storage.store")
    monkeypatch.setattr(Store, "join", join)
    (found, *_) = simulate(0).violations
    assert (found.check, "time.monotonic" in found.message) == ("bug", True)


# ---------------------------------------------------------------------- turns, and the shortest failing history


def test_turns_that_were_recorded_are_taken_again(simulation: None) -> None:
    for seed in range(6):
        recorder = Recorder(order_of(draw(seed)))
        first = play(draw(seed), recorder)
        again = play(draw(seed), Replayed(recorder.deviations))
        assert again.fingerprint == first.fingerprint


def test_some_seeds_go_by_priorities(simulation: None) -> None:
    plans = [draw(seed) for seed in range(40)]
    assert {plan.order for plan in plans} == set(ORDERS)
    plan = next(plan for plan in plans if plan.order == "priorities")
    assert play(plan).fingerprint != play(replace(plan, order="uniform")).fingerprint


def test_a_seed_that_fails_becomes_a_history_of_a_dozen_lines_and_a_file_that_plays_it(
    simulation: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant, path = MUTANTS["no-fence"], tmp_path / "case.json"
    seed, _ = noticed(mutant, range(SEEDS_OF_MUTANTS))
    assert seed is not None
    with mutant.applied():
        case = shrink(mutant.focus(draw(seed)))
        assert len(tell(case)) <= 12
        assert len(case.deviations) <= 3
        case.write(path)
        assert command.main(["--replay", str(path)]) == 1
    assert "VIOLATION of 'sealed'" in capsys.readouterr().out
    assert command.main(["--replay", str(path)]) == 0
    assert "no longer breaks" in capsys.readouterr().out


def test_a_file_that_is_no_case_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(b"{}")
    assert command.main(["--replay", str(path)]) == 2
    assert f"{path}: not a case" in capsys.readouterr().err


# ---------------------------------------------------------------------- the files


def test_who_maps_a_file_keeps_it_when_its_name_is_another_files() -> None:
    system, slot = MemoryFiles(), MemoryPath(Disk(), "", "slot")
    file = system.open(slot, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    system.posix_fallocate(file, 0, 8)
    mine = memoryview(system.map(file, 8))
    slot.unlink()
    with pytest.raises(FileNotFoundError):
        slot.stat()
    system.posix_fallocate(system.open(slot, os.O_RDWR | os.O_CREAT | os.O_EXCL), 0, 8)
    mine[:] = b"dead men"
    assert slot.read_bytes() == bytes(8)
    with pytest.raises(FileExistsError):
        system.open(slot, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def test_all_who_map_a_file_share_its_bytes() -> None:
    system, slot = MemoryFiles(), MemoryPath(Disk(), "", "slot")
    file = system.open(slot, os.O_RDWR | os.O_CREAT)
    system.ftruncate(file, 4)
    memoryview(system.map(file, 4))[:] = b"both"
    assert bytes(system.map(system.open(slot, os.O_RDWR), 4)) == slot.read_bytes() == b"both"
    with pytest.raises(ValueError, match="file size"):
        system.map(file, 5)


def test_a_rename_replaces_and_a_directory_goes_with_all_that_is_in_it() -> None:
    disk = Disk()
    arena = MemoryPath(disk, "", "node") / "job"
    arena.mkdir(parents=True)
    (arena / "a.json.part").write_bytes(b"new")
    (arena / "a.json").write_bytes(b"old")
    (arena / "a.json.part").replace(arena / "a.json")
    assert [path.name for path in arena.glob("*.json*")] == ["a.json"]
    assert (arena / "a.json").read_text() == "new"
    disk.remove(str(arena.parent))
    assert not arena.exists() and not arena.parent.exists()
    with pytest.raises(FileNotFoundError):
        (arena / "a.json").write_bytes(b"late")


# ---------------------------------------------------------------------- the scheduler


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler("test", Uniform("test", 0.5))
    yield scheduler
    scheduler.unwind()


def test_an_hour_of_waiting_takes_a_moment(scheduler: Scheduler) -> None:
    began = scheduler.now
    assert not Event().wait(3600.0)
    assert scheduler.now == began + 3600.0


def test_a_process_that_is_killed_stops_without_unwinding(scheduler: Scheduler) -> None:
    victim, lines = SimProcess("victim", "host"), []
    lock = Lock()

    def work() -> None:
        try:
            with lock:
                Event().wait()
        finally:
            lines.append(scheduler.unwinding)

    scheduler.spawn(victim, "work", work)
    scheduler.sleep(1.0)
    scheduler.kill(victim)
    scheduler.sleep(1.0)
    assert lock.locked() and not lines
    scheduler.unwind()
    assert lines == [True]


def test_a_task_that_fails_is_a_violation(scheduler: Scheduler) -> None:
    scheduler.spawn(SimProcess("any", "host"), "work", lambda: [][0])
    with pytest.raises(Exception, match="IndexError"):
        scheduler.sleep(1.0)


def test_tasks_that_wait_for_ever_are_found(scheduler: Scheduler) -> None:
    with pytest.raises(Exception, match="no task can"):
        Event().wait()


def test_pools_queues_and_conditions_hand_over_as_those_of_threads_do(scheduler: Scheduler) -> None:
    queue: SimpleQueue[int] = SimpleQueue()
    ready = Condition()
    done: list[int] = []

    def take(number: int) -> int:
        with ready:
            done.append(queue.get())
            ready.notify_all()
        return number

    with ThreadPoolExecutor(2) as pool:
        results = pool.map(take, range(4))
        for number in range(4):
            queue.put(number)
        with ready:
            assert ready.wait_for(lambda: len(done) == 4, 10.0)
        assert list(results) == [0, 1, 2, 3]
    assert sorted(done) == [0, 1, 2, 3]


# ---------------------------------------------------------------------- the oracle


def _layout(parity: int, *groups: tuple[str, ...]) -> dict[str, object]:
    names = [name for group in groups for name in group]
    return {
        "epoch": 1,
        "run": {"id": "", "begun_s": 0, "follows": []},
        "revision": 0,
        "parity": parity,
        "nodes": [{"name": name} for name in names],
        "groups": [[names.index(name) for name in group] for group in groups],
    }


def _oracle(found: list[str], parity: int, *groups: tuple[str, ...]) -> Oracle:
    oracle = Oracle(lambda check, message: found.append(check))
    oracle.committed(MemoryPath(Disk(), "", "layout-1-0.json"), "layout", _layout(parity, *groups))
    oracle.captured((1, 1), "dp0", Bytes(b"one"))
    oracle.captured((1, 2), "dp0", Bytes(b"two"))
    oracle.protected((1, 2))
    return oracle


def test_an_older_snapshot_than_the_protected_one_is_a_violation() -> None:
    found: list[str] = []
    _oracle(found, 1, ("a", "b")).restored("dp0", 2, (1, 1), Bytes(b"one"))
    assert found == ["promise"]


def test_other_bytes_than_the_trainer_had_are_a_violation() -> None:
    found: list[str] = []
    _oracle(found, 1, ("a", "b")).restored("dp0", 2, (1, 2), Bytes(b"tow"))
    assert found == ["restored"]


def _sealed_everywhere(found: list[str]) -> Oracle:
    """Step 2 is protected, and step 3 is sealed on the one node that has a shard."""
    disk = Disk()
    arena = MemoryPath(disk, "", "arena")
    arena.mkdir(mode=0o700)
    (arena / "node.json").write_bytes(encode_digested({"epoch": 1}))
    oracle = Oracle(lambda check, message: found.append(check))
    layout = _layout(1, ("a", "b"))
    layout["nodes"] = [{"name": "a", "shards": [{"coord": "dp0"}]}, {"name": "b", "shards": []}]
    oracle.committed(arena / "layout-1-0.json", "layout", layout)
    for step, content in ((2, b"two"), (3, b"three")):
        oracle.captured((1, step), "dp0", Bytes(content))
        (arena / f"{step}").write_bytes(bytes(content))
        oracle.committed(arena / f"{step}.json", "shard", {"snapshot": [1, step], "coord": "dp0"})
    oracle.protected((1, 2))
    return oracle


def test_after_a_crash_of_processes_less_than_was_sealed_everywhere_is_a_violation() -> None:
    found: list[str] = []
    oracle = _sealed_everywhere(found)
    oracle.restored("dp0", 2, (1, 2), Bytes(b"two"), alone=False)
    assert found == []
    _sealed_everywhere(found).restored("dp0", 2, (1, 2), Bytes(b"two"), alone=True)
    assert found == ["crash"]


@pytest.mark.parametrize("over", ["a loss", "a flip", "given up"])
def test_what_is_sealed_need_not_come_back_where_more_than_processes_was_lost(over: str) -> None:
    found: list[str] = []
    oracle = _sealed_everywhere(found)
    if over == "a loss":
        oracle.node_lost("b")
    elif over == "a flip":
        oracle.bit_flipped((1, 3))
    else:
        oracle.given_up((1, 3), "dp0")
    oracle.restored("dp0", 2, (1, 2), Bytes(b"two"), alone=True)
    assert found == []


def test_the_newest_sealed_snapshot_is_not_given_up_once_the_job_was_told_of_it() -> None:
    found: list[str] = []
    oracle = _sealed_everywhere(found)
    oracle.sealed((1, 3))
    oracle.given_up((1, 3), "dp0")
    assert found == ["held"]


def test_parity_of_what_is_only_to_be_sealed_is_a_violation() -> None:
    found: list[str] = []
    oracle = _sealed_everywhere(found)
    oracle.wanted((1, 2), True)
    oracle.wanted((1, 3), False)
    for step in (2, 3):
        oracle.committed(MemoryPath(Disk(), "", "any.json"), "parity", {"snapshot": [1, step]})
    assert found == ["unasked"]


def test_as_many_losses_as_each_group_has_parity_must_be_survived() -> None:
    oracle = _oracle([], 1, ("a", "b"), ("c", "d"))
    oracle.node_lost("a")
    oracle.node_lost("c")
    assert oracle.must_survive()
    oracle.node_lost("d")
    assert not oracle.must_survive()


def test_a_flipped_bit_counts_as_a_loss_of_its_snapshot_alone() -> None:
    oracle = _oracle([], 1, ("a", "b"))
    oracle.bit_flipped((1, 1))
    oracle.node_lost("a")
    assert oracle.must_survive()
    oracle.bit_flipped((1, 2))
    assert not oracle.must_survive()


def test_what_came_of_unneeded_losses_is_no_violation_but_undoing_what_a_node_knows_is() -> None:
    found: list[str] = []
    oracle = _oracle(found, 1, ("a", "b"))
    oracle.node_lost("a")
    oracle.node_lost("b")
    oracle.restored("dp0", 2, None, None)
    assert not found
    oracle.check_floor("dp0", None, (1, 2))
    assert found == ["floor"]


def _two_runs() -> tuple[JobRuns, MemoryPath, MemoryPath]:
    """Run a begins on node n0, and run b a minute later on node n1, which does not know of a. Both have a snapshot."""
    runs, disk = JobRuns(), Disk()
    arenas = [MemoryPath(disk, f"/{name}", "job") for name in ("n0", "n1")]
    for number, (run, arena) in enumerate(zip("ab", arenas, strict=True), 1):
        arena.mkdir(parents=True)
        told = {"id": run, "begun_s": 60 * number, "follows": []}
        runs.begins(number << 32, run, number)
        for name, kind, data in (
            ("node.json", "node", {"record": {"start": {"run": told}}, "protected": [number << 32, 1], "given_up": []}),
            ("dp0.0.safetensors.json", "shard", {"run": run, "snapshot": [number << 32, 1]}),
        ):
            (arena / name).touch()
            runs.committed(arena / name, kind, data)
    return runs, arenas[0], arenas[1]


def test_the_run_that_was_begun_last_must_go_on_unless_the_user_says_otherwise() -> None:
    runs, first, second = _two_runs()
    runs.enters([first, second], (), (), "", ())
    assert runs.own() == {"b"} and runs.others_have_state() and sorted(runs.left()) == ["a", "b"]
    runs.enters([first, second], (), (), "a", ())
    assert runs.own() == {"a"}
    runs.enters([first, second], (), (), "", {"b"})
    assert runs.own() == {"a"}
    runs.enters([first], (), (), "", ())
    assert runs.own() == {"a"}
    runs.enters([], (), (), "", ())
    assert runs.own() == set()


def test_what_was_deleted_or_damaged_is_not_in_reach() -> None:
    runs, first, second = _two_runs()
    runs.damaged(second / "node.json")
    (second / "dp0.0.safetensors.json").unlink()
    runs.enters([first, second], (), (), "", ())
    assert runs.own() == {"a"}


def test_storage_keeps_a_run_in_reach_also_if_all_of_it_is_spoilt() -> None:
    runs, *_ = _two_runs()
    runs.persisted((2 << 32, 1))
    runs.enters([], ["b"], ["b"], "", ())
    assert (runs.own(), runs.reach["b"].stored) == ({"b"}, (2 << 32, 1))
    runs.spoilt("b", (2 << 32, 1))
    runs.enters([], ["b"], ["b"], "", ())
    assert (runs.own(), runs.reach["b"].stored, runs.left()) == ({"b"}, None, ["b"])


@pytest.mark.slow
def test_a_job_of_a_thousand_ranks_loses_a_node_and_goes_on() -> None:
    plan = replace(
        draw(0),
        nodes=128,
        ranks=tuple(rank // 8 for rank in range(1024)),
        lengths=(200,) * 1024,
        protect="auto",
        lives=((DrawnFault("lose-node", awaits=400_000),),),
        gaps=(Gap(1.0, replace=True),),
        state=None,
        steps=2,
        every=1,
        quiet=1,
        final="stop",
        order="uniform",
        chance=0.0,
        regroup_after_s=0.0,
        flip_chance=0.0,
        break_chance=0.0,
    )
    with installed():
        report = play(plan)
    assert not report.violations and report.faults["lose-node"] == 1
