"""Under Ray, on real clusters: SMPs that outlive raylets, and worker groups in which only dead workers are replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from holdfast.chaos import faults
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, Unrecoverable

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RayTaskError

from holdfast.integrations.inprocess import forget
from holdfast.integrations.ray import nodes as ray_nodes
from holdfast.integrations.ray.worker_group import Worker, WorkerGroup, by_node, worse
from tests.proof.chaos import actions as chaos
from tests.proof.chaos.faults import CATALOGUE
from tests.proof.ray.cluster import ACTIONS, RayFault, VirtualRay
from tests.proof.ray.drill import SCENARIOS, plan, run, undisturbed
from tests.proof.sim import plan as sim_plan
from tests.scripts import completed, python

pytestmark = pytest.mark.cluster


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/hf-ray-{os.getpid()}")
    yield path
    assert not path.exists(), "the cluster left something behind"


@pytest.mark.slow  # a Ray cluster of four processes per node takes minutes to start on a busy machine
@pytest.mark.proves("ray")
def test_an_actor_is_killed_and_the_other_goes_on_in_the_same_process(launcher: Launcher, folder: Path) -> None:
    expected = undisturbed(launcher, 2)
    with VirtualRay(2, folder) as cluster:
        history = cluster.run(plan(2), [RayFault("node1", 5, "kill-trainer")])
        first, second = cluster.seats
    assert compare(expected, history) == ""
    assert {(e["step"], e["how"]) for e in history.of("started", generation=1)} == {(4, "held")}
    assert [seat.node for seat in second] == ["node0", "node1"]
    assert [before.pid == after.pid for before, after in zip(first, second, strict=True)] == [True, False]


def test_the_front_door_does_not_stand_in_the_way_of_ray() -> None:
    code = "import holdfast.integrations.ray as ours, ray; print(ray.__file__ != ours.__file__, ours.start.__module__)"
    done = python(code)
    assert done.stdout.split() == ["True", "holdfast.integrations.ray.nodes"]


def test_the_front_door_does_not_need_what_only_ray_train_needs() -> None:
    code = (
        "import sys, holdfast.integrations.ray\n"
        "print([m for m in ('ray.train', 'pandas', 'pyarrow') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_what_is_wrong_is_said_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="'PATH'"):
        ray_nodes.start("job", environment={"PATH": "/tmp"})
    with pytest.raises(ConfigError, match="job id"):
        ray_nodes.start("a job")
    with pytest.raises(ConfigError, match="one worker"):
        WorkerGroup(0, job="job")


def test_what_is_wrong_on_one_node_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RayTaskError("report", "trace", ProtocolError("smp.json is gone"))

    agent = SimpleNamespace(report=SimpleNamespace(remote=lambda begin: None))
    monkeypatch.setattr(ray_nodes, "nodes", lambda on="": ["one", "two"])
    monkeypatch.setattr(ray_nodes, "_find", lambda name: agent if name.endswith("one") else None)
    monkeypatch.setattr("ray.get", fail)
    assert [smp.trouble for smp in ray_nodes.status("job").smps] == ["smp.json is gone", "it has no node agent"]


def test_each_kind_of_the_catalogue_is_injected_by_some_backend() -> None:
    simulated = {*sim_plan.KINDS, "kill-process"}
    assert ACTIONS.keys() | chaos.ACTIONS.keys() | simulated | faults.CATALOGUE.keys() == CATALOGUE.keys()


def test_of_two_failures_the_one_counts_that_says_more() -> None:
    died, raised = RayActorError(), RayTaskError("train", "closed by peer", ValueError())
    final = Unrecoverable("nothing is left")
    assert worse(None, raised) is raised
    assert worse(raised, died) is worse(died, raised) is died
    assert worse(died, final) is worse(final, raised) is final


def test_a_worker_whose_user_wants_no_watch_over_nccl_gets_none() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with patch.dict(os.environ), patch("holdfast.snapshot.state.audit.raise_at_the_end"):
        for asked, given in (("0", "0"), ("3", "2")):
            os.environ.pop(name, None)
            worker = Worker(0, 1, "test", {name: asked})
            assert [worker.call(number, 0, 1, ("", 0), os.environ.get, (name,)) for number in (0, 1)] == [given] * 2


def test_only_what_would_happen_again_ends_a_run_of_ray_train() -> None:
    from holdfast.integrations.ray.train import GiveUp

    GiveUp().after_exception(None, {0: RuntimeError("closed by peer"), 1: RayActorError()})
    with pytest.raises(Unrecoverable, match="nothing is left"):
        GiveUp().after_exception(None, {0: RuntimeError("closed by peer"), 1: Unrecoverable("nothing is left")})


def test_ranks_follow_the_names_of_nodes() -> None:
    assert by_node(["b", "b", "a", "a", "c", "c"], 2) == [2, 3, 0, 1, 4, 5]
    assert by_node(["b", "a", "a"], 1) == [1, 2, 0]


def test_what_a_function_held_is_forgotten_with_its_error() -> None:
    class Model:
        pass

    def fail() -> None:
        model = Model()
        alive.add(model)
        try:
            raise ValueError("closed by peer")
        except ValueError as error:
            raise RuntimeError("another rank is gone") from error

    alive: weakref.WeakSet[Model] = weakref.WeakSet()
    with pytest.raises(RuntimeError) as found:
        fail()
    assert len(alive) == 1
    forget(found.value)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.proves("ray")
def test_what_is_done_to_ray_changes_no_bit(name: str, launcher: Launcher, folder: Path) -> None:
    verdict = run(name, undisturbed(launcher, SCENARIOS[name].nodes), folder)
    assert verdict.difference == "", verdict.line()


@pytest.mark.slow
def test_node_agents_start_smps_that_outlive_raylets_and_are_adopted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VirtualRay(2, folder) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        done = completed([sys.executable, "-c", LOOK_AFTER])
        assert done.returncode == 0, done.stderr[-4000:]
        first = json.loads(done.stdout.splitlines()[-1])
        assert [smp["node"] for smp in first] == ["node0", "node1"]
        assert all(psutil.Process(smp["pid"]).ppid() not in cluster.raylets() for smp in first)
        done = completed([sys.executable, "-c", REFUSED])
        assert "ConfigError: the node agent" in done.stderr and "HOLDFAST_TOKEN_FILE" in done.stderr
        cluster.kill_raylet("node1")
        assert psutil.pid_exists(first[1]["pid"])
        cluster.add("node1")
        os.kill(first[0]["pid"], signal.SIGKILL)
        done = completed([sys.executable, "-c", LOOK_AFTER])
        assert done.returncode == 0, done.stderr[-4000:]
        again = json.loads(done.stdout.splitlines()[-1])
        assert again[1]["pid"] == first[1]["pid"]
        assert again[0]["pid"] not in (0, first[0]["pid"])
        stop = "import ray, holdfast.integrations.ray; ray.init(); holdfast.integrations.ray.stop('job', remove=True)"
        subprocess.run([sys.executable, "-c", stop], capture_output=True, timeout=100, check=True)
        assert not (cluster.memory("node1") / "job").exists()


@pytest.mark.slow
def test_a_run_of_ray_train_that_goes_round_in_a_circle_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualRay(1, folder) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        command = [sys.executable, "-c", IN_A_CIRCLE, str(folder)]
        done = completed(command, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.splitlines()[-1] == "Repeated"
        assert (folder / "starts").read_text().split() == ["0", "3", "3"]


LOOK_AFTER = """
import json, ray, holdfast.integrations.ray
from dataclasses import asdict
ray.init()
found = holdfast.integrations.ray.start("job")
print(json.dumps(sorted((asdict(smp) for smp in found.smps), key=lambda smp: smp["node"])))
"""

REFUSED = """
import ray, holdfast.integrations.ray
ray.init()
holdfast.integrations.ray.start("open", environment={"HOLDFAST_HOST": "0.0.0.0"})
"""

IN_A_CIRCLE = """
import sys
from pathlib import Path
import ray, torch
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from holdfast import InMemorySnapshot
from holdfast.integrations.ray.train import GiveUp

folder = sys.argv[1]

def train():
    model = torch.nn.Linear(4, 4)
    optim = torch.optim.Adam(model.parameters())
    with InMemorySnapshot(model, optim, job="job", max_repeats=2, every=1) as snap:
        with (Path(folder) / "starts").open("a") as file:
            print(snap.step, file=file)
        for step in range(snap.step, 10):
            loss = model(torch.ones(4)).sum()
            if step == 3:
                raise ValueError("the loss is nan")
            torch.autograd.backward(loss)
            optim.step()
            snap.drain(60)

ray.init()
run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=9), callbacks=[GiveUp()])
try:
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()
except ControllerError as error:
    print(type(error.controller_failure).__name__)
"""
