"""What a script carries from turn to turn, and feeds its steps with, is found in its source; what it logs is not."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import logging
import queue
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.snapshot.state import rng
from holdfast.snapshot.step.flow import Carries, Flow
from holdfast.snapshot.step.script import Named, RunningValues
from holdfast.snapshot.step.syntax import function_of, loops_at
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


def flow(function: ast.FunctionDef, line: int, values: dict[str, Any], adapter: TorchAdapter) -> Carries:
    """What a function carries whose turns are the loops around a line."""
    adapter.verify()  # notes what is captured
    return Flow(function, loops_at(function, line), True, RunningValues(values), Named([adapter]), {}).found


def look(turn: str, *, before: str = "n = 0", after: str = "", **values: Any) -> Carries:
    """What a loop over batches carries. `turn`: what it does with each; `after`: what it does after a pass."""
    text = SET_UP % (before, textwrap.indent(turn.strip(), " " * 12), textwrap.indent(after.strip(), " " * 8))
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    known = {"snap": Hook(), "model": model, "optim": optim, "average": nn.Linear(2, 2)}
    at = next(each.lineno for each in ast.walk(function) if isinstance(each, ast.For) and "data" in ast.dump(each.iter))
    return flow(function, at, known | values, TorchAdapter(model, optim))


TRAIN = "loss = model(x).sum()\noptim.zero_grad()\nloss.backward()\noptim.step()\n"


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ("loss = model(x).sum() * min(1, n / 10)\nloss.backward()\noptim.step()\nn += 1", {"n"}),
        (TRAIN.replace("model(x)", "model(x / n)") + "n = max(0.5, n * 0.9)", {"n"}),
        ("for group in optim.param_groups:\n    group['lr'] = 0.1 / (1 + n)\n" + TRAIN + "n += 1", {"n"}),
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
    ],
)
def test_what_reaches_a_step_is_named(turn: str, named: set[str]) -> None:
    group = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).param_groups[0]
    found = look(turn, group=group)
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
        "n = 0\nfor part in x:\n    loss = model(part * n).sum()\n    loss.backward()\n    n += 1\noptim.step()",
        "if x is None:\n    n += 1\n" + TRAIN,
    ],
)
def test_what_is_only_logged_is_not_named(turn: str) -> None:
    found = look(turn)
    assert not found.carried and not found.counts and not found.numbered


def test_a_name_that_is_used_again_for_a_log_is_not_taken_for_what_it_was() -> None:
    after = "loss = total / count\nif loss < best:\n    best = loss"
    found = look(TRAIN + "total += loss.item()\ncount += 1", before="best, total, count = 9.0, 0.0, 0", after=after)
    assert not found.carried


class Moving:
    """Has an attribute with the name of somebody's variable."""

    n = "cpu"

    def batch(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.n)


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


def test_what_the_hook_tells_is_found_again() -> None:
    turn = TRAIN.replace("(x)", "(x * n)") + "n += 1"
    assert not look(turn, before="n = snap.step").carried
    assert not look(turn, before="start = snap.epoch\n    n = 3 * start").carried


def counting(iterated: str) -> Carries:
    text = f"""
def train(snap, loader, model, optim):
    for epoch in {iterated}:
        for x in snap.data(loader):
            model(x).sum().backward()
            optim.step()
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return flow(function, 4, {"snap": Hook()}, TorchAdapter(nn.Linear(1, 1), None))


def test_a_loop_that_counts_from_its_beginning_again_is_found() -> None:
    assert counting("range(3)").counts == {3}
    assert counting("tqdm(range(3))").counts == {3}
    assert not counting("range(snap.epoch, 3)").counts
    assert not counting("itertools.count()").counts


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
        job.optim.zero_grad()
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
        job.optim.zero_grad()
        yield
        step()


def with_a_loss_that_is_logged(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    total, count = 0.0, 0
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
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
        self.total += value
        self.count += 1


def with_helpers(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    stopper, warming, meter = Stopper(), Warming(job.optim), Meter()
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
        loss = job.model(torch.randn(2, 4)).square().sum()
        loss.backward()
        yield
        job.optim.step()
        warming.step()
        meter.update(loss.item())
        stopper(loss.item())
        logging.getLogger("training").info("%s", meter.total / meter.count)
        if stopper.stops:
            break


def numbers() -> Iterator[float]:
    number = 0
    while True:
        number += 1
        yield float(number)


def drawn() -> Iterator[float]:
    while True:
        yield torch.rand(1).item()


def with_iterators(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    scales, counted, noise = itertools.cycle([1.0, 2.0, 3.0]), numbers(), drawn()
    kept = iter(snap.data(lambda: itertools.cycle([1.0, 2.0, 3.0]), name="kept"))
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
        scale = next(scales) * next(counted) * next(noise) * next(kept) * next(iter([1.0]))
        (job.model(torch.randn(2, 4)).sum() * scale).backward()
        yield
        job.optim.step()


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
        job.optim.zero_grad()
        job.model(torch.randn(2, 4)).sum().backward()
        yield
        job.optim.step()


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
        job.optim.zero_grad()
        (job.model(torch.randn(2, 4)).sum() * reader.__next__()).backward()
        yield
        job.optim.step()
    reader.close()


def fed_by_a_queue(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    numbers: queue.Queue[float] = queue.Queue()
    for number in range(STEPS):
        numbers.put(float(number))
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
        (job.model(torch.randn(2, 4)).sum() * numbers.get()).backward()
        yield
        job.optim.step()


def fed_by_a_task(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    numbers: asyncio.Queue[float] = asyncio.Queue()
    for number in range(STEPS):
        numbers.put_nowait(float(number))
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
        (job.model(torch.randn(2, 4)).sum() * numbers.get_nowait()).backward()
        yield
        job.optim.step()


def read_ahead(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    numbers = itertools.count()
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(lambda: next(numbers))
        for _ in snap.steps(STEPS):
            job.optim.zero_grad()
            number = ahead.result(DEADLINE_S)
            ahead = pool.submit(lambda: next(numbers))
            (job.model(torch.randn(2, 4)).sum() * number).backward()
            yield
            job.optim.step()


def logged_by_a_thread(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    losses: queue.Queue[float] = queue.Queue()
    thread = threading.Thread(target=lambda: [losses.get() for _ in range(STEPS)])
    thread.start()
    for _ in snap.steps(STEPS):
        job.optim.zero_grad()
        loss = job.model(torch.randn(2, 4)).sum()
        loss.backward()
        yield
        job.optim.step()
        losses.put(loss.item())
    thread.join(DEADLINE_S)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (fed_by_an_object, "beside the loop (reads ahead)"),
        (fed_by_a_queue, "numbers = iter(snap.data("),
        (fed_by_a_task, "numbers = iter(snap.data("),
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
        job.optim.zero_grad()
        scale = 1.0
        for cycle, known in zip(cycles, kept, strict=True):
            scale *= next(cycle) * next(known)
        taken = by_name["b"]
        scale *= next(taken)
        (job.model(torch.randn(2, 4)).sum() * scale).backward()
        yield
        job.optim.step()


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
        job.optim.zero_grad()
        job.model(torch.randn(2, 4)).square().sum().backward()
        yield
        job.optim.step()
        job.schedule.step()


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
        job.optim.zero_grad()
        training.step()
        yield
        job.optim.step()


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
            self.job.optim.zero_grad()
            self.warm()
            self.set_rate(0.01 * self.passed + self.used, self.logged)
            self.loss = self.job.model(torch.randn(2, 4)).square().sum()
            self.backward()
            yield
            self.job.optim.step()
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
        job.optim.zero_grad()
        warm()
        job.model(torch.randn(2, 4)).square().sum().backward()
        yield
        job.optim.step()
        turns += 1
        logged += 1


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
        self.job.optim.step()
        self.turns += 1
        self.told += 1
        self.temperature = max(0.1, 1 - 0.01 * self.turns)

    def train(self, snap: InMemorySnapshot) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            self.job.optim.zero_grad()
            yield
            self.step()


def with_a_generator_that_trains(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    def trains() -> Iterator[int]:
        rate, logged = 0.05, 0
        while True:
            job.optim.param_groups[0]["lr"] = rate
            job.optim.zero_grad()
            job.backward()
            job.optim.step()
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
            job.optim.zero_grad()
            job.backward()
            yield
            job.optim.step()
            rate *= 0.9

    for _ in snap.steps(STEPS):
        yield from trains(0.05)


def in_a_function_that_a_library_calls(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    rates, logged = [0.05], [0]

    def train() -> None:
        job.optim.param_groups[0]["lr"] = rates[0]
        job.optim.zero_grad()
        job.backward()
        job.optim.step()
        rates[0] *= 0.9
        logged[0] += 1

    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            pool.submit(train).result(DEADLINE_S)
            yield


NONE: list[str] = []


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named", "others"),
    [
        (annealed, ["warmth (line", 'kept = {"warmth": warmth}', 'kept["warmth"] for warmth'], NONE),
        (annealed_in_a_function, ["warmth (line", 'kept = {"warmth": warmth}'], NONE),
        (with_a_loss_that_is_logged, NONE, NONE),
        (with_two_sources, NONE, NONE),
        (with_a_generator_for_each_turn, NONE, NONE),
        (with_hooks_on_a_step, ["turns[0] (line", "get=lambda: list(turns), set=lambda values: turns."], ["logged"]),
        (with_helpers, ["stopper.best (line", "stopper.waited (line", "warming.turn (line"], ["meter"]),
        (with_helpers_of_helpers, ["training.penalty.share (line"], NONE),
        (
            lambda snap, job: Scheduled(job).train(snap),
            ["self.turns (line", "self.passed (line"],
            ["self.loss (line", "self.logged (line", "self.used (line"],
        ),
        (with_functions_that_read, ["turns (line"], ["logged (line"]),
        (
            lambda snap, job: Cooling(job).train(snap),
            ["self.turns (line", "self.temperature (line"],
            ["self.told (line", "self.batch (line"],
        ),
        (with_a_generator_that_trains, ["rate (line"], ["logged"]),
        (in_a_function_that_a_library_calls, ["rates[0] (line"], ["logged"]),
    ],
)
def test_what_feeds_steps_is_named_once_and_what_does_not_is_not(
    loop: Loop, named: list[str], others: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = said(loop, caplog, "carries from turn to turn")
    assert bool(line) == bool(named) and all(name in line for name in named)
    assert not any(name in line for name in others)
    assert "counts from its beginning" not in caplog.text


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize(
    ("loop", "named", "others"),
    [
        (
            with_iterators,
            ["scales (line", "counted (line", 'name="scales"', 'name="counted"'],
            ["noise (line", "kept (line"],
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
