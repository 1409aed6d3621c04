"""One victim, shared by all attacks; each attack must leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.smp_kit import playground
from tests.system.attacks.victim import Victim


@pytest.fixture(scope="package")
def shared_victim() -> Iterator[Victim]:
    with playground() as ground:
        yield Victim(ground)


@pytest.fixture
def victim(shared_victim: Victim) -> Iterator[Victim]:
    """The shared victim, which is checked after each test."""
    yield shared_victim
    shared_victim.check()
