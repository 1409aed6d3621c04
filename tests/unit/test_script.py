"""What a script keeps by itself, and training is fed from: restored, or named when it is first seen."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.join import _JoinConfig
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from holdfast import ConfigError, InMemorySnapshot
from holdfast.snapshot.script import variables
from holdfast.snapshot.state.walk import LONGEST
from tests.deadlines import DEADLINE_S
from tests.unit.test_beginning import STEPS, Dropping, Job, Loop, life, looping, trial, warnings_of

pytestmark = pytest.mark.usefixtures("arena")

# ------------------------------------------------------------------ persistent workers of an evaluation


def evaluate(job: Job, loader: DataLoader[Any]) -> None:
    job.model.eval()
    with torch.no_grad():
        for (batch,) in loader:
            job.model(batch)
    job.model.train()


def evaluated_every(count: int, **options: Any) -> Loop:
    """The first evaluation follows step `count`; it makes the iterator, which draws a seed."""

    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        loader = DataLoader(TensorDataset(job.held_out), 3, **options)
        for step in snap.steps(STEPS):
            job.backward()
            yield
            job.step()
            if step % count == count - 1:
                evaluate(job, loader)

    return loop


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_that_an_evaluation_keeps_draw_no_second_seed_after_a_restart(stop: int, shuffle: bool) -> None:
    """Stopped before the first evaluation, right after it, and later."""
    loop = evaluated_every(2, num_workers=1, persistent_workers=True, shuffle=shuffle)
    assert trial(loop, Dropping, stop).statistics.failed == 0


def test_workers_that_are_made_in_each_evaluation_draw_in_each() -> None:
    assert trial(evaluated_every(2, num_workers=1), Dropping).statistics.failed == 0


def evaluated_on_two(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    loaders = [
        DataLoader(TensorDataset(job.held_out), size, num_workers=1, persistent_workers=True) for size in (2, 3, 3)
    ]
    for step in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        evaluate(job, loaders[step % 3])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_each_of_several_loaders_draws_once(stop: int) -> None:
    assert trial(evaluated_on_two, Dropping, stop).statistics.failed == 0


# ------------------------------------------------------------------ iterators that are kept


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def training_on(job: Job, snap: InMemorySnapshot, batches: Iterator[Any]) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        (batch,) = next(batches)
        job.model(batch).square().sum().backward()
        yield
        job.step()


def test_an_iterator_that_training_goes_on_in_is_refused_in_the_first_turns() -> None:
    job = Job()
    with pytest.raises(ConfigError, match=r"test_script\.py:\d+ .*snap\.data"), job.hook() as snap:
        list(training_on(job, snap, endless(DataLoader(TensorDataset(job.held_out), 2, shuffle=True))))
    assert snap.step == 1


def reading_up_to_its_place(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """The loop asks for its step, and finds its place in the data by itself."""
    generator = torch.Generator().manual_seed(5)
    batches = endless(DataLoader(TensorDataset(job.held_out), 2, shuffle=True, generator=generator))
    for _ in range(snap.step):
        next(batches)
    yield from training_on(job, snap, batches)


def reading_up_in_order(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    batches = endless(DataLoader(TensorDataset(job.held_out), 3))
    for _ in range(snap.step):
        next(batches)
    yield from training_on(job, snap, batches)


@pytest.mark.parametrize("loop", [reading_up_to_its_place, reading_up_in_order])
def test_a_loop_may_find_its_place_by_itself(loop: Loop) -> None:
    assert trial(loop).statistics.failed == 0


def evaluating_on(**options: Any) -> Loop:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        batches = endless(DataLoader(TensorDataset(job.held_out), 1, shuffle=True, **options))
        for _ in snap.steps(STEPS):
            job.backward()
            yield
            job.step()
            job.model.eval()
            with torch.no_grad():
                job.model(next(batches)[0])
            job.model.train()

    return loop


def test_an_iterator_that_evaluations_go_on_in_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    life(evaluating_on(), Job(), None)
    (said,) = [text for text in warnings_of(caplog) if "evaluations read on" in text]
    assert "test_script.py:" in said and "generator=torch.Generator()" in said


def test_with_a_generator_of_its_own_it_may_go_on(caplog: pytest.LogCaptureFixture) -> None:
    trial(evaluating_on(generator=torch.Generator()), Dropping)
    assert not [text for text in warnings_of(caplog) if "evaluations read on" in text]


# ------------------------------------------------------------------ generators in variables


class Noise:
    """Of the user's own class."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def draw(self) -> float:
        return float(self.random.normal())


def noise_after(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    generator, noise = torch.Generator().manual_seed(3), Noise()
    for _ in snap.steps(STEPS):
        job.backward()
        yield
        job.step()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01 * noise.draw())


def noise_from(snap: InMemorySnapshot, job: Job, generator: torch.Generator) -> Iterator[None]:
    for _ in snap.steps(STEPS):
        job.model(torch.randn(6, 4, generator=generator)).square().sum().backward()
        yield
        job.step()


def noise_before(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    yield from noise_from(snap, job, torch.Generator().manual_seed(3))


MODULES = np.random.RandomState(0)


def noise_of_the_module(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    if snap.step == 0:
        MODULES.seed(0)
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(6, 4)).square().sum() * float(MODULES.rand())).backward()
        yield
        job.step()


def drawing_from(seed: int) -> Callable[[], float]:
    generator = np.random.default_rng(seed)
    return lambda: float(generator.normal())


def noise_in_a_closure(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    draw = drawing_from(3)
    for _ in snap.steps(STEPS):
        (job.model(torch.randn(6, 4)).square().sum() * draw()).backward()
        yield
        job.step()


def noise_of_a_class(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    class Shared:
        random = np.random.default_rng(3)

    for _ in snap.steps(STEPS):
        (job.model(torch.randn(6, 4)).square().sum() * float(Shared.random.normal())).backward()
        yield
        job.step()


def noise_of_many(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(LONGEST + 1)]
    for _ in snap.steps(STEPS):
        job.model(sum(torch.randn(6, 4, generator=each) for each in generators)).square().sum().backward()
        yield
        job.step()


@pytest.mark.parametrize(
    "loop", [noise_after, noise_before, noise_of_the_module, noise_in_a_closure, noise_of_a_class, noise_of_many]
)
def test_generators_in_variables_go_on(loop: Loop) -> None:
    assert trial(loop).statistics.failed == 0


class Noisy(Job):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def noisy_backward(self) -> None:
        self.model(torch.randn(6, 4, generator=self.noise)).square().sum().backward()


def test_a_plain_loop_draws_from_them_again_before_its_first_step() -> None:
    assert trial(looping(Noisy.noisy_backward), Noisy).statistics.failed == 0


def test_a_plain_loop_that_draws_from_them_after_its_step_is_refused_in_the_first_turns() -> None:
    with pytest.raises(ConfigError, match=r"job\.noise.*snap\.begin"):
        life(looping(after=lambda job: torch.randn(1, generator=job.noise)), Noisy(), None)


def seeded_in_each_step(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for step in snap.steps(STEPS):
        generator = torch.Generator().manual_seed(step)
        job.model(torch.randn(6, 4, generator=generator)).square().sum().backward()
        yield
        job.step()


def replaying(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """The loop draws all that earlier steps had drawn, before it says that its first step begins."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(snap.step):
        torch.randn(6, 4, generator=generator)
    yield from noise_from(snap, job, generator)


@pytest.mark.parametrize("loop", [seeded_in_each_step, replaying])
def test_loops_that_keep_nothing_in_their_generators_go_on(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    assert trial(loop).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if "variables" in text]


# ------------------------------------------------------------------ an endless source


def endless_source(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    """Killed in the third pass over a loader within the source, which draws as each begins; so does dropout."""
    loader = DataLoader(TensorDataset(job.held_out), 3, shuffle=True)
    batches = snap.data(lambda: endless(loader))
    for (batch,) in batches:
        job.model(batch).square().sum().backward()
        yield
        job.step()
        if batches.position == STEPS:
            snap.finish()
            return


@pytest.mark.parametrize("stop", [2, 5, 6])
def test_an_endless_source_of_a_shuffled_loader_needs_no_promise(stop: int) -> None:
    assert trial(endless_source, Dropping, stop).statistics.failed == 0


class DrawsEagerly:
    """Batches of indices in an order that is drawn when an iterator is made, not when it is first read."""

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self._count = count

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(self._count, generator=self.generator).view(-1, 2).tolist())

    def __len__(self) -> int:
        return self._count // 2


@pytest.mark.parametrize("is_eager", [False, True])
def test_workers_that_persist_read_and_draw_as_without_the_hook(is_eager: bool) -> None:
    job = Job()
    data = TensorDataset(job.held_out)

    def loader() -> DataLoader[Any]:
        how: Any = {"batch_sampler": DrawsEagerly(len(data))} if is_eager else {"batch_size": 3, "shuffle": True}
        return DataLoader(data, num_workers=1, persistent_workers=True, **how)

    def passes(read: Any) -> list[Any]:
        torch.manual_seed(0)
        seen = []
        for _ in range(3):
            for (batch,) in read:
                seen.append(batch.tolist())
                job.model(batch).square().sum().backward()
                job.optim.step()
                job.optim.zero_grad()
        return [seen, torch.get_rng_state().tolist()]

    alone = passes(loader())
    with InMemorySnapshot(job.model, job.optim) as snap:
        assert alone == passes(snap.data(loader()))


def test_a_generator_that_is_missing_in_one_life_is_found_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(3)
    there = {"loop.own": own}
    monkeypatch.setattr(variables, "generators_in_variables", lambda but: dict(there))

    def life_of(held: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        made = variables.Variables(held)
        made.look(set())
        gone = made.put_back()
        torch.rand((), generator=own)
        made.note()
        return gone, made.tree()

    _, held = life_of({})
    assert list(held) == ["loop.own"]
    found = there.pop("loop.own")
    gone, without = life_of(held)
    assert (gone, without) == (["loop.own"], {})
    there["loop.own"] = found
    assert life_of(without)[0] == [] and life_of(held)[0] == []


def test_what_is_not_drawn_from_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "generators_in_variables", lambda but: {"loop.own": torch.Generator()})
    made = variables.Variables({})
    made.look(set())
    made.note()
    assert made.tree() == {}


# ------------------------------------------------------------------ what steps change in variables


class Average:
    """Of the user's own class."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.5 * self.shadow[name] + 0.5 * parameter.detach()


def said_of(
    snap: InMemorySnapshot, job: Job, after: Callable[[], object], caplog: pytest.LogCaptureFixture, steps: int = 5
) -> list[str]:
    """What is said of a loop that does `after` in each step about variables that are changed."""
    with snap:
        for _ in snap.steps(steps):
            batch = {"x": torch.randn(6, 4)}
            predicted = {"y": job.model(batch["x"])}
            loss = predicted["y"].square().sum()
            loss.backward()
            job.step()
            after()
    return [text for text in warnings_of(caplog) if "in variables of the script" in text]


def test_an_average_of_the_weights_in_a_variable_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    mean, shadow = copy.deepcopy(job.model).requires_grad_(False), Average(job.model)
    queue: deque[torch.Tensor] = deque(maxlen=100)
    frozen, still = copy.deepcopy(job.model), torch.zeros(4)
    averages = [copy.deepcopy(list(job.model.parameters())) for _ in range(2)]  # which still require gradients

    ours: torch.Tensor | None = None

    def after() -> None:
        nonlocal ours
        for ours, theirs in zip(mean.parameters(), job.model.parameters(), strict=True):
            ours.data.lerp_(theirs.detach(), 0.5)
        for ours, theirs in zip(averages[0], job.model.parameters(), strict=True):
            ours.detach().lerp_(theirs.detach(), 0.5)
        shadow.update(job.model)
        queue.append(torch.randn(3))
        frozen(torch.randn(6, 4))
        still.add_(0)

    frozen.eval()
    said = "".join(said_of(job.hook(), job, after, caplog))
    assert "".join(warnings_of(caplog)).count('snap.track("mean", tensors=mean)') == 1
    assert '"ours"' not in said  # one of the mean's
    assert all(said.count(f'snap.track("{name}", get=') == 1 for name in ("shadow", "queue", "averages"))
    assert "frozen" not in said and "still" not in said and "batch" not in said and "predicted" not in said


def test_the_rate_of_a_loss_that_steps_change_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job, smooth, fixed = Job(), torch.nn.CrossEntropyLoss(label_smoothing=0.5), torch.nn.HuberLoss(delta=0.5)

    def after() -> None:
        smooth.label_smoothing *= 0.9

    said_of(job.hook(), job, after, caplog)
    said = "".join(warnings_of(caplog))
    assert said.count('snap.track("smooth/label_smoothing", get=lambda: smooth.label_smoothing') == 1
    assert isinstance(fixed, torch.nn.Module) and "fixed" not in said


def test_what_changes_in_every_fifth_step_only_is_named(caplog: pytest.LogCaptureFixture) -> None:
    job, averages, turn = Job(), {"weight": torch.ones(3)}, itertools.count(1)

    def after() -> None:
        if next(turn) % 5 == 0:
            averages["weight"].mul_(0.5)

    said = "".join(said_of(job.hook(), job, after, caplog, steps=33))
    assert said.count('snap.track("averages", get=') == 1
    assert "batch" not in said and "predicted" not in said


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and keeps weights of its own, beside any state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [each.detach().clone() for group in inner.param_groups for each in group["params"]]

    def keep(self) -> None:
        for slow, fast in zip(self.slow, itertools.chain(*(g["params"] for g in self.param_groups)), strict=True):
            slow.lerp_(fast.detach(), 0.5)


def test_what_wraps_the_given_optimizer_and_keeps_more_is_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    wrapper = Lookahead(job.optim)
    said = "".join(said_of(job.hook(), job, wrapper.keep, caplog))
    assert said.count("optim=wrapper") == 1


class OfALibrary:
    """What a library may keep an average in."""

    __module__ = "pytest.averages"

    def __init__(self) -> None:
        self.mean = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])


def test_an_object_of_a_library_that_has_state_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job, average, given = Job(), OfALibrary(), OfALibrary()
    snap = InMemorySnapshot(job.model, job.optim, scheduler=job.schedule, extra={"given": given})
    said = "".join(said_of(snap, job, lambda: (average.mean.mul_(0.5), given.mean.mul_(0.5)), caplog))
    assert said.count('extra={"average": average}') == 1 and '"given"' not in said


class WarmUp:
    """A library's, which counts steps."""

    __module__ = "pytest.warming"

    def __init__(self) -> None:
        self.last_step = 0

    def step(self) -> None:
        self.last_step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_a_count_of_a_library_that_has_state_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job, warm_up, given, schedule = Job(), WarmUp(), WarmUp(), WarmUp()
    snap = InMemorySnapshot(job.model, job.optim, scheduler=[job.schedule, schedule], extra={"given": given})

    def after() -> None:
        for each in (warm_up, given, schedule):
            each.step()

    said = "".join(said_of(snap, job, after, caplog))
    assert said.count('extra={"warm_up": warm_up}') == 1 and '"given"' not in said and '"schedule"' not in said


class Mean:
    """A running mean of a library, which sets another one."""

    __module__ = "pytest.means"

    def __init__(self) -> None:
        self.mean = np.zeros(3)

    def update(self) -> None:
        self.mean = 0.5 * self.mean + 0.5


class MeanOfOne(Mean):
    """The same of a number, which is one of numpy's from its first update on."""

    __module__ = "pytest.means"

    def __init__(self) -> None:
        self.mean = np.zeros(())


class Experience:
    """A long buffer of a library, of which a step changes one row."""

    __module__ = "pytest.experience"

    def __init__(self) -> None:
        self.rows = np.zeros((4096, 3))
        self.place = 0

    def __call__(self) -> None:
        self.rows[self.place] = 1
        self.place += 1


class Room:
    """An environment of a library: it is told of where a turn acts in it, and not where an evaluation does."""

    __module__ = "pytest.rooms"

    def __init__(self) -> None:
        self.place = np.zeros(2)

    def reset(self) -> None:
        self.place = np.zeros(2)

    def step(self) -> None:
        self.place += 1


class Meter:
    """What a library counts for a log."""

    __module__ = "pytest.meters"

    def __init__(self) -> None:
        self.count = 0


def test_what_a_library_keeps_for_steps_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job, mean, one, experience, still, given = Job(), Mean(), MeanOfOne(), Experience(), Mean(), Mean()
    meter, room = Meter(), Room()

    def after() -> None:
        mean.update()
        one.update()
        experience()
        room.step()
        given.update()
        meter.count += 1

    snap = job.hook()
    snap.track("given", get=lambda: vars(given), set=vars(given).update)
    said = "".join(said_of(snap, job, after, caplog))
    assert all(said.count(f"vars({name}).update") == 1 for name in ("mean", "one", "experience"))
    assert all(f"vars({name})" not in said for name in ("still", "given", "meter", "room"))
    assert still.mean is not None


class Buffer:
    """A tensor in a list, and a count."""

    def __init__(self) -> None:
        self.kept = [torch.ones(3)]
        self.count = 0


class Memory:
    """Holds a buffer."""

    def __init__(self) -> None:
        self.buffer = Buffer()


class Keeping:
    """Holds what is trained, and what else steps change: an object of its own, a tensor, and what has a state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.own = Memory()
        self.mean = torch.ones(3)
        self.average = OfALibrary()

    def after(self) -> None:
        for each in (self.own.buffer.kept[0], self.mean, self.average.mean):
            each.mul_(0.5)


def test_beside_a_model_only_the_part_that_changes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    keeping = Keeping(job.model)
    said = "".join(said_of(job.hook(), job, keeping.after, caplog))
    lines = ["vars(keeping.own).update", 'setattr(keeping, "mean", value)', 'extra={"average": keeping.average}']
    assert all(said.count(line) == 1 for line in lines)
    assert "vars(keeping)" not in said


def test_beside_an_attribute_that_is_named_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    keeping = Keeping(job.model)
    snap = job.hook()
    snap.track("mean", get=lambda: keeping.mean, set=lambda value: setattr(keeping, "mean", value))
    said = "".join(said_of(snap, job, keeping.after, caplog))
    assert "vars(keeping.own).update" in said and "keeping.average}" in said and '"mean"' not in said


def test_weights_of_a_sampler_that_steps_change_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job, sampler, fixed = Job(), WeightedRandomSampler([1.0] * 6, 6), WeightedRandomSampler([1.0] * 6, 6)
    said = said_of(job.hook(), job, lambda: (sampler.weights.mul_(2), list(fixed)), caplog)
    assert "".join(said).count('setattr(sampler, "weights", value)') == 1 and "fixed" not in "".join(said)


def test_what_the_user_has_named_is_not_named_again(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    mean = torch.optim.swa_utils.AveragedModel(job.model)
    other = torch.optim.swa_utils.AveragedModel(job.model)
    queue: deque[torch.Tensor] = deque(maxlen=100)
    scale = torch.ones(3)

    def after() -> None:
        mean.update_parameters(job.model)
        other.update_parameters(job.model)
        queue.append(torch.randn(3))
        scale.mul_(0.5)

    snap = InMemorySnapshot(job.model, job.optim, scheduler=job.schedule, extra={"other": other})
    snap.track("average", tensors={str(i): tensor for i, tensor in enumerate(job.average)})
    snap.track("mean", tensors=mean)
    snap.track("queue", get=lambda: list(queue), set=queue.extend)
    snap.track("scale", tensors={"scale": scale})
    assert said_of(snap, job, after, caplog) == []


@pytest.mark.parametrize("stop", [2, 5])
def test_passes_over_sources_with_names_of_their_own_are_counted(stop: int) -> None:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        loaders = [DataLoader(TensorDataset(job.held_out), 2, shuffle=True) for _ in "ab"]
        for _ in range(snap.epoch, 2):
            for (x,), (more,) in zip(snap.data(loaders[0], name="z"), snap.data(loaders[1], name="a"), strict=True):
                job.model(torch.cat([x, more])).square().sum().backward()
                yield
                job.step()

    assert trial(loop, stop=stop).statistics.failed == 0


@pytest.mark.parametrize("kept", [False, True])
def test_passes_that_nobody_has_asked_for_are_told_of_once(kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    job, passes = Job(), iter(range(3))
    snap = job.hook()
    if kept:
        snap.track("passes", get=lambda: 0, set=lambda _: None)
    with snap:
        data = snap.data([torch.randn(6, 4), torch.randn(6, 4)])
        while next(passes, None) is not None:
            for batch in data:
                job.model(batch).square().sum().backward()
                job.step()
    said = [text for text in warnings_of(caplog) if "asked for neither" in text]
    assert len(said) == (not kept)


def test_passes_that_a_library_counts_are_told_of_in_the_first(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()

    def train(batch: torch.Tensor) -> None:
        job.model(batch).square().sum().backward()
        job.step()

    with job.hook() as snap, ThreadPoolExecutor(1) as pool:
        for batch in snap.data([torch.randn(6, 4), torch.randn(6, 4)]):
            pool.submit(train, batch).result(DEADLINE_S)
    assert [text for text in warnings_of(caplog) if "asked for neither" in text]


def test_ranks_that_may_end_at_different_steps_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.model._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=True)
    with job.hook() as snap:
        for _ in snap.steps(2):
            job.backward()
            job.step()
    assert len([text for text in warnings_of(caplog) if "Join is entered" in text]) == 1


def test_a_loop_over_step_numbers_may_begin_as_many_passes_as_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with job.hook() as snap:
        data = snap.data([torch.randn(6, 4), torch.randn(6, 4)])
        batches = iter(data)
        for _ in snap.steps(5):
            if (batch := next(batches, None)) is None:
                batches = iter(data)
                batch = next(batches)
            job.model(batch).square().sum().backward()
            job.step()
    assert "asked for neither" not in "".join(warnings_of(caplog))
