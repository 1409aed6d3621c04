"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.launcher import Launcher
from holdfast.demo import PRELOAD


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Imports torch, megatron-core and the jobs once; every virtual cluster forks from it."""
    with Launcher(["tests.jobs", *PRELOAD]) as started:
        started.wait_ready()
        yield started
