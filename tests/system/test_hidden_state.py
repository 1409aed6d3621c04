"""Jobs with state in no ``state_dict``: a resume without any one piece of it goes wrong."""

from __future__ import annotations

import pytest

from holdfast.chaos.launcher import Launcher
from tests.proof.matrix.cells import Cell, drill
from tests.sampling import chosen

LEFT_OUT = [
    ("acp_sgd:AcpSgd", "residual"),
    ("acp_sgd:AcpSgd", "p"),
    ("acp_sgd:AcpSgd", "q"),
    ("acp_sgd:AcpSgd", "turn"),
    ("eva:EvaJob", "vectors"),
    ("eva:EvaJob", "steps"),
    ("fed_impro:FedImpro", "statistics"),
    ("fed_impro:FedImpro", "round"),
    ("fed_impro:FedImpro", "clients"),
]
ONE_OF_EACH = [("acp_sgd:AcpSgd", "q"), ("eva:EvaJob", "vectors"), ("fed_impro:FedImpro", "round")]


@pytest.mark.cluster
@pytest.mark.parametrize(("job", "piece"), chosen(LEFT_OUT, ONE_OF_EACH))
def test_a_piece_that_is_left_out_is_missed(launcher: Launcher, job: str, piece: str) -> None:
    cell = Cell("left out", f"tests.proof.jobs.{job}", 2, {"without": piece}, drain=True)
    difference = drill(launcher, cell, seed=1234).difference
    assert difference.startswith(("loss of rank", "the final state of rank"))
