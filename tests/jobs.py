"""Small jobs for virtual clusters, whose state says of itself which step it is of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from chaos.trainer import Trainer
from holdfast import InMemorySnapshot
from smp_daemon.points import reach

DRAIN_DEADLINE_S = 1.0


class Stamp(torch.optim.Optimizer):
    """Fills every parameter, and two state tensors of each, with the number of steps taken."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["double"] = torch.zeros(parameter.shape, dtype=torch.float64)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["count"] += 1
                state["double"].fill_(float(state["count"]))
                parameter.data.fill_(float(state["count"]))


class Stamped(torch.nn.Module):
    """A few tensors of different sizes, and a buffer that forward fills."""

    tokens: torch.Tensor

    def __init__(self, longest: int) -> None:
        super().__init__()
        sizes = [1, 63, 4097, longest]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
        self.register_buffer("tokens", torch.zeros(5))

    def forward(self, step: int) -> None:
        self.tokens.fill_(step)


def stamps(model: Stamped, optim: Stamp) -> list[float]:
    """Every distinct value in the state. One value: one whole step."""
    tensors = [*model.parameters(), model.tokens]
    tensors += [value for state in optim.state.values() for value in state.values()]
    return sorted({float(value) for tensor in tensors for value in torch.unique(tensor.detach())})


def stamped() -> None:
    """Trains `steps` steps; reports at the start and at the end which steps its tensors are of."""
    trainer = Trainer.from_environment()
    torch.set_num_threads(1)
    trainer.init_process_group()
    model = Stamped(20_000 + trainer.args.get("skew", 1000) * trainer.rank)
    optim = Stamp(model.parameters())
    with InMemorySnapshot(model, optim, start=False, **trainer.args.get("options", {})) as snap:
        trainer.report(
            "started",
            step=snap.step,
            stamps=stamps(model, optim),
            how=snap.restored.how,
            bytes_fetched=snap.restored.bytes_fetched,
        )
        for step in range(snap.step, trainer.args["steps"]):
            model(step + 1)
            reach("train.step", step + 1)
            snap.drain(DRAIN_DEADLINE_S)  # these steps take no time; without this most of them would be skipped
            dist.barrier()
            optim.step()
            trainer.report("step", step=step + 1, protected=snap.protected_step)
        trainer.report("end", stamps=stamps(model, optim), statistics=_counts(snap.statistics))
    dist.destroy_process_group()


def _counts(statistics: Any) -> dict[str, Any]:
    return {name: getattr(statistics, name) for name in ("taken", "protected", "failed", "skipped")}
