"""A short selection of the matrix on real processes, and how a cell is judged."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import ConfigError
from holdfast.chaos.cluster import History
from holdfast.chaos.launcher import Launcher
from tests.proof.matrix.cells import CELLS, GPT, Cell, choose, drill, judge, lacks
from tests.sampling import chosen

CELL = Cell("toy", "tests.proof.jobs.plain:Plain", 2)
COVERING = (
    "TP2 PP2 DP2",
    "TP2 DP2, fp16, no distributed optimizer",
    "MoE with expert bias, PP2 EP2",
    "weights in 8 bits, delayed scaling, TP2 DP2",
    "layer-wise Muon, TP2 DP2",
    "one process, foreach",
    "FSDP2",
    "LoRA-FA",
    "ZeRO-1 under DDP, LoRA",
    "pool of unequal stages",
)
"""Cover every kind of parallelism, precision and state. What other cells have, one of these or an audit has."""


@pytest.mark.cluster
@pytest.mark.parametrize("cell", chosen(choose("quick"), choose(";".join(COVERING))), ids=lambda cell: cell.name)
@pytest.mark.proves("frameworks")
def test_a_job_that_is_killed_goes_on_to_the_last_bit(launcher: Launcher, cell: Cell) -> None:
    if missing := lacks(cell):
        pytest.skip(f"it needs {missing}")
    verdict = drill(launcher, cell, seed=1234)
    assert verdict.difference == ""
    assert len(verdict.restored) == cell.ranks * (1 + (cell.nodes > 1))


def history(*, loss: str = "1", digest: str = "a", how: str = "held", restarts: int = 2) -> History:
    told = History()
    for generation in range(restarts + 1):
        for rank in range(2):
            if generation:
                told.events.append({"kind": "started", "rank": rank, "generation": generation, "step": 1, "how": how})
            told.events.append({"kind": "step", "rank": rank, "generation": generation, "step": 1, "loss": loss})
    told.events += [
        {"kind": "end", "rank": rank, "generation": restarts, "digests": {"w": digest}} for rank in range(2)
    ]
    told.restarts = [None] * restarts  # type: ignore[list-item]
    return told


UNDISTURBED = history(restarts=0)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, ""),
        ({"loss": "2"}, "at step 1: 2, undisturbed 1"),
        ({"digest": "b"}, "rank 0 differs: w"),
        ({"how": ""}, "without restoring"),
        ({"restarts": 1}, "1 restarts after 2 kills"),
    ],
)
def test_only_what_is_identical_passes(changes: dict[str, object], difference: str) -> None:
    found = judge(CELL, UNDISTURBED, history(**changes), 1.0).difference  # type: ignore[arg-type]
    assert difference in found and bool(difference) == bool(found)


def test_what_is_left_behind_fails_a_cell() -> None:
    told = history()
    told.leaks.append("a slot")
    assert judge(CELL, UNDISTURBED, told, 1.0).difference.endswith(": a slot")


def test_cells_are_chosen_by_name() -> None:
    assert choose("all") == CELLS
    assert [cell.name for cell in choose("TP2;FSDP2")] == ["TP2", "FSDP2"]
    with pytest.raises(ConfigError, match=r"no cell 'TP3': .*TP2; PP2"):
        choose("TP3")


@pytest.mark.parametrize(
    ("release", "package", "options", "since", "missing"),
    [
        ("0.16.1", False, {"muon": True}, (), ""),
        ("0.19.2", True, {"muon": True}, (0, 19), ""),
        ("0.19.2", False, {"muon": True}, (), "emerging-optimizers, which megatron-core 0.19.2"),
        ("0.19.2", False, {}, (0, 19), ""),
        ("0.18.0rc1", True, {"muon": True}, (0, 19), "megatron-core 0.19 (0.18.0rc1"),
    ],
)
def test_what_an_environment_lacks_is_said(
    release: str, package: bool, options: Any, since: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    monkeypatch.setattr("tests.proof.matrix.cells.find_spec", lambda name: object() if package else None)
    found = lacks(Cell("a", GPT, 2, options, since=since))
    assert missing in found and bool(missing) == bool(found)
    assert lacks(Cell("a", "examples.plain:Plain", 2, options, since=since)) == ""


def test_names_of_cells_are_unique() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
