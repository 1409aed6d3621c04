"""Schedules, objects with a ``state_dict``, and modules with more state than tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.snapshot.state.record import LATE, capture_tree
from holdfast.snapshot.state.values import decode
from tests.system.test_hook import small

Loop = list[tuple[nn.Module, torch.optim.Optimizer]]


def go_on(snap: InMemorySnapshot, model: nn.Module, optim: torch.optim.Optimizer, steps: int = 1) -> None:
    """A loop as users write it: only the forward shows where a step begins."""
    for _ in range(steps):
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
        snap.drain(60)
        optim.step()
        optim.zero_grad()


def keep(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 1, **options: Any) -> None:
    """A job that ends, and leaves its snapshots to the next."""
    with InMemorySnapshot(model, optim, keep=True, **options) as snap:
        go_on(snap, model, optim, steps)


class Keeps:
    """An object with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def test_what_is_tracked_may_ask_the_hook_for_its_step(arena: Path) -> None:
    def job() -> tuple[InMemorySnapshot, torch.nn.Module, torch.optim.Optimizer, list[Any]]:
        model, optim = small()
        found: list[Any] = []
        snap = InMemorySnapshot(model, optim, keep=True, strict=True)
        snap.track("place", lambda: {"step": snap.step}, found.append)
        return snap, model, optim, found

    snap, model, optim, _ = job()
    with snap:
        go_on(snap, model, optim, steps=3)
    snap, model, optim, found = job()
    with snap:
        assert found == [{"step": snap.step}]
        go_on(snap, model, optim)
        assert snap.step > found[0]["step"]


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_schedules_come_back(arena: Path, kind: type) -> None:
    def job() -> tuple[Any, torch.optim.Optimizer, Any]:
        model, optim = small()
        return model, optim, [lr_scheduler.StepLR(optim, 2), lr_scheduler.ExponentialLR(optim, 0.9)]

    model, optim, schedules = job()
    with InMemorySnapshot(model, optim, scheduler=kind(schedules), keep=True, strict=True) as snap:
        for _ in range(3):
            go_on(snap, model, optim)
            schedules[0].step()
        schedules[1].step()
    again, its_optim, others = job()
    with InMemorySnapshot(again, its_optim, scheduler=others) as snap:
        assert snap.step == 3
        assert [schedule.last_epoch for schedule in others] == [3, 1]
        assert its_optim.param_groups[0]["lr"] == optim.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            lambda o: [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)],
            r"\['ExponentialLR', 'StepLR'\] in",
        ),
        (lambda o: lr_scheduler.StepLR(o, 2), r"\['StepLR'\] in this job"),
        (lambda o: None, "none in this"),
    ],
    ids=["another order", "one", "none"],
)
def test_other_schedules_are_refused(arena: Path, then: Any, said: str) -> None:
    model, optim = small()
    before = [lr_scheduler.StepLR(optim, 2), lr_scheduler.ExponentialLR(optim, 0.9)]
    keep(model, optim, scheduler=before)
    again, other = small()
    with pytest.raises(StateMismatch, match=rf"\['StepLR', 'ExponentialLR'\] .*, {said}"):
        InMemorySnapshot(again, other, scheduler=then(other)).__enter__()


def test_what_is_no_schedule_is_named() -> None:
    model, optim = small()
    with pytest.raises(ConfigError, match=r"scheduler\[1\] .*without state_dict"):
        TorchAdapter(model, optim, [lr_scheduler.StepLR(optim, 2), "cosine"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "make", [lambda o: lr_scheduler.StepLR(o, 1), lr_scheduler.ReduceLROnPlateau], ids=["step", "on"]
)
def test_a_schedule_among_extras_is_as_it_is_when_the_next_step_begins(arena: Path, make: Any) -> None:
    model, optim = small()
    schedule = make(optim)
    plateau = [1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []
    with InMemorySnapshot(model, optim, extra={"schedule": schedule}, keep=True) as snap:
        for _ in range(3):
            go_on(snap, model, optim)
            schedule.step(*plateau)
    again, other = small()
    its = make(other)
    with InMemorySnapshot(again, other, extra={"schedule": its}) as snap:
        assert (snap.step, its.last_epoch) == (3, schedule.last_epoch)


# ------------------------------------------------------------------ extras


class Buffer(list[int]):
    """False while it is empty."""

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self[:] = state_dict["items"]


class Endless(Keeps):
    """Has no known length, like a loader over an `IterableDataset`."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")


@pytest.mark.parametrize("held", [[], [1, 2]])
def test_what_is_false_is_an_extra_like_others(arena: Path, held: list[int]) -> None:
    model, optim = small()
    buffer = Buffer(held)
    keep(model, optim, extra={"buffer": buffer, "loader": Endless(5)}, strict=True)
    fresh, loader = Buffer(), Endless()
    with InMemorySnapshot(*small(), extra={"buffer": fresh, "loader": loader}) as snap:
        assert (snap.step, fresh, loader.value) == (1, held, 5)


def test_one_that_is_none_is_none(arena: Path) -> None:
    keep(*small(), extra={"scaler": None, "mine": Keeps(1)})
    mine = Keeps()
    with InMemorySnapshot(*small(), extra={"mine": mine}) as snap:
        assert (snap.step, mine.value) == (1, 1)


@pytest.mark.parametrize("extra", [{}, {"one": None}, {"other": Keeps()}], ids=["none", "left out", "another"])
def test_other_extras_are_refused_by_name(arena: Path, extra: dict[str, Any]) -> None:
    keep(*small(), extra={"one": Keeps()})
    with pytest.raises(StateMismatch, match=r"extra is \['one'\]"):
        InMemorySnapshot(*small(), extra=extra).__enter__()


# ------------------------------------------------------------------ what modules keep besides tensors


class Scaled(nn.Linear):
    """Has state that is not a tensor, like TransformerEngine's layers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.amax: Any = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(self.amax, float):
            self.amax = self.amax / 2 + float(inputs.abs().max())
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state


def scaled() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(Scaled(), nn.Linear(3, 3), nn.Sequential())
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_what_forward_changes_of_it_is_as_it_was_when_the_step_began(arena: Path) -> None:
    model, optim = scaled()
    snap = InMemorySnapshot(model, optim, strict=True).__enter__()
    seen = []
    for _ in range(4):
        seen.append(model[0].amax)
        go_on(snap, model, optim)
    model(torch.ones(2, 4)).sum().backward()
    assert snap.drain(60)
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)
    again, other = scaled()
    with InMemorySnapshot(again, other) as snap:
        assert snap.step in (3, 4)  # the fifth step may or may not have begun
        assert again[0].amax == [*seen, seen[3] / 2 + 1.0][snap.step]


def test_that_of_a_tracked_module_comes_back(arena: Path) -> None:
    for amax in (5.0, 1.0):
        model, optim = scaled()
        teacher = Scaled()
        teacher.amax = amax
        snap = InMemorySnapshot(model, optim, keep=True, strict=True)
        snap.track("teacher", tensors=teacher)
        with snap:
            go_on(snap, model, optim, 2)
    assert teacher.amax == 5.0


@pytest.mark.parametrize(
    "state", [b"\0\xff", {"scale": torch.ones(2, 3), "history": [1, (2.5, None)]}, torch.arange(5), None], ids=str
)
def test_it_may_be_anything_that_can_be_kept(arena: Path, state: Any) -> None:
    model, optim = scaled()
    model[0].amax = state
    keep(model, optim, 2, strict=True)
    again, other = scaled()
    with InMemorySnapshot(again, other) as snap:
        assert snap.step == 2
        assert str(again[0].amax) == str(state)


def test_a_file_in_memory_comes_back_with_its_place(arena: Path) -> None:
    model, optim = scaled()
    model[0].amax = io.BytesIO()
    torch.save({"scale": torch.ones(3)}, model[0].amax)
    model[0].amax.seek(7)
    keep(model, optim, strict=True)
    again, other = scaled()
    with InMemorySnapshot(again, other):
        assert (again[0].amax.getvalue(), again[0].amax.tell()) == (model[0].amax.getvalue(), 7)


def test_what_cannot_be_kept_is_refused_by_name_at_the_first_step(arena: Path) -> None:
    model, optim = scaled()
    model[0].amax = [object()]
    with (
        pytest.raises(StateMismatch, match=r"get_extra_state\.model0\.0\.0 is a builtins\.object"),
        InMemorySnapshot(model, optim) as snap,
    ):
        go_on(snap, model, optim, 2)


def test_a_module_that_could_not_take_it_back_is_refused() -> None:
    class OneWay(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    model = nn.Sequential(OneWay(2, 2))
    with pytest.raises(ConfigError, match=r"OneWay .*without set_extra_state"):
        TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_job_without_that_module_is_refused(arena: Path) -> None:
    model, optim = scaled()
    keep(model, optim)
    again = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Sequential())
    other = torch.optim.Adam(again.parameters())
    with pytest.raises(StateMismatch, match=r"\['model0\.0'\] in .*, none in"):
        InMemorySnapshot(again, other).__enter__()


def test_an_average_with_parameters_that_no_optimizer_has_comes_back(arena: Path) -> None:
    """As in torch's tutorials: its parameters require gradients, but never get any."""

    def job() -> tuple[nn.Module, torch.optim.swa_utils.AveragedModel, torch.optim.Optimizer]:
        model, optim = small()
        return model, torch.optim.swa_utils.AveragedModel(model), optim

    model, average, optim = job()
    with InMemorySnapshot([model, average], optim, keep=True, strict=True) as snap:
        for _ in range(4):
            go_on(snap, model, optim)
            average.update_parameters(model)
    again, its_average, other = job()
    with InMemorySnapshot([again, its_average], other) as snap:
        assert (snap.step, int(its_average.n_averaged)) == (4, 4)
        assert all(map(torch.equal, its_average.parameters(), average.parameters()))


# ---------------------------------------------------------------------- gradient scalers


def test_a_scaler_is_captured_without_waiting_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = small()

    def made(scale: float = 8.0) -> tuple[torch.amp.GradScaler, TorchAdapter]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        return scaler, TorchAdapter(model, optim, None, {"scaler": scaler})

    scaler, adapter = made()
    fresh = capture_tree(adapter.look().late(), LATE)
    scaler.scale(torch.ones(1))
    for found_inf in (0.0, 1.0, 0.0):
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(found_inf)}
        scaler.update()
    wanted = scaler.state_dict()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("it waits for the device"))
        late = capture_tree(adapter.look().late(), LATE)
    assert [leaf.name for leaf in late.leaves] == [leaf.name for leaf in fresh.leaves], "another layout would be needed"
    assert late.leaves == fresh.leaves
    other, adapter = made(64.0)
    for first in (True, False):  # before, and after, it has made its tensors
        look = adapter.look()
        adapter.load(adapter.early(), decode(late.encoded, late.tensors.__getitem__), look.fixed)
        if first:
            other.scale(torch.ones(1))
        assert other.state_dict() == wanted


class Wraps:
    """Scales gradients by a scaler of its own, as timm's ``NativeScaler`` does."""

    def __init__(self, key: str | None) -> None:
        self._scaler = torch.amp.GradScaler("cpu")
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        state = self._scaler.state_dict()
        return state if self._key is None else {self._key: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state if self._key is None else state[self._key])


def test_a_scaler_that_an_extra_wraps_is_given_if_its_state_is() -> None:
    class Forgets(Wraps):
        def state_dict(self) -> dict[str, Any]:
            return {"epoch": 1}

    whole, entry, forgotten = Wraps(None), Wraps("amp"), Forgets(None)
    adapter = TorchAdapter(*small(), None, {"whole": whole, "entry": entry, "forgotten": forgotten})
    assert adapter.scalers() == [whole._scaler, entry._scaler]
