"""Megatron-LM's data loaders continue where they were: its own, where counters do not suffice, and a script's."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast import ConfigError, StateMismatch
from holdfast.integrations.megatron_data import Loaders, Passes
from holdfast.snapshot.state.values import decode, encode
from tests import megatron_lm_loop as loop
from tests.frameworks.test_megatron_lm import goes_on, run


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kill", [("step", 8), ("step", 11)])
@pytest.mark.proves("megatron-lm")
def test_a_full_validation_goes_on_in_its_pass(arena: Path, workers: int, kill: tuple[Any, ...]) -> None:
    full: dict[str, Any] = {"full_validation": True, "num_workers": workers}
    assert goes_on(kill, **full)[0][:2] == kill


@pytest.mark.parametrize("kill", [("step", 4), ("step", 6)])
def test_workers_that_stay_draw_only_once(arena: Path, monkeypatch: pytest.MonkeyPatch, kill: tuple[Any, ...]) -> None:
    monkeypatch.setattr(loop, "SAMPLES", 26)  # a pass ends after 6 iterations
    cyclic: dict[str, Any] = {"dataloader_type": "cyclic", "num_workers": 1, "do_valid": False}
    goes_on(kill, **cyclic)


@pytest.mark.parametrize("kill", [("step", 8), ("evaluation", 6, 0), ("step", 7)])
@pytest.mark.proves("megatron-lm")
def test_a_loader_of_the_script_goes_on_where_it_says_that_it_is(arena: Path, kill: tuple[Any, ...]) -> None:
    goes_on(kill, dataloader_type="external")


class Silent:
    """A loader that does not say where it is."""

    def __next__(self) -> torch.Tensor:
        return torch.zeros(1)


class HalfHooked(Silent):
    """Says where it is, but cannot be set to a place."""

    def save_state(self) -> int:
        """A place."""
        return 3


def test_a_loader_that_begins_elsewhere_is_refused_at_the_first_step(
    arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "External", lambda: iter(loop.Savable()))
    run(("step", 8), dataloader_type="external")
    with pytest.raises(StateMismatch, match="given another batch"):
        run(dataloader_type="external")


class Around:
    """Wraps a loader, and has another member with a state."""

    def __init__(self, inner: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.inner = inner


def external(**more: Any) -> Loaders:
    """The loaders of a script that brings its own."""
    return Loaders(Namespace(dataloader_type="external", data_parallel_size=2, **more))


def test_a_loader_that_says_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = Around(Silent())
    assert external().go_on(loader, None) == (loader, None)
    assert len(caplog.records) == 1
    assert "test_megatron_data.Around, does not say" in caplog.text


def test_a_loader_that_cannot_be_told_where_to_go_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"HalfHooked, has save_state"):
        external().go_on(HalfHooked(), None)


def test_a_loader_for_validation_may_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    external().go_on(None, [HalfHooked()])
    assert "HalfHooked, does not" in caplog.text


def test_a_loader_that_the_snapshot_does_not_know_is_refused() -> None:
    loaders = external()
    loaders.set({"ranks": 2, "places": {}})
    with pytest.raises(StateMismatch, match="'train0'"):
        loaders.go_on(loop.External(), None)


def test_places_are_those_of_as_many_ranks() -> None:
    before = external()
    before.go_on(loop.External(), None)
    held = before.get()
    loaders = external()
    loaders.set(held | {"ranks": 4})
    with pytest.raises(ConfigError, match=r"4 data-parallel ranks, .* 2 now"):
        loaders.go_on(loop.External(), None)


def test_each_chunk_of_a_model_has_loaders_of_its_own() -> None:
    loaders = external()
    for _ in range(2):
        loaders.go_on(loop.External(), [loop.External(), None])
    assert list(loaders.get()["places"]) == ["train0", "valid0/0", "train1", "valid1/0"]


def test_a_pass_that_is_shuffled_anew_each_time_goes_on_in_its_order() -> None:
    class Shuffled(loop.Sampler):
        micro_batch_times_data_parallel_size = loop.BATCH

    def loader() -> Passes:
        return Passes(DataLoader(loop.Samples(), batch_sampler=Shuffled(0)))  # type: ignore[arg-type]

    first, again = loader(), loader()
    for _ in zip(range(5), first, strict=False):
        pass
    again.set(first.get())
    assert next(iter(again))[0, 0].floor() == 0
    assert again.get() == 6
    assert again._loader.batch_sampler.consumed_samples == 6 * loop.BATCH  # the generator is one batch ahead


class Pair(NamedTuple):
    """A pair."""

    first: int
    second: tuple[int, ...]


def test_a_state_of_objects_is_kept_without_pickle() -> None:
    marks = ((), ("tuple", [1]), Pair(1, (2, 3)), {"a": [()]}, OrderedDict(a=1))
    state = loop.Position(number=3, seen=loop.Seen({1: 2}), marks=marks)
    again = decode(json.loads(json.dumps(encode(state, "data", {}))), lambda name: torch.empty(0))
    assert again == state
    assert type(again.seen) is loop.Seen
    assert [type(mark) for mark in again.marks] == [type(mark) for mark in marks]
