"""One victim for all attacks that leave it as it was; each must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.victim import Victim
from tests.smp_kit import playground


@pytest.fixture(scope="package")
def shared_victim() -> Iterator[Victim]:
    with playground() as ground:
        yield Victim(ground)


@pytest.fixture
def victim(shared_victim: Victim) -> Iterator[Victim]:
    """It is looked at after the test."""
    yield shared_victim
    shared_victim.check()
