"""The extra states of modules: what their classes return from ``get_extra_state``, as Transformer Engine's do.

The scales and largest values of Transformer Engine's delayed scaling are captured beside that, because newer releases
do not unpickle the extra state that they return.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.snapshot.state.hidden import owners
from holdfast.snapshot.state.live import Tree

PACKAGE = "transformer_engine"

NOT_UNPICKLED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"

SCALING = "fp8"
"""Key of the late state under which the results of `scaling` are kept."""


def with_extra_state(roots: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, Any]]:
    """The modules in `roots`, by name, whose classes define ``get_extra_state``.

    Raises:
        ConfigError: a class has no ``set_extra_state`` to take the state back.
    """
    found = []
    for name, module in owners(roots):
        kind = type(module)
        if kind.get_extra_state is torch.nn.Module.get_extra_state:
            continue
        if kind.set_extra_state is torch.nn.Module.set_extra_state:
            raise ConfigError(f"{name}: {kind.__qualname__} has get_extra_state without set_extra_state: add it")
        found.append((name, module))
    return found


def scaling(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's live tensors for delayed scaling: scales, and the largest values of the last steps."""
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return {}
    found = {
        f"{way}.{key}": getattr(meta.get(way), key, None)
        for way in ("scaling_fwd", "scaling_bwd")
        for key in ("scale", "amax_history")
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}


class ExtraStates:
    """What ``get_extra_state`` of modules returned.

    Transformer Engine's waits for the device and pickles, for each layer. With delayed scaling all that changes from
    step to step in it is what `scaling` gives, which is captured and put back by itself: then it is called again only
    when something else has changed.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = WeakKeyDictionary()

    def of(self, module: Any) -> Any:
        if not (type(module).get_extra_state.__module__.startswith(PACKAGE) and scaling(module)):
            return module.get_extra_state()
        aside = _aside(module)
        known = self._known.get(module)
        if known is None or known[0] != aside:
            known = self._known[module] = aside, module.get_extra_state()
        return known[1]


def _aside(module: Any) -> Any:
    """What a layer's extra state holds beside its scaling: the recipe, and plain values."""
    meta: dict[str, Any] = module.fp8_meta
    modes = [getattr(module, name, None) for name in ("fp8", "fp8_calibration")]
    plain = {key: value for key, value in meta.items() if isinstance(value, bool | int | float | str | tuple | list)}
    shapes = {key: each.shape for key, each in scaling(module).items()}
    recipe = meta.get("recipe")
    return [*modes, copy.deepcopy(plain), shapes, type(recipe), dict(getattr(recipe, "__dict__", {}))]


def put_back_scaling(name: str, module: torch.nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Copy back what `scaling` returned, after ``set_extra_state``.

    Raises:
        StateMismatch: the layer has other such tensors, or of other sizes.
    """
    live = scaling(module)
    if {key: each.shape for key, each in live.items()} != {key: each.shape for key, each in held.items()}:
        raise StateMismatch(
            f"{name}: delayed scaling has {sorted(held) or 'no state'} in the snapshot, {sorted(live) or 'none'} in "
            f"this job, or of other sizes; if Transformer Engine says that it loads no pickles, set {NOT_UNPICKLED}"
        )
    for key, each in live.items():
        each.copy_(held[key])


def scalings(extra: Iterable[tuple[str, torch.nn.Module]]) -> Tree:
    """The scaling state of modules that compute in 8 bits with delayed scaling, if there are any."""
    found = {name: scaling(module) for name, module in extra}
    held = {name: {key: each.clone() for key, each in of.items()} for name, of in found.items() if of}
    return {SCALING: held} if held else {}
