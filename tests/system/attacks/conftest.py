"""One victim, shared by all attacks; each attack must leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.smp_kit import playground
from tests.system.attacks.victim import Victim


@pytest.fixture(scope="package", autouse=True)
def entered_by_all() -> Iterator[None]:
    """What an attack is made on lies in a folder that other users may enter."""
    with pytest.MonkeyPatch.context() as patched, TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        patched.setenv(ARENA_ENV, folder)
        yield


@pytest.fixture(scope="package")
def shared_victim(entered_by_all: None) -> Iterator[Victim]:
    with playground() as ground:
        yield Victim(ground)


@pytest.fixture
def victim(shared_victim: Victim) -> Iterator[Victim]:
    """The shared victim, which is checked after each test."""
    yield shared_victim
    shared_victim.check()
