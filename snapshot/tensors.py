"""Tensors as leaves of a slot: dtypes, and copies between live tensors and slot memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from smp_daemon.errors import ConfigError
from smp_daemon.slotfile import Leaf

DTYPES: dict[torch.dtype, str] = {
    torch.complex128: "C128",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
    """The leaf that stores `tensor`.

    Raises:
        ConfigError: it is sparse, quantised, on the meta device or not on the CPU; the message names it.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES or type(tensor.data) is not torch.Tensor:
        raise ConfigError(
            f"{name} is a {tensor.layout} {tensor.dtype} {type(tensor.data).__name__}: only dense "
            "plain tensors are captured so far"
        )
    if tensor.device.type != "cpu":
        raise ConfigError(f"{name} lives on {tensor.device}: only state on the CPU is captured so far")
    return Leaf(name, DTYPES[tensor.dtype], tuple(tensor.shape))


def copy_out(tensor: torch.Tensor, slot: memoryview, offset: int) -> None:
    """Copy a live tensor into slot memory. Releases the GIL for the length of the copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        source = raw_bytes(tensor)
        np.copyto(np.frombuffer(slot, np.uint8, source.size, offset), source)
    else:
        slot_tensor(slot, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


def copy_in(slot: memoryview, offset: int, tensor: torch.Tensor) -> None:
    """Copy slot memory into a live tensor, in place."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        target = raw_bytes(tensor)
        np.copyto(target, np.frombuffer(slot, np.uint8, target.size, offset))
    else:
        tensor.copy_(slot_tensor(slot, offset, tensor.dtype, tuple(tensor.shape)))


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat: NDArray[Any] = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def slot_tensor(slot: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over slot memory. It must not outlive the use of the slot: clone what is to be kept."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset).view(shape)


def empty_like_leaf(leaf: Leaf, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of the leaf's dtype and shape."""
    return torch.empty(leaf.shape, dtype=_BY_NAME[leaf.dtype], device=device)


def read_leaf(slot: memoryview, offset: int, leaf: Leaf) -> torch.Tensor:
    """A copy of a leaf that stands at `offset` of a slot."""
    return slot_tensor(slot, offset, _BY_NAME[leaf.dtype], leaf.shape).clone()
