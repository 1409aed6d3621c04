"""Deliberately broken builds: the simulation must notice each by the check that is there for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proof.sim.checks import CHECKS
from tests.proof.sim.seams import installed
from tests.proof.sim_mutants import MUTANTS, SEEDS, noticed


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_build_is_noticed_by_its_own_check(name: str) -> None:
    seed, others = noticed(MUTANTS[name], range(SEEDS))
    assert seed is not None, f"{MUTANTS[name].sign} says nothing of it in {SEEDS} seeds; others: {dict(others)}"


def test_every_check_is_known_to_notice_something() -> None:
    assert {mutant.sign for mutant in MUTANTS.values()} == set(CHECKS)
