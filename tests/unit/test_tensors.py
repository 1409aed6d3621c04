"""Tensors as leaves of a slot, and as views of its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, Leaf
from holdfast.snapshot.copy.tensors import DTYPES, empty_like_leaf, leaf_of, read_leaf, slot_tensor


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """A tensor of `dtype` whose bits are random: with NaNs, infinities and denormals."""
    count = torch.empty(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_a_tensor_over_the_slot_shares_its_bytes_and_a_leaf_read_from_it_does_not() -> None:
    slot = bytearray(16)
    shared = slot_tensor(memoryview(slot), 8, torch.int16, (2, 2))
    copied = read_leaf(memoryview(slot), 8, Leaf("w", "I16", (2, 2)))
    slot[8] = 7
    assert shared.tolist() == [[7, 0], [0, 0]]
    assert copied.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0, 3)], ids=str)
def test_a_leaf_is_read_bit_for_bit_from_its_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    slot = bytearray(b"\xa5" * 32 + bits(tensor) + b"\xa5" * 16)
    read = read_leaf(memoryview(slot), 32, leaf_of("w", tensor))
    assert (read.dtype, read.shape, bits(read)) == (dtype, shape, bits(tensor))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_leaf_has_the_length_that_its_tensor_has(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (3, 5))
    leaf = leaf_of("w", tensor)
    assert leaf == Leaf("w", DTYPES[dtype], (3, 5))
    assert leaf.bytes == tensor.nbytes
    empty = empty_like_leaf(leaf, torch.device("cpu"))
    assert (empty.dtype, empty.shape) == (tensor.dtype, tensor.shape)


def test_every_dtype_of_a_slot_has_one_dtype_of_torch() -> None:
    since_2_7 = set() if hasattr(torch, "float8_e8m0fnu") else {"F8_E8M0"}
    assert sorted(DTYPES.values()) == sorted(DTYPE_BYTES.keys() - since_2_7)


class Wrapped(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        lambda: torch.zeros(2).as_subclass(Wrapped),
    ],
    ids=["sparse", "csr", "meta", "jagged", "nested", "quantised", "subclass"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.weight (is a|lives on) "):
        leaf_of("model.weight", make())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6).expand(4, 6),
        torch.zeros(4, 1, 2).expand(4, 3, 2),
        torch.zeros(10).as_strided((4, 4), (2, 1)),
        torch.zeros(10).unfold(0, 3, 2),
        torch.nn.Parameter(torch.zeros(1).expand(2)),
    ],
    ids=["rows", "middle", "overlap", "unfolded", "parameter"],
)
def test_what_shares_memory_with_itself_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"^model\.mask, .*share memory.*clone\(\)$"):
        leaf_of("model.mask", tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6).expand(1, 1, 6),
        torch.zeros(1).expand(1),
        torch.zeros(6, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(10, 10)[::2, 1::3],
        torch.zeros(3, 1, 4).permute(2, 1, 0)[::2],
        torch.zeros(2, 0).expand(3, 2, 0),
        torch.zeros(()),
    ],
    ids=["one row", "one", "transposed", "channels last", "steps", "permuted", "empty", "scalar"],
)
def test_what_only_looks_as_if_it_did_is_not(tensor: torch.Tensor) -> None:
    assert leaf_of("w", tensor) == Leaf("w", "F32", tuple(tensor.shape))


def test_a_parameter_is_a_plain_tensor() -> None:
    assert leaf_of("w", torch.nn.Parameter(torch.zeros(2, 3))) == Leaf("w", "F32", (2, 3))
