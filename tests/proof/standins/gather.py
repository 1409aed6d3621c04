"""Makes gloo gather what only NCCL can: tensors of unequal sizes, and tensors of several types in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Make ``torch.distributed.all_gather`` accept tensors of unequal sizes, for the whole process. Idempotent."""
    dist.all_gather = _uneven(getattr(dist.all_gather, "__wrapped__", dist.all_gather))


def one_by_one() -> None:
    """Make megatron-core gather its buffers one after another where nothing overlaps, for the whole process: gloo would
    mix up the bytes of buffers of several types. Idempotent."""
    from megatron.core.distributed import param_and_grad_buffer

    together: Any = torch.distributed._coalescing_manager  # type: ignore[attr-defined]

    def gathered(*args: Any, async_ops: bool = False, **kwargs: Any) -> AbstractContextManager[Any]:
        if not async_ops:
            return nullcontext(_Done())
        overlapped: AbstractContextManager[Any] = together(*args, async_ops=True, **kwargs)
        return overlapped

    param_and_grad_buffer._coalescing_manager = gathered


def _uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [each.numel() for each in tensors]
        if len(set(sizes)) == 1:
            return gather(tensors, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.reshape(-1)
        found = [torch.empty_like(padded) for _ in tensors]
        gather(found, padded, group=group)
        for each, part in zip(tensors, found, strict=True):
            each.view(-1).copy_(part[: each.numel()])
        return _Done() if async_op else None

    return all_gather


class _Done:
    """The handle of work that is done already."""

    def wait(self) -> None:
        pass
