"""A loop in the order of Megatron-LM's ``pretrain`` and ``train``, as far as it matters for step boundaries."""

from __future__ import annotations

import copy
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.megatron_lm import InMemoryCheckpointManager

BATCH = 4

SAMPLES = 410
EVERY = 3
"""Number of iterations between evaluations."""

FULL = 3
"""Number of samples of a full validation; each evaluation reads two of them."""

OPERATIONS = 7.0
"""Number of floating-point operations of one iteration."""

Protect = Callable[[torch.nn.Module, torch.optim.Optimizer, Any, Namespace], Any]


class Samples:
    """Each sample is its number plus noise from torch's generator. A worker's seed changes with each restart, so in
    workers the noise is derived from the number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        of = None if get_worker_info() is None else torch.Generator().manual_seed(number)
        return torch.full((3,), number / SAMPLES) + torch.rand(3, generator=of)


def arguments(**given: Any) -> Namespace:
    """The arguments that ``get_args`` returns after ``setup_model_and_optimizer``."""
    known = {
        "iteration": 0,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "num_floating_point_operations_so_far": 0,
        "iterations_to_skip": [],
        "do_valid": True,
        "dataloader_type": "single",
        "full_validation": False,
        "num_workers": 0,
    }
    return Namespace(**known | given)


def pretrain(
    args: Namespace,
    iterations: int,
    protect: Protect | None,
    tell: Callable[..., None],
    *,
    snapshots: list[InMemorySnapshot] | None = None,
) -> list[Any]:
    """Train, and return the final state.

    Args:
        tell: called with the name and the results of each step and evaluation; may raise.
        snapshots: a list that the result of `protect` is appended to.
    """
    torch.manual_seed(3)
    random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    snap = protect(model, optimizer, scheduler, args) if protect is not None else None
    if snap is not None and snapshots is not None:
        snapshots.append(snap)
    if args.iteration > 0 and args.consumed_valid_samples == 0:
        args.consumed_valid_samples = args.iteration // EVERY * BATCH
    train_loader, valid_loaders, _ = build_train_valid_test_data_loaders(args)
    if isinstance(snap, Patched):
        train_loader, valid_loaders = snap.manager.load_data(train_loader, valid_loaders)
    data = iter(cyclic_iter(train_loader) if args.dataloader_type == "cyclic" else train_loader)
    passes = args.dataloader_type == "cyclic" or args.full_validation
    valid_data = iter(cyclic_iter(valid_loaders[0]) if passes else valid_loaders[0])
    operations = train(data, valid_data, model, optimizer, scheduler, args, iterations, snap, tell)
    if snap is not None:
        snap.close()
    return [
        *(parameter.tolist() for parameter in model.parameters()),
        scheduler.state_dict(),
        operations,
        args.consumed_train_samples,
        args.skipped_train_samples,
        args.consumed_valid_samples,
        torch.rand(1).item(),
        random.random(),
    ]


class Patched:
    """The snapshots of a loop that calls the checkpoint manager itself."""

    def __init__(self, manager: InMemoryCheckpointManager) -> None:
        self.manager = manager
        self.drain = manager._snap.drain
        self.close = manager.close


class Sampler:
    """Yields batches of sample numbers, starting at the position of training."""

    def __init__(self, consumed_samples: int) -> None:
        self.total_samples = SAMPLES
        self.consumed_samples = consumed_samples
        self.last_batch_size = SAMPLES % BATCH

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.total_samples - self.last_batch_size
        for first in range(self.consumed_samples % whole, whole, BATCH):
            self.consumed_samples += BATCH
            yield list(range(first, first + BATCH))


class FullSampler:
    """Yields all samples of a full validation, always from the first one."""

    def __len__(self) -> int:
        return FULL

    def __iter__(self) -> Iterator[list[int]]:
        return iter([number] for number in range(FULL))


def build_train_valid_test_data_loaders(args: Namespace) -> tuple[Any, list[Any], None]:
    """Loaders that start at the position of training, or a script's external ones."""
    if args.dataloader_type == "external":
        return External(), [External()], None
    valid: Any = FullSampler() if args.full_validation else Sampler(args.consumed_valid_samples)
    return loader_of(args, Sampler(args.consumed_train_samples)), [loader_of(args, valid)], None


def loader_of(args: Namespace, sampler: Any) -> DataLoader[torch.Tensor]:
    """A data loader; its workers, if any, are persistent."""
    workers = args.num_workers
    return DataLoader(Samples(), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)  # type: ignore[arg-type]


class Savable:
    """A loader with its own order of samples and a savable position, like Energon's."""

    def __init__(self) -> None:
        self._place = Position(number=0, seen=Seen(), marks=(1, (2, "three")))

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            number = (self._place.number * 7 + 3) % SAMPLES
            self._place.number += 1
            self._place.seen[number % 5] = self._place.seen.get(number % 5, 0) + 1
            yield torch.full((BATCH, 3), (number + sum(self._place.seen.values())) / SAMPLES)

    def save_state_rank(self) -> Position:
        """The current position."""
        return copy.deepcopy(self._place)

    def restore_state_rank(self, place: Position) -> None:
        """Continue at `place`."""
        assert type(place) is Position and type(place.seen) is Seen and place.marks == (1, (2, "three"))
        self._place = place


class Seen(dict[int, int]):
    """Counts of samples, as a dict subclass that must survive a restore."""


@dataclass(slots=True, kw_only=True)
class Position:
    """The position of a `Savable`."""

    number: int
    seen: Seen
    marks: tuple[Any, ...]


class External:
    """Like the wrapper of Energon's loader in Megatron-LM's example: it can save; only the inner loader can restore."""

    def __init__(self) -> None:
        self._dataloader = Savable()
        self._iter = iter(cyclic_iter(self._dataloader))

    def __next__(self) -> torch.Tensor:
        return next(self._iter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._iter

    def save_state(self) -> Position:
        """The current position, under Megatron-LM's name for this method."""
        return self._dataloader.save_state_rank()


def cyclic_iter(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Repeat a loader; makes each iterator when the first batch of a pass is read."""
    while True:
        yield from loader


def train(
    data: Iterator[torch.Tensor],
    valid_data: Iterator[torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    args: Namespace,
    iterations: int,
    snap: InMemorySnapshot | Patched | None,
    tell: Callable[..., None],
) -> float:
    """The training loop; returns the number of floating-point operations so far."""
    iteration = args.iteration
    num_floating_point_operations_so_far = args.num_floating_point_operations_so_far
    while iteration < iterations:
        if iteration + 1 in args.iterations_to_skip:
            next(data)
            iteration += 1
            args.consumed_train_samples += BATCH
            args.skipped_train_samples += BATCH
            continue
        args.curr_iteration = iteration
        if isinstance(snap, Patched):
            snap.manager.on_train_step_start(num_floating_point_operations_so_far)
        loss = train_step(data, model, optimizer, scheduler, snap)
        iteration += 1
        args.consumed_train_samples += BATCH
        num_floating_point_operations_so_far += OPERATIONS
        tell("step", iteration, loss)
        if iteration % EVERY == 0 and args.do_valid:
            evaluate(valid_data, model, iteration, args, tell)
        checkpoint_and_decide_exit(model, optimizer, scheduler, iteration, num_floating_point_operations_so_far)
    return float(num_floating_point_operations_so_far)


def train_step(
    data: Iterator[torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    snap: InMemorySnapshot | Patched | None,
) -> str:
    """Run one iteration; return the loss in hexadecimal."""
    optimizer.zero_grad()
    loss = model(next(data)).square().mean()
    loss.backward()
    if snap is not None:
        snap.drain(60)
    optimizer.step()
    scheduler.step()
    return float(loss.item()).hex()


def evaluate(
    data: Iterator[torch.Tensor], model: torch.nn.Module, iteration: int, args: Namespace, tell: Callable[..., None]
) -> None:
    """Evaluate on two batches."""
    model.eval()
    with torch.no_grad():
        for part in range(2):
            loss = float(model(next(data)).mean().item()).hex()
            args.consumed_valid_samples += BATCH
            tell("evaluation", iteration, part, loss)
    model.train()


def checkpoint_and_decide_exit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
) -> bool:
    """Do neither; only the place of this call in the loop matters."""
    return False
