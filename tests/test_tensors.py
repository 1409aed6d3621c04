"""Tensors go into slot memory and come back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_daemon.errors import ConfigError
from smp_daemon.slotfile import DTYPE_BYTES, Leaf
from snapshot.tensors import DTYPES, copy_in, copy_out, empty_like_leaf, leaf_of, raw_bytes, read_leaf, slot_tensor

quick = settings(deadline=None, derandomize=True, max_examples=120)

BEFORE = 32
AFTER = 16

Shape = tuple[int, ...]


def random_bits(dtype: torch.dtype, shape: Shape, seed: int = 1) -> torch.Tensor:
    """A tensor of `dtype` whose bits are random: with NaNs, infinities and denormals."""
    count = torch.empty(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return raw_bytes(tensor.resolve_conj().resolve_neg().contiguous()).tobytes() if tensor.numel() else b""


def slot_for(tensor: torch.Tensor) -> bytearray:
    return bytearray(b"\xa5" * (BEFORE + tensor.numel() * tensor.element_size() + AFTER))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1) if tensor.dim() else tensor


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor`, but every other element of something larger."""
    if not tensor.dim():
        return tensor
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES, key=str))
views = st.sampled_from([plain, transposed, strided])


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("view", [plain, transposed, strided])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor], shape: Shape
) -> None:
    tensor = view(random_bits(dtype, shape))
    slot = slot_for(tensor)
    copy_out(tensor, memoryview(slot), BEFORE)
    target = view(random_bits(dtype, shape, seed=2))
    copy_in(memoryview(slot), BEFORE, target)
    assert bits(target) == bits(tensor)


@quick
@given(dtypes, shapes, views, views)
def test_the_slot_holds_the_elements_in_order_and_nothing_else_is_touched(
    dtype: torch.dtype,
    shape: Shape,
    view: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = view(random_bits(dtype, shape))
    slot = slot_for(tensor)
    copy_out(tensor, memoryview(slot), BEFORE)
    assert bytes(slot) == b"\xa5" * BEFORE + bits(tensor) + b"\xa5" * AFTER
    target = other(torch.zeros(tensor.shape, dtype=dtype))
    if target.shape == tensor.shape:
        copy_in(memoryview(slot), BEFORE, target)
        assert bits(target) == bits(tensor)
    assert bits(read_leaf(memoryview(slot), BEFORE, leaf_of("w", tensor))) == bits(tensor)


def test_a_copy_goes_into_the_tensor_that_is_there() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6))
    whole = parameter.data
    slot = memoryview(bytearray(random_bits(torch.float32, (6,)).numpy().tobytes()))
    copy_in(slot, 0, parameter)
    assert whole.data_ptr() == parameter.data_ptr()
    assert bits(whole) == bytes(slot)
    assert parameter.requires_grad


def test_a_parameter_that_is_not_contiguous_is_filled_too() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3).t())
    wanted = random_bits(torch.float32, (3, 2))
    copy_in(memoryview(bytearray(bits(wanted))), 0, parameter)
    assert bits(parameter.detach()) == bits(wanted)


def test_a_copy_into_a_view_leaves_its_neighbours_alone() -> None:
    whole = torch.zeros(4, 4)
    copy_in(memoryview(bytearray(b"\xff" * 16)), 0, whole[:, 1])
    assert whole.isnan().tolist() == [[False, True, False, False]] * 4


@pytest.mark.parametrize("count", [1, 5])
def test_a_lazily_conjugated_or_negated_tensor_is_kept_as_it_reads(count: int) -> None:
    base = torch.complex(torch.arange(count) + 1.0, torch.arange(count) + 2.0)
    for tensor in (base.conj(), base.conj().imag):
        slot = slot_for(tensor)
        copy_out(tensor, memoryview(slot), BEFORE)
        assert torch.equal(read_leaf(memoryview(slot), BEFORE, leaf_of("w", tensor)), tensor)


@pytest.mark.parametrize("count", [1, 5])
def test_a_lazily_conjugated_or_negated_tensor_is_filled_in_place(count: int) -> None:
    def target(part: str) -> torch.Tensor:
        lazy = torch.zeros(count, dtype=torch.complex64).conj()
        return lazy if part == "whole" else lazy.imag

    for part, dtype in (("whole", torch.complex64), ("imaginary", torch.float32)):
        wanted = torch.arange(1, count + 1).to(dtype) * (1 + 2j if dtype.is_complex else 1)
        slot = memoryview(bytearray(bits(wanted)))
        tensor = target(part)
        copy_in(slot, 0, tensor)
        assert torch.equal(tensor, wanted)


def test_a_tensor_over_the_slot_shares_its_bytes_and_a_leaf_read_from_it_does_not() -> None:
    slot = bytearray(16)
    shared = slot_tensor(memoryview(slot), 8, torch.int16, (2, 2))
    copied = read_leaf(memoryview(slot), 8, Leaf("w", "I16", (2, 2)))
    slot[8] = 7
    assert shared.tolist() == [[7, 0], [0, 0]]
    assert copied.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_leaf_has_the_length_that_its_tensor_has(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (3, 5))
    leaf = leaf_of("w", tensor)
    assert leaf == Leaf("w", DTYPES[dtype], (3, 5))
    assert leaf.bytes == tensor.nbytes
    empty = empty_like_leaf(leaf, torch.device("cpu"))
    assert (empty.dtype, empty.shape) == (tensor.dtype, tensor.shape)


def test_every_dtype_of_a_slot_has_one_dtype_of_torch() -> None:
    assert sorted(DTYPES.values()) == sorted(DTYPE_BYTES)


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
        lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        lambda: torch.zeros(2).as_subclass(Wrapped),
    ],
    ids=["sparse", "csr", "meta", "nested", "quantised", "subclass"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.weight (is a|lives on) "):
        leaf_of("model.weight", make())


def test_a_parameter_is_a_plain_tensor() -> None:
    assert leaf_of("w", torch.nn.Parameter(torch.zeros(2, 3))) == Leaf("w", "F32", (2, 3))
