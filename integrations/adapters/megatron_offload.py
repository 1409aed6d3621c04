"""CPU offload: megatron-core's HybridDeviceOptimizer, which has optimizers inside that step copies of its parameters.

The copies are state, and the optimizers inside hold the moments. The parameters themselves are copied from the copies
after each step, and so again after a restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import Container, LiveTensor, Tree
from holdfast.snapshot.state.optimizers import OptimizerState, some

COPY = "master_param"
"""The entry of a parameter's state under which the optimizer also lists the copy."""


def is_hybrid(optimizer: object) -> bool:
    """Whether it is a HybridDeviceOptimizer."""
    return any(kind.__name__ == "HybridDeviceOptimizer" for kind in type(optimizer).__mro__)


def stepped(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that is stepped for a parameter: itself, or with a hybrid optimizer perhaps a copy."""
    found: torch.Tensor = (
        optimizer.param_to_inner_param.get(parameter, parameter) if is_hybrid(optimizer) else parameter
    )
    return found


class HybridState(OptimizerState):
    """A HybridDeviceOptimizer, by its own parameters. Its copies are not among `tensors`: `stepped` gives them.

    Args: those of `OptimizerState`, of which replicas divide nothing.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, prefix: str, **options: Any) -> None:
        super().__init__(optimizer, prefix, **options | {"replicated": False})
        self.inside: list[Any] = list(optimizer.sub_optimizers)

    def tensors(self) -> Iterator[LiveTensor]:
        """Moments and the like. Raises `ConfigError` if an optimizer inside keeps scales beside its state."""
        for each in self.inside:
            if getattr(each, "_scales", None):
                raise ConfigError(
                    f"{self._prefix}: {type(each).__qualname__} keeps moments in 16 or 8 bits inside a "
                    "HybridDeviceOptimizer, which nobody tried: use moments in 32 bits, or no --optimizer-cpu-offload"
                )
        copies = {id(copy) for copy in self.optimizer.param_to_inner_param.values()}
        return (each for each in super().tensors() if id(each.tensor) not in copies)

    def watched(self) -> Iterator[Container]:
        """What stays: the optimizer makes its own ``state``, and the groups of those inside, anew in each step."""
        yield self.optimizer.param_groups
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        for each in self.inside:
            yield each.state
            yield from each.state.values()

    def fixed(self) -> Tree:
        """With the class of the optimizer that steps each parameter."""
        return super().fixed() | {"inside": self._kinds()}

    def plain(self) -> Tree:
        """With the options that the optimizers inside have added to their groups, such as FusedAdam's ``step``.

        Raises:
            StateMismatch: they are others than when this was made.
        """
        if [*map(id, self.optimizer.sub_optimizers)] != [*map(id, self.inside)]:
            raise StateMismatch(
                f"{self._prefix} was given a state while it trains, and has other optimizers inside since: load it "
                "before the hook is entered"
            )
        return super().plain() | {
            "inside": {
                name: {k: group[k] for k in group.keys() - given} for name, group, given in self._groups_inside()
            }
        }

    def check(self, plain: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` as the base does, and if another kind of optimizer steps a parameter than did."""
        super().check(plain, fixed)
        held, have = fixed["inside"], self._kinds()
        moved = [f"{name} by {held[name]}, now {have[name]}" for name in have if have[name] != held[name]]
        if moved or plain["inside"].keys() != {name for name, _, _ in self._groups_inside()}:
            raise StateMismatch(
                f"{self._prefix} offloads other parameters than in the snapshot: {some(moved) or 'in other groups'}. "
                "Restore with the --optimizer-offload-fraction, and the overlap, that the snapshot was taken with"
            )

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """As the base, but where the copies are."""
        super().materialise(leaves)
        for parameter, state in self.optimizer.state.items():
            device = stepped(self.optimizer, parameter).device
            state |= {k: torch.empty_like(v, device=device) for k, v in state.items() if v.device != device}

    def load(self, plain: Tree, fixed: Tree) -> None:
        """As the base; then the optimizers inside, and the parameters, get what is theirs."""
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
        """(parameter, copy) where these are two tensors."""
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
        """Each group of those inside, called after its first parameter, and the options that it was given."""
        given = set(self.optimizer.defaults).union(*self.optimizer.param_groups)
        names = {parameter: name for name, parameter in self.parameters()}
        for each in self.inside:
            given_inside = given | set(each.defaults)
            for group in each.param_groups:
                yield names[self.optimizer.inner_param_to_orig_param[group["params"][0]]], group, given_inside
