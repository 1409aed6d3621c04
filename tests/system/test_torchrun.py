"""A job under real torchrun, with nothing added but the ``with`` line: a killed run, one SMP for three ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.snapshot.connect import warn_of_stale_store
from tests.scripts import completed
from tests.smp_kit import kill_smps

pytestmark = pytest.mark.cluster

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from holdfast import InMemorySnapshot

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
optim = torch.optim.AdamW(model.parameters(), lr=0.01)
with InMemorySnapshot(model, optim) as snap:
    restored = snap.step
    for step in snap.steps(10):
        loss = model(torch.randn(4, 8)).square().mean()
        if step == 6 and sys.argv[1] == "kill":
            snap.drain(60)
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optim.zero_grad(); loss.backward(); dist.all_reduce(loss.detach()); optim.step()
    with open(f"{sys.argv[2]}/{rank}", "w") as out:
        out.write(f"{restored} {loss.item().hex()} {torch.rand(1).item().hex()}")
dist.destroy_process_group()
"""


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with Scratch("test") as scratch:
        monkeypatch.setenv(ARENA_ENV, str(scratch.path))
        monkeypatch.setenv("HOLDFAST_JOB", "run")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield scratch.path
        kill_smps(scratch.path)


def torchrun(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / how).mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    return completed([*launch, str(script), how, str(tmp_path / how)], timeout=180)


def results(tmp_path: Path, how: str) -> list[list[str]]:
    done = torchrun(tmp_path, how)
    assert done.returncode == 0, done.stderr[-8000:]
    return [(tmp_path / how / str(rank)).read_text().split() for rank in range(3)]


@pytest.mark.slow  # tests/system/test_user_command.py kills single trainers, too
@pytest.mark.proves("trainers-die")
def test_a_killed_run_that_is_launched_again_goes_on_bit_for_bit(arena: Path, tmp_path: Path) -> None:
    undisturbed = results(tmp_path, "undisturbed")
    assert not (arena / "run").exists()
    assert torchrun(tmp_path, "kill").returncode != 0
    again = results(tmp_path, "again")
    assert [result[0] for result in undisturbed] == ["0", "0", "0"]
    assert [result[0] for result in again] == ["6", "6", "6"]
    assert [result[1:] for result in again] == [result[1:] for result in undisturbed]
    assert not (arena / "run").exists()


@pytest.mark.parametrize(
    ("restarts", "shared", "warned"), [("3", "True", True), ("0", "True", False), ("3", "False", False)]
)
def test_restarts_that_torch_cannot_do_are_warned_of(
    restarts: str, shared: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    warn_of_stale_store()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) is warned
