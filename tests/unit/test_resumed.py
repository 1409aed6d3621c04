"""After a restart the first step begins with the restored state, or the job is refused and the changes are named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.snapshot.copy.engines import CpuEngine
from holdfast.snapshot.resume.comparison import ENV, Resumed
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.step.capture import read_state
from holdfast.snapshot.step.turns import BEGIN
from tests.deadlines import DEADLINE_S
from tests.unit.test_beginning import (
    STEPS,
    STOP,
    Dropping,
    Job,
    Loop,
    counted,
    in_eval_mode,
    life,
    looping,
    next_rate,
    plain,
    trial,
    without_gradients,
)
from tests.unit.test_state import Toy, toy

pytestmark = pytest.mark.usefixtures("arena")

# ------------------------------------------------------------------ what is noticed


def resumed(adapter: Toy, *, declared: bool = False) -> Resumed:
    """A job that has just been restored."""
    return Resumed(adapter, CpuEngine(), None if declared else read_state(adapter.early()), 7)


def named(made: Resumed, *, declared: bool = False) -> str:
    """The names in the refusal; empty if it is not refused."""
    try:
        made.check(declared=declared)
    except StateMismatch as error:
        names, _, rest = str(error).partition(": no longer what was restored of step 7, as something changed it")
        assert names and rest
        return names
    return ""


def live(adapter: Toy, name: str) -> torch.Tensor:
    (tensor,) = (item.tensor for item in adapter.live if item.name == name)
    return tensor


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.fill_(9),
    "through data": lambda tensor: tensor.data.fill_(9),
    "other memory": lambda tensor: setattr(tensor, "data", torch.full_like(tensor, 9)),
    "another order": lambda tensor: setattr(
        tensor, "data", tensor.data.t() if tensor.dim() > 1 else tensor.data.flip(0) + 1
    ),
    "another type": lambda tensor: setattr(tensor, "data", tensor.data.double()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["model.weight", "model.mean", "model.base"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_tensor_that_is_not_what_was_restored_is_named(
    change: Callable[[torch.Tensor], object], name: str, declared: bool
) -> None:
    adapter = toy()
    made = resumed(adapter, declared=declared)
    change(live(adapter, name))
    assert named(made, declared=declared) == name


def put(adapter: Toy, name: str, tensor: torch.Tensor) -> None:
    """Put another tensor, or another name, in the first one's place."""
    adapter.live[0] = LiveTensor(name, tensor, Change.STEP)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda adapter: put(adapter, "model.weight", torch.full((2, 3), 9.0)), "model.weight"),
        (lambda adapter: adapter.live.pop(0), "model.weight"),
        (lambda adapter: put(adapter, "model.other", adapter.live[0].tensor), "model.other, model.weight"),
        (lambda adapter: adapter.live.append(LiveTensor("model.more", torch.zeros(1), Change.STEP)), "model.more"),
    ],
    ids=["replaced", "removed", "renamed", "added"],
)
def test_tensors_that_come_and_go_are_named(change: Callable[[Toy], object], names: str) -> None:
    """As when a state is loaded by assignment, and the tensors found first are unchanged."""
    adapter = toy()
    made = resumed(adapter)
    change(adapter)
    assert named(made) == names


def move(adapter: Toy) -> None:
    for item in adapter.live:
        item.tensor.data = item.tensor.data.clone()


def turn_in_memory(adapter: Toy) -> None:
    weight = live(adapter, "model.weight")
    weight.data = weight.data.t().contiguous().t()


def put_back(adapter: Toy) -> None:
    """Overwrite every tensor and put its value back, as an evaluation does."""
    for item in adapter.live:
        kept = item.tensor.clone()
        item.tensor.fill_(9)
        item.tensor.copy_(kept)


@pytest.mark.parametrize("change", [lambda adapter: None, move, turn_in_memory, put_back])
def test_what_has_the_same_bits_is_what_was_restored(change: Callable[[Toy], None]) -> None:
    for declared in (False, True):
        adapter = toy()
        made = resumed(adapter, declared=declared)
        change(adapter)
        assert named(made, declared=declared) == ""


def test_what_is_not_a_number_is_what_it_was() -> None:
    adapter = Toy([LiveTensor("w", torch.tensor([float("nan"), -0.0]), Change.STEP)])
    made = resumed(adapter)
    move(adapter)
    made.check(declared=False)
    live(adapter, "w").data = torch.tensor([float("nan"), 0.0])
    assert named(made) == "w"


@pytest.mark.parametrize("declared", [False, True])
def test_plain_values_are_named_by_their_paths(declared: bool) -> None:
    adapter = toy()
    adapter.late_tree["optim"] = [{"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}]
    made = resumed(adapter, declared=declared)
    adapter.late_tree["optim"][0]["groups"][0]["lr"] = 0.2
    adapter.late_tree["warm"].fill_(3)
    adapter.late_tree["seen"] = 1
    changed = named(made, declared=declared)
    assert changed == "late.warm, optim.0.groups.0.lr, seen"


@pytest.mark.parametrize("declared", [False, True])
def test_who_says_where_steps_begin_is_not_told_to_say_it(declared: bool) -> None:
    """As where a rate is set at the top of a pass, and steps warm it up."""
    adapter = toy()
    made = resumed(adapter, declared=declared)
    with torch.no_grad():
        live(adapter, "model.weight").fill_(9)
    with pytest.raises(StateMismatch) as refused:
        made.check(declared=declared)
    assert (BEGIN in str(refused.value)) is not declared


def test_a_plain_value_of_another_kind_is_another() -> None:
    adapter = toy()
    adapter.late_tree["count"] = 1
    made = resumed(adapter)
    adapter.late_tree["count"] = True
    assert named(made) == "count"


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "the random generator of torch"),
        (lambda: random.random(), "the random generator of python"),
        (lambda: np.random.random(), "the random generator of numpy"),
    ],
    ids=["torch", "python", "numpy"],
)
def test_a_generator_that_drifted_is_named_where_it_is_not_put_back(draw: Callable[[], object], name: str) -> None:
    model = torch.nn.Linear(1, 1)
    adapter: Any = TorchAdapter(model, torch.optim.SGD(model.parameters()))
    made = resumed(adapter)
    draw()
    made.check(declared=True)
    assert named(made) == name


def test_data_that_was_read_on_is_named() -> None:
    adapter = toy()
    adapter.early_tree = {"extra": {"loader": {"taken": 3}}}
    made = resumed(adapter)
    adapter.early_tree["extra"]["loader"]["taken"] = 4
    assert named(made) == "extra 'loader'"
    made.check(declared=True)


def test_what_was_written_to_and_seems_to_be_the_same_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Such as one zeroed row of a long table: a sample of its bytes does not show it."""
    adapter = Toy([LiveTensor(name, torch.ones(1000, 100), Change.STEP) for name in ("table", "other")])
    made = resumed(adapter)
    with torch.no_grad():
        live(adapter, "table")[3].zero_()
    made.check(declared=False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("table: written to between entering and the first step.")


def test_what_is_only_read_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    adapter = toy()
    made = resumed(adapter)
    assert live(adapter, "model.weight").sum() > 0
    made.check(declared=False)
    assert caplog.records == []


def test_many_names_are_cut_and_counted() -> None:
    adapter = Toy([LiveTensor(f"w{i}", torch.zeros(1), Change.STEP) for i in range(10)])
    made = resumed(adapter)
    for item in adapter.live:
        item.tensor.fill_(1)
    assert named(made) == ", ".join(f"w{i}" for i in range(8)) + ", and 2 more"


# ------------------------------------------------------------------ whole jobs


def refused(loop: Loop, make: Callable[[], Job] = Job) -> str:
    """Stop a process; return why the next one is refused."""
    torch.manual_seed(0)
    life(loop, make(), STOP)
    with pytest.raises(StateMismatch) as raised:
        life(loop, make(), None, seed=99)
    assert f"{ENV}=accept" in str(raised.value)
    with make().hook() as snap:  # the snapshot is still there
        assert snap.step == STOP - 1
    return str(raised.value)


scheduled_at_the_top = looping(step=Job.update, before=next_rate, at=range(1, STEPS))


def goes_on(loop: Loop, make: Callable[[], Job] = Job) -> None:
    """Stop a process; the next one begins with the step that it was in, and trains to the end."""
    torch.manual_seed(0)
    life(loop, make(), STOP)
    start, digests, _ = life(loop, make(), None, seed=99)
    assert (start, len(digests)) == (STOP - 1, STEPS - STOP + 1)


def loading(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    data = torch.utils.data.TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=6, shuffle=True))
    for _ in range(snap.step, STEPS):
        (batch,) = next(batches)
        job.model(batch).square().sum().backward()
        yield
        job.step()


def initialising(initialise: Callable[[Job], None], then: Loop = plain) -> Loop:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        initialise(job)
        yield from then(snap, job)

    return loop


def fill_weights(job: Job) -> None:
    torch.nn.init.constant_(job.model[0].weight, 0.125)


def load_by_assignment(job: Job) -> None:
    other = {name: value + 1 for name, value in job.model.state_dict().items()}
    job.model.load_state_dict(other, assign=True)
    job.optim.param_groups[0]["params"] = list(job.model.parameters())


def give_weights_other_memory(job: Job) -> None:
    job.model[0].weight.data = torch.full_like(job.model[0].weight, 0.125)


@pytest.mark.parametrize(
    ("initialise", "then", "name"),
    [
        (fill_weights, plain, "model0.0.weight"),
        (give_weights_other_memory, plain, "model0.0.weight"),
        (load_by_assignment, plain, "model0.0.weight"),
        (without_gradients, plain, "model0.1.running_mean"),
        (fill_weights, counted, "model0.0.weight"),
    ],
)
def test_what_is_initialised_anew_is_refused(initialise: Callable[[Job], None], then: Loop, name: str) -> None:
    assert name in refused(initialising(initialise, then)).partition(": no longer")[0]


def draw(job: Job) -> None:
    torch.randn(random.randrange(5, 50))
    np.random.random(3)


@pytest.mark.proves("start-up-may-draw")
def test_whatever_start_up_draws_a_loop_that_says_where_its_steps_begin_is_exact() -> None:
    trial(initialising(draw, counted), Dropping)


def test_an_evaluation_before_the_first_step_is_no_change() -> None:
    trial(initialising(in_eval_mode))


def test_who_accepts_the_drift_goes_on_and_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV, "accept")
    goes_on(scheduled_at_the_top)
    said = [record for record in caplog.records if "no longer what was restored of step 3" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "scheduler.0.last_epoch" in said[0].getMessage()


@pytest.mark.parametrize("value", ["yes", "1", "Accept"])
def test_any_other_word_for_it_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ENV, value)
    with pytest.raises(ConfigError, match=f"{ENV}: '{value}': say accept"):
        Job().hook()


def test_only_the_first_step_is_compared() -> None:
    def refill(job: Job) -> None:
        fill_weights(job)
        torch.rand(1)

    trial(looping(before=refill, at=[5]))


# ------------------------------------------------------------------ a batch that was read before entering


class Ahead(Job):
    """Reads its first batch when its hook is made, before it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: torch.Tensor | None = None

    def hook(self) -> InMemorySnapshot:
        self.batch = torch.randn(6, 4)
        return super().hook()

    def forward(self) -> None:
        assert self.batch is not None
        loss = self.model(self.batch).square().sum()
        self.batch = torch.randn(6, 4)
        loss.backward()


@pytest.mark.parametrize("declared", [False, True])
def test_a_batch_that_was_read_before_entering_is_refused(declared: bool) -> None:
    assert "given another batch" in refused(looping(Ahead.forward, declared=declared), Ahead)


def test_who_accepts_another_batch_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ENV, "accept")
    goes_on(looping(Ahead.forward, declared=True), Ahead)
    assert sum("given another batch" in record.getMessage() for record in caplog.records) == 1


def two_micro_batches(job: Job) -> None:
    """Each with an evaluation before it."""
    for _ in range(2):
        with torch.no_grad():
            job.model(torch.randn(3, 4))
        job.backward()


def test_the_batches_of_a_step_are_what_they_were() -> None:
    trial(looping(two_micro_batches, declared=True))


def test_who_seals_before_the_first_forward_is_told_at_the_restart_that_its_batch_is_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def draining(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for _ in snap.steps(STEPS):
            snap.drain(DEADLINE_S)
            assert isinstance(job, Ahead)
            job.forward()
            yield
            job.step()

    torch.manual_seed(0)
    life(draining, Ahead(), STOP)
    assert "sealed before it was known" not in caplog.text
    start, _, _ = life(draining, Ahead(), None, seed=99)
    assert start == STOP - 1
    said = [record for record in caplog.records if "before the inputs" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert said[0].getMessage().startswith("the snapshot of step 3")


class Live:
    """Data that is never the same twice."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(6, 4, generator=torch.Generator().manual_seed(random.SystemRandom().getrandbits(32)))


def streaming(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for batch in snap.data(Live, exact=False):
        job.model(batch).square().sum().backward()
        yield
        job.step()
        if snap.step + 1 == STEPS:
            break


def test_data_that_need_not_be_the_same_may_be_other_data() -> None:
    goes_on(streaming)


class Stale(Job):
    """A layer that is frozen after two steps keeps its last gradient, of zeros, and Adam still steps it."""

    def step(self) -> None:
        self.optim.step()
        self.optim.zero_grad(set_to_none=False)


def freezing(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for step in snap.steps(STEPS):
        job.model[0].weight.requires_grad_(step < 2)
        job.backward()
        yield
        job.step()


def test_where_there_was_a_gradient_of_zeros_there_is_one_again() -> None:
    trial(freezing, Stale)


def closing(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """Forward runs within the step."""
    assert isinstance(job, Ahead)
    yielded: list[None] = []
    for _ in snap.steps(STEPS):

        def closure() -> torch.Tensor:
            job.optim.zero_grad()
            loss: torch.Tensor = job.model(job.batch).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            yielded.append(None)
            return loss

        job.optim.step(closure)
        yield
        job.batch = torch.randn(6, 4)
    assert yielded


def test_a_batch_that_was_read_before_entering_is_refused_where_forward_runs_in_a_closure() -> None:
    torch.manual_seed(0)
    life(closing, Ahead(), STOP + 1)
    with pytest.raises(StateMismatch, match="given another batch"):
        life(closing, Ahead(), None, seed=99)


# ------------------------------------------------------------------ what is done at the top of a pass


def resetting(*, at_beginnings: bool) -> Loop:
    """Each pass begins with another running mean, which is a buffer of the model's."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        data = snap.data([torch.full((6, 4), float(number)) for number in range(4)])
        for _ in range(snap.epoch, 3):
            if not at_beginnings or not data.position:
                job.model[1].reset_running_stats()
            for x in data:
                job.model(x).square().sum().backward()
                yield
                job.step()

    return loop


@pytest.mark.parametrize("stop", [2, 4, 5, 6, 8, 9])
def test_what_a_pass_begins_with_may_be_done_where_the_place_in_it_is_none(stop: int) -> None:
    trial(resetting(at_beginnings=True), stop=stop)


def test_what_a_pass_begins_with_is_not_done_again_in_the_middle_of_it() -> None:
    with pytest.raises(StateMismatch, match=r"running_mean.*data\.position"):
        trial(resetting(at_beginnings=False), stop=6)
