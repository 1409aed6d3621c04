"""CPU offload: megatron-core's HybridDeviceOptimizer, whose inner optimizers step copies of its parameters.

The copies are state, and the inner optimizers hold the moments. The parameters themselves are filled from the copies
after each step, and likewise after a restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import Container, LiveTensor, Look, Tree
from holdfast.snapshot.state.optimizers import OptimizerState

COPY = "master_param"
"""The entry of a parameter's state under which the optimizer also lists the copy."""


def is_hybrid(optimizer: object) -> bool:
    """Whether this is a HybridDeviceOptimizer."""
    return any(kind.__name__ == "HybridDeviceOptimizer" for kind in type(optimizer).__mro__)


def stepped(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that is stepped for a parameter: the parameter itself or, in a hybrid optimizer, its copy if any."""
    found: torch.Tensor = (
        optimizer.param_to_inner_param.get(parameter, parameter) if is_hybrid(optimizer) else parameter
    )
    return found


class HybridState(OptimizerState):
    """The state of a HybridDeviceOptimizer, by its own parameters. `tensors` leaves out its copies: see `stepped`.

    Args: those of `OptimizerState`, but replicas never divide this state: `replicated` has no effect.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, prefix: str, **options: Any) -> None:
        super().__init__(optimizer, prefix, **options | {"replicated": False})
        self.inside: list[Any] = list(optimizer.sub_optimizers)

    def tensors(self) -> Iterator[LiveTensor]:
        """Moments and the like. Raises `ConfigError` if an inner optimizer keeps scales beside its state."""
        for each in self.inside:
            if getattr(each, "_scales", None):
                raise ConfigError(
                    f"{self._prefix}: {type(each).__qualname__} inside a HybridDeviceOptimizer keeps moments in 16 or "
                    "8 bits, which was never tested: use moments in 32 bits, or no --optimizer-cpu-offload"
                )
        copies = {id(copy) for copy in self.optimizer.param_to_inner_param.values()}
        return (each for each in super().tensors() if id(each.tensor) not in copies)

    def watched(self) -> Iterator[Container]:
        """The containers that persist. In each step the optimizer makes its own ``state`` and the inner groups anew."""
        yield self.optimizer.param_groups
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        for each in self.inside:
            yield each.state
            yield from each.state.values()

    def look(self) -> Look:
        """The base's, and the class of the optimizer that steps each parameter; values as in `_with_options`."""
        self._check_inside()
        found = super().look()
        return Look(found.fixed | {"inside": self._kinds()}, lambda: self._with_options(found))

    def _with_options(self, found: Look) -> Tree:
        """The base's, and options that the inner optimizers have added to their groups, such as FusedAdam's
        ``step``."""
        self._check_inside()
        return found.late() | {
            "inside": {
                name: {k: group[k] for k in group.keys() - given} for name, group, given in self._groups_inside()
            }
        }

    def _check_inside(self) -> None:
        """Raises `StateMismatch` if the inner optimizers were replaced since this object was made."""
        if [*map(id, self.optimizer.sub_optimizers)] != [*map(id, self.inside)]:
            raise StateMismatch(
                f"the inner optimizers of {self._prefix} were replaced, as load_state_dict does: load its state before "
                "the hook is entered, not while it trains"
            )

    def check(self, plain: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` as the base does, and if another kind of optimizer stepped a parameter before."""
        super().check(plain, fixed)
        held, have = fixed["inside"], self._kinds()
        moved = [f"{name} by {held[name]}, now {have[name]}" for name in have if have[name] != held[name]]
        if moved or plain["inside"].keys() != {name for name, _, _ in self._groups_inside()}:
            raise StateMismatch(
                f"{self._prefix} offloads other parameters than in the snapshot: {some(moved) or 'in other groups'}. "
                "Restore with the --optimizer-offload-fraction, and the overlap, that the snapshot was taken with"
            )

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """As the base, but on the devices of the copies."""
        super().materialise(leaves)
        for parameter, state in self.optimizer.state.items():
            device = stepped(self.optimizer, parameter).device
            state |= {k: torch.empty_like(v, device=device) for k, v in state.items() if v.device != device}

    def load(self, plain: Tree, fixed: Tree) -> None:
        """As the base; then give the inner optimizers their state, and fill the parameters from the copies."""
        for name, parameter in self.parameters():
            if COPY in fixed["order"][name]:
                self.optimizer.state.setdefault(parameter, {})[COPY] = stepped(self.optimizer, parameter)
        super().load(plain, fixed)
        original = self.optimizer.inner_param_to_orig_param
        for name, group, _ in self._groups_inside():
            group |= plain["inside"][name]
        for each in self.inside:
            each.state.clear()
            copies = [copy for group in each.param_groups for copy in group["params"]]
            held = self.optimizer.state
            each.state.update({copy: held[original[copy]] for copy in copies if original[copy] in held})
        with torch.no_grad():
            for parameter, copy in self.copies():
                parameter.copy_(copy)

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, copy) for each parameter that has a separate copy."""
        pairs: dict[torch.Tensor, torch.Tensor] = self.optimizer.param_to_inner_param
        return ((parameter, copy) for parameter, copy in pairs.items() if parameter is not copy)

    def _kinds(self) -> dict[str, str]:
        kinds = {
            self.optimizer.inner_param_to_orig_param[copy]: f"{type(each).__module__}.{type(each).__qualname__}"
            for each in self.inside
            for group in each.param_groups
            for copy in group["params"]
        }
        return {name: kinds[parameter] for name, parameter in self.parameters()}

    def _groups_inside(self) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
        """Each inner group, by the name of its first parameter, and the names of the options that it was given."""
        given = set(self.optimizer.defaults).union(*self.optimizer.param_groups)
        names = {parameter: name for name, parameter in self.parameters()}
        for each in self.inside:
            given_inside = given | set(each.defaults)
            for group in each.param_groups:
                yield names[self.optimizer.inner_param_to_orig_param[group["params"][0]]], group, given_inside
