"""Makes megatron-core train without a GPU, or on one that ranks share: for the demo, tests and chaos runs.

megatron-core 0.16 asks CUDA for its device, allocates on ``"cuda"``, recognises parameters by the spelling of their
type and draws dropout from CUDA's generator. `install` gives each of these a meaning on a CPU; Megatron itself is not
changed. Dropout on a CPU draws from torch's own generator, so the tracker's states matter as much as on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError

FACTORIES = ("empty", "empty_like", "ones", "tensor", "zeros")


def install() -> bool:
    """Replace CUDA by stand-ins. Call before the first import of megatron. On a GPU, does nothing and returns False."""
    if torch.cuda.is_available():
        return False
    if isinstance(torch.cuda.default_generators, _CpuGenerators):
        return True
    importlib.import_module("torch.distributed.optim")  # compiles TorchScript, which needs torch's own factories
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would start a C++ compiler in every rank
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = cuda.random.current_device = lambda: cpu
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.stream = contextlib.nullcontext
    cuda.Stream = _EagerStream
    cuda.current_stream = cuda.default_stream = lambda device=None: _EagerStream()
    # Otherwise torch queues operations on the generators until CUDA is initialised, which never happens.
    cuda._initialized = True
    # A build of torch with CUDA counts devices before processes are forked, and would refuse generators after the fork.
    cuda._is_in_bad_fork = lambda: False
    cuda.default_generators = _CpuGenerators()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.type = _cuda_spelling(tensor.type)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_NotAboutGenerators())
    return True


def share_gpu() -> None:
    """Let ranks that share a GPU train over gloo: it reduces tensors of a GPU one at a time, and Megatron gives it
    several in one call. Reductions that overlap the backward pass are not helped."""
    from megatron.core.distributed import param_and_grad_buffer

    def one_at_a_time(group: Any, *, async_ops: bool) -> Any:
        if async_ops:
            raise ConfigError("overlap: ranks that share a GPU cannot reduce gradients beside the backward pass")
        return contextlib.nullcontext()

    param_and_grad_buffer._coalescing_manager = one_at_a_time


class _CpuGenerators(tuple[()]):
    """``torch.cuda.default_generators``: the CPU's generator for every device."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


class _EagerStream:
    """A CUDA stream on which all work is done as soon as it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def synchronize(self) -> None:
        pass


class _NotAboutGenerators(logging.Filter):
    """Drops the warning that the CPU generator changed inside the tracker's fork: here this is intended."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": "cpu", "pin_memory": False}
            if factory.__name__ == "empty_like":
                del kwargs["pin_memory"]
        return factory(*args, **kwargs)

    return make


def _cuda_spelling(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None and self.device.type == "cpu":
            return plain(self).replace("torch.", "torch.cuda.", 1)
        return plain(self, dtype, non_blocking, **kwargs)

    return type_
