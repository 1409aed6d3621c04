"""The job of `acp_sgd`, whose trainers keep their processes when another one is killed. One line is different."""

from __future__ import annotations

from holdfast.integrations.inprocess import survive
from tests.proof.jobs import alone
from tests.proof.jobs.acp_sgd import AcpSgd

if __name__ == "__main__":
    survive(alone.main, AcpSgd)
