"""Plain PyTorch: modules and `torch.optim` optimizers, each rank holding its own state.

For distributed tensors, such as those of FSDP2's ``fully_shard``, each rank captures and restores its own part.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import some
from holdfast.snapshot.copy.tensors import block_of, local, memory_of
from holdfast.snapshot.state.adapter import Adapter, buffers, check_modules, parameter_names, warn_of_unnamed
from holdfast.snapshot.state.hidden import untracked
from holdfast.snapshot.state.live import At, Change, LiveTensor, Look, Stateful
from holdfast.snapshot.state.optimizers import OptimizerState, nested, says_more, unwrapped


class TorchAdapter(Adapter):
    """For modules and optimizers. A rank's coordinate is its rank."""

    def __init__(
        self,
        model: Any,
        optim: Any,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        extra: Mapping[str, Stateful | None] | None = None,
    ) -> None:
        self._optimizers = _check_optimizers(optim)
        modules = check_modules(model)
        self._replicated = all(isinstance(module, DistributedDataParallel) for module in modules)
        self._names = parameter_names(modules)
        states = [
            OptimizerState(optimizer, f"optim{i or ''}", replicated=self._replicated, names=self._names)
            for i, optimizer in enumerate(unwrapped(*self._optimizers))
        ]
        super().__init__(model, states, scheduler, extra)
        self._once: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        warn_of_unnamed(states)

    def coordinate(self) -> str:
        return f"dp{dist.get_rank() if dist.is_available() and dist.is_initialized() else 0}"

    def replica_set(self) -> str:
        """All ranks, if all modules are in DDP; otherwise each rank is alone."""
        return "all" if self._replicated else self.coordinate()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def rebuild(self, at: At) -> None:
        super().rebuild(at)
        self._name()

    def _name(self) -> None:
        """Name the parameters anew: they may be others, or other objects, by now."""
        self._names.clear()
        self._names.update(parameter_names(self._modules))

    def verify(self) -> None:
        super().verify()
        named = self._unknown_optimizers()
        roots = [(path, inner) for name, each in named for path, inner in nested(name, each) if says_more(inner)]
        if hidden := untracked(roots, self.captured.union(map(memory_of, self.generators().values()))):
            text = "%s: kept by an optimizer beside its state, and not captured: name it by snap.track"
            self._episodes.begin("hidden", text, some(hidden))

    def _unknown_optimizers(self) -> list[tuple[str, Any]]:
        return [(f"optim{i or ''}", optimizer) for i, optimizer in enumerate(self._optimizers)]

    def look(self) -> Look:
        """The base's state and, for exporting a snapshot, whether names have DDP's prefix."""
        found = super().look()
        return Look({**found.fixed, "export": {"wrapped": self._replicated}}, found.late)

    def tensors(self) -> Iterator[LiveTensor]:
        self._name()
        self._check_names()
        # Where no optimizer steps, nothing tells when parameters are about to change.
        change = Change.STEP if self._optimizers else Change.ANY
        for prefix, module in self._of_modules():
            for name, parameter in module.named_parameters():
                block = block_of(parameter)
                yield LiveTensor(f"{prefix}.{name}", local(parameter), change, self._replicated, block=block)
            yield from buffers(module, prefix)
        of_no_module = {
            p: f"loose.optim{i or ''}.{name}" for i, s in enumerate(self._states) for name, p in s.unnamed()
        }
        for loose, name in of_no_module.items():
            yield LiveTensor(name, local(loose), Change.STEP, block=block_of(loose))
        for state in self._states:
            yield from state.tensors()
        yield from self._tracked_tensors()

    def _check_names(self) -> None:
        """Raises `StateMismatch` if an optimizer's sharded parameter was the model's and no longer is."""
        for state in self._states:
            for place, parameter in state.unnamed():
                known, called = self._once.get(id(parameter), (None, ""))
                if known is not None and known() is parameter and local(parameter) is not parameter:
                    raise StateMismatch(
                        f"parameter {place} of an optimizer was {called}, but the model now has another tensor there, "
                        "as between FSDP2's unshard() and reshard(): call `snap.begin()` before parameters are gathered"
                    )
            for _, parameter in state.parameters():
                if name := self._names.get(parameter):
                    self._once[id(parameter)] = weakref.ref(parameter), name


def _check_optimizers(optim: Any) -> list[torch.optim.Optimizer]:
    if optim is None:
        return []
    optimizers = list(optim) if isinstance(optim, list | tuple) else [optim]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim is a {type(optimizer).__qualname__}: give a torch.optim.Optimizer, some of them, or Megatron's"
            )
    if not optimizers:
        raise ConfigError("optim is an empty list: leave it out if the loop changes parameters by itself")
    return optimizers
