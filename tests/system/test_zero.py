"""ZeRO-1: each rank keeps the optimizer's state of some parameters, and gets exactly that back."""

from __future__ import annotations

import pytest

from holdfast.chaos.launcher import Launcher
from tests.proof.matrix.cells import Cell, drill

JOB = "tests.proof.jobs.zero:Zero"


@pytest.mark.cluster
def test_divided_state_that_looks_alike_at_first_comes_back_to_the_last_bit(launcher: Launcher) -> None:
    verdict = drill(launcher, Cell("ZeRO-1", JOB, 4, drain=True), seed=1234)
    assert verdict.difference == ""
    assert len(verdict.restored) == 8
