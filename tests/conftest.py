"""Shared by all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.chaos.demo import PRELOAD
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.smp_kit import Ground, kill_smps, launch_by_fork, playground

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
"""Two workers share two cores, and threads that OpenMP keeps spinning take them from processes that have work."""

os.environ["HOLDFAST_OVERHEAD_BUDGET"] = "0"
"""Steps of tests take no time, so any snapshot would be over any budget."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests look the same on every machine: only ``pytest -m gpu`` sees its GPUs."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Imports torch, megatron-core and the jobs once; every virtual cluster forks from it."""
    with Launcher(["tests.jobs", "tests.elastic_jobs", "tests.layout_jobs", *PRELOAD]) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory on shared memory."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ground() -> Iterator[Ground]:
    """Where a test's SMPs run."""
    with playground() as made:
        yield made


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a job of this process keeps its snapshots; what is left of it at the end is removed."""
    base = Path(f"/dev/shm/holdfast-test-{os.getpid()}")
    monkeypatch.setenv(ARENA_ENV, str(base))
    monkeypatch.setenv("HOLDFAST_JOB", "test")
    monkeypatch.setattr("holdfast.smp_daemon.shared.spawn.launch", launch_by_fork)
    yield base
    kill_smps(base)
    shutil.rmtree(base, ignore_errors=True)
