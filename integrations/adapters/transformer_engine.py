"""Transformer Engine's weights in 8 or 4 bits.

They are not captured: megatron-core's own functions quantize them anew from the main parameters. A check runs these
functions once and compares all bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.snapshot.copy.tensors import local

QUANTIZED = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
"""Classes of quantized weights."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


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


def _parts(weight: Any) -> dict[str, torch.Tensor]:
    """The tensors of a quantized weight and its quantizer, without transposes and high-precision copies."""
    of_quantizer = getattr(getattr(weight, "_quantizer", None), "__dict__", {})
    found = {key: each for key, each in vars(weight).items() if key.startswith("_")}
    found |= {f"_quantizer.{key}": each for key, each in of_quantizer.items()}
    kept = (key for key in found if "transpose" not in key and "high_precision" not in key)
    return {key: found[key] for key in kept if type(found[key]) is torch.Tensor}
