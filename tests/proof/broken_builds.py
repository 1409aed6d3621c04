"""All builds that are broken on purpose, for docs/proof.md."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proof import loops_mutants, mutants, sim_mutants


def rows() -> Iterator[str]:
    """Yield a table row for each kind of run: its broken builds, and the checks that notice them."""
    for file, broken in (("sim_mutants.py", sim_mutants.MUTANTS), ("mutants/__init__.py", mutants.MUTANTS)):
        signs = sorted({build.sign for build in broken.values()})
        yield f"| `tests/proof/{file}` | {len(broken)} | {', '.join(f'`{sign}`' for sign in signs)} |"
    yield f"| `tests/proof/loops_mutants.py` | {len(loops_mutants.MUTANTS)} | outcome |"
