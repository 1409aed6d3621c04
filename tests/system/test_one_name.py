"""Everything of holdfast is imported by that one name, so a job's own files may have any other."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import completed

JOB = """
import os, signal, sys, torch
import chaos, ec, integrations, smp_daemon, snapshot, tests
from holdfast import InMemorySnapshot
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optim = torch.optim.Adam(model.parameters())
with InMemorySnapshot(model, optim) as snap:
    first = snap.step
    for step in snap.steps(6):
        optim.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        assert snap.drain(60)
        optim.step()
        if step == 3 and not first:
            os.kill(os.getpid(), signal.SIGKILL)
    print(first, snap.step, [m.__name__ for m in (chaos, ec, integrations, smp_daemon, snapshot, tests) if not m.MINE])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project that uses the names of holdfast's own folders."""
    (tmp_path / "train.py").write_text(JOB)
    for name in ("snapshot.py", "ec.py"):
        (tmp_path / name).write_text("MINE = True\n")
    for name in ("chaos", "integrations", "smp_daemon", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, *command], cwd=folder)


@pytest.mark.needs("torch")
@pytest.mark.proves("one-name")
def test_a_job_beside_files_of_the_same_names_is_killed_and_goes_on(folder: Path, arena: Path) -> None:
    killed = run(folder, "train.py")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run(folder, "train.py")
    assert again.stdout.split() == ["3", "6", "[]"], again.stderr


def test_commands_run_beside_files_of_the_same_names(folder: Path, arena: Path) -> None:
    said = run(folder, "-m", "holdfast.cli", "gc")
    assert said.returncode == 0, said.stderr
