"""The counters that Megatron-LM keeps in its arguments go with a snapshot."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from holdfast.hook import InMemorySnapshot
from holdfast.megatron_lm import protect
from tests.test_hook import arena as arena

BATCH = 16


def start(iteration: int = 0) -> tuple[Namespace, torch.nn.Module, torch.optim.Optimizer]:
    """What a run of the script has after ``setup_model_and_optimizer``."""
    args = Namespace(iteration=iteration, consumed_train_samples=iteration * BATCH, skipped_train_samples=0)
    model = torch.nn.Linear(3, 2)
    return args, model, torch.optim.Adam(model.parameters())


def train(
    snap: InMemorySnapshot, args: Namespace, model: torch.nn.Module, optim: torch.optim.Optimizer, until: int
) -> None:
    """Megatron-LM's loop, as far as it touches its arguments."""
    for iteration in range(args.iteration, until):
        args.curr_iteration = iteration
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        snap.drain(10)
        optim.step()
        args.consumed_train_samples += BATCH


def test_a_restart_goes_on_at_the_iteration_and_sample_of_the_snapshot(arena: Path) -> None:
    args, model, optim = start(iteration=100)
    snap = protect(model, optim, None, args, strict=True)
    assert (snap.step, args.iteration) == (0, 100)
    train(snap, args, model, optim, until=105)
    model(torch.ones(1, 3))
    assert snap.drain(10)
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)

    args, model, optim = start(iteration=90)  # a checkpoint on disk, older by nature
    snap = protect(model, optim, None, args, strict=True)
    assert (snap.step, args.iteration) == (5, 105)
    assert args.consumed_train_samples == 105 * BATCH
    assert args.skipped_train_samples == 0
    train(snap, args, model, optim, until=107)
    snap.close()
    assert args.consumed_train_samples == 107 * BATCH
    assert not (arena / "test").exists()
