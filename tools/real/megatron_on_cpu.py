"""A module for ``--first``: runs Megatron-LM's scripts on CPUs, beyond `megatron_cpu`, and notes their results.

From Megatron's own functions, it notes each iteration's mean losses, gradient norm and learning rate, each evaluation,
and at the end the weights, main parameters, moments, schedule and counters of a rank.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

from holdfast.chaos import megatron_cpu
from tools.real.probe import Probe, digest

FACTORIES = (
    *("arange", "as_tensor", "full", "full_like", "linspace", "ones_like", "rand", "rand_like", "randint", "randn"),
    "zeros_like",
)


class Event:
    """A CUDA event with nothing ever pending."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def record(self, *ignored: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 0.0

    def query(self) -> bool:
        return True


def install() -> None:
    """Replace the functions of CUDA that Megatron-LM's training scripts call."""
    megatron_cpu.install()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.set_device = cuda.set_stream = lambda *ignored: None
    cuda.get_device_capability = lambda *ignored: (8, 0)
    cuda.get_device_properties = lambda *ignored: types.SimpleNamespace(
        major=8, minor=0, total_memory=1 << 34, multi_processor_count=1, name="CPU"
    )
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *ignored: 0)
    cuda.device_memory_used = lambda *ignored: 0
    cuda.memory_stats = lambda *ignored: {}
    cuda.ipc_collect = lambda: None
    cuda.reset_peak_memory_stats = lambda *ignored: None
    cuda.get_rng_state = lambda *ignored: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *ignored: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *ignored: None
    cuda.Event = Event
    for name in FACTORIES:
        setattr(torch, name, megatron_cpu._on_cpu(getattr(torch, name)))


def watch(probe: Probe) -> None:
    """Replace functions of CUDA, and have Megatron's own results noted."""
    install()
    training: Any = importlib.import_module("megatron.training.training")
    try:
        fused: Any = importlib.import_module("megatron.legacy.fused_kernels")
    except ModuleNotFoundError:
        pass  # newer versions compile nothing
    else:
        fused.load = lambda args: None
    training.set_jit_fusion_options = lambda *ignored, **named: None
    log, evaluate, train = training.training_log, training.evaluate, training.train

    def training_log(losses: Any, total: Any, rate: Any, iteration: int, *rest: Any, **named: Any) -> Any:
        norm = rest[3] if len(rest) > 3 else named.get("grad_norm")
        consumed = training.get_args().consumed_train_samples
        probe.note("iteration", [iteration, consumed, digest([losses, rate, norm])])
        return log(losses, total, rate, iteration, *rest, **named)

    def evaluating(*arguments: Any, **named: Any) -> Any:
        found = evaluate(*arguments, **named)
        args = training.get_args()
        probe.note("eval", [args.curr_iteration, args.consumed_valid_samples, digest(found)])
        probe.tell("eval")
        return found

    def training_through(steps: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **named: Any) -> Any:
        found = train(steps, model, optimizer, scheduler, *rest, **named)
        args = training.get_args()
        inside = getattr(optimizer, "chained_optimizers", [optimizer])
        counters = [args.consumed_train_samples, args.skipped_train_samples, args.consumed_valid_samples, *found[:2]]
        probe.keep("weights", lambda: [list(each.named_parameters()) for each in model])
        probe.keep("moments", lambda: [_of(each.optimizer) for each in inside])
        probe.keep("Megatron's schedule", scheduler.state_dict)
        probe.keep("counters", lambda: counters)
        return found

    training.training_log, training.evaluate, training.train = training_log, evaluating, training_through


def _of(optimizer: Any) -> list[Any]:
    return [[p, optimizer.state.get(p, {})] for group in optimizer.param_groups for p in group["params"]]
