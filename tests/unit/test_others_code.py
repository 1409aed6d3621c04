"""Habits of other people's code that a snapshot must cope with: it is exact, or refuses, or warns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot
from holdfast.snapshot.copy.tensors import empty_restrided, strides_of
from holdfast.snapshot.state.adapter import settles_late
from holdfast.snapshot.state.walk import tensors_in
from tests.unit.test_beginning import STEPS, STOP, Simple, counted, plain, trial, warnings_of

pytestmark = pytest.mark.usefixtures("arena")


# ---------------------------------------------------------------------- how elements are laid out in memory


def test_strides_come_back() -> None:
    """A kernel may sum in another order if the elements are laid out differently."""
    seen: list[tuple[list[int] | None, list[int] | None, list[int] | None]] = []

    class Turned(Simple):
        def __init__(self) -> None:
            super().__init__()
            self.optim = Turning(self.model.parameters())
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    class Turning(torch.optim.SGD):
        """Leaves weights and its own state in column-major order, as LAPACK does; part of the state is in a list."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.05)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            weight = self.param_groups[0]["params"][0]
            held = self.state[weight]
            laid = [strides_of(held[name]) if held else None for name in ("basis", "rows")]
            seen.append((strides_of(weight), laid[0], laid[1]))
            weight.data = weight.t().contiguous().t()
            held["basis"] = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
            held["rows"] = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)))[0][:2]
            held["bases"] = [held["basis"].clone()]
            assert strides_of(held["bases"][0]) == [1, 3]

    trial(counted, Turned)
    assert seen[:STEPS] == [(None, None, None)] + [([1, 8], [1, 3], [1, 3])] * (STEPS - 1)
    assert seen[STEPS + STOP] == ([1, 8], [1, 3], [1, 3])  # when the last process begins


def test_a_view_stays_where_it_is_and_new_memory_may_have_gaps() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert empty_restrided(whole, None) is None
    for strides in (None, [8, 2], [1, 3]):
        assert empty_restrided(whole[:, :2], strides) is None  # the gaps belong to somebody else
    for strides in ([0, 1], [1, 1], [1, 2], [4]):
        assert empty_restrided(whole, strides) is None  # elements would share memory, or of another shape
    apart = empty_restrided(whole, [8, 2])
    assert apart is not None
    assert apart.stride() == (8, 2)
    other = empty_restrided(whole, [1, 3])
    assert other is not None
    assert other.stride() == (1, 3)
    back = empty_restrided(other, None)
    assert back is not None
    assert back.is_contiguous()


# ---------------------------------------------------------------------- what the hook is given


@pytest.mark.usefixtures("compiling")
def test_the_forward_of_a_compiled_model_is_seen_if_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    class Compiled(Simple):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(self.model, backend="eager")

    trial(plain, Compiled)
    assert not [text for text in warnings_of(caplog) if "no forward" in text]


class Graph:
    """A batch as graph libraries make it: an object that its own contents refer to."""

    def __init__(self, x: torch.Tensor) -> None:
        self.store = {"x": x, "graph": self}
        self.size = 3


def test_a_batch_of_any_class_is_looked_into() -> None:
    x = torch.randn(3)
    assert [id(tensor) for tensor in tensors_in(([Graph(x)], {"mask": None}))] == [id(x)]
    assert list(tensors_in([torch.nn.Linear(2, 2), torch, lambda: x])) == []


# ---------------------------------------------------------------------- state kept elsewhere


class Metric(torch.nn.Module):
    """Accumulates in plain attributes, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(2)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {}


class Hiding(torch.optim.SGD):
    """Keeps a tensor in an attribute, outside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.momenta = [torch.zeros(3)]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "momenta": self.momenta}


def test_what_is_not_captured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), Metric())
    optim = Hiding(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    with InMemorySnapshot(model, optim, extra={"accuracy": Metric()}) as snap:
        for _ in snap.steps(2):
            model[0](torch.randn(3, 4)).sum().backward()
            optim.step()
            optim.zero_grad()
    said = warnings_of(caplog)
    for text in (
        "model0.1, a Metric, keeps seen beside its parameters and buffers: that is not captured",
        "extra['accuracy'], a Metric, has nothing in its state_dict: nothing of it is captured",
        "a schedule changes options of Hiding, and is not captured: give it as scheduler=",
        "optim.momenta[0]: kept by an optimizer beside its state, and not captured: name it by snap.track",
    ):
        assert [each for each in said if each.startswith(text)], (text, said)


def test_what_is_given_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trial(counted, Simple)
    assert not [text for text in warnings_of(caplog) if "captured" in text]


def test_an_average_is_no_data_though_its_layers_can_be_counted() -> None:
    assert settles_late(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not settles_late(iter_of_batches())


def iter_of_batches() -> Any:
    class Batches:
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Ignores the state."""

    return Batches()


def test_a_lazy_module_is_to_run_first() -> None:
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ConfigError, match=r"weight; bias: .*run it once"):
        InMemorySnapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
