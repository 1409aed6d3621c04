"""Transformer Engine: weights in 8 or 4 bits, and the scaling of layers that compute in 8 bits.

Such weights are not captured: megatron-core's own functions quantize them anew from the main parameters. A check runs
these functions once and compares all bytes. The scales and largest values of delayed scaling are captured directly,
because newer releases do not unpickle the extra state that they return.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.snapshot.copy.tensors import local

QUANTIZED = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
"""Classes of quantized weights."""

PACKAGE = "transformer_engine"

PLAIN = (torch.Tensor, torch.nn.Parameter)

NOT_UNPICKLED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is stored in 8 or 4 bits, in one of the known classes."""
    return any(kind.__name__ in QUANTIZED for kind in type(weight).__mro__)


def check_weights(weights: Mapping[torch.Tensor, str]) -> None:
    """Raises `ConfigError` if a weight's class is unknown, so that it may hold more than is captured."""
    for weight, name in weights.items():
        if type(local(weight)) not in PLAIN and not is_quantized(weight):
            known = ", ".join(QUANTIZED)
            raise ConfigError(
                f"{name} is kept as {type(weight).__name__}, which is not captured: {known} are, and plain tensors; "
                "train without --fp8-param-gather, --fp4-param-gather and --moe-single-grouped-weight"
            )


def check_quantized_anew(weights: Mapping[torch.Tensor, str], quantize: Callable[[], None]) -> None:
    """Check that `quantize` reproduces the weights. They are put back, whatever comes of it.

    Raises:
        ConfigError: a weight has no tensors that could be compared.
        StateMismatch: `quantize` made other bytes.
    """
    held = {weight: {key: part.to("cpu", copy=True) for key, part in _parts(weight).items()} for weight in weights}
    if bare := [weights[weight] for weight, parts in held.items() if not parts]:
        raise ConfigError(
            f"{bare[0]}: no tensors were found in this quantized weight, so it cannot be checked; train without "
            "--fp8-param-gather"
        )
    differ = ""
    try:
        quantize()
    finally:
        for weight, parts in held.items():
            now = _parts(weight)
            for key, part in parts.items():
                if not torch.equal(part.view(torch.uint8), now[key].cpu().view(torch.uint8)):
                    differ = differ or f"{weights[weight]} ({key})"
                now[key].copy_(part)
    if differ:
        raise StateMismatch(
            f"{differ}: quantizing the main parameter anew does not give this weight, so a restore would change it; "
            "train without --fp8-param-gather and --fp4-param-gather"
        )


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


def _parts(weight: Any) -> dict[str, torch.Tensor]:
    """The tensors of a quantized weight and its quantizer, without transposes and high-precision copies."""
    of_quantizer = getattr(getattr(weight, "_quantizer", None), "__dict__", {})
    found = {key: each for key, each in vars(weight).items() if key.startswith("_")}
    found |= {f"_quantizer.{key}": each for key, each in of_quantizer.items()}
    kept = (key for key in found if "transpose" not in key and "high_precision" not in key)
    return {key: found[key] for key in kept if type(found[key]) is torch.Tensor}
