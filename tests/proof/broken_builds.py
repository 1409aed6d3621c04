"""All builds that are broken on purpose, for docs/proof.md."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.proof import loops_mutants, mutants, sim_mutants

INTERLEAVINGS = Path(__file__).with_name("test_interleavings.py")


def builds() -> dict[str, list[str]]:
    """A line for each broken build that names the check that notices it, by where it runs."""
    return {
        "Simulation": _by_check(sim_mutants.MUTANTS),
        "Real processes": _by_check(mutants.MUTANTS),
    }


def builds_by_outcome() -> dict[str, list[str]]:
    """What is wrong with each build that is noticed by another outcome than in a whole build."""
    return {"Training loops": [*loops_mutants.MUTANTS], "Interleavings": _interleavings()}


def _by_check(broken: Mapping[str, Any]) -> list[str]:
    """The builds that each check notices."""
    found: dict[str, list[str]] = {}
    for build in broken.values():
        found.setdefault(build.sign, []).append(build.what)
    return [f"* `{sign}`: {'; '.join(builds)}" for sign, builds in found.items()]


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
