"""The table of what is supported says only what is proved: by the matrix, by tests, or by committed reports."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.adapters.megatron import TRIED
from tests.proof.matrix.cells import CELLS, GPT
from tests.proof.matrix.kinds import KINDS, SupportedKind, SupportStatus

ROOT = Path(__file__).parents[2]
OF_MEGATRON = {cell.name: cell for cell in CELLS if cell.job == GPT}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def reports() -> list[dict[str, Any]]:
    paths = sorted((ROOT / "benchmarks" / "results").glob("matrix-*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_named_as_a_proof_is_there(kind: SupportedKind) -> None:
    assert set(kind.cells) <= OF_MEGATRON.keys()
    for name in kind.tests:
        file, _, function = name.partition("::")
        assert function in functions(ROOT / "tests" / file), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_status_has_the_proof_that_it_stands_for(kind: SupportedKind) -> None:
    proved = {
        SupportStatus.EXACT: bool(kind.cells),
        SupportStatus.STRUCTURES: bool(kind.tests),
        SupportStatus.DEVICE: not kind.cells and bool(kind.note),
        SupportStatus.REFUSED: bool(kind.tests) and not kind.cells,
    }
    assert proved[kind.status]


def test_every_cell_is_of_a_kind() -> None:
    assert {name for kind in KINDS for name in kind.cells} == OF_MEGATRON.keys()


@pytest.mark.parametrize("release", TRIED)
def test_every_cell_was_exact_with_every_release_that_counts_as_tried(release: str) -> None:
    numbers = tuple(int(part) for part in release.split("."))
    exact = {
        verdict["cell"]["name"]
        for report in reports()
        if report["versions"]["megatron-core"].startswith(f"{release}.")
        for verdict in report["verdicts"]
        if not verdict["difference"] and not verdict.get("skipped")
    }
    assert {name for name, cell in OF_MEGATRON.items() if numbers >= cell.since} <= exact
