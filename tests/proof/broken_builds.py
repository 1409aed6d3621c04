"""All builds that are broken on purpose, for docs/proof.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.proof import loops_mutants, mutants, sim_mutants

INTERLEAVINGS = Path(__file__).with_name("test_interleavings.py")


def rows() -> Iterator[str]:
    """Yield a table row for each kind of run: its broken builds, and the checks that notice them."""
    for file, broken in (("sim_mutants.py", sim_mutants.MUTANTS), ("mutants/__init__.py", mutants.MUTANTS)):
        signs = sorted({build.sign for build in broken.values()})
        yield f"| `tests/proof/{file}` | {len(broken)} | {', '.join(f'`{sign}`' for sign in signs)} |"
    yield f"| `tests/proof/loops_mutants.py` | {len(loops_mutants.MUTANTS)} | outcome |"
    yield f"| `tests/proof/{INTERLEAVINGS.name}` | {len(_interleavings())} | outcome |"


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
