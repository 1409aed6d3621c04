"""All builds that are broken on purpose, for docs/proof.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from holdfast.chaos.findings import PROMISES
from tests.proof import loops_mutants, mutants, sim_mutants
from tests.proof.sim.checks import CHECKS

INTERLEAVINGS = Path(__file__).with_name("test_interleavings.py")


def rows() -> Iterator[str]:
    """Yield a table row for each broken build."""
    for name, simulated in sim_mutants.MUTANTS.items():
        yield _row("simulation", name, simulated.what, f"{simulated.sign}: {CHECKS[simulated.sign]}")
    for name, mutant in mutants.MUTANTS.items():
        yield _row("real processes", name, mutant.what, f"{mutant.sign}: {PROMISES[mutant.sign]}")
    for name in loops_mutants.MUTANTS:
        yield _row("training loops", "", name, "another outcome of the loop than in a whole build")
    for name in _interleavings():
        yield _row("interleavings", "", name, "what came back, or was protected")


def _interleavings() -> list[str]:
    """Names of the broken builds in `INTERLEAVINGS`, which is parsed because importing it needs more packages."""
    for node in ast.parse(INTERLEAVINGS.read_text()).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "MUTANTS"
            and isinstance(node.value, ast.Dict)
        ):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise LookupError(f"{INTERLEAVINGS.name} has no MUTANTS")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
