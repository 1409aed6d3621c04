"""Drills: one job runs twice on virtual nodes, undisturbed and with faults; the results must match to the last bit.

A job is a class; an instance is one rank's training. Every trainer runs `train`; `holdfast.chaos.differences` compares
the runs.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from holdfast.chaos.runner import find
from holdfast.chaos.trainer import Trainer
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.snapshot.hook import SnapshotHook

DRAIN_DEADLINE_S = 2.0

State = Iterable[tuple[str, Any]]


class Job(Protocol):
    """One rank of a training job. It is created from a seed and the job's own options, after the process group."""

    def __init__(self, seed: int, **options: Any) -> None: ...

    def protect(self, **options: Any) -> SnapshotHook:
        """The hook for the training loop, not entered yet; `options` are those of `holdfast.InMemorySnapshot`."""
        ...

    def step(self, step: int, middle: Callable[[], None]) -> float | None:
        """Train one step, counted from 0; call `middle` at least once before the optimizer's step.

        Returns the loss, or None if this rank has none.
        """
        ...

    def state(self) -> State:
        """All state that determines how training continues, by name, collected without holdfast's own code."""
        ...


def train() -> None:
    """Train one rank of a job, from joining the process group to the last step.

    Arguments: ``job`` (``module:Class``), ``seed``, ``steps``, ``snapshots``. Optional: ``options`` of the job;
    ``hook`` options; ``drain``: wait for each snapshot in the middle of the next step, since steps that take no time
    would skip most snapshots (a number: only up to that step; the job must call `middle` once a step); ``defaults``:
    use the hook's default options, instead of a snapshot at every step.
    """
    trainer = Trainer.from_environment()
    args = trainer.args
    torch.set_num_threads(1)
    trainer.init_process_group()
    if place().type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    go_through(args, trainer.report)
    # The group is not destroyed: that would wait, with the GIL held, for gloo's threads, which may still need the GIL
    # to release what DDP's last reduction held. The process ends right after this.


def go_through(args: Mapping[str, Any], report: Callable[..., None]) -> None:
    """The part of `train` that follows the process group; calls `report` at the start, after every step, and at the
    end."""
    job: Job = find(args["job"])(args["seed"], **args.get("options", {}))
    with ExitStack() as stack:
        snap: SnapshotHook | None = None
        if args["snapshots"]:
            every = {"every": "auto" if args.get("defaults") else 1}
            snap = stack.enter_context(job.protect(start=False, **(every | args.get("hook", {}))))
            restored = snap.restored
            report(
                "started",
                step=snap.step,
                how=restored.how,
                bytes_fetched=restored.bytes_fetched,
                clock=restored.clock,
                tier=restored.tier,
                passed_over=restored.passed_over,
            )
        began_s = time.monotonic()
        for step in range(snap.step if snap else 0, args["steps"]):

            def middle(number: int = step + 1) -> None:
                if snap is not None and drains(args.get("drain", False), number):
                    snap.drain(DRAIN_DEADLINE_S)
                    dist.barrier()  # now the last step is protected everywhere, so a job that is killed resumes from it
                failpoint("train.step", number)

            loss = job.step(step, middle)
            report(
                "step",
                step=step + 1,
                loss="none" if loss is None else loss.hex(),
                protected=snap.protected_step if snap else None,
                interval=snap.statistics.interval if snap else None,
            )
        held_up = snap.statistics.stall_s / (time.monotonic() - began_s) if snap else None
        report("end", digests=digests(job.state()), held_up=held_up)


def place() -> torch.device:
    """The device on which this process trains: its GPU, or the CPU if it sees no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def drains(drain: bool | int, step: int) -> bool:
    """Whether a job whose argument is `drain` waits in the middle of a step, counted from 1."""
    return drain if isinstance(drain, bool) else step <= drain


# ---------------------------------------------------------------------- state, and its digests


def digests(state: State) -> dict[str, str]:
    """A digest of each value, by name. Raises `ValueError` if a name occurs twice."""
    found: dict[str, str] = {}
    for name, value in state:
        if name in found:
            raise ValueError(f"two values are named {name!r}")
        found[name] = digest(value)
    return found


def digest(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a tensor, an array, or a plain value's ``repr``."""
    sha = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        sha.update(f"{value.dtype}{value.shape}".encode())
        sha.update(value.tobytes())
    else:
        sha.update(repr(value).encode())
    return sha.hexdigest()[:16]


def modules(*parts: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of modules, by name."""
    for i, module in enumerate(parts):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            yield f"module{i}.{name}", local(tensor)


def optimizer(optim: torch.optim.Optimizer, prefix: str = "optim") -> Iterator[tuple[str, Any]]:
    """Options of an optimizer's groups, and its state of every parameter, by name."""
    for g, group in enumerate(optim.param_groups):
        yield f"{prefix}.group{g}", sorted((k, str(v)) for k, v in group.items() if k != "params")
        for p, parameter in enumerate(group["params"]):
            for key, value in optim.state.get(parameter, {}).items():
                yield f"{prefix}.group{g}.parameter{p}.{key}", local(value)


def generators() -> Iterator[tuple[str, Any]]:
    """The states of the random generators of Python, NumPy, torch and, if there is one, the GPU, by name."""
    yield "random.python", random.getstate()
    yield "random.numpy", repr(np.random.get_state(legacy=False))
    yield "random.torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "random.cuda", torch.cuda.get_rng_state()


def local(value: Any) -> Any:
    """This rank's part of a distributed tensor; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value
