"""Jobs whose number of ranks changes. They report digests of every undivided tensor, assembled without holdfast's own
code, and of each rank's own state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.chaos import drill
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.plain import to_plain
from tests.jobs import joined
from tests.proof.jobs.elastic import Elastic
from tests.proof.jobs.zero import Zero

DRAIN_DEADLINE_S = 10.0

Piece = tuple[str, int, int, torch.Tensor]
"""Name and length of a flattened whole, the offset of a tensor in it, and the tensor."""


class Count:
    """Extra state: the number of steps that it has seen."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def train() -> None:
    """Train a job of kind `kind` up to step `steps`, with each snapshot protected before the next step ends."""
    trainer = joined()
    args = trainer.args
    job: Any
    if args["kind"] == "megatron":
        from tests.proof.gpt import FullGpt

        job = FullGpt(1234, **args.get("options", {}))
    elif args["kind"] == "zero":
        job = Zero(7)
    else:
        job = Elastic(7, args["kind"], **args.get("options", {}))
    arena = Path(args["arena"]) / os.environ["HOLDFAST_NODE"]
    options: dict[str, Any] = {}
    counted = Count()
    if args["kind"] == "zero":  # ranks pass different extras
        options["extra"] = {"log" if dist.get_rank() == 0 else "count": counted}
    snap = job.protect(arena=arena, every=1, keep=True, elastic=args["elastic"], **options)
    ema = {"ema": torch.zeros(3)}
    snap.track("ema", tensors=ema, changes="after step")
    with snap:
        trainer.report(
            "started",
            step=snap.step,
            how=snap.restored.how,
            tier=snap.restored.tier,
            spent=to_plain(snap.statistics.spent),
            count=counted.steps,
            **said(job, ema),
        )
        for step in range(snap.step, args["steps"]):

            def middle(number: int = step + 1) -> None:
                snap.drain(DRAIN_DEADLINE_S)
                dist.barrier()
                failpoint("train.step", number)

            loss = job.step(step, middle)
            ema["ema"] += step
            counted.steps += 1
            trainer.report("step", step=step + 1, loss=loss)
        trainer.report("end", **said(job, ema))


def said(job: Any, ema: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Digests of the job's wholes, of state that is identical on all ranks, and of each rank's own state."""
    pieces = list(
        megatron(job) if hasattr(job, "chunks") else plain(job.model, getattr(job, "optim", None) or job.zero.optim)
    )
    everyone: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, pieces)
    wholes: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, length, start, tensor in (piece for part in everyone for piece in part):
        whole = wholes.setdefault(name, torch.zeros(length, dtype=tensor.dtype))
        mask = seen.setdefault(name, torch.zeros(length, dtype=torch.bool))
        here = slice(start, start + tensor.numel())
        both = mask[here]
        assert torch.equal(whole[here][both], tensor.reshape(-1)[both]), f"{name} is not alike on all ranks"
        whole[here], mask[here] = tensor.reshape(-1), True
    holes = [name for name, mask in seen.items() if not mask.all()]
    assert not holes, holes
    schedule = job.scheduler if hasattr(job, "chunks") else job.schedule
    position = job.batches.state_dict() if hasattr(job, "batches") else {}
    own = dict(drill.generators())
    if hasattr(job, "chunks"):
        from megatron.core import tensor_parallel

        own |= {f"tracker.{k}": v for k, v in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    return {
        "whole": {name: drill.digest(whole) for name, whole in sorted(wholes.items())},
        "alike": drill.digest([sorted(schedule.state_dict().items(), key=str), ema["ema"].tolist(), position]),
        "own": drill.digests(own.items()),
    }


def plain(model: torch.nn.Module, optim: torch.optim.Optimizer) -> Iterator[Piece]:
    """Parameters and the state of this rank's optimizer; distributed tensors are assembled by torch."""
    for name, parameter in model.named_parameters():
        for key, value in [("", parameter), *optim.state.get(parameter, {}).items()]:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            yield f"{name}/{key}", full.numel(), 0, full.detach().clone()


def megatron(job: Any) -> Iterator[Piece]:
    """Weights, main parameters and moments, placed by Megatron's own maps of each rank's ranges."""
    from megatron.core import parallel_state as mpu

    place = f"pp{mpu.get_pipeline_model_parallel_rank()}-tp{mpu.get_tensor_model_parallel_rank()}"
    names = {}
    for i, chunk in enumerate(job.chunks):
        for name, parameter in chunk.named_parameters():
            names[parameter] = f"{place}/{i}.{name}"
            yield f"{place}/{i}.{name}", parameter.numel(), 0, parameter.detach().clone()
    for part in job.optim.chained_optimizers:
        groups = [
            *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
            *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
        ]
        for weight, main in (pair for weights, mains in groups for pair in zip(weights, mains, strict=True)):
            start = part._get_model_param_range_map(weight)["param"].start
            for key, value in [("main", main), *part.optimizer.state.get(main, {}).items()]:
                whole = (weight.numel(), start) if value.shape == main.shape else (value.numel(), 0)
                yield f"{names[weight]}/{key}", *whole, value.detach().clone()
