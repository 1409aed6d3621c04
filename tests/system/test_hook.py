"""`InMemorySnapshot` in one process: restores in place, boundaries, and failures that must not reach the loop."""

from __future__ import annotations

import logging
import os
import pydoc
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast import ConfigError, HoldfastError, InMemorySnapshot, SmpUnavailable, StateMismatch, prefetch
from holdfast.cli.status import gather
from holdfast.smp_daemon.ops.metrics import exposition
from holdfast.smp_daemon.shared.board import Board, SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.records import ShardRecord, digest_units, read_json, record_name
from holdfast.snapshot import connect
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.step.copier import Copier
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import completed, python, started
from tests.smp_kit import kill_smps, mounted, owner_of, read_line, suspend
from tests.system.test_transport import Notice, noticing

SCRIPT = """
import hashlib, os, random, signal, sys
import numpy, torch
from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.failpoints import failpoint

torch.set_num_threads(1)
stop, steps = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)
)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=0.1, total_steps=50)
with InMemorySnapshot(model, optim, scheduler=schedule) as snap:
    print("start", snap.step)
    for step in range(snap.step, steps):
        x = torch.randn(8, 16) * random.random() + numpy.random.random()
        loss = model(x).square().mean()
        optim.zero_grad(); loss.backward()
        if stop - 2 <= step <= stop:
            snap.drain(60)  # such short steps are skipped while snapshots are being sealed
        if step == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        optim.step(); schedule.step()
        print(step, loss.item().hex(), schedule.get_last_lr()[0].hex())
    sha = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(v for s in optim.state.values() for v in s.values())]:
        sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    print("end", sha.hexdigest(), torch.rand(1).item().hex(), random.random(), numpy.random.random())
"""


def run_script(stop: int, steps: int = 12) -> tuple[int, list[str]]:
    done = completed([sys.executable, "-c", SCRIPT, str(stop), str(steps)])
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


def small(width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(width, 3)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(
    snap: InMemorySnapshot, model: torch.nn.Module, optim: torch.optim.Optimizer, steps: int, drain_s: float = 60
) -> None:
    for _ in range(steps):
        width: Any = next(model.parameters()).shape[1]
        optim.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        snap.drain(drain_s)
        optim.step()


def half_a_step(snap: InMemorySnapshot, model: torch.nn.Module) -> None:
    """Up to the optimizer, with all snapshots so far protected."""
    model(torch.ones(2, 4)).sum().backward()
    assert snap.drain(60)


def values(model: torch.nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *(v for state in optim.state.values() for v in state.values())]
    return [tensor.detach().clone() for tensor in tensors]


def trained() -> list[torch.Tensor]:
    """Train a job two steps, end it and keep its snapshots; return its values."""
    model, optim = small()
    with InMemorySnapshot(model, optim, keep=True) as snap:
        train(snap, model, optim, 2)
    return values(model, optim)


def assert_goes_on(step: int, kept: list[torch.Tensor]) -> None:
    """A new job begins with a step, and with these values."""
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        assert snap.step == step
        assert all(torch.equal(a, b) for a, b in zip(values(model, optim), kept, strict=True))


def smp_pid(arena: Path) -> int:
    return owner_of(arena / "test").pid


@pytest.mark.proves("trainers-die")
def test_a_killed_process_goes_on_bit_for_bit(arena: Path) -> None:
    status, undisturbed = run_script(stop=-1)
    assert status == 0
    status, before = run_script(stop=7)
    assert status == -signal.SIGKILL
    status, after = run_script(stop=-1)
    assert status == 0
    assert after[0] == "start 7"
    assert before[1:] == undisturbed[1:8]
    assert after[1:] == undisturbed[8:]


def test_a_job_that_ends_well_leaves_no_process_and_no_memory(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
        pid = smp_pid(arena)
        assert psutil.pid_exists(pid)
    assert not (arena / "test").exists()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_hook_that_was_left_is_left_only_once(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optim = small()
    with caplog.at_level(logging.INFO), InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 2)
        snap.close()
        caplog.clear()
    assert caplog.messages == []


def test_an_exception_in_the_loop_keeps_everything_for_the_restart(arena: Path) -> None:
    model, optim = small()
    with pytest.raises(ZeroDivisionError):
        with InMemorySnapshot(model, optim) as snap:
            train(snap, model, optim, 4)
            kept = values(model, optim)
            half_a_step(snap, model)
            raise ZeroDivisionError
    assert_goes_on(4, kept)


def test_a_getter_that_fails_as_the_hook_is_entered_leaves_nothing_behind(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tracked(get: Callable[[], float]) -> tuple[InMemorySnapshot, torch.nn.Module, torch.optim.Optimizer]:
        model, optim = small()
        snap = InMemorySnapshot(model, optim)
        snap.track("ratio", get, lambda value: None)
        return snap, model, optim

    with pytest.raises(KeyboardInterrupt):
        snap, model, optim = tracked(lambda: 1.0)
        with snap:
            train(snap, model, optim, 4)
            raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError):
        tracked(lambda: 1 / 0)[0].__enter__()
    caplog.clear()
    snap, model, optim = tracked(lambda: 1.0)
    with snap:
        assert snap.step == 3, "no step followed the fourth, so no snapshot was taken of it"
        train(snap, model, optim, 2)
    assert "another hook" not in caplog.text


class Counted(torch.nn.Linear):
    count = 0


holdfast.register(Counted, get=lambda module: module.count, set=lambda module, count: setattr(module, "count", count))


@pytest.mark.parametrize("wrong", ["HOLDFAST_PROFILE", "HOLDFAST_AUDIT", "HOLDFAST_LEAVE_ON"])
def test_a_start_that_fails_leaves_nothing_open_and_may_be_tried_again(
    arena: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    model = Counted(4, 3)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    monkeypatch.setenv(wrong, "USR1" if wrong == "HOLDFAST_LEAVE_ON" else "{")
    with ThreadPoolExecutor(1) as thread:

        def fails() -> tuple[int, set[threading.Thread]]:
            with pytest.raises(ConfigError, match=wrong):
                thread.submit(snap.__enter__).result()
            return psutil.Process().num_fds(), set(threading.enumerate())

        (files, threads), (now_open, running) = fails(), fails()
        assert now_open <= files and running <= threads
    monkeypatch.delenv(wrong)
    with snap:
        train(snap, model, optim, 2)
        assert snap.protected_step == 1


def test_an_error_as_the_last_snapshot_is_taken_leaves_nothing_open(arena: Path) -> None:
    before, held = set(threading.enumerate()), [1]
    model, optim = small()
    snap = InMemorySnapshot(model, optim, strict=True)
    snap.track("held", lambda: held[0], lambda value: None)
    with pytest.raises(StateMismatch, match="held"):
        with snap:
            for step in snap.steps(9):
                train(snap, model, optim, 1)
                if step == 3:
                    held[0] = object()  # type: ignore[call-overload]
                    break
    assert set(threading.enumerate()) <= before


def test_slots_that_are_still_being_made_ready_keep_no_copy_from_its_end(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never_ends(*_: object) -> None:
        raise DeadlineExceeded("it did not end")

    def slow(*values: Any, **more: Any) -> None:
        time.sleep(1)
        seal(*values, **more)

    model, optim = small()
    with pytest.raises(ZeroDivisionError):
        with InMemorySnapshot(model, optim) as snap:
            train(snap, model, optim, 2)
            kept, session = values(model, optim), snap._session
            seal = session.rank.smp.sealing.seal
            monkeypatch.setattr(session.rank.smp.sealing, "seal", slow)
            monkeypatch.setattr(session.protecting.layouts, "stop_reserving", never_ends)
            model(torch.ones(2, 4)).sum().backward()
            raise ZeroDivisionError
    assert "made ready" in caplog.text and "not sealed" not in caplog.text
    assert_goes_on(2, kept)


def test_where_the_time_of_a_run_went_is_known_across_restarts(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optim = small()
    with pytest.raises(ZeroDivisionError):
        with InMemorySnapshot(model, optim, every=2) as snap:
            train(snap, model, optim, 5)
            before = snap.statistics.spent
            raise ZeroDivisionError
    caplog.set_level("INFO", "holdfast")
    with InMemorySnapshot(model, optim, every=2) as snap:
        at, spent = snap.step, snap.statistics.spent
        assert (spent.since, spent.count, spent.again) == (before.since, at, 5 - at)
        assert spent.until > before.until
        assert spent.repeated > 0
        train(snap, model, optim, 6)
        [(_, overview)] = gather(arena)
        assert overview.spent.again == 5 - at
        assert overview.spent.count > at
        effective, text = overview.goodput
        assert effective is not None
        assert 0 < effective < 1
        assert "steps that count" in text
        assert overview.to_json()["goodput"]["effective"] == effective
        metrics = exposition("test", overview.statuses[0], overview).decode()
        assert f'part="repeated"}} {overview.spent.repeated}' in metrics
        assert snap.statistics.spent.scalars()["holdfast/steps_again"] == 5 - at
        (trainer,) = overview.statuses[0].trainers
        assert 0 < trainer.own.work_s < trainer.own.step_s
        assert (trainer.own.data_s, overview.stragglers) == (0, [])
    assert "the run so far: " in caplog.text


def test_what_is_in_help() -> None:
    """Where people look for the attributes of `snap`."""
    text = " ".join(re.sub(".\b", "", pydoc.render_doc(InMemorySnapshot)).split())  # without overstriking
    assert {"restored", "statistics"} <= set(re.findall(r"(\w+) \| [A-Z]", text))


def test_what_is_normal_is_said_only_to_those_who_ask(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start, a kill in the middle of a step and a restart, in the output of a script."""
    said = []
    for kind in ("", "logfmt"):
        monkeypatch.setenv("HOLDFAST_LOG", kind)
        for stop in ("3", "-1"):
            command = [sys.executable, "-c", SCRIPT, stop, "6"]
            done = completed(command)
            said.append(done.stderr.splitlines())
    assert said[:2] == [[], []]
    for line in ("a snapshot every step", "no other node", "restored step 3 .*own "):
        times = [sum(bool(re.search(line, each)) for each in life) for life in said[2:]]
        assert times == ([0, 1] if "restored" in line else [1, 1]), line


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"steps_again": 0}, " 1,200 .*own nodes .*830 ms; .*again: 0$"),
        ({"steps_again": 1, "tier": "group"}, "step 1,200 .*other nodes .*830 ms; .*again: 1$"),
        ({"steps_again": 1300, "tier": "persisted"}, "step 1,200 .*storage .*830 ms; .*again: 1,300$"),
        ({"tier": "group", "how": "resharded"}, "other .*resharded .*again: unknown$"),
    ],
)
def test_how_a_rank_started_is_a_line(more: dict[str, Any], facts: str) -> None:
    given = {"tier": "local", "how": "held", "clock": {"enter": 1.0, "load": 1.83}} | more
    assert re.search(facts, str(Restored(2, UNNAMED, SnapshotId(1, 1200), **given)))
    assert "nothing was restored" in str(Restored(1, UNNAMED))


def test_restored_tensors_do_not_alias_the_snapshot(arena: Path) -> None:
    kept = trained()
    for _ in range(2):
        again, other = small()
        with InMemorySnapshot(again, other, keep=True):
            assert all(torch.equal(a, b) for a, b in zip(values(again, other), kept, strict=True))
            for parameter in again.parameters():
                parameter.data.fill_(7)


def test_the_step_is_counted_and_the_snapshot_is_protected(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 5)
        assert snap.step == 5
        assert snap.protected_step == 4
        assert snap.statistics.failed == 0
        assert snap.statistics.skipped == 0


def test_the_trainers_digests_are_those_of_the_bytes_in_the_slots(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed: dict[SnapshotId, tuple[int, ...]] = {}
    seal = SmpClient.seal

    def noting(self: SmpClient, snapshot: SnapshotId, *rest: Any, digests: tuple[int, ...], **options: Any) -> None:
        sealed[snapshot] = digests
        seal(self, snapshot, *rest, digests=digests, **options)

    monkeypatch.setattr(SmpClient, "seal", noting)
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3))
    optim = torch.optim.Adam(model.parameters())
    with InMemorySnapshot(model, optim, keep=True) as snap:
        train(snap, model, optim, 4)
    found = set()
    for path in (arena / "test").glob("*.safetensors"):
        content = read_json(path.with_name(record_name(path.name)))
        if content is not None:
            record = from_plain(ShardRecord, content, "a commit record")
            assert record.digests == digest_units(memoryview(path.read_bytes()), record.unit_bytes)
            assert record.digests == sealed[record.snapshot]
            found.add(record.snapshot)
    assert len(found) >= 2


@pytest.mark.skipif(not runs.digests(), reason="the SMP takes the digests")
def test_a_digest_of_other_bytes_than_were_copied_is_noticed_at_once(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complete = UnitDigests.complete
    monkeypatch.setattr(UnitDigests, "complete", lambda self, slot: tuple(d ^ 1 for d in complete(self, slot)))
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
        assert snap.statistics.failed > 0
        assert snap.protected_step is None
    assert "not those that were sealed" in caplog.text


def test_only_every_nth_step_is_taken(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim, every=3) as snap:
        train(snap, model, optim, 10)
        assert snap.statistics.taken == 3


@pytest.mark.proves("never-waits")
def test_without_a_free_slot_steps_are_skipped_rather_than_waited_for(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim, slots=3) as snap:
        train(snap, model, optim, 8)
        assert snap.protected_step is not None
        assert snap.statistics.taken + snap.statistics.skipped == 8


@pytest.mark.proves("all-or-refused")
def test_another_model_is_refused_before_anything_is_written(arena: Path) -> None:
    trained()
    other, its_optim = small(5)
    before = values(other, its_optim)
    with pytest.raises(StateMismatch, match=r"model0\.weight is F32\[3, 4\] .*F32\[3, 5\]"):
        InMemorySnapshot(other, its_optim).__enter__()
    assert all(torch.equal(a, b) for a, b in zip(list(other.parameters()), before, strict=False))
    assert not its_optim.state


def test_a_renamed_parameter_is_named(arena: Path) -> None:
    trained()
    wrapped = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with pytest.raises(StateMismatch, match=r"model0\.bias only .*model0\.0\.bias only"):
        InMemorySnapshot(wrapped, torch.optim.Adam(wrapped.parameters())).__enter__()


def test_another_optimizer_is_named_and_nothing_is_put_into_it(arena: Path) -> None:
    trained()
    other = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(StateMismatch, match=r"optim is .*\.Adam .*\.SGD "):
        InMemorySnapshot(other, sgd).__enter__()
    assert not sgd.state
    assert sgd.param_groups[0]["lr"] == 0.1


def test_state_that_grows_during_training_gets_a_new_layout(arena: Path) -> None:
    model, optim = small()
    late = torch.nn.Linear(64, 64)
    with InMemorySnapshot([model, late], optim) as snap:
        train(snap, model, optim, 3)
        optim.add_param_group({"params": late.parameters()})
        train(snap, torch.nn.Sequential(model, torch.nn.Linear(3, 64), late), optim, 6)
        assert snap.protected_step is not None
        assert snap.protected_step > 6
        assert snap.statistics.failed >= 1


def test_a_state_that_cannot_be_kept_is_named(arena: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"handle": object()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model, optim = small()
    with pytest.raises(StateMismatch, match=r"late\.extra\.odd\.handle is .*\.object"):
        with InMemorySnapshot(model, optim, extra={"odd": Odd()}) as snap:
            train(snap, model, optim, 1)


def test_too_little_shared_memory_is_said_at_the_first_step(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(arena, "1m"):
        model = torch.nn.Linear(400, 400)
        optim = torch.optim.Adam(model.parameters())
        with pytest.raises(HoldfastError, match=r"needs [\d,]+ bytes .* [\d,]+ left"):
            with InMemorySnapshot(model, optim) as snap:
                train(snap, model, optim, 1)
        kill_smps(arena)


def test_a_missing_smp_is_said_if_none_may_be_started(arena: Path) -> None:
    with pytest.raises(SmpUnavailable, match="no SMP serves"):
        InMemorySnapshot(*small(), start=False).__enter__()


def test_a_run_without_an_id_is_refused(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set HOLDFAST_JOB"):
        InMemorySnapshot(*small())


DRAWN = "2fa60f3c-932b-48d5-8cbb-0903eea98c54"
"""As torchrun draws one at each start of a job on one node, whatever --rdzv-id says."""


@pytest.mark.parametrize(
    ("launcher", "job"),
    [
        ({"TORCHELASTIC_RUN_ID": "run-7", "GROUP_WORLD_SIZE": "1"}, "run-7"),
        ({"TORCHELASTIC_RUN_ID": DRAWN, "GROUP_WORLD_SIZE": "2"}, DRAWN),  # all nodes were told this one
        ({"TORCHELASTIC_RUN_ID": DRAWN, "GROUP_WORLD_SIZE": "1"}, ""),
        ({"TORCHELASTIC_RUN_ID": DRAWN, "GROUP_WORLD_SIZE": "1", "SLURM_JOB_ID": "77"}, "77"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77"}, "77"),
    ],
)
def test_an_id_that_the_next_start_does_not_have_is_none(
    monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str], job: str
) -> None:
    for name in ("HOLDFAST_JOB", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    if job:
        assert connect.job_from_environment() == job
    else:
        with pytest.raises(ConfigError, match="set HOLDFAST_JOB"):
            connect.job_from_environment()


def test_what_a_running_smp_does_not_hear_is_named(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_LINKS", "2")
    for given in ({}, {"HOLDFAST_PERSIST": str(tmp_path)}):
        assert "was started with something else" not in caplog.text
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with InMemorySnapshot(*small(), keep=True):
            pass
    (said,) = [each.getMessage() for each in caplog.records if "was started with something else" in each.getMessage()]
    assert "HOLDFAST_PERSIST" in said and "HOLDFAST_LINKS" not in said


def test_several_ranks_without_a_process_group_are_refused(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2.*process group"):
        InMemorySnapshot(*small()).__enter__()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with InMemorySnapshot(*small()):
        pass


@pytest.mark.parametrize("job", ["../etc", "", "a/b", "x" * 65, ".hidden"])
def test_a_job_id_is_no_path(arena: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.delenv("HOLDFAST_JOB")
    with pytest.raises(ConfigError, match=r"job id|no id"):
        InMemorySnapshot(*small(), job=job)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "often"}, "every='often': .* 1 or more"),
        ({"slots": 1}, "slots=1: .* 2 to 16"),
        ({"slots": 2, "elastic": True}, "slots=2 and elastic: .* 3 slots"),
        ({"protect_every": 0}, "protect_every=0: .* 1 or more"),
        ({"protect_every": "often"}, "protect_every=.often.: .* 1 or more"),
        ({"slots": 17}, "slots=17: .* 2 to 16"),
        ({"protect": "6+0"}, "at least 1"),
        ({"protect": "copies:0"}, "at least 1"),
        ({"protect": "200+56"}, "at most 255"),
        ({"protect": "four"}, "protect='four'"),
    ],
)
def test_bad_options_are_named(arena: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        InMemorySnapshot(*small(), **options)


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ("rack", "HOLDFAST_DOMAINS: 'rack' .*kind=name"),
        ("@tp", "dp0 has no .* 'tp'"),
    ],
)
@pytest.mark.parametrize("said", ["option", "environment"])
def test_domains_that_cannot_be_are_named_before_an_smp_is_started(
    arena: Path, monkeypatch: pytest.MonkeyPatch, domains: str, message: str, said: str
) -> None:
    if said == "environment":
        monkeypatch.setenv("HOLDFAST_DOMAINS", domains)
    with pytest.raises(ConfigError, match=message):
        InMemorySnapshot(*small(), domains=domains if said == "option" else None).__enter__()
    assert not (arena / "test").exists()


@pytest.mark.parametrize(
    ("option", "expected"), [(None, ("rack=r7",)), ("switch=s3,@dp", ("dp=0", "switch=s3")), ("", ())], ids=str
)
def test_the_layout_knows_the_domains_of_a_node(
    arena: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HOLDFAST_DOMAINS", "rack=r7")
    model, optim = small()
    with InMemorySnapshot(model, optim, domains=option) as snap:
        train(snap, model, optim, 1)
        (layout,) = inventory(arena).layouts.values()
    assert [node.domains for node in layout.nodes] == [expected]


@pytest.mark.parametrize(
    ("protect", "data", "parity", "message"),
    [
        ("4+2", 4, 2, "no other node"),
        ("copies:2", 1, 2, "no other node"),
        ("auto", 1, 1, "no other node"),
        ("none", 1, 0, "loss of"),
    ],
)
def test_an_operator_is_told_once_what_is_not_protected(
    arena: Path, caplog: pytest.LogCaptureFixture, protect: str, data: int, parity: int, message: str
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    model, optim = small()
    with InMemorySnapshot(model, optim, protect=protect) as snap:
        assert message not in caplog.text
        train(snap, model, optim, 4)
        (layout,) = inventory(arena).layouts.values()
    assert (layout.data, layout.parity) == (data, parity)
    assert caplog.text.count(message) == 1


def inventory(arena: Path) -> Inventory:
    with closing(SmpClient(arena / "test", "test")) as client:
        return client.inventory()


def test_an_smp_that_dies_does_not_disturb_the_loop(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
        kill_smps(arena)
        train(snap, model, optim, 6)
        assert snap.protected_step is not None
        assert snap.protected_step > 4
    assert not (arena / "test").exists()


def test_a_signal_that_raises_while_the_smp_is_asked_costs_a_snapshot_or_two(arena: Path) -> None:
    """The reply was still to come; it must not be taken for the reply to the next request."""
    model, optim = small()
    with noticing(), pytest.raises(KeyboardInterrupt), InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 4)
        half_a_step(snap, model)
        smp = psutil.Process(smp_pid(arena))
        suspend(smp.pid)
        try:
            with ThreadPoolExecutor(1) as threads:
                asked = threads.submit(_interrupt_once_asked, snap)
                with pytest.raises(Notice):
                    snap._session.rank.client.inventory()
                asked.result(DEADLINE_S)
        finally:
            smp.resume()
        train(snap, model, optim, 8)
        assert snap.statistics.failed <= 2 and snap.statistics.failed + snap.statistics.protected == 11
        assert snap.protected_step == snap.step - 1
        assert smp_pid(arena) == smp.pid and snap._session.rank.client.inventory().record.ends == {}
        kept = values(model, optim)
        half_a_step(snap, model)
        raise KeyboardInterrupt
    assert_goes_on(12, kept)


AT_WORK = """
import sys, torch
from holdfast import InMemorySnapshot

model = torch.nn.Linear(4, 3)
optim = torch.optim.Adam(model.parameters())
with InMemorySnapshot(model, optim) as snap:
    for line in sys.stdin:
        model(torch.ones(1, 4)).sum().backward()
        snap.drain(60)
        optim.step()
        print(snap.step, flush=True)
"""


def test_a_second_run_of_the_same_job_is_refused_while_the_first_is_at_work(arena: Path) -> None:
    with started([sys.executable, "-c", AT_WORK]) as first:

        def step() -> str:
            print(file=first.stdin, flush=True)
            return read_line(first.stdout)

        assert [step() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        with pytest.raises(ConfigError, match=f"running .*process {first.pid} .*dp0, .*step 3"):
            InMemorySnapshot(*small()).__enter__()
        assert [step() for _ in range(3)] == ["4\n", "5\n", "6\n"], "the first one is not disturbed"
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        assert snap.step == 5, "the last was not drained"


def _interrupt_once_asked(snap: InMemorySnapshot) -> None:
    await_that(snap._session.rank.client._lock.locked)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_strict_hook_raises_what_went_wrong(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_starts(*_: object, **__: object) -> None:
        raise SmpUnavailable("no SMP can be started")

    model, optim = small()
    with pytest.raises(SmpUnavailable):
        with InMemorySnapshot(model, optim, strict=True) as snap:
            train(snap, model, optim, 3)
            monkeypatch.setattr(connect, "start_smp", none_starts)
            kill_smps(arena)
            train(snap, model, optim, 3)


def test_a_copy_that_does_not_end_keeps_no_rank_from_ending_the_job(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never_ends(*_: object) -> None:
        raise DeadlineExceeded("it did not end")

    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
        monkeypatch.setattr(Copier, "close", never_ends)
    assert not (arena / "test").exists()
    assert "not sealed" in caplog.text and "left running" not in caplog.text


def test_whoever_cannot_end_an_smp_names_the_command_that_does(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_answer(*_: object) -> None:
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(SmpClient, "finish", no_answer)
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
    [line] = [line for line in caplog.messages if "left running" in line]
    assert line.split("`")[1] == f"holdfast gc --job test --arena {arena}"


def test_whoever_is_replaced_by_a_newer_start_is_not_told_to_remove_what_that_one_holds(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 3)
        newer = SmpClient(arena / "test", "test")
        newer.join(newer.inventory().epoch + 1)
        newer.close()
    [line] = [line for line in caplog.messages if "left running" in line]
    assert "newer start" in line and "holdfast gc" not in line
    assert (arena / "test").exists()


def test_state_that_cannot_be_captured_later_does_not_disturb_the_loop(arena: Path) -> None:
    class Moody:
        content: Any = 1

        def state_dict(self) -> dict[str, Any]:
            return {"content": self.content}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model, optim = small()
    moody = Moody()
    with InMemorySnapshot(model, optim, extra={"moody": moody}) as snap:
        train(snap, model, optim, 3)
        moody.content = object()
        train(snap, model, optim, 2)
        moody.content = 2
        train(snap, model, optim, 3)
        assert snap.statistics.failed == 2
        assert snap.protected_step == 7


def test_state_that_cannot_be_captured_as_it_grows_is_tried_again(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[Any] = [1]
    model, optim = small()
    snap = InMemorySnapshot(model, optim)
    snap.track("held", lambda: held[0], lambda value: None)
    with snap:
        train(snap, model, optim, 3)
        held[0] = object()
        model.register_buffer("grown", torch.ones(3))
        train(snap, model, optim, 5)
        assert snap.protected_step == 2
        held[0] = 2
        train(snap, model, optim, 8)
        assert snap.protected_step == 15
    [told] = [line for line in caplog.messages if "no new layout" in line]
    assert "tracked.held" in told
    assert "no more snapshots" not in caplog.text


def test_the_hooks_are_gone_after_the_block(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim) as snap:
        train(snap, model, optim, 1)
    optim.step()
    assert snap.step == 1


FORKS = {
    "the workers of a loader": """
data = torch.randn(12, 4)
loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
with InMemorySnapshot(model, optim) as snap:
    for batch in snap.data(loader):
        step(batch)
    print(snap.step, snap.protected_step, snap.statistics.failed, "grpc" in sys.modules)
""",
    "a process that leaves the block": """
with InMemorySnapshot(model, optim) as snap:
    for _ in range(3):
        step(torch.randn(2, 4))
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(3):
            step(torch.randn(2, 4))
        print(snap.step, snap.protected_step, snap.statistics.failed, "grpc" in sys.modules)
if not child:
    os._exit(0)
""",
}


@pytest.mark.parametrize("how", FORKS)
def test_what_is_forked_does_not_end_the_job_and_grpc_is_not_loaded(arena: Path, how: str) -> None:
    code = """
import os, sys, torch
from holdfast import InMemorySnapshot
model = torch.nn.Linear(4, 3); optim = torch.optim.Adam(model.parameters())
def step(batch):
    optim.zero_grad(); model(batch).sum().backward(); snap.drain(60); optim.step()
"""
    done = python(code + FORKS[how])
    assert done.stdout.split() == ["6", "5", "0", "False"], done.stderr


@pytest.mark.proves("budget")
def test_the_interval_grows_where_snapshots_cost_more_than_their_budget(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim, protect="none", every="auto", overhead_budget=1e-6) as snap:
        for _ in range(400):
            train(snap, model, optim, 1)
            if snap.statistics.interval > 10:
                break
        assert snap.statistics.interval > 10
        assert "of the time" in snap.statistics.why
        taken = snap.statistics.taken
        train(snap, model, optim, snap.statistics.interval)
        assert snap.statistics.taken <= taken + 1


def test_a_snapshot_that_is_never_over_holds_up_the_next_and_the_log_says_so(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.snapshot.delays.STARVED_S", 0.0)
    model, optim = small()
    with InMemorySnapshot(model, optim, protect="none", every="auto") as snap:
        train(snap, model, optim, 3)
        taken = snap.statistics.taken
        with monkeypatch.context() as patch:
            patch.setattr(SmpClient, "outcome", lambda client, snapshot: SnapshotOutcome.PENDING)
            train(snap, model, optim, 6, drain_s=0)  # in vain
            assert snap.statistics.taken <= taken + 1
        assert "has been waiting" in caplog.text
        train(snap, model, optim, 6)
        assert snap.statistics.taken > taken + 1


def test_traffic_pauses_while_the_step_communicates(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim, protect="none") as snap:
        train(snap, model, optim, 2)
        board = Board(arena / "test" / "board")
        with snap.phase("comm"):
            assert board.paused_for(time.monotonic()) > 0
        assert board.paused_for(time.monotonic()) == 0
        with pytest.raises(ConfigError, match="'comm'"), snap.phase("forward"):  # type: ignore[arg-type]
            pass


def test_an_smp_that_was_made_ready_ahead_is_the_one_that_serves(arena: Path) -> None:
    prefetch().join(DEADLINE_S)
    pid = smp_pid(arena)
    model, optim = small()
    with InMemorySnapshot(model, optim, start=False, keep=True, protect="none") as snap:
        train(snap, model, optim, 2)
        snap.begin()
        assert snap.drain(60)
    prefetch().join(DEADLINE_S)
    assert smp_pid(arena) == pid
    with InMemorySnapshot(*small(), start=False) as again:
        assert again.step == 2


def test_nothing_is_drained_while_there_is_no_snapshot(arena: Path) -> None:
    model, optim = small()
    with InMemorySnapshot(model, optim, every=3, protect="none") as snap:
        assert snap.drain(60)
        train(snap, model, optim, 2)
        snap.begin()
        assert not snap.drain(60)
        train(snap, model, optim, 3)
        snap.begin()
        assert snap.drain(60)


def test_a_frozen_base_is_restored(arena: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 3))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model, torch.optim.Adam(model[1].parameters(), lr=0.1)

    model, optim = make()
    with InMemorySnapshot(model, optim, keep=True, protect="none") as snap:
        train(snap, model, optim, 6)
        snap.begin()
        assert snap.drain(60)
    fresh, fresh_optim = make()
    with InMemorySnapshot(fresh, fresh_optim, protect="none") as snap:
        assert snap.step == 6
        assert all(map(torch.equal, values(fresh, fresh_optim), values(model, optim)))


def test_in_a_loop_over_steps_begin_does_nothing(arena: Path) -> None:
    model, optim = small()
    done: list[int] = []
    with InMemorySnapshot(model, optim, protect="none") as snap:
        for step in snap.steps(9):
            snap.begin()
            train(snap, model, optim, 1)
            done.append(step)
            if step == 4:
                break
        assert done == [0, 1, 2, 3, 4]
        snap.begin()
        train(snap, model, optim, 1)
        snap.begin()
        assert snap.step == 6


@pytest.mark.parametrize("begin", [True, False], ids=["begin", "steps"])
def test_a_loop_that_ended_well_goes_on_with_the_turn_after_its_last(arena: Path, begin: bool) -> None:
    def turns(snap: InMemorySnapshot, until: int) -> Iterator[int]:
        if not begin:
            yield from snap.steps(until)
            return
        for turn in range(snap.step, until):
            snap.begin()
            yield turn

    done: list[int] = []
    for until in (3, 5):
        model, optim = small()
        with InMemorySnapshot(model, optim, keep=True, strict=True) as snap:
            for turn in turns(snap, until):
                train(snap, model, optim, 1)
                done.append(turn)
            assert begin or snap.step == until, "the end of this loop is seen at once"
        assert snap.step == until
    assert done == [0, 1, 2, 3, 4]


def test_a_loop_that_ended_well_and_does_not_say_where_steps_begin_may_draw_its_data(arena: Path) -> None:
    """At the end nothing had been read for the next step, so it is unknown what reading draws."""

    def run(until: int, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, optim = small()
        with InMemorySnapshot(model, optim, strict=True, **options) as snap:
            for _ in range(snap.step, until):
                optim.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                snap.drain(60)
                optim.step()
        return values(model, optim)

    whole = run(6, job="whole")
    run(3, keep=True)
    assert all(map(torch.equal, run(6), whole))
