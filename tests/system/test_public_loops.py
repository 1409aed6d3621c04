"""Loops as public code has them: killed, restarted, and compared with a run without the hook, bit by bit; or refused in
words that lead on. A life ends here by an exception in the middle of a step, in one process."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import InMemorySnapshot, StateMismatch


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


@pytest.mark.parametrize("dies", [(0, 9), (1, 9)], ids=str)
def test_a_loop_that_counts_anew_is_told_at_once_and_does_not_end_wrong(
    arena: Path, dies: object, caplog: pytest.LogCaptureFixture
) -> None:
    job = accumulating(enumerate)
    live(job, dies=dies)
    told = [line for line in caplog.records if ".enumerate()" in line.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.WARNING
    with pytest.raises(StateMismatch, match="gradients that no step has used"):
        live(job)
    repaired = accumulating(lambda batches: batches.enumerate())
    alone, life = live(repaired, hooked=False), live(repaired)
    assert life.losses.items() <= alone.losses.items() and life.end == alone.end


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
