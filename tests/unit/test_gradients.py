"""What gradients show of a loop is reported, once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from holdfast.snapshot.step.gradients import (
    KEPT,
    MOST_WITHOUT_A_STEP,
    MOST_ZEROED,
    NO_STEP,
    Ahead,
    Forgotten,
    Gradients,
)
from holdfast.snapshot.step.own_time import OwnTime


class Watched:
    """A model whose gradients are watched, and what was reported."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.said: list[tuple[object, ...]] = []
        self.zeroed = 0
        self.gradients = Gradients([self.model], lambda *line: self.said.append(line), self._count)

    def _count(self) -> None:
        self.zeroed += 1

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()

    def zero(self, to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=to_none)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.gradients.remove()
    before = list(made.said)
    made.backward()
    assert made.said == before


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_that_zeroes_its_gradients_hears_nothing(watched: Watched, to_none: bool) -> None:
    for _ in range(3):
        for _ in range(2):  # micro-batches
            watched.backward()
        watched.gradients.stepped()
        watched.zero(to_none)
    watched.gradients.check()
    assert watched.said == []


def test_gradients_that_are_only_computed_are_not_those_of_a_step(watched: Watched) -> None:
    """As by penalties on their norm, and in the inner loops of meta-learning."""
    for _ in range(3):
        for _ in range(2):  # while those of the step before are still there
            torch.autograd.grad(watched.model(torch.ones(1, 2)).sum(), [*watched.model.parameters()])
        watched.zero()
        torch.autograd.grad(watched.model(torch.ones(1, 2)).sum(), [*watched.model.parameters()])
        watched.backward()
        with torch.no_grad():
            watched.model.weight -= 0.1
        watched.gradients.stepped()
    assert (watched.said, watched.zeroed) == ([], 0)


@pytest.mark.parametrize("zeroes", [True, False])
def test_after_a_restart_gradients_that_are_only_computed_are_not_added(zeroes: bool) -> None:
    watched = Watched()
    watched.model.weight.grad = torch.zeros(1, 2)
    forgotten = Forgotten([watched.model], ["model0.weight"], lambda *line: watched.said.append(line))
    torch.autograd.grad(watched.model(torch.ones(1, 2)).sum(), [*watched.model.parameters()])
    assert watched.said == []
    if zeroes:
        watched.zero()
    watched.backward()
    assert watched.said == ([] if zeroes else [(KEPT, "model0.weight")])
    forgotten.remove()


def test_gradients_that_were_zero_before_are_not_taken_for_zeroed(watched: Watched) -> None:
    """As those of what comes before a layer that begins with zeros, in diffusion models, or where no label counts."""
    watched.backward()
    watched.gradients.stepped()
    watched.zero(to_none=False)
    (watched.model(torch.ones(1, 2)).sum() * 0).backward()
    watched.backward()
    assert watched.zeroed == 0
    watched.zero(to_none=False)
    watched.backward()
    assert watched.zeroed == 1


def test_gradients_that_are_kept_from_step_to_step_are_named_once(watched: Watched) -> None:
    for _ in range(4):
        watched.backward()
        watched.gradients.stepped()
    assert watched.said == [(KEPT, "model0.weight")]


def test_gradients_that_a_turn_adds_to_after_its_step_has_begun_are_kept(watched: Watched) -> None:
    """As where a batch is read, and begins a step, between the backwards of two micro-batches."""
    for _ in range(3):
        watched.backward()
        watched.gradients.stepped()
        watched.backward()
        with torch.no_grad():
            watched.model.weight.add_(1)
        watched.zero()
    assert watched.said == [(KEPT, "model0.weight")]
    watched.backward()
    watched.gradients.stepped()
    watched.backward()
    watched.gradients.remove()
    watched.gradients.stepped()  # the last step ends as the hook is left


@pytest.mark.parametrize(
    ("turn", "is_ahead"),
    [
        ("mfbs", False),  # m: data is read, f: forward, b: backward, s: a step
        ("mfbmfbs", False),  # micro-batches
        ("mmfmbs", False),  # a second source
        ("fmfbs", False),  # an evaluation with gradients, which nobody computes
        ("fbzmfbs", False),  # z: gradients are zeroed
        ("mfbsfbs", False),  # two optimizers
        ("fmbs", True),
        ("fbms", True),
        ("fmbfmbs", True),
        ("fbmfbms", True),
    ],
)
def test_a_turn_that_trains_before_its_step_begins_is_found(turn: str, is_ahead: bool, watched: Watched) -> None:
    ahead, found = Ahead([watched.model]), []
    losses: list[torch.Tensor] = []
    for event in turn * 2:
        if event == "m":
            ahead.reads()
        elif event == "f":
            found.append(ahead.found("f"))
            losses.append(watched.model(torch.ones(1, 2)).sum())
        elif event == "b":
            losses.pop().backward()  # type: ignore[no-untyped-call]
        elif event == "s":
            found.append(ahead.found("s"))
            ahead.stepped()
        if event in "sz":
            watched.zero()
    ahead.remove()
    assert any(found) is is_ahead


def test_gradients_that_are_zeroed_before_they_are_used_are_not_kept(watched: Watched) -> None:
    for _ in range(4):
        watched.backward()  # of a loss that only passes through this model
        watched.zero()
        watched.backward()
        watched.gradients.stepped()
    assert watched.said == []


def test_gradients_that_are_zeroed_in_a_step_that_does_not_use_them_are_not_kept(watched: Watched) -> None:
    """As those of a generator that trains in every second step, and that the discriminator's loss passes through."""
    watched.backward()
    watched.gradients.stepped()
    for is_used in (False, False, True):
        watched.backward()
        if is_used:
            with torch.no_grad():
                watched.model.weight.add_(1)
        watched.zero()
        watched.gradients.stepped()
        assert bool(watched.said) is is_used
        watched.backward()
        watched.gradients.stepped()


def test_a_step_that_is_left_out_is_noticed(watched: Watched) -> None:
    for step in range(6):
        watched.backward()
        if step not in (2, 4):
            watched.gradients.stepped()
        watched.zero()
    assert watched.zeroed == 2
    assert watched.said == []


def test_gradients_without_any_step_are_told_of_after_a_while(watched: Watched) -> None:
    for _ in range(MOST_WITHOUT_A_STEP + 3):
        watched.backward()
        watched.zero()
    watched.gradients.check()
    assert watched.said == [(NO_STEP, MOST_WITHOUT_A_STEP)]
    assert watched.zeroed == MOST_WITHOUT_A_STEP + 2 - (MOST_ZEROED - 1)


def test_a_first_turn_with_many_steps_in_it_is_no_loop_without_a_step(watched: Watched) -> None:
    """As where several networks are trained, each of them many times in a turn."""
    optim = torch.optim.SGD(watched.model.parameters(), 0.1)
    for _ in range(MOST_WITHOUT_A_STEP + 3):
        watched.backward()
        optim.step()
        watched.zero()
    assert watched.said == []


def test_gradients_without_any_step_are_told_of_as_the_loop_ends(watched: Watched) -> None:
    watched.gradients.check()
    assert watched.said == []
    for _ in range(3):
        watched.backward()
        watched.zero()
    watched.gradients.check()
    assert watched.said == [(NO_STEP, 3)]
    assert watched.zeroed == 0  # as when a graph is warmed up before it is captured


def test_where_gradients_are_added_up_elsewhere_nothing_is_said_of_them(watched: Watched) -> None:
    setattr(watched.model.weight, "main_grad", torch.zeros(1, 2))  # noqa: B010
    for _ in range(4):
        watched.backward()
        watched.gradients.stepped()
    assert watched.said == []


def graphs_of_a_compiled_loop(model: torch.nn.Module) -> int:
    """How many graphs torch.compile makes of two turns, each with two backwards in a compiled function."""
    torch.compiler.reset()
    counted = CompileCounter()

    @torch.compile(backend=counted)
    def accumulate(x: torch.Tensor) -> None:
        for _ in range(2):
            model(x).sum().backward()

    for _ in range(2):
        accumulate(torch.ones(1, 2))
        model.zero_grad()
    return int(counted.frame_count)


def test_a_backward_in_a_compiled_function_does_not_trace_into_hooks(watched: Watched) -> None:
    own_time = OwnTime([watched.model], time.monotonic, lambda: 0.0)
    seen = graphs_of_a_compiled_loop(watched.model)
    own_time.remove()
    assert seen == graphs_of_a_compiled_loop(torch.nn.Linear(2, 1))
    assert "monotonic" not in str(counters["graph_break"])
