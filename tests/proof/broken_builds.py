"""All builds that are broken on purpose, for docs/proof.md."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.chaos.findings import PROMISES
from tests.proof import loops_mutants, mutants, sim_mutants
from tests.proof.sim.checks import CHECKS


def rows() -> Iterator[str]:
    """Yield a table row for each broken build."""
    for name, simulated in sim_mutants.MUTANTS.items():
        yield _row("simulation", name, simulated.what, f"{simulated.sign}: {CHECKS[simulated.sign]}")
    for name, mutant in mutants.MUTANTS.items():
        yield _row("real processes", name, mutant.what, f"{mutant.sign}: {PROMISES[mutant.sign]}")
    for name in loops_mutants.MUTANTS:
        yield _row("training loops", "", name, "another outcome of the loop than in a whole build")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
