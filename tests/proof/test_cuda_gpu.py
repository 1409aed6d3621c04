"""On a real CUDA device: copies and loads are bit for bit the same while the device keeps computing."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_runtime import Runtime
from holdfast.snapshot.copy.engines import SlotTensor
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.tensors import DTYPES, octets
from holdfast.snapshot.step.capture import Staging
from tests.unit.test_engines import Pauses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device is visible: run by `make gpu`, or `pytest -m gpu`"
    ),
]

STEPS = 4


class Refusing(Runtime):
    """CUDA that refuses to register memory."""

    def register(self, address: int, count: int) -> int:
        return 2


@pytest.fixture(params=[Runtime, Refusing], ids=["registered", "ring"])
def engine(request: pytest.FixtureRequest) -> Iterator[CudaEngine]:
    made = CudaEngine(request.param(torch.device("cuda", 0)), Pages())
    yield made
    made.close()


def state() -> list[torch.Tensor]:
    """About 330 MB: longer than a chunk, of an odd length, scattered, conjugated, tiny, empty."""
    generator = torch.Generator("cuda").manual_seed(1)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    return [
        noise(50_000_003),
        noise(4001, 5003).t(),
        noise(1000, 1001, dtype=torch.complex64).conj(),
        noise(4_000_001).bfloat16(),
        noise(0, 3),
        noise(),
    ]


def placed(tensors: list[torch.Tensor]) -> list[SlotTensor]:
    pieces = []
    at = 4096
    for tensor in tensors:
        pieces.append(SlotTensor(tensor, at, tensor.nbytes))
        at += -(-tensor.nbytes // 64) * 64
    return pieces


def new_slot(pieces: list[SlotTensor]) -> memoryview:
    return memoryview(mmap.mmap(-1, pieces[-1].offset + pieces[-1].bytes))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).cpu()


def in_slot(slot: memoryview, piece: SlotTensor) -> torch.Tensor:
    return torch.frombuffer(slot, dtype=torch.uint8)[piece.offset : piece.offset + piece.bytes]


def test_each_snapshot_is_the_state_of_its_boundary(engine: CudaEngine) -> None:
    live = state()
    pieces = placed(live)
    slot = new_slot(pieces)
    engine.prepare([slot], nullcontext)
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(STEPS):
        busy = busy @ busy / 64  # at the boundary, values that the state depends on are still being computed
        for tensor in live:
            tensor.mul_(0.75).add_(busy[0, 0].nan_to_num() * 0 + step)
        transfer = engine.mark()
        wanted = [tensor.clone() for tensor in live]
        transfer.copy(pieces, slot, Pauses())
        transfer.guard()
        transfer.fence()
        for tensor in live:
            tensor.zero_()
        transfer.finish()
        for piece, value in zip(pieces, wanted, strict=True):
            assert torch.equal(in_slot(slot, piece), flat_bytes(value))
        for tensor, value in zip(live, wanted, strict=True):
            tensor.copy_(value)


def test_a_load_gives_back_every_bit_behind_what_is_queued(engine: CudaEngine) -> None:
    live = state()
    pieces = placed(live)
    slot = new_slot(pieces)
    engine.prepare([slot], nullcontext)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    transfer.finish()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 64
    for tensor in live:
        tensor.fill_(7)  # still queued when the load begins
    engine.load(pieces, slot)
    for piece in pieces:
        assert torch.equal(in_slot(slot, piece), flat_bytes(piece.tensor))


def test_memory_of_a_source_is_not_handed_out_while_it_is_copied(engine: CudaEngine) -> None:
    live = torch.full((64 << 20,), 3, dtype=torch.uint8, device="cuda")
    pieces = placed([live])
    slot = new_slot(pieces)
    engine.prepare([slot], nullcontext)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    engine.forget()
    pieces.clear()  # what was given is held all the same
    del live
    torch.full((64 << 20,), 4, dtype=torch.uint8, device="cuda")
    transfer.finish()
    assert bytes(slot[4096:]) == b"\x03" * (64 << 20)


def test_tensors_that_fill_their_allocations_are_copied_and_loaded(engine: CudaEngine) -> None:
    """Allocations often follow each other without a gap, and CUDA copies from one at a time."""
    made = [torch.full((16 << 20,), i, dtype=torch.uint8, device="cuda") for i in range(8)]
    live = sorted(made, key=torch.Tensor.data_ptr)
    wanted = [tensor.cpu() for tensor in live]
    pieces = tuple(placed(live))
    slot = new_slot(list(pieces))
    engine.prepare([slot], nullcontext)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    transfer.finish()
    for piece, value in zip(pieces, wanted, strict=True):
        assert torch.equal(in_slot(slot, piece), value)
        piece.tensor.zero_()
    engine.load(pieces, slot)
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(live, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_are_staged_packed_and_copied(engine: CudaEngine, dtype: torch.dtype) -> None:
    noise = torch.randint(0, 2 if dtype is torch.bool else 200, (64, 8 * dtype.itemsize), dtype=torch.uint8)
    plain = noise.view(dtype).cuda()
    pieces = tuple(placed([plain, plain.clone().t()]))
    slot = new_slot(list(pieces))
    engine.prepare([slot], nullcontext)
    staged = Staging().take(pieces)
    transfer = engine.mark()
    transfer.copy(staged, slot, Pauses())
    transfer.finish()
    for piece in pieces:
        assert torch.equal(in_slot(slot, piece), octets(piece.tensor.cpu().contiguous()))


def test_a_refused_registration_leaves_no_error_behind() -> None:
    runtime = Runtime(torch.device("cuda", 0))
    assert runtime.register(0, mmap.PAGESIZE) != 0
    assert torch.ones(3, device="cuda").sum().item() == 3
