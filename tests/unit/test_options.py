"""Options of the hook are checked before anything is done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.plain import encode_json
from holdfast.snapshot.options import Options
from holdfast.snapshot.resume.choice import StartOptions

WRONG: dict[str, Any] = {
    "job": 5,
    "protect": 2,
    "domains": ["a"],
    "slots": "3",
    "start": "no",
    "keep": 1,
    "strict": "yes",
    "arena": 7,
    "deadline_s": "60",
    "overhead_budget": "1%",
    "max_repeats": True,
    "generations": 1.5,
    "restore_step": "7",
    "elastic": "off",
    "block": "2",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_type_is_refused_by_name(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=f"^{name}="):
        InMemorySnapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), **{name: WRONG[name]})


@pytest.mark.parametrize("deadline_s", [0.0, 1e10, math.inf, math.nan])
def test_a_deadline_that_no_thread_can_wait_for_is_refused_at_once(deadline_s: float) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^deadline_s="):
        InMemorySnapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), job="test", deadline_s=deadline_s)


@pytest.mark.parametrize("orders", ["HOLDFAST_AUDIT", "HOLDFAST_PROFILE"])
def test_a_job_that_is_only_tried_is_given_an_arena_of_its_own(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with the snapshots of the real one, and remove them at its end."""
    monkeypatch.setenv(orders, "{}")
    monkeypatch.setenv("HOLDFAST_ARENA", "/dev/shm/scratch")
    monkeypatch.setenv("HOLDFAST_EVERY", "1")
    options = Options.given(job="j", arena="/dev/shm/real", every=10, restore_step=7, require="snapshot", slots=4)
    assert options == Options(job="j", every=1, slots=4)
    assert options.job_arena == Path("/dev/shm/scratch/j")


def test_a_path_may_be_a_string_and_a_number_may_be_numpys() -> None:
    given = {"slots": 4, "every": 5, "protect_every": 2, "generations": 2, "deadline_s": np.float32(5), "elastic": None}
    numpys = {name: np.int64(value) if type(value) is int else value for name, value in given.items()}
    options = Options.given(job="j", arena="/dev/shm/there", **numpys)
    assert options.job_arena == Path("/dev/shm/there/j")
    assert encode_json(options.for_start) == encode_json(StartOptions(generations=2, protect_every=2))
    assert [type(each) for each in (options.slots, options.every, options.deadline_s)] == [int, int, float]


@pytest.mark.parametrize("name", ["every", "protect_every", "block"])
def test_a_switch_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=True"):
        Options.given(job="j", **{name: True})


def test_an_arena_stays_where_it_is_when_a_script_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_ARENA", "arenas")
    told, given = Options(job="j"), Options(job="j", arena="other")
    monkeypatch.chdir("/")
    assert (told.job_arena, given.job_arena) == (tmp_path / "arenas" / "j", tmp_path / "other" / "j")
