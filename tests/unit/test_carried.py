"""What a script carries from turn to turn, and feeds its steps with, is found in its source; what it logs is not."""

from __future__ import annotations

import ast
import asyncio
import copy
import heapq
import inspect
import itertools
import logging
import queue
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from holdfast import InMemorySnapshot
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.snapshot.script import calls
from holdfast.snapshot.script.anew import hands_on
from holdfast.snapshot.script.flow import Carries, Flow
from holdfast.snapshot.script.iterators import unwatched
from holdfast.snapshot.script.running import Named, RunningValues, helper_of
from holdfast.snapshot.script.syntax import called_in, function_of, loops_at
from holdfast.snapshot.script.variables import line_for_attribute
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.live import Change
from holdfast.snapshot.state.tracked import Tracked
from tests.deadlines import DEADLINE_S
from tests.unit.test_beginning import STEPS, Job, Loop, life

SET_UP = """
def train(snap, loader, model, optim, average):
    %s
    for epoch in range(snap.epoch, 3):
        for x, y in snap.data(loader):
%s
%s
"""


class Hook:
    """Stands for the hook in a source that is only read."""

    __module__ = "holdfast.hook"


class Around:
    """Moves a loader's batches to a device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def flow(function: ast.FunctionDef, line: int, values: dict[str, Any], adapter: TorchAdapter) -> Carries:
    """What a function carries whose turns are the loops around a line."""
    known = RunningValues(values)
    helpers = {path: each for path in called_in([function]) if (each := helper_of(path, known)) is not None}
    return Flow(function, known, Named([adapter]), helpers, turns=loops_at(function, line), top=line).found


def look(
    turn: str,
    *,
    before: str = "n = 0",
    after: str = "",
    tracked: Tracked | None = None,
    extra: Any = None,
    schedule: Any = None,
    **values: Any,
) -> Carries:
    """What a loop over batches carries. `turn`: what it does with each; `after`: what it does after a pass."""
    text = SET_UP % (before, textwrap.indent(turn.strip(), " " * 12), textwrap.indent(after.strip(), " " * 8))
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    known = {"snap": Hook(), "model": model, "optim": optim, "average": nn.Linear(2, 2)}
    at = next(each.lineno for each in ast.walk(function) if isinstance(each, ast.For) and "data" in ast.dump(each.iter))
    adapter = TorchAdapter(model, optim, schedule, extra and {"extra": extra})
    if tracked is not None:
        adapter.track(tracked)
    return flow(function, at, known | values, adapter)


class Warmth:
    """A factor that is called, or read, and depends on a count."""

    def __init__(self) -> None:
        self.turn = 0

    def next(self) -> None:
        self.turn += 1

    @property
    def now(self) -> float:
        return min(1.0, self.turn / 10)

    def __call__(self) -> float:
        return self.now


TRAIN = "loss = model(x).sum()\noptim.zero_grad()\nloss.backward()\noptim.step()\n"


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ("loss = model(x).sum() * min(1, n / 10)\nloss.backward()\noptim.step()\nn += 1", {"n"}),
        (TRAIN.replace("model(x)", "model(x / n)") + "n = max(0.5, n * 0.9)", {"n"}),
        ("for group in optim.param_groups:\n    group['lr'] = 0.1 / (1 + n)\n" + TRAIN + "n += 1", {"n"}),
        ("for warmth in optim.param_groups:\n    warmth['lr'] = 0.1 / (1 + n)\n" + TRAIN + "n += 1", {"n"}),
        ("rate = 0.1 / (1 + n)\noptim.param_groups[0]['lr'] = rate\n" + TRAIN + "n += 1", {"n"}),
        ("out, n = model(x, n)\nout.sum().backward()\noptim.step()\nn = n.detach()", {"n"}),
        (TRAIN + "n += 1\nif n > 100:\n    break", {"n"}),
        ("n += 1\nif n % 2:\n    continue\n" + TRAIN, {"n"}),
        ("loss = model(x).sum()\nloss.backward()\nn += 1\nif n % 4 == 0:\n    optim.step()", {"n"}),
        (
            TRAIN + "n += 1\nif n % 4 == 0:\n    good = model.state_dict()\nelse:\n    model.load_state_dict(good)",
            {"n", "good"},
        ),
        (TRAIN.replace("optim.step", "for p in ps:\n    p.grad.mul_(1 / n)\noptim.step") + "n += 1", {"n"}),
        (TRAIN.replace("optim.step", "for p in ps:\n    p.grad *= n\noptim.step") + "n += 1", {"n"}),
        ("n.append(x)\nmodel(n[0]).sum().backward()\noptim.step()", {"n"}),
        ("n[y] = x\nmodel(n).sum().backward()\noptim.step()", {"n"}),
        (TRAIN + "average.update_parameters(model)", {"average"}),
        (TRAIN + "for a, b in zip(average.parameters(), model.parameters()):\n    a.data.copy_(b.data)", {"average"}),
        (TRAIN + "n += 1\nif n % 8 == 0:\n    evaluate(model, held_out)", {"n"}),
        (TRAIN + "n += 1\nif n % 8 == 0:\n    evaluate(model, around)", {"n"}),
        (TRAIN + "n += 1\nif n % 8 == 0:\n    for x in held_out:\n        print(x)", {"n"}),
        (TRAIN + "n += 1\nfor p, q in zip(average.parameters(), ps):\n    p.lerp_(q, 1 / n)", {"n", "average"}),
        (TRAIN + "n += 1\nfor q in group['params']:\n    if n % 5 == 0:\n        q.data.copy_(x)", {"n"}),
        ("loss = model(x).sum()\nloss.backward()\nused.step()\nn += loss\nif n > 9:\n    used = optim", {"n", "used"}),
        ("warmth.turn += 1\n" + TRAIN.replace("model(x)", "model(x, scaled(warmth))"), {"warmth.turn"}),
        (TRAIN + "n[y] = loss.item()\nsampler.weights = n", {"n", "sampler.weights"}),
        ("loss = model(x).sum() * warmth()\nloss.backward()\noptim.step()\nwarmth.next()", {"warmth.turn"}),
        ("loss = model(x).sum() * warmth.now\nloss.backward()\noptim.step()\nwarmth.next()", {"warmth.turn"}),
        (TRAIN + "n += 1\nif n % 50 == 0:\n    show(noisy(x))", {"n"}),
        (TRAIN + "n += 1\nif n % 50 == 0:\n    show(torch.randn(3))", {"n"}),
    ],
)
def test_what_reaches_a_step_is_named(turn: str, named: set[str]) -> None:
    group = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).param_groups[0]
    known: dict[str, Any] = {
        "held_out": DataLoader(TensorDataset(torch.zeros(1, 2))),
        "around": Around(DataLoader(TensorDataset(torch.zeros(1, 2)))),
        "sampler": WeightedRandomSampler([1.0, 1.0], 2),
        "noisy": nn.Dropout(0.1),
        "used": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
        "warmth": Warmth(),
    }
    found = look(turn, group=group, **known)
    assert {*found.carried, *found.updated} == named
    assert all(found.carried.values())


@pytest.mark.parametrize(
    "turn",
    [
        TRAIN + "n += loss.item()\nprint(n)",
        TRAIN + "n += 1\nif n % 10 == 0:\n    print(loss.item() / n)\n    n = 0",
        TRAIN + "now = time.time()\nspent = now - n\nn = now\nlog(spent)",
        TRAIN + "n = loss.item() if n == 0 else 0.9 * n + 0.1 * loss.item()\nbar.set_postfix(loss=n)",
        TRAIN + "writer.add_scalar('loss', loss, n)\nn += 1\nif n % 100 == 0:\n    save(model.state_dict())",
        TRAIN + "losses = [n for n in range(3)]",
        TRAIN + "n += 1\nif n % 50 == 0:\n    show(model(x))",
        TRAIN + "n += 1\nif n % 50 == 0:\n    noisy.eval()\n    show(noisy(x))",
        "n = 0\nfor part in x:\n    loss = model(part * n).sum()\n    loss.backward()\n    n += 1\noptim.step()",
        "if x is None:\n    n += 1\n" + TRAIN,
        TRAIN + "if x is None:\n    sparse.step()\n    sparse.param_groups[0]['lr'] = 0.1",
        TRAIN + "n += 1\nif n % 8 == 0:\n    model.eval()\n    show(model(y))\n    model.train()",
        TRAIN + "for a, b in zip(model.parameters(), average.parameters()):\n    a.data.lerp_(b.data, 0.5)",
        TRAIN + "n += 1\nif n % 8 == 0:\n    evaluate(model, seeded)",
        TRAIN + "n += 1\nif n % 8 == 0:\n    print(n / len(held_out))",
        TRAIN + "n += 1\nif n % 8 == 0 and n:\n    print(n)\n    if is_trial:\n        break",
        TRAIN + "n += 1\nif n % 8 == 0 and n:\n    print(n)\n    if not is_whole:\n        break",
        "if x is None:\n    n = 0\nelif y is None:\n    n = 1\nelse:\n    raise ValueError\n" + TRAIN + "model(n)",
    ],
)
def test_what_is_only_logged_is_not_named(turn: str) -> None:
    seeded: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1, 2)), generator=torch.Generator())
    held_out: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1, 2)))
    found = look(turn, noisy=nn.Dropout(0.1), seeded=seeded, held_out=held_out, is_trial=False, is_whole=True)
    assert not found.carried and not found.counts and not found.numbered


def test_a_name_that_is_used_again_for_a_log_is_not_taken_for_what_it_was() -> None:
    after = "loss = total / count\nif loss < best:\n    best = loss"
    found = look(TRAIN + "total += loss.item()\ncount += 1", before="best, total, count = 9.0, 0.0, 0", after=after)
    assert not found.carried


class Episode:
    """Counts its steps from when it was reset, as an environment does."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> int:
        self.count = 0
        return self.count

    def reset_unless(self, over: bool) -> None:
        if over:
            return
        self.count = 0

    def reset_if(self, over: bool) -> None:
        if over:
            self.count = 0

    def resets(self) -> Iterator[int]:
        yield self.count
        self.count = 0

    def step(self) -> int:
        self.count += 1
        return self.count


@pytest.mark.parametrize(
    ("begins", "named"),
    [
        ("state = episode.reset()", set()),
        ("if y:\n    episode.reset()", {"episode.count"}),
        ("episode.reset_unless(y)", {"episode.count"}),
        ("episode.reset_if(y)", {"episode.count"}),
        ("resets = episode.resets()", {"episode.count"}),
        ("if episode.step():\n    continue\nepisode.reset()", {"episode.count"}),
    ],
)
def test_what_a_function_sets_anew_in_each_turn_is_not_carried(begins: str, named: set[str]) -> None:
    turn = begins + "\n" + TRAIN.replace("model(x)", "model(x * episode.step())")
    assert look(turn, episode=Episode()).carried.keys() == named


class Moving:
    """Has an attribute with the name of somebody's variable."""

    n = "cpu"

    def batch(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.n)


class Options(dict[str, Any]):
    """Answers any question for an attribute, as classes of configurations do."""

    __getattr__ = dict.get


@pytest.mark.parametrize("given", [Options(warm=10), FunctionType])
def test_what_a_call_is_given_may_answer_any_question(given: object) -> None:
    turn = "loss = model(x).sum() * warmth(n, given)\nloss.backward()\noptim.step()\nn += 1"
    assert look(turn, given=given).carried.keys() == {"n"}


def test_a_variable_with_the_name_of_an_attribute_is_another() -> None:
    turn = (
        TRAIN.replace("model(x)", "model(device.batch(x))") + "for n, p in model.named_parameters():\n    print(n, p)"
    )
    assert look(turn, device=Moving()).carried == {}


def test_what_a_pass_leaves_counts_too() -> None:
    early = "if n < best:\n    best, wait = n, 0\nelse:\n    wait += 1\n    if wait > 3:\n        break"
    found = look(TRAIN, before="best, wait, n = 9.0, 0, 0.0", after="n = model(x).sum().item()\n" + early)
    assert set(found.carried) == {"best", "wait"}
    assert set(look(TRAIN.replace("(x)", "(x * n)"), after="n *= 0.8").carried) == {"n"}
    assert not look(TRAIN.replace("(x)", "(x * n)"), after="print(n)", before="n = 0.8").carried


class Tempered(nn.Module):
    """Divides by a number in an attribute, and keeps others in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.temp, self.is_sharp, self.drop = 1.0, False, nn.Dropout(0.1)


class Saving(Tempered):
    """The same, with that number in its state."""

    def get_extra_state(self) -> float:
        return self.temp


@pytest.mark.parametrize(
    ("turn", "after", "named"),
    [
        (TRAIN, "model.temp *= 0.5", {"model.temp"}),
        (TRAIN, "model.temp = 0.5 ** epoch", {"model.temp"}),
        (TRAIN, "if epoch == 2:\n    model.is_sharp = True", {"model.is_sharp"}),
        (TRAIN, "model.drop.p *= 0.9", {"model.drop.p"}),
        ("model.temp = 0.5 ** epoch\n" + TRAIN, "", set()),
        (TRAIN, "saving.temp *= 0.5", set()),
        (TRAIN.replace("model(x)", "saving(x)"), "saving.temp *= 0.5", set()),
    ],
)
def test_what_the_script_leaves_in_attributes_of_a_model_counts_too(turn: str, after: str, named: set[str]) -> None:
    model = Tempered()
    found = look(turn, after=after, model=model, saving=Saving())
    assert found.carried.keys() == named
    tracked = Tracked("temp", lambda: (model.temp, model.is_sharp, model.drop.p), print, None, Change.ANY, late=False)
    assert not look(turn, after=after, model=model, tracked=tracked).carried


TOP = """
def train(snap, loader, model, optim):
    for epoch in range(snap.epoch, 3):
        %s
        for x, y in snap.data(loader):
            model(x).sum().backward()
            optim.step()
"""


@pytest.mark.parametrize(
    ("top", "again"),
    [
        ("if epoch == 2: optim.add_param_group({'params': more})", {4}),
        ("for group in optim.param_groups: group['lr'] *= 0.5", {4}),
        ("if epoch > 1: schedule.step(epoch)", {4}),
        ("optim.param_groups[0]['lr'] = 0.1 / (1 + epoch)", set()),
        ("model.train()", set()),
    ],
)
def test_what_is_done_again_in_the_middle_of_a_pass_is_found(top: str, again: set[int]) -> None:
    function = ast.parse(TOP % top).body[0]
    assert isinstance(function, ast.FunctionDef)
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    known = {"snap": Hook(), "model": model, "optim": optim, "schedule": schedule}
    assert flow(function, 5, known, TorchAdapter(model, optim)).again == again


def test_what_the_hook_tells_is_found_again() -> None:
    turn = TRAIN.replace("(x)", "(x * n)") + "n += 1"
    assert not look(turn, before="n = snap.step").carried
    assert not look(turn, before="start = snap.epoch\n    n = 3 * start").carried


def counting(iterated: str, **values: Any) -> Carries:
    text = f"""
def train(snap, loader, model, optim):
    for epoch in {iterated}:
        for x in snap.data(loader):
            model(x).sum().backward()
            optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return flow(function, 4, {"snap": Hook(), **values}, TorchAdapter(nn.Linear(1, 1), None))


@pytest.mark.parametrize(
    ("begins", "numbered"),
    [("", True), ("3 * epoch", True), ("snap.step", False), ("3 * epoch + data.position", False)],
)
def test_the_number_of_a_pass_does_not_tell_the_place_in_it(begins: str, numbered: bool) -> None:
    text = f"""
def train(snap, data, model, optim):
    for epoch in range(snap.epoch, 3):
        for i, x in enumerate(log(data), {begins}):
            optim.param_groups[0]["lr"] = 0.1 / (1 + i)
            model(x).sum().backward()
            optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    given = {"snap": Hook(), "data": Hook()}
    assert flow(function, 4, given, TorchAdapter(nn.Linear(1, 1), None)).numbered is numbered


@pytest.mark.parametrize(
    ("beside", "numbered", "carried"),
    [
        ("range(9)", True, set()),
        ("shares", True, set()),
        ("rates", False, {"rates"}),
        ("snap.data(other)", False, set()),
        ("itertools.repeat(0.5)", False, set()),
    ],
)
def test_what_is_zipped_with_batches_begins_anew_with_the_process(
    beside: str, numbered: bool, carried: set[str]
) -> None:
    text = f"""
def train(snap, data, model, optim):
    for epoch in range(snap.epoch, 3):
        for i, x in zip({beside}, data):
            optim.param_groups[0]["lr"] = 0.1 / (1 + i)
            model(x).sum().backward()
            optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    given = {"snap": Hook(), "data": Hook(), "shares": [1.0, 0.5], "rates": itertools.cycle([1.0, 0.5])}
    found = flow(function, 4, given, TorchAdapter(nn.Linear(1, 1), None))
    assert found.numbered is numbered and {*found.carried} == carried


@pytest.mark.parametrize(
    ("over", "ends_it"),
    [
        ("x in islice(snap.data(loader), 3)", True),
        ("x in tqdm(islice(data, n))", True),
        ("x in islice(snap.data(loader), none)", False),
        ("x in islice(data, 3 - data.position)", False),
        ("_, x in zip(range(3), snap.data(loader))", True),
        ("x, _ in zip(data, range(n))", True),
        ("_, x in zip(weights, snap.data(loader))", True),
        ("_, x in zip(range(8), snap.data(loader))", False),
        ("_, x in zip(range(len(loader)), snap.data(loader))", False),
        ("_, x in zip(count(), snap.data(loader))", False),
        ("_, x in zip(count(1), snap.data(loader))", False),
        ("_, x in zip(range(3 - data.position), data)", False),
        ("n, x in zip(range(snap.step, 3), endless(snap.data(loader)))", False),
    ],
)
def test_a_number_that_ends_a_pass_begins_anew_with_the_process(over: str, ends_it: bool) -> None:
    text = f"""
def train(snap, data, loader, model, optim):
    for epoch in range(snap.epoch, 3):
        for {over}:
            model(x).sum().backward()
            optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    numbers: dict[str, Any] = {"n": 3, "none": None, "weights": [1.0, 2.0]}
    given = {"snap": Hook(), "data": Hook(), "loader": DataLoader(TensorDataset(torch.zeros(8))), **numbers}
    assert flow(function, 4, given, TorchAdapter(nn.Linear(1, 1), None)).numbered is ends_it


def skipping(iterated: str, test: str) -> bool:
    text = f"""
def train(snap, model, optim):
    for step in {iterated}:
        if {test}:
            continue
        for i in range(3):
            if i % 2 == snap.step:
                continue
        model(step).sum().backward()
        optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return flow(function, 3, {"snap": Hook()}, TorchAdapter(nn.Linear(1, 1), None)).skips


def test_a_loop_finds_its_place_only_if_it_passes_over_turns_that_it_counts_itself() -> None:
    assert skipping("range(9)", "step < snap.step")
    assert skipping("loader", "count() < snap.step")
    assert not skipping("range(9)", "step % 3")
    assert not skipping("snap.steps(9)", "step % 3")


def test_a_loop_that_counts_from_its_beginning_again_is_found() -> None:
    assert counting("range(3)").counts == {3}
    assert counting("tqdm(range(3))").counts == {3}
    assert counting("numbers", numbers=range(3)).counts == {3}
    assert not counting("names", names=["a", "b"]).counts
    assert not counting("range(snap.epoch, 3)").counts
    assert counting("range(snap.epoch, 3)").passes
    assert not counting("snap.steps(args.epoch)").passes
    assert not counting("itertools.count()").counts


def test_a_bar_around_numbers_counts_from_its_beginning_too() -> None:
    bar = pytest.importorskip("tqdm").tqdm(range(3), disable=True)
    assert counting("bar", bar=bar).counts == {3}


# ------------------------------------------------------------------ in a running job


def said(loop: Loop, caplog: pytest.LogCaptureFixture, text: str) -> str:
    """What a job is told of `text`, in one line at most."""
    life(loop, Job(), None)
    lines = [each for each in map(logging.LogRecord.getMessage, caplog.records) if text in each]
    assert len(lines) <= 1
    return "".join(lines)


def annealed(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    warmth = 1.0
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * warmth).backward()
        yield
        job.step()
        warmth *= 0.9


def annealed_in_a_function(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    warmth = 1.0

    def step() -> None:
        nonlocal warmth
        (job.model(torch.randn(2, 4)).sum() * warmth).backward()
        job.step()
        warmth *= 0.9

    for _ in snap.steps(STEPS):
        yield
        step()


def with_two_steps_in_a_turn(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    warmth = 1.0
    for _ in snap.steps(STEPS):
        for _ in range(2):
            (job.model(torch.randn(2, 4)).sum() * warmth).backward()
            job.update()
        yield
        warmth *= 0.9


def with_a_loss_that_is_logged(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    total, count = 0.0, 0
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        loss.backward()
        yield
        job.step()
        total += loss.item()
        count = count + 1
        if count % 2 == 0:
            logging.getLogger("training").info("%s", total / count)


class Stopper:
    """What many scripts have to stop early."""

    def __init__(self) -> None:
        self.best, self.waited, self.stops = float("inf"), 0, False

    def __call__(self, loss: float) -> None:
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
            self.stops = self.waited > 100


class Warming:
    """A schedule of the user's own."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.turn = optim, 0

    def step(self) -> None:
        self.turn += 1
        for group in self.optim.param_groups:
            group["lr"] = 0.01 * self.turn

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, held: dict[str, int]) -> None:
        self.turn = held["turn"]


class Meter:
    """What many scripts have to log a mean."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        def tell(share: float) -> None:
            percent = 100 * share
            logging.getLogger("training").debug("%s", percent)

        self.total += value
        self.count += 1
        tell(self.total / self.count)


class Mean:
    """What many scripts have for the losses of a pass."""

    def __init__(self) -> None:
        self.now, self.total, self.count = 0.0, 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.now = self.total / self.count


def summed(snap: InMemorySnapshot, job: Job) -> Generator[None, None, float]:
    mean, least = Mean(), 0.0
    for number, x in snap.data([torch.randn(2, 4) for _ in range(3)]).enumerate():
        loss = job.model(x).sum()
        loss.backward()
        yield
        job.step()
        mean.update(loss.item())
        least = min(least, loss.item())
        print(number, least)
    return mean.now


def with_a_rate_that_follows_a_sum(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.epoch, 2):
        job.optim.param_groups[0]["lr"] = 0.01 * (yield from summed(snap, job))


class Restarting:
    """Makes steps smaller after bad passes, and counts all of them."""

    def __init__(self, job: Job) -> None:
        self.job, self.bad, self.seen = job, 0, 0

    def on_pass(self, loss: float) -> None:
        self.seen += 1
        self.bad = self.bad + 1 if loss > 0 else 0
        if self.bad > 1:
            self.job.optim.param_groups[0]["lr"] *= 0.5
        print(self.seen)


def with_callbacks_after_a_pass(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    restarting, other = Restarting(job), Restarting(job)
    callbacks: list[Callable[[float], None]] = [restarting.on_pass, print]
    objects = (other, Meter())
    for _ in range(snap.epoch, 2):
        mean = yield from summed(snap, job)
        for callback in callbacks:
            callback(mean)
        for each in objects:
            if isinstance(each, Restarting):
                each.on_pass(mean)


def with_a_sum_that_is_logged(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.epoch, 2):
        print((yield from summed(snap, job)))


def with_helpers(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    stopper, warming, meter = Stopper(), Warming(job.optim), Meter()
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).square().sum()
        loss.backward()
        yield
        job.update()
        warming.step()
        meter.update(loss.item())
        stopper(loss.item())
        logging.getLogger("training").info("%s", meter.total / meter.count)
        if stopper.stops:
            break


def with_an_event_that_stops_it(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    stopper, stop = Stopper(), threading.Event()
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        stopper(1.0)
        if stopper.stops:
            stop.set()
        if stop.is_set():
            break


def with_an_entry_that_stops_it(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    stopper, found = Stopper(), {"stop": False}
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        stopper(1.0)
        if stopper.stops:
            found.update(stop=True)
        if found["stop"]:
            break


class Phase:
    """A part of a schedule."""

    def __init__(self) -> None:
        self.turn = 0

    def step(self) -> float:
        self.turn += 1
        return 0.01 * self.turn


class Cycle:
    """A schedule of the user's own that is made of parts."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.phases, self.at = optim, [Phase(), Phase()], 0

    def step(self) -> None:
        rate = self.phases[self.at].step()
        for group in self.optim.param_groups:
            group["lr"] = rate


def with_a_schedule_of_parts(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    cycle = Cycle(job.optim)
    for _ in snap.steps(STEPS):
        job.model(torch.randn(2, 4)).sum().backward()
        yield
        job.update()
        cycle.step()


def noise(width: int) -> Iterator[torch.Tensor]:
    while True:
        narrow = torch.randn(2, width - 1)
        yield torch.nn.functional.pad(narrow, (0, 1))


def with_generators_that_only_draw(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    by_width = {width: noise(width) for width in (4, 8)}
    for _ in snap.steps(STEPS):
        for width, each in by_width.items():
            drawn = next(each)
            if width == 4:
                job.model(drawn).sum().backward()
        yield
        job.update()


class Room:
    """An environment of a library."""

    def __init__(self) -> None:
        self.place = 0

    def reset(self) -> float:
        self.place = 0
        return 0.0

    def step(self, action: float) -> float:
        self.place += 1
        return self.place * action


@pytest.fixture(autouse=True)
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed library that `Room` comes from."""
    library = ModuleType("a_gym")
    library.__file__ = "/lib/site-packages/a_gym.py"
    monkeypatch.setitem(sys.modules, "a_gym", library)
    monkeypatch.setattr(Room, "__module__", "a_gym")


def eases(args: SimpleNamespace, factor: float = 0.9) -> float:
    args.scale = args.scale * factor
    args.told = args.told + 1
    return float(args.scale)


def with_a_function_that_keeps_in_its_argument(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    options = SimpleNamespace(scale=1.0, told=0)
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * eases(options, factor=0.8)).backward()
        yield
        job.update()


def with_a_function_that_changes_its_argument(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    options = SimpleNamespace(scale=1.0, told=0)
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * options.scale).backward()
        yield
        job.update()
        eases(args=options)


def notes(share: float, found: list[float], beside: list[float] = [], *, told: list[float] | None = None) -> float:  # noqa: B006
    found.append(share)
    beside.append(share)
    if told is not None:
        told.append(share)
    return len(found) + len(beside)


def with_lists_that_functions_are_given(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    seen, passed, logged = [1.0], [1.0], [1.0]
    for _ in snap.steps(STEPS):
        fresh: list[float] = []
        note_all(fresh)
        (job.model(torch.randn(2, 4)).sum() * notes(0.5, seen, told=passed) * len(passed) * len(fresh)).backward()
        yield
        job.update()
        note_all(logged)
        print(len(logged))


def note_all(found: list[float]) -> None:
    found.append(1.0)


def with_containers_that_are_asked(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    means: dict[str, float] = {}
    nearest, kept = [1.0], {"a": 1.0}
    for turn in snap.steps(STEPS):
        share = means.get("share", 1.0) * nearest.count(1.0) * sum(kept.values())
        (job.model(torch.randn(2, 4)).sum() * share).backward()
        yield
        job.update()
        means["share"] = means.get("share", 1.0) * 0.9
        means["told"] = means.get("told", 1.0) + 1
        kept["b"] = kept.get("b", 0.0) + 1
        heapq.heappush(nearest, float(turn))
        print(means.get("told"))


def shares() -> Callable[[], float]:
    held = {"turns": 0}

    def share() -> float:
        held["turns"] += 1
        return 1 / held["turns"]

    return share


COOLED = {"turns": 0, "told": 0}


@torch.no_grad()
def cooled() -> float:
    COOLED["turns"] += 1
    return 1 / COOLED["turns"]


@contextmanager
def cooling() -> Iterator[int]:
    COOLED["told"] += 1
    yield COOLED["told"]


class Pulse:
    """Counts whenever it is read, or entered."""

    def __init__(self) -> None:
        self.read, self.entered = 0, 0

    @property
    def now(self) -> int:
        self.read += 1
        return self.read

    def __enter__(self) -> int:
        self.entered += 1
        return self.entered

    def __exit__(self, *_: object) -> None:
        pass


def with_functions_that_others_call(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    held, logged = {"turns": 0}, {"turns": 0}

    def work() -> None:
        held["turns"] += 1

    def note() -> None:
        logged["turns"] += 1

    with ThreadPoolExecutor(1) as pool:
        for _ in snap.steps(STEPS):
            pool.submit(work).result()
            pool.submit(note).result()
            (job.model(torch.randn(2, 4)).sum() / held["turns"]).backward()
            yield
            job.update()
            print(logged["turns"])


def with_functions_that_nobody_calls_by_name(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    share, pulse, other = shares(), Pulse(), Pulse()
    for _ in snap.steps(STEPS):
        with pulse as beat:
            (job.model(torch.randn(2, 4)).sum() * share() * cooled() * pulse.now * beat).backward()
            yield
            job.update()
        with cooling() as told:
            print(told, other.read)


EASE, EASED = 1.0, 0


def eased() -> float:
    """Keeps a global variable for itself, and another one for nobody."""
    global EASE, EASED
    EASE = EASE * 0.9
    EASED = EASED + 1
    return EASE


def with_a_global_variable_of_a_function(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * eased()).backward()
        yield
        job.update()


def with_a_global_variable_elsewhere(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    import elsewhere  # type: ignore[import-not-found]

    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * elsewhere.eased()).backward()
        yield
        job.update()


@pytest.mark.usefixtures("arena")
def test_a_global_variable_of_another_module_is_named_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere.py").write_text("EASE, EASED = 1.0, 0\n\n\n" + inspect.getsource(eased))
    monkeypatch.syspath_prepend(tmp_path)
    line = said(with_a_global_variable_elsewhere, caplog, "carries from turn to turn")
    sys.modules.pop("elsewhere")
    assert 'snap.track("elsewhere/EASE", get=lambda: elsewhere.EASE' in line
    assert "EASED" not in line


def with_environments(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    room, inner_room, eval_room, other_room = Room(), Room(), Room(), Room()

    def collected() -> float:
        return inner_room.step(1.0)

    def evaluated() -> None:
        other_room.step(1.0)

    for _ in snap.steps(STEPS):
        seen = room.step(1.0) + collected()
        job.model(torch.full((2, 4), seen)).sum().backward()
        yield
        job.update()
        eval_room.step(1.0)
        evaluated()


def with_sums_that_are_made_anew(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    sums = torch.zeros(2)
    for step in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        sums[0] += loss.detach()
        sums[1] += 1
        loss.backward()
        yield
        if not sums[1].isnan():
            job.update()
        if step % 2:
            sums = torch.zeros(2)


def with_sums_that_are_emptied(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    sums = torch.zeros(2)
    for step in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        sums[0] += loss.detach()
        loss.backward()
        yield
        if not sums[0].isnan():
            job.update()
        if step % 2:
            sums.zero_()


def one_pass(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for x in snap.data([torch.randn(2, 4) for _ in range(STEPS)]):
        job.model(x).sum().backward()
        yield
        job.update()


def with_a_pass_in_a_function(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for number in range(snap.epoch, 1):
        if number:
            job.schedule.step()
        yield from one_pass(snap, job)
        job.schedule.step()


@pytest.mark.usefixtures("arena")
def test_the_top_of_a_pass_that_a_function_makes_is_found(caplog: pytest.LogCaptureFixture) -> None:
    first = inspect.getsourcelines(with_a_pass_in_a_function)[1]
    line = said(with_a_pass_in_a_function, caplog, "at the top of a pass")
    assert f"line {first + 3} of {Path(__file__).name}" in line


class Reading:
    """Data that is read at a place of its own, as training and evaluations do."""

    def __init__(self) -> None:
        self.place = 0

    def next(self) -> torch.Tensor:
        self.place += 1
        return torch.full((2, 4), float(self.place))


def evaluated_on_its_own_data(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    training, other, held_out = Reading(), Reading(), Reading()
    for _ in snap.steps(STEPS):
        job.model.eval()
        with torch.no_grad():
            logging.getLogger("training").debug("%s", job.model(held_out.next()).sum())
        job.model.train()
        job.model(training.next() + other.next()).sum().backward()
        yield
        job.update()


class Counted(torch.autograd.Function):
    """What scripts reverse gradients by, more and more."""

    share = 0.0
    logged = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        Counted.share = min(1.0, Counted.share + 0.01)
        Counted.logged += 1
        return -Counted.share * given


def with_a_function_of_its_own(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        Counted.apply(job.model(torch.randn(2, 4)).sum()).backward()  # type: ignore[no-untyped-call]
        yield
        job.update()


def set_rate(optim: torch.optim.Optimizer, step: int, args: SimpleNamespace) -> None:
    rate = args.rate
    rate *= 0.9**step
    for group in optim.param_groups:
        group["lr"] = rate


def shrink(optim: torch.optim.Optimizer, args: SimpleNamespace) -> None:
    scale = args.scale
    scale *= 0.9
    for group in optim.param_groups:
        group["lr"] *= float(scale)


def with_rates_that_follow_from_options(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """A number is not changed in place, though a tensor would be."""
    args = SimpleNamespace(rate=0.1, scale=torch.ones(()))
    for step in snap.steps(STEPS):
        set_rate(job.optim, step, args)
        shrink(job.optim, args)
        job.model(torch.randn(2, 4)).square().sum().backward()
        yield
        job.update()


def with_a_schedule_that_reads(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    held = {"scale": 1.0}

    def watch(loss: float) -> None:
        held["scale"] *= 0.9 if loss > 1 else 1.0

    schedule = torch.optim.lr_scheduler.LambdaLR(job.optim, lambda turn: held["scale"] * 0.9**turn)
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).square().sum()
        loss.backward()
        yield
        job.update()
        watch(loss.item())
        schedule.step()


class Cut:
    """A callback."""

    def __init__(self) -> None:
        self.turns = 0
        self.logged = 0

    def after_backward(self, model: nn.Module) -> None:
        self.turns += 1
        for parameter in model.parameters():
            parameter.grad.div_(self.turns)  # type: ignore[union-attr]

    def after_step(self, model: nn.Module) -> None:
        self.logged += 1


class Warmer(Cut):
    """Keeps a count in one method, and reads it in another."""

    def after_backward(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, self.turns / 5))  # type: ignore[union-attr]

    def after_step(self, model: nn.Module) -> None:
        self.turns += 1
        self.logged += 1


SETTINGS = {"warmth": 1.0, "logged": 0.0}


class Scaled(nn.Module):
    """Reads what another function keeps."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * SETTINGS["warmth"]


def cool() -> None:
    SETTINGS["warmth"] *= 0.9
    SETTINGS["logged"] += 1


class Callbacks:
    """Calls its callbacks by name."""

    def __init__(self, *found: Cut) -> None:
        self.found = found

    def __call__(self, name: str, model: nn.Module) -> None:
        for each in self.found:
            getattr(each, name)(model)


def with_callbacks(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    calls = Callbacks(Cut())
    for _ in snap.steps(STEPS):
        job.model(torch.randn(2, 4)).sum().backward()
        calls("after_backward", job.model)
        yield
        job.update()
        calls("after_step", job.model)


def with_functions_that_share(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    calls, model = Callbacks(Warmer()), nn.Sequential(job.model, Scaled())
    for _ in snap.steps(STEPS):
        model(torch.randn(2, 4)).sum().backward()
        calls("after_backward", job.model)
        yield
        job.update()
        calls("after_step", job.model)
        cool()


def numbers() -> Iterator[float]:
    number = 0
    while True:
        number += 1
        yield float(number)


def halved() -> Iterator[float]:
    share = 1.0
    while True:
        share = share / 2
        yield share


def drawn() -> Iterator[float]:
    while True:
        yield torch.rand(1).item()


def with_a_dict_of_everything(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    state: dict[str, Any] = {"model": job.model, "iter_num": 0, "step_count": 0}
    for _ in snap.steps(STEPS):
        for group in job.optim.param_groups:
            group["lr"] = 0.1 / (1 + state["iter_num"])
        state["iter_num"] += 1
        (state["model"](torch.randn(2, 4)).sum() * state["step_count"]).backward()
        yield
        job.update()
        state["step_count"] += 1


def counted_elsewhere() -> Iterator[float]:
    """Neither loops over anything nor counts."""
    held = numbers()
    while True:
        yield next(held)


def with_what_another_generator_holds(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    scales = counted_elsewhere()
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * next(scales)).backward()
        yield
        job.update()


def with_iterators(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    scales, counted, noise = itertools.cycle([1.0, 2.0, 3.0]), numbers(), drawn()
    shares, halves = (share / 10 for share in range(1, 100)), halved()
    kept = iter(snap.data(lambda: itertools.cycle([1.0, 2.0, 3.0]), name="kept"))
    for _ in snap.steps(STEPS):
        scale = next(scales) * next(counted) * next(noise) * next(kept) * next(iter([1.0])) * next(shares)
        scale *= next(halves)
        (job.model(torch.randn(2, 4)).sum() * scale).backward()
        yield
        job.update()


class Endless:
    """Reads a loader whose iterator was made before the hook could see it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        with unwatched():
            self.batches = iter(loader)

    def next(self) -> Any:
        return next(self.batches)

    def train(self, snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            job.model(*self.next()).sum().backward()
            yield
            job.update()


def with_reads_within_a_turn(snap: InMemorySnapshot, job: Job, *, ahead: bool = False) -> Iterator[None]:
    data = iter(snap.data([torch.randn(2, 4) for _ in range(3 * STEPS)]))
    for _ in snap.steps(STEPS):
        batches = iter([next(data), next(data)]) if ahead else data
        for _ in range(2):
            job.model(next(batches)).sum().backward()
            job.update()
        yield


def with_a_pass_in_each_turn(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(2):
        yield from one_pass(snap, job)


@pytest.mark.usefixtures("arena")
def test_a_generator_that_reads_on_in_another_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert "scales = iter(snap.data(" in said(with_what_another_generator_holds, caplog, "a restart begins it anew")


def finished(model: nn.Module, losses: list[float], best: float) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4)).sum().mul(best + len(losses)).item()


def with_a_function_after_its_loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    best, warmth = 0.0, 1.0
    losses = list[float]()
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum() * warmth
        loss.backward()
        yield
        job.update()
        losses.append(loss.item())
        best = max(best, loss.item())
        warmth *= 0.5
    finished(job.model, losses, best)


def with_an_update_that_an_option_leaves_out(snap: InMemorySnapshot, job: Job, bonus: bool = False) -> Iterator[None]:
    reward, warmth = 1.0, 1.0
    for _ in snap.steps(STEPS):
        if bonus:
            reward *= 2.0
        else:
            warmth *= 0.5
        (job.model(torch.randn(2, 4)).sum() * reward * warmth).backward()
        yield
        job.update()


def with_what_an_option_leaves_out(snap: InMemorySnapshot, job: Job, scaler: Any = None) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(job.optim)
            scaler.update()
        else:
            loss.backward()
            for parameter in job.model.parameters():
                parameter.main_grad = parameter.grad
                parameter.grad = parameter.main_grad * 0.5
            yield
            job.update()


@pytest.mark.usefixtures("arena")
def test_what_an_option_leaves_out_is_not_named_nor_are_gradients(caplog: pytest.LogCaptureFixture) -> None:
    assert not said(with_what_an_option_leaves_out, caplog, "the script carries")


class Precision:
    """Scales losses by what it counts, if it is told to."""

    def __init__(self, is_low: bool) -> None:
        self.is_low, self.scale = is_low, 1.0

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_low:
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def finish(self, job: Job) -> None:
        if self.is_low:
            self.unscale(job)

    def unscale(self, job: Job) -> None:
        for parameter in job.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / self.scale)
        self.scale *= 2


def with_a_precision(snap: InMemorySnapshot, job: Job, is_low: bool) -> Iterator[None]:
    precision = Precision(is_low)
    for _ in snap.steps(STEPS):
        precision.backward(job.model(torch.randn(2, 4)).sum())
        precision.finish(job)
        yield
        job.update()


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("is_low", [True, False])
def test_what_an_option_leaves_out_in_another_function_is_not_named(
    is_low: bool, caplog: pytest.LogCaptureFixture
) -> None:
    line = said(partial(with_a_precision, is_low=is_low), caplog, "the script carries")
    assert ("precision.scale (line" in line) == is_low


@pytest.mark.usefixtures("arena")
def test_batches_that_are_read_in_the_middle_of_a_turn_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not said(partial(with_reads_within_a_turn, ahead=True), caplog, "Read all batches")
    assert not said(with_a_pass_in_each_turn, caplog, "Read all batches")
    assert said(with_reads_within_a_turn, caplog, "Read all batches")


def with_hooks_on_a_step(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    turns, logged = [0], [0]

    def warm(optim: torch.optim.Optimizer, *_: object) -> None:
        turns[0] += 1
        for group in optim.param_groups:
            group["lr"] = 0.01 * turns[0]

    def log(*_: object) -> None:
        logged[0] += 1

    job.optim.register_step_pre_hook(warm)
    job.optim.register_step_post_hook(log)
    for _ in snap.steps(STEPS):
        job.model(torch.randn(2, 4)).sum().backward()
        yield
        job.update()


class Reader:
    """Reads ahead in a thread of its own, which waits for room most of the time."""

    def __init__(self) -> None:
        self.queue: queue.Queue[float] = queue.Queue(1)
        self.thread = threading.Thread(target=self._fill, name="reads ahead")
        self.thread.start()

    def _fill(self) -> None:
        for number in range(STEPS + 1):
            self.queue.put(float(number))

    def __next__(self) -> float:
        return self.queue.get(timeout=DEADLINE_S)

    def close(self) -> None:
        next(self)
        self.thread.join(DEADLINE_S)


def fed_by_an_object(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    reader = Reader()
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * reader.__next__()).backward()
        yield
        job.update()
    reader.close()


def fed_by_a_queue(snap: InMemorySnapshot, job: Job, *, kind: type[Any] = queue.Queue) -> Iterator[None]:
    numbers = kind()
    for number in range(STEPS):
        numbers.put_nowait(float(number))
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(2, 4)).sum() * numbers.get_nowait()).backward()
        yield
        job.update()


def read_ahead(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    numbers = itertools.count()
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(lambda: next(numbers))
        for _ in snap.steps(STEPS):
            number = ahead.result(DEADLINE_S)
            ahead = pool.submit(lambda: next(numbers))
            (job.model(torch.randn(2, 4)).sum() * number).backward()
            yield
            job.update()


def logged_by_a_thread(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    losses: queue.Queue[float] = queue.Queue()
    thread = threading.Thread(target=lambda: [losses.get() for _ in range(STEPS)])
    thread.start()
    for _ in snap.steps(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        loss.backward()
        yield
        job.update()
        losses.put(loss.item())
    thread.join(DEADLINE_S)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (fed_by_an_object, "beside the loop (reads ahead)"),
        (fed_by_a_queue, "numbers = iter(snap.data("),
        (partial(fed_by_a_queue, kind=asyncio.Queue), "numbers = iter(snap.data("),
        (read_ahead, "ahead = iter(snap.data("),
        (logged_by_a_thread, ""),
    ],
)
def test_what_threads_feed_steps_with_is_named(loop: Loop, named: str, caplog: pytest.LogCaptureFixture) -> None:
    line = said(loop, caplog, "a restart begins it anew")
    assert bool(line) == bool(named) and named in line


def from_a_list(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    cycles, by_name = [itertools.cycle([1.0, 2.0, 3.0])], {"b": itertools.cycle([1.0, 2.0])}
    kept = [iter(snap.data(lambda: itertools.cycle([1.0, 2.0, 3.0]), name="kept"))]
    for _ in snap.steps(STEPS):
        scale = 1.0
        for cycle, known in zip(cycles, kept, strict=True):
            scale *= next(cycle) * next(known)
        taken = by_name["b"]
        scale *= next(taken)
        (job.model(torch.randn(2, 4)).sum() * scale).backward()
        yield
        job.update()


def with_two_sources(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """Each batch begins a step anew, within a turn, and in a loop of its own."""
    reads = [iter(snap.data(lambda: itertools.repeat(1.0), name=name)) for name in ("a", "b")]
    for _ in snap.steps(STEPS):
        loss: Any = 0.0
        for i in range(2):
            loss = loss + job.model(torch.randn(2, 4)).sum() * next(reads[i])
        loss.backward()
        yield
        job.step()


def with_its_own_schedule(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()


@pytest.mark.usefixtures("arena")
def test_what_the_hook_was_given_is_kept_wherever_the_script_holds_it(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.schedule = Warming(job.optim)
    life(with_its_own_schedule, job, None)
    assert "turn" not in caplog.text


class Penalty:
    def __init__(self) -> None:
        self.share = 0.1
        self.told = 0

    def update(self, loss: float) -> None:
        self.share *= 1.1 if loss > 1 else 0.9
        self.told += 1


class Training:
    """Its step calls methods, of its own and of what it holds, which read and write numbers."""

    def __init__(self, job: Job) -> None:
        self.job, self.penalty = job, Penalty()

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.job.model(torch.randn(2, 4)).square().sum() * self.penalty.share
        return loss

    def step(self) -> None:
        loss = self.loss()
        torch.autograd.backward(loss)
        self.penalty.update(loss.item())


def with_helpers_of_helpers(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    training = Training(job)
    for _ in snap.steps(STEPS):
        training.step()
        yield
        job.update()


class Meters:
    """Goes through batches, and logs what it was told, as those of torchvision's reference scripts do."""

    def __init__(self) -> None:
        self.meters: dict[str, list[float]] = defaultdict(list)

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.meters[name].append(value)

    def __getattr__(self, name: str) -> list[float]:
        return self.meters[name]

    def log_every(self, batches: Iterable[Any]) -> Iterator[Any]:
        reading: dict[str, float] = {}
        for count, batch in enumerate(batches):
            yield batch
            reading.update(count=count)
            print(reading, self.meters)


def with_meters_around_its_data(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    meters = Meters()
    for scale in meters.log_every(snap.data([torch.ones(())] * STEPS)):
        loss = job.model(torch.randn(2, 4)).square().sum() * scale
        loss.backward()
        yield
        job.update()
        meters.update(loss=loss.item())


class Scheduled:
    """Its loop counts, and its methods read the counts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loss = torch.zeros(())
        self.turns = self.passed = self.logged = self.used = 0

    def warm(self) -> None:
        self.set_rate(0.01 * (1 + self.turns))

    def set_rate(self, rate: float, logged: int = 0) -> None:
        for group in self.job.optim.param_groups:
            group["lr"] = rate
        print(logged)

    def backward(self) -> None:
        torch.autograd.backward(self.loss)

    def tell(self) -> None:
        print(self.logged)

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        self.used = snap.step
        for _ in snap.steps(STEPS):
            self.warm()
            self.set_rate(0.01 * self.passed + self.used, self.logged)
            self.loss = self.job.model(torch.randn(2, 4)).square().sum()
            self.backward()
            yield
            self.job.update()
            self.tell()
            self.turns += 1
            self.passed += 1
            self.logged += 1
            self.used += 1


def with_functions_that_read(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    turns = logged = 0

    def warm() -> None:
        for group in job.optim.param_groups:
            group["lr"] = 0.01 * (1 + turns)
        print(logged)

    for _ in snap.steps(STEPS):
        warm()
        job.model(torch.randn(2, 4)).square().sum().backward()
        yield
        job.update()
        turns += 1
        logged += 1


class Adding:
    """Adds gradients up, but for a while."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.is_last = True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        was = self.is_last
        self.is_last = False
        try:
            yield
        finally:
            self.is_last = was

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_last:
            torch.autograd.backward(loss)


def with_a_switch_that_is_put_back(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    adding, share = Adding(job), 0.5
    for _ in snap.steps(STEPS):
        with adding.held_back():
            adding.backward(job.model(torch.randn(2, 4)).sum())
        before = share
        share = share * 0.5
        adding.backward(job.model(torch.randn(2, 4)).sum() * share)
        yield
        job.update()
        share = before


class Batch:
    """What each turn makes anew."""

    def __init__(self) -> None:
        self.value = torch.ones(2, 4)


class Warmup:
    """A callback that is given its trainer: reads what that counts, and counts there itself."""

    def before_turn(self, fitting: Fitting, batch: Batch) -> None:
        batch.value = batch.value * 2
        fitting.loss = fitting.job.model(batch.value).square().sum()

    def before_step(self, fitting: Fitting) -> None:
        for group in fitting.job.optim.param_groups:
            group["lr"] = 0.01 * (1 + fitting.turns) + 0.001 * fitting.seen
        print(fitting.logged)

    def after_step(self, fitting: Fitting) -> None:
        fitting.seen += 1


class Fitting:
    """A trainer that passes itself to its callbacks."""

    def __init__(self, job: Job) -> None:
        self.job, self.callbacks = job, [Warmup()]
        self.turns = self.seen = self.logged = 0
        self.loss = torch.zeros(())

    def read(self) -> Batch:
        held: Any = [Batch()]
        loader = DataLoader[Any](held, collate_fn=lambda found: copy.copy(found[0]), generator=torch.Generator())
        found: Batch = next(iter(loader))
        return found

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            batch = self.read()
            for each in self.callbacks:
                each.before_turn(self, batch)
            torch.autograd.backward(self.loss)
            for each in self.callbacks:
                each.before_step(self)
            yield
            self.job.update()
            self.turns += 1
            self.logged += 1
            for each in self.callbacks:
                each.after_step(self)


class Cooling:
    """One number follows from another, and the loop is in one method, the step in the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.turns = self.told = 0
        self.temperature = 1.0
        self.batch = torch.zeros(())

    def step(self) -> None:
        self.batch = torch.randn(2, 4)
        (self.job.model(self.batch).square().sum() * self.temperature).backward()
        self.job.update()
        self.turns += 1
        self.told += 1
        self.temperature = max(0.1, 1 - 0.01 * self.turns)

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            yield
            self.step()


group = torch.Generator()
"""Called as a variable of a function, which is another one."""


class Counting:
    """Its count gives the rate, by another method, or the seed."""

    def __init__(self, job: Job, seeds: bool) -> None:
        self.job, self.seeds = job, seeds
        self.updates = 0

    def count(self, updates: int) -> None:
        self.updates = updates
        if not self.seeds:
            for group in self.job.optim.param_groups:
                group["lr"] = 0.1 / updates

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            yield
            if self.seeds:
                torch.manual_seed(1 + self.updates)
            self.job.backward()
            self.job.update()
            self.count(self.updates + 1)


def with_a_generator_that_trains(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    def trains() -> Iterator[int]:
        rate, logged = 0.05, 0
        while True:
            job.optim.param_groups[0]["lr"] = rate
            job.backward()
            job.update()
            rate *= 0.9
            logged += 1
            yield logged

    turns = trains()
    for _ in snap.steps(STEPS):
        next(turns)
        yield


def with_a_generator_for_each_turn(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    def trains(rate: float) -> Iterator[None]:
        for _ in range(1):
            job.optim.param_groups[0]["lr"] = rate
            job.backward()
            yield
            job.update()
            rate *= 0.9

    for _ in snap.steps(STEPS):
        yield from trains(0.05)


def in_a_function_that_a_library_calls(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    rates, logged = [0.05], [0]

    def train() -> None:
        job.optim.param_groups[0]["lr"] = rates[0]
        job.backward()
        job.update()
        rates[0] *= 0.9
        logged[0] += 1

    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            pool.submit(train).result(DEADLINE_S)
            yield


class Experience:
    """What was seen, and how much of it."""

    def __init__(self) -> None:
        self.seen = torch.zeros(8, 4)
        self.place = self.count = self.newest = 0

    def add(self, x: torch.Tensor) -> None:
        self.seen[self.place] = x
        self.place = (self.place + 1) % 8
        self.count += 1
        self.newest = self.count

    def drawn(self) -> torch.Tensor:
        return self.seen[: self.count] / self.newest


def replayed(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    experience = Experience()
    for _ in snap.steps(STEPS):
        experience.add(torch.randn(4))
        experience.add(torch.randn(4))
        job.model(experience.drawn()).sum().backward()
        yield
        job.step()


def fill(target: nn.Module, source: nn.Module) -> None:
    for theirs, ours in zip(target.parameters(), source.parameters(), strict=True):
        theirs.data.copy_(ours)


def with_a_target(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    target = copy.deepcopy(job.model)
    for turn in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        if turn % 8 == 7:
            fill(target, source=job.model)


def with_two_targets(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """The same variables go through both, as in TD3 and SAC, and then through what is only looked at."""
    first, second, shadow = (copy.deepcopy(job.model) for _ in range(3))
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        for ours, theirs in zip(job.model.parameters(), first.parameters(), strict=True):
            theirs.data.copy_(0.1 * ours.data + 0.9 * theirs.data)
        for ours, theirs in zip(job.model.parameters(), second.parameters(), strict=True):
            theirs.data.copy_(0.1 * ours.data + 0.9 * theirs.data)
        for ours, theirs in zip(job.model.parameters(), shadow.parameters(), strict=True):
            print((ours - theirs).norm())


class Leader(nn.Linear):
    """Has another one follow it slowly."""

    def lead(self, follower: nn.Module) -> None:
        for theirs, mine in zip(follower.parameters(), self.parameters(), strict=True):
            theirs.data.lerp_(mine.data, 0.1)


def with_a_target_that_a_model_leads(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    leader, targets = Leader(4, 2), [Leader(4, 2)]
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(3, 4)).sum() + targets[0](torch.randn(3, 4)).sum()).backward()
        yield
        job.step()
        leader.lead(targets[0])


class Solver:
    """Is made anew for each batch, and counts its steps. It refers to itself, so that it is there for a while."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken = 0
        self.itself = self

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.taken += 1
        found: torch.Tensor = self.model(x * self.taken)
        return x + found.sum()


def solved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    solver = Solver(model)
    for _ in range(3):
        x = solver.step(x)
    return x.sum()


def with_a_solver_for_each_batch(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        loss = solved(job.model, torch.randn(3, 4))
        torch.autograd.backward(loss)
        yield
        job.step()


class Watching:
    """Evaluates now and then, and takes over weights, by a count of its own."""

    def __init__(self, job: Job) -> None:
        self.turns = 0
        self.loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(2, 4)), batch_size=2)
        self.model, self.target = job.model, copy.deepcopy(job.model)

    def evaluate(self) -> None:
        for (x,) in self.loader:
            self.model(x)

    def after_a_turn(self) -> None:
        self.turns += 1
        if self.turns % 2 == 0:
            self.evaluate()
            for theirs, ours in zip(self.target.parameters(), self.model.parameters(), strict=True):
                theirs.data.copy_(ours)


def evaluated_now_and_then(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    watching = Watching(job)
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        watching.after_a_turn()


class Weighting:
    """Weighs by the losses that it was told of, some calls below the loop."""

    def __init__(self) -> None:
        self.history = np.ones((2, 4))
        self.told = 0.0

    def sample(self) -> float:
        return float(self.weights()[0])

    def weights(self) -> Any:
        return self.history.mean(axis=-1)

    def tell(self, loss: float) -> None:
        self.told += loss
        self.note(loss)

    def note(self, loss: float) -> None:
        self.history[0, :-1] = self.history[0, 1:]
        self.history[0, -1] = loss


class Weighted:
    """Trains with it as libraries do, in methods that call one another."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.weighting = Weighting()

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            self.turn()
            yield
            self.job.step()

    def turn(self) -> None:
        self.backward()
        print(self.weighting.told)

    def backward(self) -> None:
        loss = self.job.model(torch.ones(2, 4)).sum() * self.weighting.sample()
        loss.backward()
        self.weighting.tell(loss.item())


def with_dots_and_brackets_in_keys(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    sums = {"loss.share[0]": 1.0, "loss.logged": 0.0}
    for _ in snap.steps(STEPS):
        loss = job.model(torch.ones(2, 4)).sum() * sums["loss.share[0]"]
        loss.backward()
        yield
        job.step()
        sums["loss.share[0]"] *= 0.5
        sums["loss.logged"] += 1.0


@pytest.mark.usefixtures("arena")
def test_a_loop_with_two_optimizers_is_read_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
    turns = 0
    with InMemorySnapshot(model, optimizers) as snap:
        for _ in snap.steps(3):
            (model(torch.ones(2)).sum() * turns).backward()
            for optimizer in optimizers:
                optimizer.step()
            turns += 1
    assert "turns (line" in caplog.text


NONE: list[str] = []


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named", "others"),
    [
        (annealed, ["warmth (line", 'kept = {"warmth": warmth}', 'kept["warmth"] for warmth'], NONE),
        (with_two_steps_in_a_turn, ["warmth (line"], NONE),
        (annealed_in_a_function, ["warmth (line", 'kept = {"warmth": warmth}'], NONE),
        (with_a_loss_that_is_logged, NONE, NONE),
        (with_two_sources, NONE, NONE),
        (with_a_generator_for_each_turn, NONE, NONE),
        (with_hooks_on_a_step, ["turns[0] (line", "get=lambda: list(turns), set=lambda values: turns."], ["logged"]),
        (with_a_function_of_its_own, ["Counted.share (line"], ["logged"]),
        (with_a_schedule_that_reads, ["held['scale'] (line"], NONE),
        (with_rates_that_follow_from_options, ["args.scale (line"], ["args.rate"]),
        (with_functions_that_share, ["calls.found[0].turns (line", "SETTINGS['warmth'] (line"], ["logged"]),
        (with_callbacks, ["calls.found[0].turns (line"], ["logged"]),
        (with_helpers, ["stopper.best (line", "stopper.waited (line", "warming.turn (line"], ["meter", "percent"]),
        (with_an_event_that_stops_it, ["stopper.best (line", "stopper.waited (line"], NONE),
        (with_an_entry_that_stops_it, ["stopper.best (line", "stopper.waited (line", "found (line"], NONE),
        (
            evaluated_on_its_own_data,
            ["training.place (line", 'snap.track("training/place"', 'snap.track("other/place"'],
            ["held_out"],
        ),
        (with_a_schedule_of_parts, ["cycle.phases[i].turn (line"], ["cycle.at"]),
        (
            with_environments,
            ["room (line", "get=lambda: cloudpickle.dumps(vars(room))", "cloudpickle.dumps(vars(inner_room))"],
            ["seen (line", "eval_room", "other_room"],
        ),
        (with_a_function_that_keeps_in_its_argument, ["options.scale (line"], ["args."]),
        (with_a_function_that_changes_its_argument, ["options.scale (line"], ["args.", "told"]),
        (
            with_lists_that_functions_are_given,
            ["seen (line", "passed (line", "notes.__defaults__ (line", 'setattr(notes, "__defaults__", value)'],
            ["fresh", "logged", "found"],
        ),
        (
            with_containers_that_are_asked,
            ["means['share'] (line", "nearest (line", "kept['b'] (line"],
            ["told"],
        ),
        (with_functions_that_others_call, ["held['turns'] (line"], ["logged"]),
        (
            with_functions_that_nobody_calls_by_name,
            ["held['turns'] (line", "COOLED['turns'] (line", "pulse.read (line", "pulse.entered (line"],
            ["['told']", "other."],
        ),
        (with_a_global_variable_of_a_function, ["EASE (line", 'kept["EASE"] for EASE'], ["EASED"]),
        (with_sums_that_are_made_anew, ["sums (line", 'kept = {"sums": sums}'], ["sums[", "slice("]),
        (with_sums_that_are_emptied, ["sums (line", 'kept = {"sums": sums}'], ["sums[", "slice("]),
        (with_meters_around_its_data, NONE, NONE),
        (with_a_rate_that_follows_a_sum, ["mean.now (line", "mean.total (line"], ["number", "least"]),
        (with_a_sum_that_is_logged, NONE, NONE),
        (with_callbacks_after_a_pass, ["restarting.bad (line", "objects[0].bad (line"], ["seen", "number"]),
        (with_helpers_of_helpers, ["training.penalty.share (line"], NONE),
        (
            lambda snap, job: Scheduled(job).train(snap),
            ["self.turns (line", "self.passed (line"],
            ["self.loss (line", "self.logged (line", "self.used (line"],
        ),
        (with_functions_that_read, ["turns (line"], ["logged (line"]),
        (with_a_switch_that_is_put_back, NONE, NONE),
        (lambda snap, job: Fitting(job).train(snap), ["self.turns (line", "self.seen (line"], ["logged", "batch"]),
        (
            lambda snap, job: Cooling(job).train(snap),
            ["self.turns (line", "self.temperature (line"],
            ["self.told (line", "self.batch (line"],
        ),
        (lambda snap, job: Counting(job, seeds=False).train(snap), ["self.updates (line"], NONE),
        (lambda snap, job: Counting(job, seeds=True).train(snap), ["self.updates (line"], NONE),
        (with_a_generator_that_trains, ["rate (line"], ["logged"]),
        (in_a_function_that_a_library_calls, ["rates[0] (line"], ["logged"]),
        (with_a_dict_of_everything, ["state[key] for key in ['iter_num', 'step_count']"], ["dict(state)"]),
        (replayed, ["experience (line", "get=lambda: pickle.dumps(vars(experience))"], ["experience.place"]),
        (with_generators_that_only_draw, NONE, NONE),
        (with_two_targets, ['"first", tensors=first)', '"second", tensors=second)'], ["shadow"]),
        (with_a_target, ['snap.track("target", tensors=target)'], NONE),
        (with_an_update_that_an_option_leaves_out, ["warmth (line"], ["reward"]),
        (with_a_function_after_its_loop, ["warmth (line"], ["best (line", "losses (line"]),
        (with_a_target_that_a_model_leads, ["targets[0] (line"], ["follower", "leader"]),
        (with_a_solver_for_each_batch, NONE, NONE),
        (lambda snap, job: Weighted(job).train(snap), ["self.weighting.history (line"], ["told"]),
        (with_dots_and_brackets_in_keys, ["sums['loss.share[0]'] (line", "get=lambda: dict(sums)"], ["logged"]),
        (evaluated_now_and_then, ["watching.turns (line", 'track("target", tensors=watching.target)'], NONE),
    ],
)
def test_what_feeds_steps_is_named_once_and_what_does_not_is_not(
    loop: Loop, named: list[str], others: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = said(loop, caplog, "carries from turn to turn")
    assert bool(line) == bool(named) and all(name in line for name in named)
    assert not any(name in line for name in others)
    assert "counts from its beginning" not in caplog.text


class Passes:
    """Counts passes from a number that it is given, or finds in an attribute."""

    def __init__(self, snap: InMemorySnapshot, job: Job) -> None:
        self.snap, self.job, self.first = snap, job, 0

    def train(self, first: int = 0) -> Iterator[None]:
        for _ in range(first, 3):
            yield from self.one()

    def train_from_attribute(self) -> Iterator[None]:
        for _ in range(self.first, 3):
            yield from self.one()

    def one(self) -> Iterator[None]:
        for (x,) in self.snap.data(DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)):
            self.job.model(x).sum().backward()
            yield
            self.job.step()


def given_an_argument(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    yield from Passes(snap, job).train(first=snap.epoch)


def given_an_attribute(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    passes = Passes(snap, job)
    passes.first = snap.epoch
    yield from passes.train_from_attribute()


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("loop", [given_an_argument, given_an_attribute])
def test_a_loop_may_be_told_by_its_caller_where_to_count_on(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    assert said(loop, caplog, "counts from its beginning") == ""


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("args.first = snap.epoch", True),
        ("train(model, first=int(snap.step))", True),
        ("print(f'goes on in pass {str(snap.epoch)}')", False),
        ("logger.info('%d', snap.step)", False),
        ("args.first = other.epoch", False),
        ("for epoch in range(snap.epoch, 3):\n    pass", False),
    ],
)
def test_to_log_the_place_tells_nobody_where_to_count_on(text: str, does: bool) -> None:
    assert hands_on(ast.parse(text), RunningValues({"snap": Hook()}).of) is does


@pytest.mark.usefixtures("arena")
def test_what_holdfast_calls_meanwhile_is_not_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_EVENTS", 10_000)  # a turn of that loop takes some hundreds
    assert "calls.found[0].turns (line" in said(with_callbacks, caplog, "carries from turn to turn")


class Entering:
    """Enters the hook itself if it is given none, and saves one of its counts."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optim = torch.optim.SGD(self.model.parameters(), 0.1)
        self.turns = self.saved = 0

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["saved"]

    def hook(self) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.optim, extra={"job": self})

    def enter(self) -> None:
        with self.hook() as snap:
            self.train(snap)

    def step(self) -> None:
        self.turns += 1
        self.saved += self.turns
        self.model(torch.full((1,), float(self.saved))).sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def train(self, snap: InMemorySnapshot) -> None:
        for _ in snap.steps(3):
            self.step()


def outside(trainer: Entering) -> None:
    with trainer.hook() as snap:
        trainer.train(snap)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(("run", "name"), [(Entering.enter, "self.turns"), (outside, "trainer.turns")])
def test_what_an_object_keeps_has_one_name_where_the_hook_is_entered(
    run: Callable[[Entering], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(Entering())
    (line,) = (each for each in caplog.messages if "carries from turn to turn" in each)
    assert line.startswith(f"{name} (line ") and line.count(".turns (line ") == 1
    assert f"get=lambda: {name}" in line and "saved" not in line


class Heated(Entering):
    """Has a part that its caller has another name for."""

    def __init__(self, warmth: Warmth) -> None:
        super().__init__()
        self.warmth = warmth

    def step(self) -> None:
        self.warmth.next()
        (self.model(torch.ones(1)).sum() * self.warmth()).backward()
        self.optim.step()
        self.optim.zero_grad()


@pytest.mark.usefixtures("arena")
def test_what_is_to_be_tracked_has_the_name_that_it_has_where_the_hook_is_entered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warmth = Warmth()
    Heated(warmth).enter()
    (line,) = (each for each in caplog.messages if "carries from turn to turn" in each)
    assert 'snap.track("warmth/turn", get=lambda: self.warmth.turn, ' in line
    assert line.count("warmth.turn (line ") == 1


class Rollout:
    """What a turn fills, and empties first."""

    def __init__(self) -> None:
        self.first = self.second = self.third = self.place = 0.0

    def add(self, value: float) -> None:
        self.first, self.second, self.third = self.second, self.third, value
        self.place += 1


class Player:
    """Acts in an environment, and remembers, in methods of its own; its caller enters the hook."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim, self.room, self.rollout = model, optim, Room(), Rollout()

    def act(self) -> None:
        self.rollout.add(self.room.step(1.0))

    def learn(self, snap: InMemorySnapshot) -> None:
        for _ in snap.steps(3):
            self.act()
            kept = self.rollout
            (self.model(torch.ones(1)).sum() * (kept.first + kept.second + kept.third + kept.place)).backward()
            self.optim.step()
            self.optim.zero_grad()


@pytest.mark.usefixtures("arena")
def test_objects_that_methods_call_methods_for_have_the_name_that_the_caller_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(1, 1)
    player = Player(model, torch.optim.SGD(model.parameters(), 0.1))
    with InMemorySnapshot(model, player.optim) as snap:
        player.learn(snap)
    (line,) = (each for each in caplog.messages if "carries from turn to turn" in each)
    assert "vars(player.room)" in line and "vars(player.rollout)" in line and "self." not in line


@pytest.mark.usefixtures("arena")
def test_an_environment_that_is_tracked_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    model, room = nn.Linear(1, 1), Room()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    snap = InMemorySnapshot(model, optim)
    snap.track("room", get=lambda: dict(vars(room)), set=lambda held: vars(room).update(held))
    with snap:
        for _ in snap.steps(3):
            model(torch.full((1,), room.step(1.0))).sum().backward()
            optim.step()
            optim.zero_grad()
    assert "carries from turn to turn" not in caplog.text


def test_the_line_for_one_object_in_a_list_keeps_them_all() -> None:
    """A schedule goes on to its next part after what is named was seen."""
    cycle, kept = Cycle(torch.optim.SGD([torch.zeros(1)], 0.1)), dict[str, Any]()
    cycle.phases[1].turn = 7
    snap = SimpleNamespace(track=lambda name, **how: kept.update(how, name=name))
    exec(line_for_attribute("cycle.phases[i].turn"), {"snap": snap, "cycle": cycle})
    held = kept["get"]()
    cycle.phases[1].turn = 0
    kept["set"](held)
    assert (kept["name"], held, cycle.phases[1].turn) == ("cycle/phases/turn", [0, 7], 7)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named", "others"),
    [
        (
            with_iterators,
            ["scales (line", "counted (line", "shares (line", "halves (line", 'name="scales"', 'name="counted"'],
            ["noise (line", "kept (line"],
        ),
        (
            lambda snap, job: Endless(DataLoader(TensorDataset(torch.ones(90, 4)), 2)).train(snap, job),
            ["self.batches (line", 'self.batches = iter(snap.data(lambda: ..., name="batches"))'],
            NONE,
        ),
        (from_a_list, ["cycles[i] = iter(snap.data(", "by_name['b'] = iter(snap.data("], ["kept[i]"]),
    ],
)
def test_iterators_that_know_their_place_are_named_with_a_line_for_each(
    loop: Loop, named: list[str], others: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = said(loop, caplog, "read on from")
    assert all(name in line for name in named) and not any(name in line for name in others)
    assert "carries from turn to turn" not in caplog.text


# ------------------------------------------------------------------ the source of a function that is running


def decorated(function: Callable[[], Any]) -> Callable[[], Any]:
    return function


class Within:
    @staticmethod
    @decorated
    def method() -> FrameType | None:
        text = """
no indentation here
"""
        return inspect.currentframe() if text else None


@decorated
def at_the_top() -> FrameType | None:
    return inspect.currentframe()


@pytest.mark.parametrize("function", [Within.method, at_the_top])
def test_the_source_of_a_function_is_found_with_its_lines(function: Callable[[], FrameType | None]) -> None:
    frame = function()
    assert frame is not None
    source = function_of(frame.f_code, frame.f_globals)
    assert isinstance(source, ast.FunctionDef) and source.name == function.__name__
    assert source.body[0].lineno <= frame.f_lineno <= (source.end_lineno or 0)


def test_without_a_source_nothing_is_found() -> None:
    names: dict[str, Any] = {"inspect": inspect}
    exec("def made():\n    return inspect.currentframe()", names)
    frame = names["made"]()
    assert function_of(frame.f_code, frame.f_globals) is None


@pytest.mark.parametrize("count", [0, 1, 128, 623, 624, 625, 3000])
def test_numbers_that_torch_has_drawn_are_counted(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(2):  # just seeded, and later
        before = rng.state_of(generator)
        for _ in range(count):
            torch.randint(2, (1,), generator=generator)
        assert rng.numbers_between(before, rng.state_of(generator)) == count
    assert rng.numbers_between(before, rng.state_of(torch.Generator().manual_seed(-1))) is None


def test_of_what_a_tracked_function_reads_in_part_the_rest_is_named() -> None:
    warmth, another = (SimpleNamespace(turn=0, phase=0, best=0) for _ in range(2))
    turn = "warmth.turn += 1\nwarmth.phase += warmth.turn % 3\n" + TRAIN.replace("model(x)", "model(x * warmth.phase)")
    ways: list[tuple[Callable[[], Any], set[str]]] = [
        (lambda: warmth.best, {"warmth.turn", "warmth.phase"}),
        (lambda: warmth.phase, {"warmth.turn"}),
        (lambda: [warmth.turn, warmth.phase], set()),
        (lambda: dict(vars(warmth)), set()),
        (lambda: [vars(each) for each in (warmth,)], set()),
        (lambda: warmth.__reduce__(), set()),
        (partial(vars, warmth), set()),
        (lambda: another.phase, {"warmth.turn", "warmth.phase"}),
    ]
    for get, named in ways:
        tracked = Tracked("warmth", get, print, None, Change.ANY, late=False)
        assert look(turn, tracked=tracked, warmth=warmth).carried.keys() == named


class Saved:
    """An object that saves all its attributes, and loads some."""

    def __init__(self) -> None:
        self.turn = self.phase = self.half = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn = state["turn"]
        self.half = self.turn // 2


class LoadedWhole(Saved):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class LoadedByItsBase(Saved):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)


class LoadedByOthers(Saved):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Saved, {"warmth.phase"}), (LoadedWhole, set()), (LoadedByItsBase, set()), (LoadedByOthers, set())],
)
def test_of_an_object_that_loads_single_attributes_the_others_are_named(kind: type[Saved], named: set[str]) -> None:
    turn = "warmth.turn += 1\nwarmth.half = warmth.half + warmth.turn\nwarmth.phase += warmth.half % 3\n"
    turn += TRAIN.replace("model(x)", "model(x * warmth.phase)")
    warmth = kind()
    assert look(turn, extra=warmth, warmth=warmth).carried.keys() == named
    assert look(turn, schedule=warmth, warmth=warmth).carried.keys() == named
