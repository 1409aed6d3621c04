"""Where a step begins, however the loop is written: a restored job continues unchanged, or a warning says why not."""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot
from tests.deadlines import DEADLINE_S

STEPS = 7
STOP = 4


class Job:
    """A model with buffers, an average of its weights, and a schedule."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        middle = layers or (torch.nn.BatchNorm1d(8),)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), *middle, torch.nn.Linear(8, 2))
        self.held_out = torch.randn(6, 4)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optim: Any = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule: Any = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    def hook(self) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optim, scheduler=self.schedule)
        snap.track("average", tensors={str(i): tensor for i, tensor in enumerate(self.average)}, changes="step")
        return snap

    def take_over(self, other: Job) -> None:
        """Start from the same state as `other`."""
        self.model.load_state_dict(other.model.state_dict())
        self.held_out = other.held_out
        for mean, known in zip(self.average, other.average, strict=False):
            mean.copy_(known)

    def backward(self) -> None:
        """Forward and backward on one batch."""
        self.model(torch.randn(6, 4)).square().sum().backward()

    def step(self) -> None:
        """Everything after backward."""
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()
        for mean, weight in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.5)

    def swap(self) -> None:
        """Exchange the weights and their average, as loops do for an evaluation."""
        for mean, weight in zip(self.average, self.model.parameters(), strict=True):
            mean.data, weight.data = weight.data.clone(), mean.data.clone()

    def digest(self) -> str:
        """A digest of all state."""
        sha = hashlib.sha256()
        owned = [parameter for group in self.optim.param_groups for parameter in group["params"]]
        states = [value for parameter in owned for _, value in sorted(self.optim.state[parameter].items())]
        for tensor in [*self.model.state_dict().values(), *self.average, *states, torch.get_rng_state()]:
            if isinstance(tensor, torch.Tensor):
                sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        sha.update(pickle.dumps((random.getstate(), np.random.get_state()[1].tolist(), self.rates())))  # type: ignore[index]
        return sha.hexdigest()

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optim.param_groups]


Loop = Callable[[InMemorySnapshot, Job], Iterator[None]]
"""A loop yields in each step just before its optimizer steps; everything taken so far is protected there."""


class Stop(Exception):
    """Ends a process where it is raised."""


def life(loop: Loop, job: Job, stop: int | None, seed: int = 1) -> tuple[int, list[str], InMemorySnapshot]:
    """Run one process. Returns the step it started with, the digest of the state in each of its steps, and the hook."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    digests: list[str] = []
    snap = job.hook()
    try:
        with snap:
            start = snap.step
            for _ in loop(snap, job):
                snap.drain(DEADLINE_S)
                digests.append(job.digest())
                if len(digests) == stop:
                    raise Stop
    except Stop:
        pass
    return start, digests, snap


def trial(loop: Loop, make: Callable[[], Job] = Job, stop: int = STOP, behind: int = 1) -> InMemorySnapshot:
    """A process that is stopped and its successor do the same as an undisturbed one; returns the first one's hook.

    Args:
        behind: how many steps are repeated.
    """
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    for other in models[1:]:
        other.take_over(models[0])
    _, whole, _ = life(loop, models[0], None)
    _, before, first = life(loop, models[1], stop)
    start, after, _ = life(loop, models[2], None, seed=99)
    assert start == stop - behind
    assert before == whole[:stop]
    assert after == whole[start:]
    return first


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


BEGIN = "call `snap.begin()` at the top of the loop"


# ------------------------------------------------------------------ loops that do not say where steps begin


class Dropping(Job):
    """A job whose forward also draws random numbers."""

    def __init__(self) -> None:
        super().__init__(torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))


class Simple(Job):
    """A job whose forward changes no state."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Tanh())


def plain(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        job.backward()
        yield
        job.step()


def evaluated(evaluate: Callable[[Job], None]) -> Loop:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for _ in range(snap.step, STEPS):
            job.backward()
            yield
            job.step()
            evaluate(job)

    return loop


def in_eval_mode(job: Job) -> None:
    job.model.eval()
    job.model(job.held_out).sum()
    job.model.train()


def without_gradients(job: Job) -> None:
    """In training mode, so it leaves changed averages in the buffers."""
    with torch.no_grad():
        job.model(job.held_out)


def with_the_average(job: Job) -> None:
    job.swap()
    in_eval_mode(job)
    without_gradients(job)
    job.swap()


def with_the_average_in_training_mode(job: Job) -> None:
    """Gradients of it could be computed, but are not."""
    job.swap()
    job.model(job.held_out).sum()
    job.swap()


def with_the_average_many_times(job: Job) -> None:
    for _ in range(3):
        with_the_average_in_training_mode(job)


def with_the_average_copied_in(job: Job) -> None:
    """The average is copied into the memory of the weights."""
    kept = [weight.detach().clone() for weight in job.model.parameters()]
    with torch.no_grad():
        for mean, weight in zip(job.average, job.model.parameters(), strict=True):
            weight.copy_(mean)
    job.model(job.held_out).sum()
    with torch.no_grad():
        for weight, value in zip(job.model.parameters(), kept, strict=True):
            weight.copy_(value)


def with_the_average_copied_in_through_data(job: Job) -> None:
    kept = [weight.data.clone() for weight in job.model.parameters()]
    for mean, weight in zip(job.average, job.model.parameters(), strict=True):
        weight.data.copy_(mean)
    job.model(job.held_out).sum()
    for weight, value in zip(job.model.parameters(), kept, strict=True):
        weight.data.copy_(value)


def clamped(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.clamp_(-0.3, 0.3)


def clamped_through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("make", [Job, Simple])
@pytest.mark.parametrize(
    "between",
    [
        in_eval_mode,
        without_gradients,
        with_the_average,
        with_the_average_in_training_mode,
        with_the_average_many_times,
        with_the_average_copied_in,
        with_the_average_copied_in_through_data,
        clamped,
        clamped_through_data,
    ],
)
def test_what_code_between_two_steps_leaves_behind_comes_back_and_what_it_borrows_does_not(
    between: Callable[[Job], None], make: Callable[[], Job]
) -> None:
    snap = trial(evaluated(between), make)
    # On a busy machine a copy may be so late that the in-place writes reach it; that snapshot is given up.
    in_place = between in (with_the_average_copied_in, with_the_average_copied_in_through_data)
    assert snap.statistics.failed <= in_place


@pytest.mark.usefixtures("arena")
def test_an_evaluation_that_looks_like_training_and_leaves_nothing_behind_changes_nothing() -> None:
    """Provided that nothing else changes until the step itself begins."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in range(snap.step, STEPS):
            if step:
                job.model(job.held_out)
            job.model(torch.full((6, 4), step + 1.0)).square().sum().backward()
            yield
            job.step()

    snap = trial(loop, Simple)
    assert snap.statistics.failed == 0


@pytest.mark.usefixtures("arena")
def test_an_evaluation_that_cannot_be_told_from_the_beginning_of_a_step_costs_the_snapshot_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It changes buffers in training mode; a restart would lose that change."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in range(snap.step, STEPS):
            job.backward()
            yield
            job.step()
            if step in (2, 3):
                job.model(job.held_out)

    torch.manual_seed(0)
    _, _, snap = life(loop, Job(), 6)
    assert snap.statistics.failed == 2
    said = [text for text in warnings_of(caplog) if "an evaluation" in text]
    assert len(said) == 1
    assert "no snapshot of step 3" in said[0]
    assert BEGIN in said[0]


@pytest.mark.usefixtures("arena")
def test_what_is_doubtful_is_never_sealed() -> None:
    """The process ends in a step whose beginning was uncertain; the restart goes back to the step before it."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in range(snap.step, STEPS):
            job.backward()
            if step != 3:
                yield
            job.step()
            if step == 2:
                job.model(job.held_out)
            if step == 3:
                raise Stop

    torch.manual_seed(0)
    life(loop, Job(), None)
    snap = Job().hook()
    with snap:
        assert snap.step == 2


def siamese(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        left, right = job.model(torch.randn(6, 4)), job.model(torch.randn(6, 4))
        (left - right).square().sum().backward()
        yield
        job.step()


def accumulating(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        for _ in range(3):
            job.backward()
        yield
        job.step()


def reading_ahead(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        batch = torch.randn(6, 4) * random.random() + np.random.random()
        job.model(batch).square().sum().backward()
        yield
        job.step()


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("loop", [plain, siamese, accumulating, reading_ahead])
@pytest.mark.parametrize("make", [Dropping, Simple])
def test_loops_that_say_nothing_are_followed(
    loop: Loop, make: Callable[[], Job], caplog: pytest.LogCaptureFixture
) -> None:
    snap = trial(loop, make)
    assert snap.statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


class Parts(Job):
    """Only the parts of the hooked module are ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"a": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)), "b": torch.nn.Linear(8, 2)}
        )
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    def backward(self) -> None:
        self.model["b"](self.model["a"](torch.randn(6, 4))).square().sum().backward()


@pytest.mark.usefixtures("arena")
def test_a_dict_of_modules_whose_parts_alone_are_called_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    snap = trial(plain, Parts)
    assert snap.statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if "no forward" in text]


class Quasi(Simple):
    """A job whose optimizer runs the model several times in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.optim = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)


@pytest.mark.usefixtures("arena")
def test_a_closure_that_runs_the_model_is_of_the_step() -> None:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for _ in range(snap.step, 9):
            batch = torch.randn(6, 4)

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                job.optim.zero_grad()
                loss: torch.Tensor = (job.model(batch) - 1).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            yield
            job.optim.step(closure)
            job.schedule.step()

    torch.manual_seed(0)
    jobs = [Quasi() for _ in range(3)]
    for other in jobs[1:]:
        other.take_over(jobs[0])
    _, whole, _ = life(loop, jobs[0], None)
    _, before, _ = life(loop, jobs[1], 7)
    start, after, _ = life(loop, jobs[2], None, seed=99)
    assert start == 5  # there is no snapshot 6 yet at that point, since forward only runs within `step`
    assert before == whole[:7]
    assert after == whole[start:]


# ------------------------------------------------------------------ forwards that the hook does not see


class Compiled(Job):
    """The hook gets the raw module, but the loop calls the compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Any = torch.compile(self.model, backend="eager")

    def backward(self) -> None:
        self.called(torch.randn(6, 4)).square().sum().backward()


@pytest.mark.usefixtures("arena", "compiling")
def test_a_forward_that_nobody_sees_is_warned_of_once_and_its_snapshots_are_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    snap = trial(plain, Compiled, behind=2)  # each snapshot is taken only as the next step ends
    assert snap.statistics.failed <= 1  # the first one, since nobody had noted its buffers
    said = [text for text in warnings_of(caplog) if "no forward" in text]
    assert len(said) == 3  # once in each of the three processes
    assert all(BEGIN in text for text in said)


@pytest.mark.usefixtures("arena", "compiling")
def test_a_compiled_step_goes_on_where_it_was() -> None:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        @torch.compile(backend="eager")
        def forward_and_backward(batch: torch.Tensor) -> None:
            loss: torch.Tensor = job.model(batch).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]

        for _ in range(snap.step, STEPS):
            forward_and_backward(torch.randn(6, 4))
            yield
            job.step()

    assert trial(loop, behind=2).statistics.failed <= 1


# ------------------------------------------------------------------ loops that say where their steps begin


class Adversaries(Job):
    """Two networks with an optimizer each, which step in another order than the one they are listed in."""

    def __init__(self) -> None:
        self.held_out = torch.randn(6, 4)
        self.parts = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))]
        self.model = torch.nn.ModuleList(self.parts)
        self.average = []
        self.optims = [torch.optim.Adam(part.parameters(), lr=0.05) for part in self.parts]
        self.optim = self.optims[0]

    def hook(self) -> InMemorySnapshot:
        return InMemorySnapshot(list(self.parts), self.optims)

    def turn(self, which: int) -> None:
        made = self.parts[0](torch.randn(6, 4))
        loss = self.parts[1](made if which == 0 else made.detach()).square().sum()
        self.model.zero_grad()
        loss.backward()

    def digest(self) -> str:
        self.optim = self.optims[0]
        first = super().digest()
        self.optim = self.optims[1]
        return first + super().digest()


def discriminator_first(snap: InMemorySnapshot, job: Any) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        job.turn(1)
        yield
        job.optims[1].step()
        job.turn(0)
        job.optims[0].step()


def discriminator_first_and_declared(snap: InMemorySnapshot, job: Any) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        job.turn(1)
        yield
        job.optims[1].step()
        job.turn(0)
        job.optims[0].step()


@pytest.mark.usefixtures("arena")
def test_optimizers_that_step_in_another_order_than_they_are_listed_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer 1 of 2, a Adam, .*`optim` lists"):
        life(discriminator_first, Adversaries(), None)


@pytest.mark.usefixtures("arena")
def test_where_the_loop_says_so_optimizers_step_in_any_order() -> None:
    assert trial(discriminator_first_and_declared, Adversaries).statistics.failed == 0


def begun(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        snap.begin()
        job.backward()
        yield
        job.step()


def counted(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()


def scheduled_at_the_top(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for step in snap.steps(STEPS):
        if step:
            job.schedule.step()
        job.backward()
        yield
        job.optim.step()
        job.optim.zero_grad()


def evaluated_in_training_mode(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        job.model(torch.randn(6, 4))


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("loop", [begun, counted, scheduled_at_the_top, evaluated_in_training_mode])
def test_a_loop_that_says_where_its_steps_begin_goes_on_where_it_was(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    assert trial(loop, Dropping).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


@pytest.mark.usefixtures("arena", "compiling")
def test_a_compiled_model_in_a_loop_that_says_where_its_steps_begin_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert trial(counted, Compiled).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


# ------------------------------------------------------------------ exceptions


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("declared", [False, True])
def test_an_exception_between_the_optimizer_and_the_schedule_leaves_the_step_before(
    arena: Path, declared: bool
) -> None:
    """The state of the step that has just ended is incomplete, and must never be sealed."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in snap.steps(STEPS) if declared else range(snap.step, STEPS):
            job.backward()
            yield
            if step == 3 and failing:
                job.optim.step()
                raise Stop
            job.step()

    torch.manual_seed(0)
    failing, jobs = False, [Job() for _ in range(3)]
    for other in jobs[1:]:
        other.take_over(jobs[0])
    _, whole, _ = life(loop, jobs[0], None)
    failing = True
    life(loop, jobs[1], None)
    failing = False
    start, after, _ = life(loop, jobs[2], None, seed=99)
    assert start == 3
    assert after == whole[3:]


@pytest.mark.usefixtures("arena")
def test_a_forward_that_fails_before_it_is_certain_that_a_step_began_leaves_the_step_before() -> None:
    """The forward may have been an evaluation with exchanged weights."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in range(snap.step, STEPS):
            if step == 4:
                job.swap()
                job.model(job.held_out)
                raise Stop
            job.backward()
            yield
            job.step()

    torch.manual_seed(0)
    life(loop, Job(), None)
    with Job().hook() as snap:
        assert snap.step == 3
