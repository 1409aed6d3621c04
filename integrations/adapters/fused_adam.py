"""Transformer Engine's FusedAdam, which makes an optimizer precision-aware: it may keep moments in 16 bits, main
parameters of its own, and the scales of both beside its state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import Change, Container, LiveTensor
from holdfast.snapshot.state.optimizers import OptimizerState

SCALE = ".scale"


def keeps_scales(optimizer: object) -> bool:
    """Whether this is the FusedAdam of a precision-aware Transformer Engine, 2.0 or newer."""
    return all(hasattr(optimizer, name) for name in ("_scales", "initialize_state", "name_to_dtype_map"))


class FusedAdamState(OptimizerState):
    """The state of a FusedAdam, with its scales.

    Raises:
        ConfigError: moments are kept in 8 bits.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, prefix: str, **options: Any) -> None:
        super().__init__(optimizer, prefix, **options)
        narrow = [name for name, dtype in optimizer.name_to_dtype_map.items() if dtype == torch.uint8]
        if narrow:
            raise ConfigError(
                f"{prefix}: FusedAdam keeps {narrow[0]} in 8 bits, in a tensor class of Transformer Engine that was "
                f"never tested: train with --{narrow[0].replace('_', '-')}-dtype bf16"
            )
        self._scales_before: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def tensors(self) -> Iterator[LiveTensor]:
        """Moments, main parameters, and the scales of both."""
        yield from super().tensors()
        for name, parameter in self.parameters():
            for entry, scale in self.optimizer._scales.get(parameter, {}).items():
                yield LiveTensor(f"{self._prefix}.{name}.{entry}{SCALE}", scale, Change.STEP)

    def watched(self) -> Iterator[Container]:
        """The base's containers, and those of the scales."""
        yield from super().watched()
        yield self.optimizer._scales
        yield from self.optimizer._scales.values()

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Let the optimizer create its own state."""
        self._scales_before = dict(self.optimizer._scales)
        before = {key: dict(state) for key, state in self.optimizer.state.items()}
        for name, parameter in self.parameters():
            if not self.optimizer.state.get(parameter) and f"{self._prefix}.{name}.exp_avg" in leaves:
                self._initialise(parameter)
        super().materialise({name: leaf for name, leaf in leaves.items() if not name.endswith(SCALE)})
        self._before = before

    def withdraw(self) -> None:
        """Undo `materialise`, including the scales."""
        super().withdraw()
        self.optimizer._scales.clear()
        self.optimizer._scales.update(self._scales_before)

    def _initialise(self, parameter: torch.Tensor) -> None:
        make = self.optimizer.initialize_state
        remainders = getattr(self.optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16
        several = len(inspect.signature(make).parameters) > 1  # since Transformer Engine 2.1
        make(parameter, remainders) if several else make(parameter)
