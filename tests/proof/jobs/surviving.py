"""The job of `acp_sgd`, whose trainers keep their processes when another one is killed. One line is different."""

from __future__ import annotations

from holdfast.chaos import drill
from holdfast.integrations.inprocess import survive
from tests.proof.jobs.acp_sgd import AcpSgd

if __name__ == "__main__":
    survive(drill.main, AcpSgd)
