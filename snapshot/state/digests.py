"""The digest of a value, by which it is known again: a batch, a random generator, a user's values.

It covers types, names, shapes and contents; addresses and which parts are shared do not count, so that equal values
have equal digests whichever process made them.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.state.rng import state_of
from holdfast.snapshot.state.walk import GENERATORS, walk

SAMPLED = 1024
"""About how many elements of each tensor, and of each list, of a batch are compared."""

LIMITS = {None: (1000, 1 << 30), SAMPLED: (6, 100_000)}
"""How many levels, and how many containers and objects, are compared of a value and of a batch. A batch may be any
object, with parts that refer to each other."""


def digest_of(value: Any) -> str:
    """The digest of all of `value`, which refers nowhere to itself: 32 hexadecimal digits. Waits for a GPU if it reads
    tensors there."""
    return _digest(value, None)


def digest_of_batch(value: Any) -> str:
    """The digest of a sample of `value`. Does not wait for a GPU: of tensors there it looks at the shapes only."""
    return _digest(value, SAMPLED)


def _digest(value: Any, sampled: int | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    deepest, most = LIMITS[sampled]
    found = walk([("", value)], _is_opened, once=False, thinned=sampled, deepest=deepest, most=most)
    for path, part, _ in found:
        kind = type(part)
        told = _TOLD.get(id(kind)) or next(filter(None, (_TOLD.get(id(each)) for each in kind.__mro__)))
        content = told(part, sampled)
        digest.update(f"{path} {kind.__qualname__} {len(content)} ".encode("utf-8", "surrogatepass"))
        digest.update(content)
    return digest.hexdigest()


def _is_opened(value: Any) -> bool:
    return not callable(value)


def elements_of(tensor: torch.Tensor, sampled: int | None = None) -> bytes:
    """The bytes of a tensor's elements, or of about `sampled` of them, spread evenly."""
    part = local(tensor).detach()
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse to be sliced, as MONAI's batches do
        if sampled is not None and part.is_contiguous():
            part = part.view(-1)[:: part.numel() // sampled | 1]
        elif sampled is not None:
            part = part[thin(part.shape, sampled)]
        part = part.resolve_conj().resolve_neg().cpu().contiguous()
    # Not by way of NumPy: torch never again resizes memory that it has lent to an array, and this may be the user's.
    return ctypes.string_at(part.data_ptr(), part.nbytes)


def form_of(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Data type and shape of an array, or of this rank's part of a tensor."""
    part = local(value) if isinstance(value, torch.Tensor) else value
    return f"{part.dtype}{tuple(part.shape)}"


def _told_tensor(value: torch.Tensor, sampled: int | None) -> bytes:
    if value.layout is not torch.strided or value.is_meta:
        return f"{value.layout}{value.dtype}{tuple(value.shape)}".encode()
    there = sampled is not None and value.device.type != "cpu"
    return form_of(value).encode() + (b"" if there else elements_of(value, sampled))


def _told_array(value: np.ndarray[Any, Any], sampled: int | None) -> bytes:
    part = value if sampled is None else value[thin(value.shape, sampled)]
    return form_of(value).encode() + (b"" if value.dtype.hasobject else part.tobytes())


def _told_number(value: Any, sampled: int | None) -> bytes:
    return (hex(value) if isinstance(value, int) else repr(value)).encode()  # decimal has limits, and is slow


def _told_length(value: Any, sampled: int | None) -> bytes:
    return str(len(value)).encode()


def _told_set(value: Any, sampled: int | None) -> bytes:
    return "".join(sorted(_digest(part, sampled) for part in value)).encode()  # in no order, whatever its items are


_BY_TYPE: dict[Any, Callable[[Any, int | None], bytes]] = {
    **dict.fromkeys((bool, int, float, complex, type(None), torch.dtype, torch.device), _told_number),
    **dict.fromkeys((list, tuple, dict, deque), _told_length),
    **dict.fromkeys((set, frozenset), _told_set),
    io.BytesIO: lambda value, sampled: f"{value.tell()} ".encode() + value.getvalue(),
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value, sampled: bytes(value)),
    **dict.fromkeys(GENERATORS, lambda value, sampled: digest_of(state_of(value)).encode()),
    str: lambda value, sampled: value.encode("utf-8", "surrogatepass"),
    np.generic: lambda value, sampled: b"" if value.dtype.hasobject else str(value.dtype).encode() + value.tobytes(),
    torch.Tensor: _told_tensor,
    np.ndarray: _told_array,
    random.SystemRandom: lambda value, sampled: b"",
    object: lambda value, sampled: b"",
}
_TOLD = {id(kind): told for kind, told in _BY_TYPE.items()}  # a metaclass may compare its classes


def thin(shape: tuple[int, ...], sampled: int) -> tuple[slice, ...]:
    """Slices that leave about `sampled` elements of a shape."""
    share = sampled ** (1 / max(1, len(shape)))
    return tuple(slice(None, None, max(1, round(size / share))) for size in shape)
