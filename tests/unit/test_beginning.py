"""A loop is plain, or says where its steps begin, and goes on unchanged after a restart; others are refused at once."""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot
from tests.deadlines import DEADLINE_S

pytestmark = pytest.mark.usefixtures("arena")
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

    def update(self) -> None:
        """The step of the optimizer alone."""
        self.optim.step()
        self.optim.zero_grad()

    def step(self) -> None:
        """Everything after backward."""
        self.update()
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
    start, before, whole, first = stopped(loop, make, stop)
    assert start == stop - behind
    assert before == whole[:stop]
    return first


def stopped(loop: Loop, make: Callable[[], Job], stop: int) -> tuple[int, list[str], list[str], InMemorySnapshot]:
    """A process is stopped, and its successor does the same as an undisturbed one. Returns at which step that begins,
    what the stopped and the undisturbed process did, and the stopped one's hook."""
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    for other in models[1:]:
        other.take_over(models[0])
    _, whole, _ = life(loop, models[0], None)
    _, before, first = life(loop, models[1], stop)
    start, after, _ = life(loop, models[2], None, seed=99)
    assert after == whole[start:]
    return start, before, whole, first


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


def looping(
    backward: Callable[[Any], object] = lambda job: job.backward(),
    step: Callable[[Any], object] = lambda job: job.step(),
    after: Callable[[Any], object] = lambda job: None,
    *,
    before: Callable[[Any], object] = lambda job: None,
    at: Collection[int] = range(STEPS),
    declared: bool = False,
) -> Loop:
    """The usual loop, with something `before` and `after` the steps `at`; `declared`: it says where its steps begin."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for turn in snap.steps(STEPS) if declared else range(snap.step, STEPS):
            if turn in at:
                before(job)
            backward(job)
            yield
            step(job)
            if turn in at:
                after(job)

    return loop


plain = looping()
counted = looping(declared=True)


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


def clamped(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.clamp_(-0.3, 0.3)


def clamped_through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


@pytest.mark.parametrize("make", [Job, Simple])
@pytest.mark.parametrize(
    "between",
    [
        in_eval_mode,
        without_gradients,
        with_the_average,
        clamped,
        clamped_through_data,
    ],
)
def test_what_code_between_two_steps_leaves_behind_comes_back_and_what_it_borrows_does_not(
    between: Callable[[Job], None], make: Callable[[], Job]
) -> None:
    assert trial(looping(after=between), make).statistics.failed == 0


def siamese(job: Job) -> None:
    left, right = job.model(torch.randn(6, 4)), job.model(torch.randn(6, 4))
    (left - right).square().sum().backward()


def accumulating(job: Job) -> None:
    for _ in range(3):
        job.backward()


def drawing_from_all(job: Job) -> None:
    job.model(torch.randn(6, 4) * random.random() + np.random.random()).square().sum().backward()


@pytest.mark.parametrize("backward", [Job.backward, siamese, accumulating, drawing_from_all])
@pytest.mark.parametrize("make", [Dropping, Simple])
def test_loops_that_say_nothing_are_followed(
    backward: Callable[[Job], None], make: Callable[[], Job], caplog: pytest.LogCaptureFixture
) -> None:
    snap = trial(looping(backward), make)
    assert snap.statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


class Scaled(Simple):
    """A job with a scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.optims: list[Any] = [self.optim]

    def hook(self) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.optims, scheduler=self.schedule, extra={"scaler": self.scaler})

    def digest(self) -> str:
        states = [value for optim in self.optims for state in optim.state.values() for value in state.values()]
        return f"{super().digest()} {[value.tolist() for value in states]} {self.scaler.state_dict()}"


class ScaledTwo(Scaled):
    """The weight and the bias of its last layer have an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        *_, weight, bias = self.model.parameters()
        self.optims = [torch.optim.Adam([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1, momentum=0.9)]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optims[0], 0.9)


@pytest.mark.parametrize("make", [Scaled, ScaledTwo])
def test_a_step_that_a_scaler_skips_is_a_step(make: Callable[[], Job], caplog: pytest.LogCaptureFixture) -> None:
    def loop(snap: InMemorySnapshot, job: Any) -> Iterator[None]:
        for step in snap.steps(STEPS) if make is ScaledTwo else range(snap.step, STEPS):
            loss = job.model(torch.randn(6, 4)).square().sum()
            job.scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            yield
            for optim in job.optims:
                job.scaler.step(optim)
            job.scaler.update()
            job.model.zero_grad()
            job.schedule.step()

    assert trial(loop, make).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


# ------------------------------------------------------------------ loops that are not plain, and say nothing


def with_a_closure(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        batch = torch.randn(6, 4)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            job.optim.zero_grad()
            loss: torch.Tensor = (job.model(batch) - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        yield
        job.optim.step(closure)


def in_eval_mode_always(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    job.model.eval()
    yield from plain(snap, job)


def stepping_twice(job: Job) -> None:
    job.optim.step()
    job.step()


def skipping(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for step in range(snap.step, STEPS):
        job.backward()
        if step == 1:
            job.optim.zero_grad()
            continue
        yield
        job.step()


def never_stepping(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(100):
        job.backward()
        job.optim.zero_grad()
        yield


def on_held_out_data(job: Job) -> None:
    job.model(job.held_out).square().sum().backward()


def drawing_for_an_evaluation(job: Job) -> None:
    job.model.eval()
    with torch.no_grad():
        job.model(torch.randn(6, 4))
    job.model.train()


def drawing_in_an_evaluation(job: Job) -> None:
    with torch.no_grad():
        torch.nn.Sequential(job.model, torch.nn.Identity())(job.held_out)


def add_noise(job: Job) -> None:
    with torch.no_grad():
        for weight in job.model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))


def with_a_batch_read_ahead(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    following = torch.randn(6, 4)
    for _ in range(snap.step, STEPS):
        loss = job.model(following).square().sum()
        following = torch.randn(6, 4)
        loss.backward()
        yield
        job.step()


def next_rate(job: Job) -> None:
    job.schedule.step()


class Unfreezing(Job):
    """The optimizer is given the last parameter later."""

    def __init__(self) -> None:
        super().__init__()
        *known, self.late = self.model.parameters()
        self.late.requires_grad_(False)
        self.optim = torch.optim.Adam(known, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    def unfreeze(self) -> None:
        self.optim.add_param_group({"params": [self.late.requires_grad_()]})


def with_a_functional_call(job: Job) -> None:
    weights = dict(job.model.named_parameters())

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(job.model, given, (torch.randn(6, 4),)).square().sum()
        return found

    for name, grad in torch.func.grad(loss)({name: weight.detach() for name, weight in weights.items()}).items():
        weights[name].grad = grad


class Compiled(Job):
    """The hook gets the raw module, but the loop calls the compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Any = torch.compile(self.model, backend="eager")

    def backward(self) -> None:
        self.called(torch.randn(6, 4)).square().sum().backward()


NOT_PLAIN: list[tuple[Loop, Callable[[], Job], str]] = [
    (with_a_closure, Simple, "no forward"),
    (plain, Compiled, "no forward"),
    (in_eval_mode_always, Job, "eval mode"),
    (looping(step=stepping_twice), Job, "no forward"),
    (skipping, Job, "zeroed again"),
    (never_stepping, Job, "zeroed again"),
    (looping(on_held_out_data, after=lambda job: job.model(job.held_out)), Job, "no gradients"),
    (looping(after=with_the_average_in_training_mode), Job, r"does not train .*\(torch\)"),
    (looping(after=drawing_for_an_evaluation), Job, r"random numbers .*\(torch\)"),
    (looping(after=drawing_in_an_evaluation), Dropping, r"random numbers .*\(torch\)"),
    (looping(on_held_out_data, after=add_noise), Simple, r"random numbers .*\(torch\)"),
    (with_a_batch_read_ahead, Simple, r"random numbers .*\(torch\)"),
    (looping(step=Job.update, before=next_rate), Job, r"at the top of the loop .*lr"),
    (looping(before=Unfreezing.unfreeze, at=[1]), Unfreezing, "given parameters"),
    (looping(with_a_functional_call), Job, r"place of its parameters.*weight"),
]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(("loop", "make", "seen"), NOT_PLAIN)
def test_a_loop_that_is_not_plain_is_told_so_in_its_first_turns_with_the_line_to_add(
    loop: Loop, make: Callable[[], Job], seen: str
) -> None:
    torch.manual_seed(0)
    job = make()
    snap = job.hook()
    turns = 0
    with pytest.raises(ConfigError, match=rf"(?s){seen}.*snap\.begin\(\)"), snap:
        for _ in loop(snap, job):
            turns += 1
            snap.drain(DEADLINE_S)
    assert turns <= (2 if loop is not never_stepping else 20)
    assert snap.protected_step is None


def forward_alone(job: Job) -> None:
    job.model(job.held_out)


def drawing_alone(job: Job) -> None:
    random.random()


@pytest.mark.parametrize(
    ("evaluate", "seen"),
    [
        (forward_alone, "does not train"),
        (drawing_for_an_evaluation, "random numbers"),
        (drawing_alone, "random numbers"),
    ],
)
def test_what_is_first_seen_later_costs_the_snapshots_of_its_steps_and_is_warned_of_once(
    evaluate: Callable[[Job], None], seen: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And a restart goes on exactly, from a step before or after these."""
    loop = looping(after=evaluate, at=[2, 3])
    first = trial(loop, Job, stop=3)
    assert first.statistics.failed == 0
    caplog.clear()
    torch.manual_seed(0)
    _, _, snap = life(loop, Job(), 6)
    assert snap.statistics.failed == 2
    (said,) = [text for text in warnings_of(caplog) if BEGIN in text]
    assert "no snapshot of step 3" in said
    assert seen in said


def test_a_step_before_which_an_optimizer_was_given_parameters_has_no_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop would give them once more after a restart there."""
    trial(looping(before=Unfreezing.unfreeze, at=[3]), Unfreezing, stop=4, behind=2)
    assert any("given parameters" in text for text in warnings_of(caplog))


def test_what_is_not_known_to_be_of_a_step_is_never_sealed() -> None:
    """The process ends in a step that began with an evaluation; the restart goes back to the step before it."""

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

    def backward(self) -> None:
        """The discriminator first."""
        self.turn(1)

    def step(self) -> None:
        self.optims[1].step()
        self.turn(0)
        self.optims[0].step()

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


def test_several_optimizers_are_refused_unless_the_loop_says_where_its_steps_begin() -> None:
    with pytest.raises(ConfigError, match=r"several optimizers.*snap\.begin\(\)"):
        life(plain, Adversaries(), None)


def begun(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for _ in range(snap.step, STEPS):
        snap.begin()
        job.backward()
        yield
        job.step()


scheduled_at_the_top = looping(step=Job.update, before=next_rate, at=range(1, STEPS), declared=True)
evaluated_in_training_mode = looping(after=lambda job: job.model(torch.randn(6, 4)), declared=True)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("loop", "make"),
    [
        *((loop, Dropping) for loop in (begun, counted, scheduled_at_the_top, evaluated_in_training_mode)),
        (counted, Adversaries),  # whose optimizers step in any order
        (counted, Compiled),
    ],
)
def test_a_loop_that_says_where_its_steps_begin_goes_on_where_it_was(
    loop: Loop, make: Callable[[], Job], caplog: pytest.LogCaptureFixture
) -> None:
    assert trial(loop, make).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if BEGIN in text]


# ------------------------------------------------------------------ exceptions


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


def test_a_forward_that_fails_before_it_is_certain_that_a_step_began_leaves_the_step_before() -> None:
    """The forward may have been an evaluation with exchanged weights."""

    def fail(job: Job) -> None:
        job.swap()
        job.model(job.held_out)
        raise Stop

    torch.manual_seed(0)
    life(looping(before=fail, at=[4]), Job(), None)
    with Job().hook() as snap:
        assert snap.step == 3
