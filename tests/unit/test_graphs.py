"""What a loop does while a CUDA graph is captured is reported at each replay, and unknown graphs are noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.snapshot.step import boundary, graphs
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.graphs import UNHEARD, Graphs


class Recorded:
    """Stands in for a graph."""

    under_way = False

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def capture_begin(self) -> None:
        type(self).under_way = True

    def capture_end(self) -> None:
        type(self).under_way = False

    def replay(self) -> None:
        self.said.append("replay")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "kind_of_graph", lambda: Recorded)
    for module in (graphs, boundary):
        monkeypatch.setattr(module, "capturing", lambda: Recorded.under_way)
    before = dict(vars(Recorded))
    yield
    assert dict(vars(Recorded)) == before


class Hearing:
    """Records what a boundary reports."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def before_step(self) -> None:
        self.said.append("before step")

    def after_step(self) -> None:
        self.said.append("after step")

    def on_forward(self, number: int, given: Any) -> None:
        self.said.append(f"forward {number}")

    def on_evaluation(self) -> None:
        self.said.append("evaluation")

    def on_backward(self, number: int) -> None:
        self.said.append(f"backward {number}")


def test_a_step_that_was_captured_is_told_of_at_each_replay() -> None:
    said: list[str] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listening = Boundary([optimizer], [model], Hearing(said))
    graph = Recorded(said)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    alone = [each for each in said if each != "backward 0"]
    assert alone == ["forward 1", "backward 1", "before step", "after step"]
    said.clear()
    graph.capture_begin()
    step()
    graph.capture_end()
    assert said == []  # nothing has run yet
    for number in (2, 3):
        graph.replay()
        told = [each for each in said if each != "backward 0"]
        assert told == [f"forward {number}", f"backward {number}", "before step", "replay", "after step"]
        said.clear()
    step()
    assert said[0] == "forward 4"
    listening.remove()
    said.clear()
    graph.replay()
    assert said == ["replay"]


def test_graphs_of_which_nothing_is_known_are_spoken_of_once_nothing_else_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[str] = []
    earlier = Recorded(said)
    listening = Graphs()
    for _ in range(UNHEARD - 1):
        earlier.replay()
    listening.heard()  # another step was seen, so these replays are part of the forward
    with caplog.at_level(logging.WARNING):
        for _ in range(UNHEARD - 1):
            earlier.replay()
        assert not caplog.records
        for _ in range(UNHEARD):
            earlier.replay()
    [record] = caplog.records
    assert f"replayed {UNHEARD} times, and no optimizer has stepped" in record.getMessage()
    listening.remove()


def test_what_is_said_in_a_transform_of_torch_func_is_heard_outside_of_it() -> None:
    graphs, heard = Graphs(), []

    def look(x: torch.Tensor) -> torch.Tensor:
        graphs.say(lambda: heard.append(torch.ones(2).data_ptr() != 0))
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(3, 2))
    graphs.remove()
    assert heard == [True]
