"""A start that must go on: it is refused if it would begin from nothing, or go back to before a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot, Unrecoverable
from holdfast.cli.main import main
from holdfast.snapshot.hook import SnapshotHook
from tests.smp_kit import Crash


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, arena: Path) -> Iterator[None]:
    """Every test's script begins anew."""
    monkeypatch.setattr(SnapshotHook, "blocks", {})
    yield


def train(until: int, *, crash: bool = True, **options: Any) -> int:
    """Train up to a step, every one of them safe, and crash; returns where the job went on."""
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    first = -1
    try:
        with InMemorySnapshot(model, optim, every=1, max_repeats=0, **options) as snap:
            first = snap.step
            for step in snap.steps(until + 1 if crash else until):
                optim.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                assert snap.drain(60)
                if step == until:
                    raise Crash
                optim.step()
    except Crash:
        assert crash
    return first


def test_a_start_that_would_begin_from_nothing_is_refused_and_is_no_start(arena: Path) -> None:
    with pytest.raises(Unrecoverable, match=r"HOLDFAST_REQUIRE.*nothing to go back to"):
        train(2, require="snapshot")
    assert train(2) == 0
    assert train(3, require="snapshot") == 2
    assert train(4, require=3) == 3


def test_a_start_that_would_go_back_too_far_says_how_far_it_can(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(3) == 0
    monkeypatch.setenv("HOLDFAST_REQUIRE", "5")
    with pytest.raises(Unrecoverable, match=r"step 5 .*3, in memory.*HOLDFAST_REQUIRE=3"):
        train(3)
    monkeypatch.setenv("HOLDFAST_REQUIRE", "3")
    assert train(3) == 3, "what was held is still there"


def test_an_older_step_that_is_asked_for_must_do_as_well(arena: Path) -> None:
    assert train(4, generations=2) == 0
    with pytest.raises(Unrecoverable, match=r"step 4 .*HOLDFAST_REQUIRE=3"):
        train(4, generations=2, restore_step=3, require=4)
    assert train(4, generations=2, restore_step=3, require=3) == 3


def test_another_job_id_is_told_where_it_looked(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(2) == 0
    monkeypatch.setenv("HOLDFAST_NODE", "rack7-3")
    with pytest.raises(Unrecoverable, match=r"nodes that answered: rack7-3.*job, arena and storage"):
        train(2, job="misspelt", require="snapshot")
    assert not list(arena.rglob("misspelt/*.safetensors"))
    assert main(["gc", "--older-than", "0s"]) in (0, 1)


def test_the_trainings_after_the_first_one_of_a_script_begin_from_nothing(arena: Path) -> None:
    assert train(2) == 0
    assert train(4, crash=False, require="snapshot") == 2
    assert train(2, crash=False, require="snapshot") == 0, "the second training of this process"


@pytest.mark.parametrize("require", ["Snapshot", -1, 1.5])
def test_what_cannot_be_required_is_refused(require: Any) -> None:
    with pytest.raises(ConfigError, match="require"):
        InMemorySnapshot(torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=0.1), require=require)
