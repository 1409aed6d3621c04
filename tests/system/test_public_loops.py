"""Loops as public code has them: killed, restarted, and compared with a run without the hook, bit by bit; or refused in
words that lead on. A life ends here by an exception in the middle of a step, in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from tests.unit.test_beginning import warnings_of


class Died(BaseException):
    """The end of a life."""


class Bare:
    """What a loop has instead of a snapshot, in the run without the hook."""

    step = epoch = 0

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None: ...

    def steps(self, count: int) -> range:
        return range(count)

    def track(self, *_: Any, **__: Any) -> None: ...

    def data(self, source: Any, **_: Any) -> Batches:
        return Batches(source)

    def begin(self) -> None: ...


class Batches:
    """What a loop has instead of `snapshot.step.data.Data`."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        for batch in self.source() if callable(self.source) else self.source:
            self.position += 1
            yield batch

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self)


class Life:
    """One life of a job, which calls `snapshot` for the hook, and `lose` in the middle of each step."""

    def __init__(self, hooked: bool, dies: object = None) -> None:
        self.hooked = hooked
        self.losses: dict[object, str] = {}
        self.end = ""
        self._dies = dies
        self._snap: Any = None

    def snapshot(self, model: Any, optim: Any, **options: Any) -> Any:
        self._snap = InMemorySnapshot(model, optim, every=1, **options) if self.hooked else Bare()
        return self._snap

    def lose(self, key: object, loss: Any) -> None:
        self.losses[key] = loss.item().hex()
        if self.hooked:
            self._snap.drain(60)  # so that each step's snapshot finds a slot
        if key == self._dies:
            raise Died

    def close(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Note the final state."""
        digest = hashlib.sha256()
        for each in [*model.state_dict().values(), *model.parameters(), *(o.state_dict() for o in optimizers)]:
            digest.update(_bytes(each))
        self.end = digest.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        whole = (value.to_dense() if value.is_sparse else value).detach().resolve_conj().contiguous()
        return whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes, value))
    return repr(value).encode()


Job = Callable[[Life], None]


def live(job: Job, *, hooked: bool = True, dies: object = None) -> Life:
    life = Life(hooked, dies)
    torch.manual_seed(0)
    if dies is None:
        job(life)
    else:
        with pytest.raises(Died):
            job(life)
    return life


def check(job: Job, *deaths: object) -> list[Life]:
    """Live through these deaths, and to the end: the same losses, and the same final state, as without the hook."""
    alone = live(job, hooked=False)
    lives = [live(job, dies=dies) for dies in (*deaths, None)]
    losses: dict[object, str] = {}
    for life in lives:
        assert life.losses.items() <= alone.losses.items()
        losses |= life.losses
    assert losses == alone.losses and lives[-1].end == alone.end
    assert all(len(life.losses) < len(alone.losses) for life in lives), "a life began anew"
    return lives


def net(drop: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(drop), nn.ReLU(), nn.Linear(32, 4))


def table(length: int = 80) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(length, 16, generator=generator), torch.randint(0, 4, (length,), generator=generator)
    )


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
    return nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 4 if y is None else y)


# ---------------------------------------------------------------------- loops that count their batches


def accumulating(number: Callable[[Any], Iterator[tuple[int, Any]]]) -> Job:
    """Ten batches a pass, in steps of 4, 4 and 2."""

    def job(life: Life) -> None:
        model = net()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(table(), batch_size=8, shuffle=True)
        with life.snapshot(model, optim) as snap:
            for epoch in range(snap.epoch, 3):
                batches = snap.data(loader)
                for i, (x, y) in number(batches):
                    loss = loss_of(model, x, y) / 4
                    loss.backward()
                    life.lose((epoch, batches.position - 1), loss)
                    if (i + 1) % 4 == 0 or i + 1 == len(loader):
                        optim.step()
                        optim.zero_grad()
            life.close(model, optim)

    return job


@pytest.mark.parametrize(
    "number",
    [lambda batches: batches.enumerate(), lambda batches: enumerate(batches, batches.position)],
    ids=["enumerate", "position"],
)
def test_a_loop_that_goes_on_counting_is_exact(
    arena: Path, number: Callable[[Any], Iterator[tuple[int, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    check(accumulating(number), (0, 9), (1, 5))
    assert not [line for line in caplog.records if "enumerate" in line.getMessage()]


def test_a_loop_whose_steps_follow_from_a_number_that_begins_anew_is_refused_at_once(arena: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.enumerate\(\)"):
        live(accumulating(enumerate))


@pytest.mark.parametrize("dies", [(0, 6), (1, 9)], ids=str)
def test_a_loop_that_carries_gradients_into_the_next_pass_is_exact(arena: Path, dies: object) -> None:
    def job(life: Life) -> None:
        model, numbers = net(), [0]
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(table(), batch_size=8, shuffle=True)
        snap = life.snapshot(model, optim)
        snap.track("number", get=lambda: numbers[0], set=lambda value: numbers.__setitem__(0, value))
        with snap:
            for epoch in range(snap.epoch, 3):
                batches = snap.data(loader)
                for x, y in batches:
                    numbers[0] += 1
                    loss = loss_of(model, x, y) / 4
                    loss.backward()
                    life.lose((epoch, batches.position - 1), loss)
                    if numbers[0] % 4 == 0:
                        optim.step()
                        optim.zero_grad()
            life.close(model, optim)

    check(job, dies)


# ---------------------------------------------------------------------- what is said of a loop


def counted(
    life: Life,
    model: nn.Module,
    optim: torch.optim.Optimizer,
    steps: int = 6,
    batch: Callable[[int], torch.Tensor] = lambda step: torch.randn(8, 16),
    schedule: Any = None,
) -> None:
    """A loop that counts its steps."""
    with life.snapshot(model, optim, scheduler=schedule) as snap:
        for step in snap.steps(steps):
            optim.zero_grad()
            loss = loss_of(model, batch(step))
            loss.backward()
            life.lose(step, loss)
            optim.step()
            if schedule is not None:
                schedule.step()
        life.close(model, optim)


def test_noise_from_a_generator_that_nothing_names_is_named_as_the_cause(arena: Path) -> None:
    """As mixup in the loop does; the data itself comes back."""

    def drawing(generator: torch.Generator) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand((), generator=generator)

    def job(life: Life) -> None:
        model, shares = net(), drawing(torch.Generator().manual_seed(3))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with life.snapshot(model, optim) as snap:
            batches = snap.data(DataLoader(table(), batch_size=8, shuffle=True))
            for x, y in batches:
                share = next(shares)
                loss = loss_of(model, share * x + (1 - share) * x.flip(0), y)
                loss.backward()
                life.lose(batches.position - 1, loss)
                optim.step()
                optim.zero_grad()

    live(job, dies=4)
    with pytest.raises(StateMismatch, match=r"gave the same batch.*Generator.*snap\.track"):
        live(job)


def test_an_optimizer_that_is_made_anew_in_training_is_told_of(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(life: Life) -> None:
        model = net()
        optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with life.snapshot(model, optim) as snap:
            for step in snap.steps(16):
                if step == 4:
                    optim = torch.optim.SGD(model.parameters(), lr=1e-2)
                optim.zero_grad()
                loss = loss_of(model, torch.randn(8, 16))
                loss.backward()
                life.lose(step, loss)
                optim.step()
            life.close(model)

    live(job)
    (said,) = [text for text in warnings_of(caplog) if "optimizer" in text]
    assert "no snapshot" in said and "list of both" in said
    check(job, 10)  # it began again where the last snapshot was, and is right


def test_steps_that_are_left_out_now_and_then_are_no_news(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(life: Life) -> None:
        model = net()
        optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=12)
        with life.snapshot(model, optim) as snap:
            for step in snap.steps(20):

                def closure() -> Any:
                    optim.zero_grad()
                    loss = loss_of(model, torch.ones(8, 16))
                    loss.backward()
                    return loss

                life.lose(step, closure())
                if step % 5 == 4:
                    optim.step(closure)  # type: ignore[no-untyped-call]
            life.close(model, optim)

    check(job, 12)
    assert not [text for text in warnings_of(caplog) if "gradients" in text]


class Compiled(torch.optim.Optimizer):
    """Keeps numbers in scalar tensors, which a compiled step would take. One is filled before each use; the other
    lasts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self._rate = torch.tensor(0.0)
        self._scale = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._scale.mul_(0.9)
        for group in self.param_groups:
            self._rate.fill_(group["lr"])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * self._rate * self._scale)


def test_numbers_in_scalar_tensors_of_an_optimizer_come_back(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(life: Life) -> None:
        model = net()
        counted(life, model, Compiled(model.parameters()), 10)

    check(job, 3, 7)
    assert warnings_of(caplog) == []


def test_a_default_device_that_is_not_the_data_s_disturbs_nothing(arena: Path) -> None:
    def job(life: Life) -> None:
        model = net()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [torch.randn(8, 16) for _ in range(6)]
        labels = torch.arange(8) % 4
        torch.set_default_device("meta")
        try:
            with life.snapshot(model, optim) as snap:
                data = snap.data(batches)
                for x in data:
                    loss = loss_of(model, x, labels)
                    loss.backward()
                    life.lose(data.position - 1, loss)
                    optim.step()
                    optim.zero_grad()
                torch.set_default_device("cpu")
                life.close(model, optim)
        finally:
            torch.set_default_device(None)

    check(job, 3)


# ---------------------------------------------------------------------- known to hold


def cycled(life: Life) -> None:
    """An endless generator over a shuffled loader, read for several passes."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(table(40), batch_size=8, shuffle=True)

    def cycle() -> Iterator[Any]:
        while True:
            yield from loader

    with life.snapshot(model, optim) as snap:
        for number, (x, y) in snap.data(cycle, ahead=0).enumerate():
            loss = loss_of(model, x, y)
            loss.backward()
            life.lose(number, loss)
            optim.step()
            optim.zero_grad()
            if number == 16:
                break
        life.close(model, optim)
        if life.hooked:
            snap.finish()


class Rotating(torch.optim.Optimizer):
    """Keeps lists of matrices in its state, which are new ones after every step; empty lists for vectors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                sides = parameter.shape if parameter.dim() == 2 else ()
                state |= {"step": 0, "mean": torch.zeros_like(parameter), "sides": [torch.zeros(n, n) for n in sides]}
            state["step"] += 1
            if state["sides"]:
                grams = gradient @ gradient.t(), gradient.t() @ gradient
                state["sides"] = [side.lerp(gram, 0.1) for side, gram in zip(state["sides"], grams, strict=True)]
            state["mean"] = state["mean"] * 0.9 + gradient * 0.1
            parameter.add_(state["mean"], alpha=-self.param_groups[0]["lr"])


def rotated(life: Life) -> None:
    model = net()
    counted(life, model, Rotating(model.parameters()))


def normed(life: Life) -> None:
    """Parametrisations, and their buffers."""
    kinds = nn.utils.parametrizations
    model = nn.Sequential(
        kinds.spectral_norm(nn.Linear(16, 16)), kinds.weight_norm(nn.Linear(16, 16)), kinds.orthogonal(nn.Linear(16, 4))
    )
    counted(life, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


class Odd(nn.Module):
    """Complex, empty and 0-dimensional parameters, a conjugated view as a buffer, and one that forward assigns."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
        self.t, self.e = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 4))
        self.register_buffer("turned", torch.randn(9, dtype=torch.cfloat).conj())
        self.register_buffer("seen", torch.zeros(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        wave = torch.fft.irfft(torch.fft.rfft(x) * self.w * self.turned, n=16)
        return self.head(wave * self.t + 0.01 * self.seen) + self.e.sum()


def odd(life: Life) -> None:
    model = Odd()
    counted(life, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def frozen_norms(life: Life) -> None:
    """Trained in eval mode, and says where its steps begin."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counted(life, model, optim, schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10))


def replayed(life: Life) -> None:
    """A replay buffer of tensors, which grows, given by `get`."""
    model, held = net(), list[torch.Tensor]()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snap = life.snapshot(model, optim)
    snap.track("replay", get=lambda: list(held), set=lambda values: held.__setitem__(slice(None), values))
    with snap:
        for step in snap.steps(8):
            held.append(torch.randn(16))
            loss = loss_of(model, torch.stack([held[i] for i in torch.randint(0, len(held), (8,))]))
            optim.zero_grad()
            loss.backward()
            life.lose(step, loss)
            optim.step()
        life.close(model, optim)


def sparse(life: Life) -> None:
    embedding, head = nn.Embedding(100, 16, sparse=True), nn.Linear(16, 4)
    model = nn.ModuleList([embedding, head])
    optims = [torch.optim.SparseAdam(embedding.parameters(), lr=1e-2), torch.optim.AdamW(head.parameters(), lr=1e-2)]
    with life.snapshot(model, optims) as snap:
        for step in snap.steps(6):
            loss = loss_of(nn.Sequential(embedding, head), torch.randint(0, 100, (8,)))
            for optim in optims:
                optim.zero_grad()
            loss.backward()
            life.lose(step, loss)
            for optim in optims:
                optim.step()
        life.close(model, *optims)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "averaged": lambda optim: torch.optim.swa_utils.SWALR(optim, swa_lr=0.05, anneal_epochs=5),
    "sequential": lambda optim: torch.optim.lr_scheduler.SequentialLR(
        optim,
        [
            torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optim, 8),
        ],
        [3],
    ),
    "chained": lambda optim: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optim, 0.9),
        ]
    ),
    "restarts": lambda optim: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optim, 3),
    "cyclic": lambda optim: torch.optim.lr_scheduler.CyclicLR(optim, 0.01, 0.1, step_size_up=3, gamma=0.9),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_comes_back(arena: Path, kind: str) -> None:
    def job(life: Life) -> None:
        model = net()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        counted(life, model, optim, 8, schedule=SCHEDULES[kind](optim))

    check(job, 5)


@pytest.mark.parametrize(
    ("job", "deaths"),
    [
        (cycled, [7, 13]),
        (rotated, [1, 4]),
        (normed, [3]),
        (odd, [3]),
        (frozen_norms, [3]),
        (replayed, [5]),
        (sparse, [3]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_killed_loop_goes_on_bit_for_bit(arena: Path, job: Job, deaths: list[object]) -> None:
    check(job, *deaths)


@pytest.mark.parametrize("dies", [1, 4])
def test_a_loop_that_changes_parameters_by_itself_says_where_its_steps_begin(arena: Path, dies: int) -> None:
    def job(life: Life) -> None:
        model = net()
        with life.snapshot(model, None) as snap:
            for step in snap.steps(7):
                loss = model(torch.randn(8, 16)).square().mean()
                model.zero_grad()
                loss.backward()
                life.lose(step, loss)
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad, alpha=-0.1)
        life.close(model)

    check(job, dies)


def test_without_an_optimizer_a_loop_that_says_nothing_is_refused(arena: Path) -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"no optimizer.*snap\.begin"), InMemorySnapshot(model):
        model(torch.randn(8, 16)).sum().backward()


@pytest.mark.parametrize("dies", [1, 4])
def test_what_a_plain_loop_shuffles_once_is_shuffled_alike_again(arena: Path, dies: int) -> None:
    def job(life: Life) -> None:
        model, rows = net(), torch.randn(32, 16)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own = torch.Generator().manual_seed(3)
        with life.snapshot(model, optim) as snap:
            order = torch.randperm(32, generator=own)
            for step in range(snap.step, 7):
                loss = loss_of(model, rows[order[4 * step : 4 * step + 4]])
                loss.backward()
                life.lose(step, loss)
                optim.step()
                optim.zero_grad()
            life.close(model, optim)

    check(job, dies)


@pytest.mark.parametrize("at_top", [True, False], ids=["before the change", "after it"])
def test_a_loop_without_an_optimizer_that_is_left_early_loses_no_turn(arena: Path, at_top: bool) -> None:
    def job(snap: InMemorySnapshot, model: nn.Module, stop: int) -> None:
        for step in snap.steps(6):
            if at_top and step == stop:
                break
            loss = model(torch.randn(8, 16)).square().mean()
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
            if step == stop:
                break

    def life(stop: int, *, hooked: bool = True) -> str:
        torch.manual_seed(0)
        model = net()
        with InMemorySnapshot(model, every=1, block=1) if hooked else Bare() as snap:
            job(cast(InMemorySnapshot, snap), model, stop)
        return hashlib.sha256(_bytes(model.state_dict())).hexdigest()

    undisturbed = life(-1, hooked=False)
    life(3)
    assert life(-1) == undisturbed


def test_an_optimizer_that_the_hook_was_not_given_is_named(arena: Path) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"AdamW steps \d+ parameters.*optim="), InMemorySnapshot(model) as snap:
        for _ in snap.steps(3):
            model(torch.randn(8, 16)).sum().backward()
            optim.step()
