"""Tensors as leaves of a slot: their dtypes, and tensors over slot memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.slotfile import Leaf


class Block(NamedTuple):
    """The part of a whole tensor that a rank holds.

    Attributes:
        whole: shape of the whole tensor.
        start: where the rank's part begins in it, dimension by dimension; empty if the part is not a block.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]


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
    torch.complex32: "C32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"
DEVICES = ("cpu", "cuda")
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
    """The leaf that stores `tensor`.

    Raises:
        ConfigError: it is sparse, quantised, neither on a CPU nor on a GPU, its memory was released, or its elements
            share memory, so that it could not be filled again; the message names it.
    """
    if not _is_plain(tensor.data) or tensor.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is a {'nested ' * tensor.is_nested}{tensor.layout} {tensor.dtype} {type(tensor.data).__name__}, "
            "which is not captured: keep the dense tensors that it is made of in its place, such as its indices and "
            "its values, and make it of them in forward; or, if training does not change it, keep it in an attribute "
            "that is no buffer and no parameter"
        )
    if tensor.device.type not in DEVICES:
        raise ConfigError(f"{name} lives on {tensor.device}: only state on {' and '.join(DEVICES)} is captured")
    if not tensor.is_contiguous() and _overlaps(tensor.shape, tensor.stride()):
        raise ConfigError(
            f"{name}, of shape {list(tensor.shape)} and strides {list(tensor.stride())}, is a view in which elements "
            "share memory, as expand() makes them, and cannot be filled again: keep a copy of it, made by clone()"
        )
    if tensor.numel() and tensor.untyped_storage().nbytes() < tensor.itemsize * (
        tensor.storage_offset() + reach(tensor)
    ):
        raise ConfigError(
            f"{name} has no memory at the beginning of a step: something has released it, as an option does that "
            "offloads optimizer state between steps (`untyped_storage().resize_`); turn that off"
        )
    return Leaf(name, DTYPES[tensor.dtype], tuple(tensor.shape))


def reach(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between the first and the last of a tensor that is not empty, with both."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def strides_of(tensor: torch.Tensor) -> list[int] | None:
    """The strides of a tensor's elements in memory; None: row by row, without gaps.

    They belong to the state: kernels may add up in another order for other strides, and round differently.
    """
    return None if tensor.is_contiguous() else list(tensor.stride())


def empty_restrided(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor | None:
    """An uninitialised tensor like it with those strides, see `strides_of`.

    They may leave gaps, as those of a part of a matrix do. None if it has them already, if they are not of a tensor of
    this shape, or if it is a view with gaps itself: new memory would part it from what lies in them.
    """
    if strides == strides_of(tensor) or not _is_dense(tensor.shape, tensor.stride()):
        return None
    if strides is None:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if len(strides) != tensor.dim() or _overlaps(tensor.shape, strides):
        return None
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reached = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != reached:
                return False
            reached *= size
    return True


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory: to rule it out, each dimension steps over all that smaller steps reach."""
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return 0 not in shape
            reached += (size - 1) * stride
    return False


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a `DTensor`, in place; any other tensor as it is."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # with gradients it would be a view that autograd tracks
        return to_local()


def block_of(tensor: torch.Tensor) -> Block | None:
    """The part of a whole `DTensor` that this rank has; None for any other tensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor) or not all(type(each) in (Replicate, Shard) for each in placements):
        return Block(whole, ())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    return Block(whole, tuple(offset))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor, as a view with stride 1; ``view(-1)`` of a single element may have
    another."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return flat(tensor).view(torch.uint8)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements can be read: not sparse or nested, no subclass, and in memory that can be read."""
    return _is_plain(tensor) and tensor.device.type in DEVICES


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def memory_of(value: Any) -> int:
    """The address of a tensor's storage, equal for tensors that share memory; for other objects, their id."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
        with suppress(RuntimeError):  # some subclasses only refer to other tensors
            return local(value).untyped_storage().data_ptr() or id(value)
    return id(value)


def slot_tensor(slot: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over slot memory. It must not outlive the use of the slot: clone what is to be kept."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset).view(shape)


def empty_like_leaf(leaf: Leaf, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of the leaf's dtype and shape."""
    return torch.empty(leaf.shape, dtype=_BY_NAME[leaf.dtype], device=device)


def set_dtype(tensor: torch.Tensor, leaf: Leaf) -> None:
    """Convert a tensor, in place, to the leaf's dtype."""
    tensor.data = tensor.data.to(_BY_NAME[leaf.dtype])


def leaf_tensor(slot: memoryview, offset: int, leaf: Leaf) -> torch.Tensor:
    """A leaf at `offset` of a slot, over slot memory; see `slot_tensor`."""
    return slot_tensor(slot, offset, _BY_NAME[leaf.dtype], leaf.shape)


def read_leaf(slot: memoryview, offset: int, leaf: Leaf) -> torch.Tensor:
    """A copy of a leaf at `offset` of a slot."""
    return leaf_tensor(slot, offset, leaf).clone()
