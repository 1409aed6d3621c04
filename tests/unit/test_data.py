"""The place in the data. A loop that is killed at any batch and restarted continues with the same batches, the same
random numbers and the same count of passes, whatever its source; or it is refused by name."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from holdfast.integrations.batches import GlobalBatches
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.values import decode, encode
from holdfast.snapshot.step.data import Data

SAMPLES, BATCH, PASSES = 22, 4, 3


@dataclass
class Snapshot:
    """What a hook would have kept of one boundary."""

    generators: dict[str, Any]
    places: str
    steps: int


@dataclass
class Hook:
    """The part of a hook that `Data` needs. Keeps what it captured at all boundaries, so a test can go back to any."""

    restored: Snapshot | None = None
    sources: dict[str, Data] = field(default_factory=dict)
    taken: list[Snapshot] = field(default_factory=list)
    stepped: bool = True
    steps: int = 0

    def end(self) -> None:
        """End the process and its workers. Otherwise the collector would find them in a cycle and free them in any
        order, and torch waits five seconds for each worker that was not told to end."""
        self.sources.clear()

    def __post_init__(self) -> None:
        self._pending = self.restored
        self._marked: dict[str, Any] | None = None
        self._held = decode(json.loads(self.restored.places), no_tensor) if self.restored else {}
        if self.restored:
            self.steps, self.stepped = self.restored.steps, False

    def data(self, source: Any, name: str = "data", **options: Any) -> Data:
        if name not in self.sources:
            self.sources[name] = Data(source, name, self._held.get(name), self.mark, self.begin, **options)
        return self.sources[name]

    def mark(self) -> None:
        if self._pending is not None:
            rng.restore(self._pending.generators)
            self._pending = None
            self.stepped = True  # the boundary of the restore is captured once more
        if self.stepped:
            self._marked = rng.capture()

    def begin(self) -> None:
        if self._marked is not None:
            places = {name: data.state() for name, data in self.sources.items()}
            text = json.dumps(encode(places, "places", {}))
            self.taken.append(Snapshot(self._marked, text, self.steps))
            self._marked = None
            self.stepped = False

    def step(self) -> None:
        self.stepped = True
        self.steps += 1


def no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"{name}: tensors among the place would be leaves of their own")


def seen(batch: Any) -> str:
    """Every bit of a batch, as text."""
    if isinstance(batch, torch.Tensor):
        return f"{batch.dtype}{tuple(batch.shape)}{batch.reshape(-1).view(torch.uint8).numpy().tobytes().hex()}"
    if isinstance(batch, list | tuple):
        return " ".join(map(seen, batch))
    return repr(batch)


def train(hook: Hook, *batches: Any) -> str:
    """A step that draws from every global generator, as dropout does. Returns what it saw and drew."""
    drawn = [*torch.rand(5).tolist(), random.random(), *np.random.random(3)]
    hook.step()
    return f"{' '.join(map(seen, batches))} {[number.hex() for number in drawn]}"


Loop = Callable[[Hook], Iterator[str]]
"""A whole job: yields what each of its steps saw, and anything else that must be the same."""


def over(
    make: Callable[[], Any],
    passes: int = PASSES,
    before_pass: Callable[[Any, int], None] | None = None,
    **options: Any,
) -> Loop:
    """The usual loop over the source that `make` returns."""

    def loop(hook: Hook) -> Iterator[str]:
        source = make()
        data = hook.data(source, **options)
        for epoch in range(data.epoch(), passes):
            if before_pass is not None:
                before_pass(source, epoch)
            for batch in data:
                yield f"{epoch} {train(hook, batch)}"
            torch.rand(3)  # validation also draws
            assert data.epoch() == epoch + 1

    return loop


def begin_a_process(loop: Loop, restored: Snapshot | None, seed: int = 7) -> tuple[Hook, Iterator[str]]:
    """Do what a start does before its loop: seed, and, if it is a restart, draw other numbers than the first did."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    GENERATOR.manual_seed(seed)
    hook = Hook(restored)
    if restored is not None:
        torch.rand(11), random.random(), np.random.random()
    return hook, loop(hook)


def whole(loop: Loop, restored: Snapshot | None = None) -> tuple[list[str], list[Snapshot]]:
    """What a loop sees until its end, and the snapshots that it takes."""
    hook, steps = begin_a_process(loop, restored)
    return list(steps), hook.taken


def check(loop: Loop, *kills: int) -> list[str]:
    """Run `loop` undisturbed. Then kill it in each of the steps `kills` (by default up to twenty steps), restart it,
    and kill and restart it again two steps later. Returns what the undisturbed loop saw."""
    hook, steps = begin_a_process(loop, None)
    expected = list(steps)
    assert len(hook.taken) == len(expected) == len(set(expected))
    for kill in kills or range(0, len(expected), 1 + len(expected) // 20):
        again, rest = begin_a_process(loop, hook.taken[kill])
        found = list(itertools.islice(rest, 2))
        assert found == expected[kill : kill + 2], f"restarted at step {kill}"
        last = again.taken[-1]
        rest.close()  # type: ignore[attr-defined]
        again.end()
        third, rest = begin_a_process(loop, last)
        assert list(rest) == expected[last.steps :], f"restarted at step {kill}, and again at step {last.steps}"
        third.end()
    hook.end()
    return expected


def check_once(loop: Loop, kills: Iterable[int]) -> None:
    """`check`, without a second kill."""
    expected, taken = whole(loop)
    for kill in kills:
        assert whole(loop, taken[kill])[0] == expected[kill:]


# ---------------------------------------------------------------------- data sets


def table() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 3, dtype=torch.float32).reshape(SAMPLES, 3), torch.arange(SAMPLES))


class Augmented(Dataset[torch.Tensor]):
    """Draws from the global generators of whatever process it is in."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [float(index), torch.rand(()).item(), random.random(), np.random.random()]
        return torch.tensor(numbers, dtype=torch.float64)


class Own(Augmented):
    """Draws from its own generators, which continue from pass to pass."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(3)
        self.more = [random.Random(4), {"deep": torch.Generator().manual_seed(5)}]

    def __getitem__(self, index: int) -> torch.Tensor:
        first, second = self.more
        assert isinstance(first, random.Random) and isinstance(second, dict)
        drawn = torch.rand((), generator=second["deep"]).item()
        return torch.tensor([index, self.numbers.random(), first.random(), drawn], dtype=torch.float64)


class Prefetching:
    """Reads a batch ahead of the one that it gives, as timm's loader does."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead: list[torch.Tensor] = []
        for batch in self.loader:
            ahead.append(batch)
            if len(ahead) > 1:
                yield ahead.pop(0)
        yield from ahead


class Stream(IterableDataset[torch.Tensor]):
    """Divides itself among the workers, and draws."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, SAMPLES, stride):
            yield torch.tensor([index, random.random()], dtype=torch.float64)


class Buffered(IterableDataset[int]):
    """Shuffles through a buffer, using `draw`."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for index in range(SAMPLES):
            buffer.append(index)
            if len(buffer) == 8:
                yield buffer.pop(self.draw(len(buffer)))
        while buffer:
            yield buffer.pop(self.draw(len(buffer)))


class Stage:
    """A stage of a pipeline, which keeps the one before it."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __iter__(self) -> Iterator[Any]:
        return iter(self.before)


def nested(source: Any, stages: int) -> Any:
    return source if not stages else Stage(nested(source, stages - 1))


class Chunks(Sampler[int]):
    """Draws eight numbers at a time, from torch's global generator."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for start in range(0, SAMPLES, self.size):
            yield from torch.randint(SAMPLES, (min(self.size, SAMPLES - start),)).tolist()


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options.setdefault("batch_size", BATCH)
    return DataLoader(table() if dataset is None else dataset, **options)


def own_generator(**options: Any) -> DataLoader[Any]:
    return loader(generator=torch.Generator().manual_seed(9), **options)


GENERATOR = torch.Generator()
"""A global that a function uses."""

SOURCES: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "no last": lambda: loader(shuffle=True, drop_last=True),
    "a generator of its own": lambda: own_generator(shuffle=True),
    "no batches": lambda: loader(shuffle=True, batch_size=None),
    "with replacement": lambda: loader(sampler=RandomSampler(table(), replacement=True, num_samples=70), batch_size=7),
    "more than there are": lambda: loader(sampler=RandomSampler(table(), num_samples=50), batch_size=9),
    "replacement, own": lambda: loader(
        sampler=RandomSampler(table(), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2)),
        batch_size=7,
    ),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([0.1 * (i + 1) for i in range(SAMPLES)], SAMPLES)),
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(3, 20))),
    "batch sampler": lambda: loader(batch_sampler=BatchSampler(RandomSampler(table()), 5, drop_last=False)),
    "augmented": lambda: loader(Augmented(), shuffle=True),
    "its own generators": lambda: loader(Own(), shuffle=True),
    "chunks of the global generator": lambda: loader(sampler=Chunks()),
    "buffered": lambda: loader(Buffered(random.Random(8).randrange)),
    "a function with a buffer": lambda: partial(iter, Buffered(random.Random(8).randrange)),
    "a generator deep inside": lambda: partial(iter, nested(Buffered(random.Random(8).randrange), 5)),
    "a list": lambda: [torch.full((2,), float(i)) for i in range(6)],
    "a range": lambda: range(5),
    "a function": lambda: lambda: (torch.rand(3, generator=GENERATOR) + i for i in range(6)),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.proves("mid-epoch")
def test_a_loop_goes_on_where_it_was(kind: str) -> None:
    steps = check(over(SOURCES[kind]))
    assert len(steps) > PASSES


DRAWING: dict[str, Callable[[], Any]] = {
    "iterable": lambda: loader(Stream()),
    "a function": lambda: lambda: (torch.rand(3) + i for i in range(6)),
}
"""Sources that draw from the same generators as the step, and that have no visible indices."""


@pytest.mark.parametrize("kind", DRAWING)
def test_a_source_that_draws_as_the_step_does_is_exact_with_a_promise_and_refused_without(kind: str) -> None:
    check(over(DRAWING[kind], ahead=0))
    for kill, refused in ((0, False), (1, False), (5, True), (6, False), (11, True)):
        expected, taken = whole(over(DRAWING[kind]))
        _, rest = begin_a_process(over(DRAWING[kind]), taken[kill])
        if refused:
            with pytest.raises(StateMismatch, match=r"'data' is not where it was: .*ahead=N"):
                next(rest)
        else:
            assert next(rest) == expected[kill]


WORKERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: loader(Augmented(), num_workers=2),
    "shuffled": lambda: loader(Augmented(), shuffle=True, num_workers=2),
    "read ahead": lambda: loader(Augmented(), shuffle=True, num_workers=2, prefetch_factor=4),
    "a generator of its own": lambda: own_generator(dataset=Augmented(), shuffle=True, num_workers=2),
    "workers that live on": lambda: loader(Augmented(), shuffle=True, num_workers=2, persistent_workers=True),
    "workers that live on behind a wrapper": lambda: Prefetching(
        loader(Augmented(), shuffle=True, num_workers=2, persistent_workers=True)
    ),
    "iterable": lambda: loader(Stream(), num_workers=2),
    "chunks of the global generator": lambda: loader(sampler=Chunks(1), num_workers=2, prefetch_factor=2),
    "skipping, but not in its workers": lambda: TellingLoader(
        Augmented(), batch_size=BATCH, shuffle=True, num_workers=2
    ),
    "replacement, own": lambda: loader(
        Augmented(),
        sampler=RandomSampler(table(), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2)),
        batch_size=12,
        num_workers=2,
    ),
}


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.proves("mid-epoch")
def test_a_loop_with_workers_goes_on_where_it_was(kind: str) -> None:
    check(over(WORKERS[kind], passes=2), 0, 3, 5, 6, 8)


class Devices:
    """The generators of two devices, behind torch's functions for CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generators = [torch.Generator().manual_seed(number) for number in (3, 4)]
        monkeypatch.setattr(rng, "uses_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [each.get_state() for each in self.generators])
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.generators[device].set_state(state))
        monkeypatch.setattr(torch.cuda, "seed", lambda: torch.rand((), generator=self.generators[1]).item())


def test_the_generators_of_devices_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)

    def batches() -> Iterator[float]:
        draw: Any = torch.cuda.seed
        for _ in range(SAMPLES // BATCH):
            yield draw()

    def loop(hook: Hook) -> Iterator[str]:
        for generator in devices.generators:
            generator.manual_seed(random.getrandbits(30))
        yield from over(lambda: batches, ahead=0)(hook)

    check(loop)


def test_reading_through_it_changes_nothing() -> None:
    def plainly(make: Callable[[], Any]) -> list[str]:
        hook = Hook()
        begin_a_process(lambda hook: iter(()), None)
        source = make()
        found = []
        for epoch in range(PASSES):
            for batch in source() if callable(source) else source:
                found.append(f"{epoch} {train(hook, batch)}")
            torch.rand(3)
        return found

    for kind, make in SOURCES.items():
        assert whole(over(make))[0] == plainly(make), kind


# ---------------------------------------------------------------------- loops


def test_what_a_loop_asks_the_loader_for_the_data_answers() -> None:
    loader = DataLoader(Augmented(), batch_size=2)
    data = Hook().data(loader)
    assert data.dataset is loader.dataset
    assert (data.batch_size, data.sampler) == (2, loader.sampler)
    with pytest.raises(AttributeError, match="bogus"):
        _ = data.bogus
    assert not hasattr(Hook().data(lambda: iter(())), "dataset")


def distributed() -> DataLoader[Any]:
    return loader(sampler=DistributedSampler(table(), num_replicas=2, rank=1, seed=3))


def test_the_user_tells_a_distributed_sampler_the_pass() -> None:
    check(over(distributed, before_pass=lambda source, epoch: source.sampler.set_epoch(epoch)))


def test_a_pass_that_is_left_counts_as_finished_when_the_next_begins() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        data = hook.data(loader(Augmented(), shuffle=True))
        for epoch in range(data.epoch(), 4):
            for number, batch in enumerate(data, data.position):
                yield f"{epoch} {number} {train(hook, batch)}"
                if number == 2:
                    break
            assert data.epoch() == epoch + 1

    assert len(check(loop)) == 12


def test_a_pass_that_is_left_before_its_batch_is_used_is_left_again() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        data = hook.data(loader(shuffle=True))
        for epoch in range(data.epoch(), 3):
            for batch in data:
                if hook.steps % 3 == 2:
                    hook.step()
                    break
                yield f"{epoch} {train(hook, batch)}"

    expected, taken = whole(loop)
    for snapshot in taken:
        found, _ = whole(loop, snapshot)
        assert found == expected[len(expected) - len(found) :]


class CountsItsPasses(Sampler[int]):
    """As many samplers shuffle: by a generator that is seeded with the number of the pass."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.passes)).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_counts_its_passes_goes_on_counting(workers: int) -> None:
    make = partial(DataLoader, TensorDataset(torch.arange(10.0)), 2, num_workers=workers)
    check(over(lambda: make(sampler=CountsItsPasses(10))), *([] if workers == 0 else [4, 7]))


class ShufflesItsOwn(Sampler[list[int]]):
    """Gives batches in an order that `shuffle` makes of what it keeps, or of a copy."""

    def __init__(self, shuffle: Callable[[ShufflesItsOwn], list[int]]) -> None:
        self.shuffle, self.order, self.array, self.parts = shuffle, list(range(8)), np.arange(8), {"a": list(range(8))}

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number] for number in self.shuffle(self))


def in_place(order: list[int]) -> list[int]:
    random.shuffle(order)
    return order


def array_in_place(sampler: ShufflesItsOwn) -> list[int]:
    np.random.shuffle(sampler.array)
    return list(map(int, sampler.array))


def made_anew(sampler: ShufflesItsOwn) -> list[int]:
    sampler.order = in_place(list(range(8)))
    return sampler.order


@pytest.mark.parametrize(
    ("shuffle", "named"),
    [
        (lambda sampler: in_place(sampler.order), "batch_sampler.order"),
        (lambda sampler: in_place(sampler.parts["a"]), "batch_sampler.parts['a']"),
        (array_in_place, "batch_sampler.array"),
        (lambda sampler: in_place(sampler.order.copy()), ""),
        (made_anew, ""),
    ],
)
def test_what_a_pass_shuffles_in_place_is_named_as_it_begins(
    shuffle: Callable[[ShufflesItsOwn], list[int]], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(1)
    np.random.seed(1)
    loader = DataLoader(table(), batch_sampler=ShufflesItsOwn(shuffle))
    batches = iter(Data(loader, "data", None, lambda: None, lambda: None))
    next(batches)
    said = [line.getMessage() for line in caplog.records if "in place" in line.getMessage()]
    assert len(said) == bool(named) and all(named in line for line in said)
    next(batches)
    assert len([line for line in caplog.records if "in place" in line.getMessage()]) == bool(named)


class TellsThePass:
    """A library's wrapper of a loader, as Lightning Fabric's, that counts passes for a distributed sampler."""

    __module__ = "torch.utils.wrappers"

    def __init__(self, inner: Any) -> None:
        self.inner, self.passes = inner, 0

    def __iter__(self) -> Iterator[Any]:
        self.inner.sampler.set_epoch(self.passes)
        self.passes += 1
        yield from self.inner


def test_a_librarys_wrapper_that_counts_passes_goes_on_counting() -> None:
    check(over(lambda: TellsThePass(distributed())))


class Stages(Dataset[torch.Tensor]):
    """A curriculum: there is more of it in each pass."""

    stage = 1

    def __len__(self) -> int:
        return 4 * self.stage

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index + 100 * self.stage))


def test_a_data_set_goes_on_in_its_stage() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        stages = Stages()
        data = hook.data(DataLoader(stages, 2, shuffle=True))
        for epoch in range(data.epoch(), 3):
            data.source = DataLoader(stages, 2, shuffle=True)
            for batch in data:
                yield f"{epoch} {train(hook, batch)}"
            stages.stage += 1

    check(loop)


def test_sources_side_by_side() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        one = hook.data(loader(Augmented(), shuffle=True), "one")
        other = hook.data(own_generator(dataset=Own(), shuffle=True, batch_size=3), "other")
        for epoch in range(one.epoch(), 3):
            for batch, more in zip(one, other, strict=False):
                yield f"{epoch} {train(hook, batch, more)}"

    check(loop)


def test_a_source_that_is_read_now_and_then() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        labelled = hook.data(loader(shuffle=True), "labelled")
        other = hook.data(loader(Augmented(), shuffle=True, batch_size=10), "other")
        for epoch in range(labelled.epoch(), 3):
            for batch in labelled:
                yield f"{epoch} {train(hook, batch)}"
            for batch in other:
                yield f"{epoch} {train(hook, batch)}"

    # Only in the first loop: in the second one, `labelled` has ended, so a restarted job continues with its next pass.
    check_once(loop, (0, 2, 5))


def test_several_batches_a_step() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        data = hook.data(loader(Augmented(), shuffle=True, batch_size=2))
        held: list[torch.Tensor] = []
        for epoch in range(data.epoch(), 3):
            for batch in data:
                held.append(batch)
                torch.rand(2)
                if len(held) == 3:
                    yield f"{epoch} {train(hook, held)}"
                    held.clear()

    # A pass has 11 batches: the fourth step has two of the first pass and one of the second, and begins in the first.
    check(loop)


def test_a_batch_that_is_prepared_ahead() -> None:
    """As in nanoGPT: the next batch is drawn while a step runs."""

    def batches() -> Iterator[torch.Tensor]:
        ahead = torch.rand(4)
        while True:
            now, ahead = ahead, torch.rand(4)
            yield now

    def loop(hook: Hook) -> Iterator[str]:
        for batch in hook.data(batches, ahead=1):
            if hook.steps == 12:
                return
            if hook.steps % 4 == 0:
                torch.rand(9)  # an evaluation
            yield train(hook, batch)

    check_once(loop, range(12))


def after_batches(count: int, **options: Any) -> Data:
    """The data of a job that was killed after so many batches of its first pass."""
    hook = Hook()
    data = hook.data(loader(shuffle=True))
    batches = iter(data)
    for batch in itertools.islice(batches, count):
        train(hook, batch)
    assert data.epoch() == 0
    held = decode(json.loads(json.dumps(encode(data.state(), "", {}))), no_tensor)
    return Data(loader(shuffle=True), "data", held, *[lambda: None] * 2, **options)


def test_at_the_end_of_a_pass_nothing_is_left_of_it() -> None:
    """A step of another source may begin when this one has given all its batches, but has not ended yet."""
    again = after_batches(6)
    before = torch.get_rng_state()
    assert list(again) == []
    assert torch.equal(torch.get_rng_state(), before)
    assert again.epoch() == 1
    assert len(list(again)) == 6


def test_reading_batches_again_tells_the_smp_that_the_process_lives() -> None:
    beats: list[None] = []
    assert len(list(after_batches(4, heartbeat=lambda: beats.append(None)))) == 2
    assert len(beats) == 4


# ---------------------------------------------------------------------- sources that know their place


class Telling:
    """A loader that reports its place. Not a `DataLoader`."""

    def __init__(self, told: list[int] | None = None) -> None:
        self.position, self.turn, self.told = 0, 0, told

    def __iter__(self) -> Iterator[int]:
        while self.position < 6:
            self.position += 1
            yield 100 * self.turn + self.position
        self.position, self.turn = 0, self.turn + 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "turn": [self.turn]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, [self.turn] = state["position"], state["turn"]
        if self.told is not None:
            self.told.append(self.position)


class TellingLoader(DataLoader[Any]):
    """A `DataLoader` that reports its place, like torchdata's. It skips samples without loading them, so it draws
    nothing for them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.given = self.skip = 0

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        for _ in range(self.skip):
            next(iterator._sampler_iter)
        self.given, self.skip = self.skip, 0
        return self._count(iterator)

    def _count(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": [(torch.tensor(self.given), torch.empty(0)), None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (given, nothing), _ = state["given"]
        assert nothing.numel() == 0
        self.skip = int(given)


def test_a_source_that_knows_its_place_is_told_it() -> None:
    check(over(Telling))
    _, taken = whole(over(Telling))
    told: list[int] = []
    _, rest = begin_a_process(over(lambda: Telling(told)), taken[4])
    next(rest)
    assert told == [4]


def test_an_endless_iterator_that_knows_its_place_may_be_given() -> None:
    def loop(hook: Hook) -> Iterator[str]:
        for batch in hook.data(GlobalBatches(SAMPLES, BATCH, seed=2)):
            if hook.steps == 14:
                return
            yield train(hook, batch)

    check_once(loop, range(14))


def test_a_loader_that_skips_is_told_its_place_and_read_again_if_that_is_not_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    check(over(lambda: TellingLoader(table(), batch_size=BATCH, shuffle=True)))
    assert "read again instead" not in caplog.text
    check(over(lambda: TellingLoader(Own(), batch_size=BATCH, shuffle=True)))
    check(over(lambda: TellingLoader(Buffered(random.Random(8).randrange), batch_size=BATCH)))
    assert "read again" in caplog.text
    assert "again of pass 1" in caplog.text


# ---------------------------------------------------------------------- what cannot be brought back


def restart(first: Callable[[], Any], then: Callable[[], Any], kill: int, passes: int = PASSES, **options: Any) -> None:
    """A job over `first`, killed in step `kill`, and restarted over `then`."""
    expected, taken = whole(over(first, passes))
    again, _ = begin_a_process(lambda hook: iter(()), taken[kill])
    found = [train(again, batch) for batch in again.data(then(), **options)]
    assert found and found != expected


@pytest.mark.parametrize("source", [iter([1, 2]), (x for x in [1]), map(str, [1]), zip([1], [2], strict=True)])
def test_what_can_be_read_once_only_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"'data' is a .*read once.*function"):
        Hook().data(source)


def test_what_gives_no_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a int, .*no batches"):
        Hook().data(7)
    with pytest.raises(ConfigError, match="in_order=False"):
        Hook().data(loader(num_workers=2, in_order=False))


def test_data_that_shrank_is_refused_by_name() -> None:
    with pytest.raises(StateMismatch, match=r"only 3 batches now, .*5 of pass 0"):
        restart(lambda: list(range(6)), lambda: list(range(3)), 5)
    with pytest.raises(StateMismatch, match="batch 6 of pass 0 is not there"):
        restart(lambda: list(range(6)), lambda: list(range(5)), 5)


@pytest.mark.parametrize("kill", [0, 2, 6, 8])
def test_other_data_is_refused_by_name(kill: int) -> None:
    with pytest.raises(StateMismatch, match=r"that of the earlier run|from those"):
        restart(lambda: list(range(6)), lambda: list(range(1, 7)), kill)


class Counting(Sampler[int]):
    """Shuffles by its own count, which nobody restores: it is no number in an attribute."""

    def __init__(self) -> None:
        self.turns = [0]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.turns[0] += 1
        return iter(random.Random(self.turns[0]).sample(range(SAMPLES), SAMPLES))


class Lazy(Augmented):
    """Makes its generator on first use."""

    numbers: np.random.Generator | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.numbers is None:
            self.numbers = np.random.default_rng(1)
        return torch.tensor([index, self.numbers.random()])


@pytest.mark.parametrize(
    ("make", "kills", "named"),
    [
        pytest.param(lambda: loader(sampler=Counting()), (6, 7, 11), r"differs? from.*state_dict", id="a count"),
        pytest.param(lambda: loader(Lazy()), (6, 8), r"generator dataset\.numbers", id="a generator that is made late"),
    ],
)
def test_what_hangs_on_what_nobody_restores_is_refused_by_name(
    make: Callable[[], Any], kills: tuple[int, ...], named: str
) -> None:
    check(over(make, passes=1))
    for kill in kills:
        with pytest.raises(StateMismatch, match=named):
            restart(make, make, kill)


def draw_torch(end: int) -> int:
    return int(torch.randint(end, ()))


@pytest.mark.parametrize("draw", [draw_torch, random.randrange, np.random.randint])
def test_a_buffer_that_is_drawn_from_as_the_step_is_is_exact_or_refused(draw: Callable[[int], int]) -> None:
    loop = over(lambda: loader(Buffered(draw), batch_size=3), passes=2)
    expected, taken = whole(loop)
    refused = 0
    for kill in range(len(expected)):
        try:
            assert whole(loop, taken[kill])[0] == expected[kill:]
        except StateMismatch as error:
            refused += 1
            assert "'data' is not where it was" in str(error)
    assert 0 < refused < len(expected)


def test_whoever_says_so_goes_on_with_other_data(caplog: pytest.LogCaptureFixture) -> None:
    restart(lambda: list(range(6)), lambda: list(range(1, 9)), 2, exact=False)
    assert "batches differ" in caplog.text
    with pytest.raises(AssertionError):  # no data is left
        restart(lambda: list(range(6)), lambda: list(range(5)), 5, exact=False)


def test_reading_that_draws_otherwise_is_refused() -> None:
    def drawing(count: int) -> Callable[[], Iterator[int]]:
        def batches() -> Iterator[int]:
            for number in range(5):
                torch.rand(count)
                yield number

        return batches

    with pytest.raises(StateMismatch, match="batch 2 of pass 0 drew"):
        restart(lambda: drawing(2), lambda: drawing(3), 1)


def test_an_evaluation_begins_no_step() -> None:
    data = Hook().data(loader())
    with torch.no_grad(), pytest.raises(ConfigError, match="gradients are off"):
        next(iter(data))


@pytest.mark.parametrize("stateful", [False, True])
def test_accelerates_loader_says_where_it_is_only_if_the_one_in_it_does(stateful: bool) -> None:
    """A stateful one goes on in every pass. It makes its first iterator, which draws, when it is prepared."""
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata" if stateful else "accelerate")

    def make() -> Any:
        configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
        return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(loader(shuffle=True))

    check(over(make, passes=PASSES if stateful else 1))


def test_two_loops_over_one_source_are_told_apart() -> None:
    hook = Hook()
    data = hook.data(loader())
    with pytest.raises(ConfigError, match="'data' is read by two loops"):
        for _ in zip(data, data, strict=True):
            pass


def test_an_error_in_the_data_is_the_users_own() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("no such shard")

    hook = Hook()
    data = hook.data(batches)
    with pytest.raises(OSError, match="no such shard"):
        list(data)
    with pytest.raises(OSError, match="no such shard"):
        list(data)
    assert data.epoch() == 1


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"'data': .*does not say"):
        Data([1], "data", {"epoch": 3}, lambda: None, lambda: None)


# ---------------------------------------------------------------------- small things


def test_it_knows_how_long_it_is() -> None:
    hook = Hook()
    data = hook.data(loader())
    assert len(data) == 6
    with pytest.raises(TypeError):
        len(hook.data(lambda: iter([1]), "endless"))


def test_the_place_does_not_grow() -> None:
    """A slot's record may become twice as long; more would need new memory in the middle of a job."""
    _, taken = whole(over(lambda: lambda: (torch.rand(3) for _ in range(60)), passes=1))
    sizes = [len(snapshot.places) for snapshot in taken]
    assert max(sizes[1:]) < 3.3 * sizes[1]
    _, taken = whole(over(lambda: loader(shuffle=True)))
    sizes = [len(snapshot.places) for snapshot in taken]
    assert max(sizes[1:]) - min(sizes[1:]) < 200


class Timed(IterableDataset[float]):
    """Draws what nobody seeds, as a shuffle does that is seeded by the time."""

    def __iter__(self) -> Iterator[float]:
        draw = random.SystemRandom()
        while True:
            yield draw.random()


def test_a_stream_that_no_restart_can_repeat_is_refused_at_its_first_batch() -> None:
    _, steps = begin_a_process(over(lambda: DataLoader(Timed(), BATCH, num_workers=1)), None)
    with pytest.raises(ConfigError, match="exact=False"):
        next(steps)
    _, steps = begin_a_process(over(lambda: DataLoader(Timed(), BATCH, num_workers=1), exact=False), None)
    assert next(steps)


@pytest.mark.parametrize("persistent", [False, True])
def test_that_no_worker_lives_on_is_said_at_the_start(persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    whole(over(lambda: loader(num_workers=1, persistent_workers=persistent), passes=2))
    said = [line.levelname for line in caplog.records if "persistent_workers" in line.message]
    assert said == ["WARNING"] * persistent
