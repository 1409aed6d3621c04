"""Several hosts: an SMP that the others could not reach is an error, which says how to fix it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import socket_path
from holdfast.snapshot.connect import check_reachable, connect, spanning, start_here
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, Ground, run_on

TWO_LINES = r"export HOLDFAST_HOST=\S.*\n\s+export HOLDFAST_TOKEN_FILE=\S"
LAUNCHERS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "LWS_GROUP_SIZE", "JOB_COMPLETION_INDEX", "SLURM_NNODES")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "HOLDFAST_HOST", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "spans"),
    [
        ({}, ""),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, ""),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE=16, LOCAL_WORLD_SIZE=8"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "SLURM_NNODES": "4"}, ""),  # torchrun on one node of a job
        ({"WORLD_SIZE": "4"}, ""),  # nothing says where the ranks are
        ({"SLURM_NNODES": "4"}, "SLURM_NNODES=4"),
        ({"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "1"}, ""),
        ({"SLURM_NNODES": "1"}, ""),
        ({"PET_NNODES": "2:4"}, "PET_NNODES=2:4"),
        ({"PET_NNODES": "1"}, ""),
        ({"LWS_GROUP_SIZE": "2"}, "LWS_GROUP_SIZE=2"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1"),
        ({"JOB_COMPLETION_INDEX": "0"}, ""),
        ({"SLURM_NNODES": "many", "WORLD_SIZE": "-4", "LOCAL_WORLD_SIZE": "x"}, ""),
    ],
)
def test_what_launchers_say_of_hosts(environment: dict[str, str], spans: str) -> None:
    assert spanning(environment) == spans


def test_only_the_usual_loopback_is_a_mistake() -> None:
    check_reachable("127.0.0.1", "")
    check_reachable("10.0.0.7", "SLURM_NNODES=4")
    check_reachable("127.0.0.2", "SLURM_NNODES=4")
    with pytest.raises(ConfigError, match=rf"\(SLURM_NNODES=4\).* on 127\.0\.0\.1(?s:.*){TWO_LINES}"):
        check_reachable("127.0.0.1", "SLURM_NNODES=4")


def test_a_trainer_starts_no_smp_that_others_cannot_reach(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    arena = ground.base / "node0" / JOB
    with pytest.raises(ConfigError, match=TWO_LINES):
        connect(arena, JOB, start=True)
    with pytest.raises(ConfigError, match="Ray has 3"):
        start_here(arena, JOB, "Ray has 3")
    assert not arena.exists()


def test_nor_uses_one(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    smp = ground.prepare()
    smp.host = "127.0.0.1"
    smp.launch().wait_ready()
    connect(smp.arena, JOB, start=False).close()
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    with pytest.raises(ConfigError, match=rf"(?s)SMP {smp.owner.pid} .*`holdfast smp stop` .*127.*{TWO_LINES}"):
        connect(smp.arena, JOB, start=False)
    other = ground.smp("node1")  # a virtual node of this host
    connect(other.arena, JOB, start=False).close()


def test_a_start_that_fails_says_why_though_a_dead_smp_left_its_socket(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = ground.smp()
    run_on([smp], [[3000]]).protect(1)
    smp.kill()
    assert socket_path(smp.arena).is_socket()
    monkeypatch.setenv("HOLDFAST_NODE", "another")
    with pytest.raises(ConfigError, match="belongs to job"):
        connect(smp.arena, JOB, start=True)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, Path.touch, lambda path: path.symlink_to("/nonexistent")])
def test_whatever_is_in_the_place_of_the_socket_goes(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    smp = ground.smp()
    smp.kill()
    socket_path(smp.arena).unlink()
    make(socket_path(smp.arena))
    monkeypatch.setenv("HOLDFAST_NODE", "node0")
    client = ground.keep(connect(smp.arena, JOB, start=True))
    assert client.inventory().node == "node0"
    client.stop(remove=True, force=True)


def test_the_command_starts_none_either(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert main(["smp", "start", "--job", JOB, "--arena", str(ground.base), "--detach"]) == 2
    said = capsys.readouterr().err
    assert "SLURM_NNODES=2" in said and said.count("export HOLDFAST_") == 2
    assert list(ground.base.glob("*/smp.json")) == []


SCRIPT = """
import torch
from pathlib import Path
from holdfast import InMemorySnapshot

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
try:
    InMemorySnapshot(model, torch.optim.SGD(model.parameters(), 0.1)).__enter__()
except Exception as error:
    print(type(error).__name__, str(error).count("export HOLDFAST_"), flush=True)
"""


@pytest.mark.needs("torch")
def test_two_torchruns_are_told_what_to_say(ground: Ground, tmp_path: Path) -> None:
    """As a user would try it on two machines, with only the README."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"HOLDFAST_ARENA": str(ground.base), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"),
                *("--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", str(script)),
            ],
            env=os.environ | environment | {"HOLDFAST_NODE": f"node{rank}", "HOLDFAST_JOB": JOB},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for agent in agents:
            out, errors = agent.communicate(timeout=DEADLINE_S)
            assert out.split() == ["ConfigError", "2"], errors
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_what_is_said_is_json_for_programs(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ground.host()
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("HOLDFAST_HOST", host)
    assert main(["smp", "start", "--job", JOB, "--arena", str(ground.base), "--detach", "--json", "-"]) == 0
    try:
        assert json.loads(capsys.readouterr().out)["host"] == host
    finally:
        assert main(["smp", "stop", "--job", JOB, "--arena", str(ground.base), "--remove"]) == 0
