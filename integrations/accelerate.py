"""Loops with Hugging Face's ``accelerate.Accelerator``: ``with protect(accelerator) as snap:``.

The accelerator wraps what it prepares; the wrappers pass steps and state on. It also has counters of its own: how many
batches it has accumulated gradients of, and how many passes each of its data loaders has made.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.adapters.releases import need_release
from holdfast.smp_daemon.shared.errors import ConfigError

NAME = "accelerate"
"""The name under which the accelerator's counters are tracked."""

SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")
"""The supported distributed types: one process, and DDP."""


def protect(accelerator: Accelerator, *, extra: dict[str, Any] | None = None, **options: Any) -> InMemorySnapshot:
    """Make the snapshot of all that an accelerator has prepared. Call it after ``accelerator.prepare``.

    ::

        with protect(accelerator) as snap:
            for epoch in range(snap.epoch, epochs):
                for batch in snap.data(loader):
                    with accelerator.accumulate(model):
                        ...

    It captures the models, optimizers and schedules that were prepared, the gradient scaler, what was given to
    ``register_for_checkpointing``, and the accelerator's counters; ``snap.data`` adds the place in a prepared loader. A
    step is a step of the optimizer, which ``snap.step`` counts. If gradients are accumulated over several batches, the
    first of these begins the step.

    Supports one process, and DDP. Training blocks as `holdfast.InMemorySnapshot` says.

    Args:
        extra, options: for `holdfast.InMemorySnapshot`.

    Raises:
        ConfigError: accelerate is too old, no model and optimizer have been prepared, or the accelerator runs FSDP,
            DeepSpeed, Megatron-LM or XLA.
    """
    need_release("accelerate", accelerate.__version__, "1.10")
    kind = DistributedType(accelerator.distributed_type).value
    if kind not in SERVED:
        raise ConfigError(f"an accelerator of type {kind} is not supported: use one process, or DDP")
    if not accelerator._optimizers or not accelerator._models:
        raise ConfigError("the accelerator has prepared no model and optimizer yet: call accelerator.prepare before")
    for loader in accelerator._dataloaders:
        with_generator(loader)
    more: dict[str, Any] = {f"custom{i}": each for i, each in enumerate(accelerator._custom_objects)}
    snap = InMemorySnapshot(
        accelerator._models,
        [each.optimizer for each in accelerator._optimizers],
        scheduler=accelerator._schedulers,
        extra=more | {"scaler": accelerator.scaler} | (extra or {}),
        **options,
    )
    snap.track(NAME, get=lambda: _counters(accelerator), set=lambda held: _count_on(accelerator, held))
    return snap


def with_generator(loader: Any) -> None:
    """Give a seedable sampler its generator. The sampler makes one only in its first pass (and seeds it in every pass),
    but `InMemorySnapshot.data` looks for generators before that."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator(torch.get_default_device())


def _counters(accelerator: Accelerator) -> dict[str, Any]:
    return {"step": accelerator.step, "passes": [getattr(each, "iteration", 0) for each in accelerator._dataloaders]}


def _count_on(accelerator: Accelerator, held: dict[str, Any]) -> None:
    """Restore the counters. Loaders with a seedable sampler shuffle by the number of the pass."""
    accelerator.step = held["step"]
    for loader, passes in zip(accelerator._dataloaders, held["passes"], strict=True):
        loader.iteration = passes
