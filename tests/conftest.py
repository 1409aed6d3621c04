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

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
"""Two workers share two cores, and threads that OpenMP keeps spinning take them from processes that have work."""

os.environ["HOLDFAST_OVERHEAD_BUDGET"] = "0"
"""Steps of tests take no time, so any snapshot would be over any budget."""


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
