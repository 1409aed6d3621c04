"""`make test` proves what the README promises: by unit tests, and by those of real processes in tests/canaries.txt."""

from __future__ import annotations

import ast

from tests.promises import PROMISES, ROOT, proofs

CANARIES = [line.partition("[")[0] for line in (ROOT / "tests/canaries.txt").read_text().splitlines()]
FRAMEWORKS = {"megatron-lm", "lightning", "hugging-face", "deepspeed", "torchft", "dcp", "ray"}
"""Their tests import them, which takes longer than many a test: `make test-rest`."""


def test_every_promise_of_the_readme_is_proved_by_make_test() -> None:
    of_the_readme = {name for name, promise in PROMISES.items() if promise.page == "README.md"}
    proved = {name for name, tests in proofs().items() if any(runs(test.file, test.test) for test in tests)}
    assert not of_the_readme - FRAMEWORKS - proved


def test_every_canary_is_a_test() -> None:
    for canary in CANARIES:
        file, *_, name = canary.split("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, canary


def runs(file: str, name: str) -> bool:
    """Whether `make test` runs a test."""
    return file.startswith("tests/unit/") or any(
        canary.startswith(f"{file}::") and canary.endswith(f"::{name}") for canary in CANARIES
    )
