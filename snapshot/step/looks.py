"""A digest of a batch, by which it is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

LOOKED_AT = 1024
"""About how many elements of each tensor of a batch are compared."""

_DEEPEST = 6


def digest_of(batch: Any) -> str:
    """A digest of types, shapes and a part of the values: equal for equal batches, whichever process made them."""
    digest = hashlib.blake2b(digest_size=8)
    _digest_into(batch, digest.update, 0)
    return digest.hexdigest()


def _digest_into(value: Any, put: Callable[[bytes], Any], depth: int) -> None:
    put(type(value).__qualname__.encode())
    match value:
        case torch.Tensor():
            put(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.layout is torch.strided and value.device.type == "cpu":  # reading from a device would wait for it
                put(_sample(value.detach()).contiguous().view(torch.uint8).numpy().tobytes())
        case np.ndarray():
            put(f"{value.dtype}{value.shape}".encode())
            if value.dtype != object:
                put(value[_thin(value.shape)].tobytes())
        case str():
            put(value.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray() | memoryview():
            put(bytes(value))
        case None | bool() | int() | float() | complex() | np.generic():
            put(repr(value).encode())
        case Mapping() if depth < _DEEPEST:
            for key, part in value.items():
                put(repr(key).encode() if isinstance(key, str | int) else b"")
                _digest_into(part, put, depth + 1)
        case list() | tuple() if depth < _DEEPEST:
            put(str(len(value)).encode())
            for part in value[:: max(1, len(value) // LOOKED_AT)]:
                _digest_into(part, put, depth + 1)
        case _ if depth < _DEEPEST and hasattr(value, "__dict__") and not isinstance(value, type):
            for name, part in vars(value).items():
                put(name.encode())
                _digest_into(part, put, depth + 1)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        part = tensor.view(-1)[:: tensor.numel() // LOOKED_AT | 1]
    else:
        part = tensor[_thin(tensor.shape)].reshape(-1)
    return part.resolve_conj().resolve_neg()


def _thin(shape: Iterable[int]) -> tuple[slice, ...]:
    """Slices that leave about `LOOKED_AT` elements of a shape."""
    sizes = tuple(shape)
    share = LOOKED_AT ** (1 / max(1, len(sizes)))
    return tuple(slice(None, None, max(1, round(size / share))) for size in sizes)
