"""State on a device goes into slots and comes back, whatever the order in which the device does its work.

`FakeCuda` stands in for CUDA: work is queued per stream, done only when somebody waits for it, and then in the order
that is worst for the test. Memory of the device is gone as soon as nobody holds it.
"""

from __future__ import annotations

import logging
import mmap
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.snapshot.copy import cuda, cuda_runtime
from holdfast.snapshot.copy.cuda import CudaEngine, chunks
from holdfast.snapshot.copy.cuda_runtime import DeviceEvent, DeviceStream, TorchRuntime
from holdfast.snapshot.copy.engines import CopyEngine, CpuEngine, SlotTensor
from holdfast.snapshot.copy.tensors import flat
from holdfast.snapshot.copy.witness import StateChanged, Subjects, Witness
from tests.deadlines import DEADLINE_S

quick = settings(deadline=None, derandomize=True, max_examples=120)

PAGE = mmap.PAGESIZE
CHUNK = PAGE // 4
RANGE = 2 * PAGE
ORDERS = ["compute first", "side first", 1, 2, 3]


class Memory(bytearray):
    """Device memory: freed with the last tensor over it."""


@dataclass(eq=False)
class FakeEvent:
    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass(eq=False)
class FakeStream:
    cuda: FakeCuda
    work: deque[tuple[FakeEvent | None, Callable[[], None]]] = field(default_factory=deque)

    def record_event(self) -> FakeEvent:
        self.cuda.raise_fault()
        event = FakeEvent()
        self.work.append((None, lambda: setattr(event, "passed", True)))
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        self.cuda.raise_fault()
        assert isinstance(event, FakeEvent)
        self.work.append((event, lambda: None))

    @property
    def ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].passed)


class FakeCuda:
    """A device with a compute stream and side streams; `order` says who goes first: a name, or a seed."""

    def __init__(self, order: str | int = "compute first") -> None:
        self.device = torch.device("cpu")
        self.order = order
        self.random = random.Random(order)
        self.compute = FakeStream(self)
        self.streams = [self.compute]
        self.local = threading.local()
        self.memory: dict[int, Callable[[], Memory | None]] = {}
        self.ranges: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.refused: Callable[[int], bool] = lambda nth: False
        self.on_unregister: Callable[[], None] = lambda: None
        self.copies = 0
        self.done = 0
        self.fail_at: int | None = None
        self.fault = ""
        self.stuck = False

    # ------------------------------------------------------------------ for tests

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of `like` in device memory."""
        made = self._allocate(like, strong=False)
        return made.copy_(like)

    def later(self, work: Callable[[], object]) -> None:
        """Queue a computation on the compute stream."""
        self.compute.work.append((None, lambda: (work(), None)[1]))

    def run(self, until: FakeEvent | None = None) -> None:
        """Work until `until` has passed, or there is nothing that can be done."""
        ordered = self.streams if self.order == "compute first" else self.streams[::-1]
        while not self.stuck and not (until and until.passed):
            ready = [stream for stream in ordered if stream.ready]
            if not ready:
                return
            stream = self.random.choice(ready) if isinstance(self.order, int) else ready[0]
            stream.work.popleft()[1]()
            self.done += 1

    def raise_fault(self) -> None:
        if self.fault:
            raise RuntimeError(self.fault)

    # ------------------------------------------------------------------ `Runtime`

    def current_stream(self) -> DeviceStream:
        assert self._here() is self.compute, "asked for while the side stream was current"
        return self.compute

    def lowest_stream(self) -> DeviceStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: DeviceStream) -> Iterator[None]:
        before, self.local.stream = self._here(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.raise_fault()
        to, read = self._handle(target), self._handle(source)
        self.copies += 1
        number = self.copies

        def transfer() -> None:
            if number == self.fail_at:
                self.fault = "an illegal memory access was encountered"
            if not self.fault:
                to().copy_(read())

        self._here().work.append((None, transfer))

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        assert self._here() is not self.compute
        assert like.nbytes <= CHUNK
        return self._allocate(like, strong=True)

    def pinned(self, count: int) -> torch.Tensor:
        self._on_device()
        made = torch.zeros(count, dtype=torch.uint8)
        self.ranges[made.data_ptr()] = count
        return made

    def wait(self, event: DeviceEvent) -> None:
        self._on_device()
        assert isinstance(event, FakeEvent)
        self.run(event)
        self.raise_fault()
        if not event.passed:
            raise DeadlineExceeded("the device is stuck")

    def register(self, address: int, count: int) -> int:
        self._on_device()
        assert address % PAGE == count % PAGE == 0
        assert 0 < count <= RANGE
        nth = sum(kind != "unregister" for kind, _ in self.log)
        if address in self.ranges or self.refused(nth):
            self.log.append(("refuse", address))
            return 2
        self.log.append(("register", address))
        self.ranges[address] = count
        return 0

    def unregister(self, address: int) -> int:
        self._on_device()
        self.on_unregister()
        self.log.append(("unregister", address))
        return 0 if self.ranges.pop(address, None) else 1

    # ------------------------------------------------------------------ inside

    def _here(self) -> FakeStream:
        stream = getattr(self.local, "stream", self.compute)
        assert isinstance(stream, FakeStream)
        return stream

    def _on_device(self) -> None:
        assert self._here() is not self.compute, "this thread's current device is not set"

    def _allocate(self, like: torch.Tensor, strong: bool) -> torch.Tensor:
        memory = Memory(b"\xdd" * max(like.itemsize, like.nbytes))
        storage = torch.frombuffer(memory, dtype=like.dtype).untyped_storage()
        made = torch.empty(0, dtype=like.dtype)
        made.set_(storage, 0, like.shape, like.contiguous().stride())  # no view, which would hold its base
        self.memory[made.data_ptr()] = (lambda: memory) if strong else weakref.ref(memory)
        return made

    def _handle(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The tensor at the time of the call, if its memory is still there and the device can reach it."""
        alive = self.memory.get(tensor.untyped_storage().data_ptr())
        if alive is None:
            return lambda: self._reachable(tensor)
        form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj())

        def restored() -> torch.Tensor:
            memory = alive()
            assert memory is not None, "device memory was freed while its copy was queued"
            dtype, shape, stride, offset, conj = form
            plain = torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)
            return plain.conj() if conj else plain

        return restored

    def _reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = [a for a, count in self.ranges.items() if a <= start and stop <= a + count]
        assert inside, "host memory that is not within one registered range"
        return tensor


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(cuda, "REGISTER_BYTES", RANGE)


def new_slot(count: int = 5 * PAGE) -> memoryview:
    return memoryview(mmap.mmap(-1, count))


def no_pause(count: int) -> None:
    pass


def place(*tensors: torch.Tensor, at: int = 64) -> list[SlotTensor]:
    pieces = []
    for tensor in tensors:
        pieces.append(SlotTensor(tensor, at, tensor.nbytes))
        at += tensor.nbytes
    return pieces


def bits(tensor: torch.Tensor) -> bytes:
    values = flat(tensor.resolve_conj().resolve_neg().contiguous())
    return bytes(values.view(torch.uint8).tolist()) if values.numel() else b""


def content(slot: memoryview, pieces: list[SlotTensor]) -> list[bytes]:
    return [bytes(slot[piece.offset : piece.offset + piece.bytes]) for piece in pieces]


def assign(live: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(live, values, strict=True):
        tensor.copy_(value)


def state(fake: FakeCuda) -> list[torch.Tensor]:
    """Tensors that are longer than a chunk, cross a registration, are scattered, conjugated, negated or empty."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return fake.tensor(torch.randn(shape, generator=generator, dtype=dtype))

    return [
        noise(RANGE // 4 + 12),
        noise(40, 30).t(),
        noise(4, 700)[:, ::2],
        noise(40, dtype=torch.complex64).conj(),
        noise(0, 3),
        noise(),
        fake.tensor(torch.arange(7, dtype=torch.uint8)),
    ]


def never(nth: int) -> bool:
    return False


def always(nth: int) -> bool:
    return True


registered_or_not = pytest.mark.parametrize("refused", [never, always], ids=["registered", "ring"])
in_any_order = pytest.mark.parametrize("order", ORDERS)


@in_any_order
@registered_or_not
def test_a_slot_holds_the_state_of_its_boundary(order: str | int, refused: Callable[[int], bool]) -> None:
    fake = FakeCuda(order)
    fake.refused = refused
    engine: CopyEngine = CudaEngine(fake)
    slots = [new_slot(), new_slot()]
    live = state(fake)
    pieces = place(*live)
    for step in range(4):
        wanted = [tensor * 0 + step + 0.5 if tensor.is_floating_point() else tensor + 1 for tensor in live]
        fake.later(partial(assign, live, wanted))
        engine.mark()
        fake.later(lambda: None)  # forward and backward
        engine.copy(pieces, slots[step % 2], no_pause)
        engine.fence()
        fake.later(lambda: [t.fill_(99) for t in live])
        engine.finish()
        assert content(slots[step % 2], pieces) == [bits(tensor) for tensor in wanted]
        fake.run()
    engine.close()


@in_any_order
@registered_or_not
def test_a_load_fills_live_tensors_behind_what_is_queued(order: str | int, refused: Callable[[int], bool]) -> None:
    fake = FakeCuda(order)
    fake.refused = refused
    engine = CudaEngine(fake)
    live = state(fake)
    pieces = place(*live)
    slot = new_slot()
    slot[:] = random.Random(5).randbytes(slot.nbytes)
    fake.later(lambda: [t.fill_(7) for t in live])  # still to be initialised
    engine.load(pieces, slot)
    assert [bits(tensor) for tensor in live] == content(slot, pieces)
    fake.run()
    assert [bits(tensor) for tensor in live] == content(slot, pieces)


@registered_or_not
def test_nothing_outside_the_pieces_is_written(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    engine = CudaEngine(fake)
    slot = new_slot()
    pieces = place(fake.tensor(torch.full((3000,), 7, dtype=torch.uint8)), at=100)
    engine.mark()
    engine.copy(pieces, slot, no_pause)
    engine.finish()
    assert bytes(slot) == bytes(100) + b"\x07" * 3000 + bytes(slot.nbytes - 3100)


def test_the_training_thread_neither_blocks_nor_waits_for_the_device() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    fake.later(lambda: None)
    engine.mark()
    engine.copy(place(*state(fake)), new_slot(), no_pause)
    engine.fence()
    assert fake.done == 0
    engine.finish()
    assert fake.done > 0


def test_a_fence_without_a_new_mark_is_harmless() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    live = state(fake)
    pieces, slot = place(*live), new_slot()
    engine.fence()
    engine.mark()
    engine.copy(pieces, slot, no_pause)
    engine.fence()
    engine.finish()
    engine.fence()
    assert [bits(tensor) for tensor in live] == content(slot, pieces)


def test_a_copy_that_was_not_queued_as_a_whole_before_the_fence_fails() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    slot = new_slot()
    engine.mark()
    engine.copy(place(*state(fake)), slot, lambda count: engine_fence_from_training(engine))
    with pytest.raises(HoldfastError, match="may have changed"):
        engine.finish()
    engine.mark()
    engine.fence()
    with pytest.raises(HoldfastError, match="cannot be copied"):
        engine.copy(place(*state(fake)), slot, no_pause)
    engine.mark()
    engine.copy(place(*state(fake)), slot, no_pause)
    engine.fence()
    engine.finish()


def engine_fence_from_training(engine: CudaEngine) -> None:
    training = threading.Thread(target=engine.fence)
    training.start()
    training.join(DEADLINE_S)
    assert not training.is_alive()


def test_a_copy_needs_a_boundary() -> None:
    fake = FakeCuda()
    with pytest.raises(HoldfastError, match="mark"):
        CudaEngine(fake).copy(place(*state(fake)), new_slot(), no_pause)


def test_each_chunk_waits_for_its_pause() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    engine.mark()
    seen: list[tuple[int, int]] = []
    tensor = fake.tensor(torch.zeros(RANGE + 100, dtype=torch.uint8))
    engine.copy(place(tensor, at=0), new_slot(), lambda count: seen.append((count, fake.copies)))
    assert [count for count, _ in seen] == [CHUNK] * (RANGE // CHUNK) + [100]
    assert [copies for _, copies in seen] == list(range(len(seen)))


@registered_or_not
def test_a_pause_that_raises_ends_the_copy_and_leaves_the_slot_alone(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    engine = CudaEngine(fake)
    slot = new_slot()
    live = fake.tensor(torch.full((RANGE,), 7, dtype=torch.uint8))

    def pause(count: int) -> None:
        if fake.copies == 3:
            raise HoldfastError("given up")

    engine.mark()
    with pytest.raises(HoldfastError, match="given up"):
        engine.copy(place(live, at=0), slot, pause)
    slot[:] = bytes(slot.nbytes)  # somebody else's now
    fake.run()
    engine.close()
    assert bytes(slot) == bytes(slot.nbytes)


@registered_or_not
def test_what_is_copied_is_held_until_it_is_copied(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    engine = CudaEngine(fake)
    slot = new_slot()
    plain, scattered = fake.tensor(torch.arange(900.0)), fake.tensor(torch.arange(1200.0))
    scattered = torch.empty(0).set_(scattered.untyped_storage(), 0, (40, 30), (1, 40))
    live = [plain, scattered, fake.tensor(torch.arange(9.0))]
    wanted = [bits(tensor) for tensor in live]
    pieces = place(*live)
    memory = [fake.memory[tensor.untyped_storage().data_ptr()] for tensor in live]
    engine.mark()
    engine.copy(pieces, slot, no_pause)
    for tensor in live:
        tensor.data = torch.empty(0)  # the training loop lets go of the memory
    assert None not in [held() for held in memory]
    engine.finish()
    assert content(slot, pieces) == wanted
    assert [held() for held in memory] == [None] * len(memory)


@registered_or_not
def test_a_copy_that_nobody_finished_ends_before_the_next_begins(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    engine = CudaEngine(fake)
    first, second = new_slot(), new_slot()
    engine.mark()
    engine.copy(place(fake.tensor(torch.full((RANGE,), 1, dtype=torch.uint8)), at=0), first, no_pause)
    engine.mark()
    engine.copy(place(fake.tensor(torch.full((RANGE,), 2, dtype=torch.uint8)), at=0), second, no_pause)
    assert bytes(first[:RANGE]) == b"\x01" * RANGE
    engine.finish()
    assert bytes(second[:RANGE]) == b"\x02" * RANGE


def test_tensors_elsewhere_are_refused_before_anything_is_queued() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    engine.mark()
    with pytest.raises(ConfigError, match="meta"):
        engine.copy(place(fake.tensor(torch.zeros(3)), torch.zeros(3, device="meta")), new_slot(), no_pause)
    assert fake.copies == 0


# ---------------------------------------------------------------------- looks at the state


def named(*tensors: torch.Tensor) -> tuple[SlotTensor, ...]:
    pieces = place(*tensors)
    return tuple(SlotTensor(each.tensor, each.offset, each.bytes, f"w{i}") for i, each in enumerate(pieces))


def test_bytes_may_be_under_way_when_a_copy_returns() -> None:
    assert CudaEngine(FakeCuda()).queues


@pytest.mark.parametrize("turn", range(12))
def test_a_sample_is_the_same_bytes_as_of_host_memory(turn: int) -> None:
    fake = FakeCuda()
    pieces = place(*state(fake))
    on_device, on_host = CudaEngine(fake).sample(pieces, turn), CpuEngine().sample(pieces, turn)
    for name in ("index", "start", "length", "place"):
        assert getattr(on_device, name).tolist() == getattr(on_host, name).tolist()
    looked_at = on_host.place >= 0  # what is conjugated lazily is resolved on the way
    assert (on_device.read() == on_host.read())[looked_at].all()
    assert on_device.read().any(axis=1).sum() >= 3


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_only_so_many_pieces_are_looked_at_a_turn_and_soon_all(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    monkeypatch.setattr(cuda, "SAMPLED", 3)
    fake = FakeCuda()
    engine = CudaEngine(fake)
    pieces = place(*[fake.tensor(torch.full((4,), float(i))) for i in range(8)])
    seen: set[int] = set()
    for turn in range(5, 5 + 24 * interval, interval):
        sample = engine.sample(pieces, turn)
        assert len(sample.index) == 3
        values = sample.read()[:, :16].copy().view("f4")
        assert values.tolist() == [[float(i)] * 4 for i in sample.index]
        assert engine.sample(pieces, turn).index.tolist() == sample.index.tolist()
        seen.update(sample.index.tolist())
    assert seen == set(range(8))


def test_a_sample_of_nothing_asks_the_device_nothing() -> None:
    fake = FakeCuda()
    for tensors in ((), (fake.tensor(torch.zeros(0, 3)),)):
        sample = CudaEngine(fake).sample(place(*tensors), 4)
        assert (len(sample.index), len(sample.read())) == (0, 0)
    assert not fake.compute.work


def test_taking_a_sample_does_not_wait_for_the_device_and_reading_it_does() -> None:
    fake = FakeCuda()
    ran: list[bool] = []
    fake.later(lambda: ran.append(True))
    sample = CudaEngine(fake).sample(place(*state(fake)), 1)
    assert not ran
    sample.read()
    assert ran


def test_a_device_that_fails_while_it_is_looked_at_fails_the_snapshot() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    sample = engine.sample(place(*state(fake)), 1)
    fake.fault = "an illegal memory access"
    with pytest.raises(HoldfastError, match="a look at the state failed on cpu: an illegal memory access"):
        sample.read()
    with pytest.raises(HoldfastError, match="a look at the state failed"):
        engine.sample(place(*state(fake)), 1)
    fake.fault = ""
    fake.stuck = True
    with pytest.raises(DeadlineExceeded):
        engine.sample(place(*state(fake)), 1).read()


@registered_or_not
def test_what_changes_while_it_is_copied_is_named(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    engine = CudaEngine(fake)
    live = [fake.tensor(torch.full((n,), 1.0)) for n in (3, 500, 40)]
    pieces = named(*live)
    slot = new_slot()
    for changing in (None, 1):
        witness = Witness(engine, Subjects(pieces), 3)
        engine.mark()
        engine.copy(pieces, slot, no_pause)
        if changing is not None:
            live[changing].data.fill_(2)
        witness.look()  # as at the fence: what is queued may be under way
        engine.fence()
        engine.finish()
        if changing is None:
            witness.check(slot)
        else:
            with pytest.raises(StateChanged, match=rf"^w{changing} changed"):
                witness.check(slot)


def test_a_torn_copy_of_what_was_changed_back_is_named() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    live = [fake.tensor(torch.full((500,), 1.0)), fake.tensor(torch.full((20, 30), 1.0)).t()]
    pieces = named(*live)
    slot = new_slot()
    witness = Witness(engine, Subjects(pieces), 3)
    for tensor in live:
        tensor.data.fill_(2)
    engine.mark()
    engine.copy(pieces, slot, no_pause)
    engine.finish()
    for tensor in live:
        tensor.data.fill_(1)
    witness.look()
    assert witness.changed() == []
    with pytest.raises(StateChanged, match=r"^w0, w1 changed"):
        witness.check(slot)


# ---------------------------------------------------------------------- registration


def copied(engine: CudaEngine, fake: FakeCuda, slot: memoryview) -> None:
    engine.mark()
    engine.copy(place(fake.tensor(torch.ones(3))), slot, no_pause)
    engine.finish()


def test_a_slot_is_registered_once_in_ranges() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    slot = new_slot(5 * PAGE - 100)
    for _ in range(3):
        copied(engine, fake, slot)
    engine.load(place(fake.tensor(torch.ones(3))), slot)
    base = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
    assert fake.log == [("register", base + start) for start in (0, RANGE, 2 * RANGE)]
    assert [fake.ranges[address] for _, address in fake.log] == [RANGE, RANGE, PAGE]


def test_the_same_mapping_by_another_name_is_the_same_slot() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    slot = new_slot()
    copied(engine, fake, slot)
    copied(engine, fake, memoryview(slot))
    assert len(fake.log) == 3


def test_a_refused_registration_is_undone_logged_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCuda()
    fake.refused = lambda nth: nth >= 2
    engine = CudaEngine(fake)
    slots = [new_slot(), new_slot()]
    with caplog.at_level(logging.WARNING):
        for slot in slots:
            copied(engine, fake, slot)
            assert bytes(slot[64:76]) == bits(torch.ones(3))
    base = torch.frombuffer(slots[0], dtype=torch.uint8).data_ptr()
    assert fake.log == [
        ("register", base),
        ("register", base + RANGE),
        ("refuse", base + 2 * RANGE),
        ("unregister", base + RANGE),
        ("unregister", base),
    ]
    assert len(caplog.records) == 1
    assert "error 2" in caplog.text


def test_a_slot_that_nobody_holds_is_unregistered_before_its_mapping_goes() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    mapping = mmap.mmap(-1, PAGE)
    mapped = weakref.ref(mapping)
    old = memoryview(mapping)
    del mapping
    copied(engine, fake, old)
    del old
    assert mapped() is not None
    seen: list[bool] = []
    fake.on_unregister = lambda: seen.append(mapped() is not None)
    new = new_slot(PAGE)
    copied(engine, fake, new)
    assert seen == [True]
    assert mapped() is None
    assert [kind for kind, _ in fake.log] == ["register", "unregister", "register"]


def test_a_slot_is_unregistered_only_after_its_last_copy() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    old = new_slot()
    engine.mark()
    engine.copy(place(*state(fake)), old, no_pause)
    del old
    copied(engine, fake, new_slot())  # the fake fails a copy into what is not registered
    assert sum(kind == "unregister" for kind, _ in fake.log) == 3


def test_close_waits_unregisters_everything_and_may_be_called_again() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    mapping = mmap.mmap(-1, 5 * PAGE)
    mapped = weakref.ref(mapping)
    slot = memoryview(mapping)
    del mapping
    engine.mark()
    engine.copy(place(fake.tensor(torch.ones(2000))), slot, no_pause)
    engine.close()
    assert bytes(slot[64:8064]) == bits(torch.ones(2000))
    assert fake.ranges == {}
    engine.close()
    assert sum(kind == "unregister" for kind, _ in fake.log) == 3
    del slot
    assert mapped() is None


# ---------------------------------------------------------------------- errors


@registered_or_not
def test_an_error_of_the_device_surfaces_in_finish(refused: Callable[[int], bool]) -> None:
    fake = FakeCuda()
    fake.refused = refused
    fake.fail_at = 2
    engine = CudaEngine(fake)
    engine.mark()
    engine.copy(place(fake.tensor(torch.zeros(2 * CHUNK, dtype=torch.uint8))), new_slot(), no_pause)
    engine.fence()
    with pytest.raises(HoldfastError, match="illegal memory access"):
        engine.finish()
    engine.mark()  # the device answers nothing any more, and still the training thread hears of it elsewhere
    engine.fence()
    with pytest.raises(HoldfastError, match="illegal memory access"):
        engine.copy(place(fake.tensor(torch.zeros(3))), new_slot(), no_pause)


def test_a_fence_that_fails_makes_the_copy_fail() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    engine.mark()
    engine.copy(place(*state(fake)), new_slot(), no_pause)
    fake.fault = "out of memory"
    engine.fence()
    fake.fault = ""
    with pytest.raises(HoldfastError, match="out of memory"):
        engine.finish()


def test_a_device_that_is_stuck_is_noticed_and_its_pages_stay() -> None:
    fake = FakeCuda()
    engine = CudaEngine(fake)
    slot = new_slot()
    engine.mark()
    engine.copy(place(*state(fake)), slot, no_pause)
    fake.stuck = True
    with pytest.raises(DeadlineExceeded):
        engine.finish()
    with pytest.raises(DeadlineExceeded):
        engine.close()
    assert len(fake.ranges) == 3
    fake.stuck = False
    engine.close()
    assert fake.ranges == {}


@dataclass
class Countdown:
    """Passes at the nth query."""

    left: int

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_waiting_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = object.__new__(TorchRuntime)  # there is no device to make it for
    runtime.device = torch.device("cuda:1")
    countdown = Countdown(3)
    runtime.wait(countdown)
    assert countdown.left == 0
    monkeypatch.setattr(cuda_runtime, "DEADLINE_S", 0.0)
    with pytest.raises(DeadlineExceeded, match="cuda:1"):
        runtime.wait(Countdown(1000))


def test_without_a_cuda_device_there_is_no_runtime() -> None:
    with pytest.raises(ConfigError, match="cpu"):
        TorchRuntime(torch.device("cpu"))


# ---------------------------------------------------------------------- chunks


@quick
@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    swap=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.complex128]),
    limit=st.integers(16, 400),
)
def test_chunks_are_the_piece_in_order(shape: list[int], swap: bool, dtype: torch.dtype, limit: int) -> None:
    count = torch.empty(shape).numel()
    tensor = torch.arange(count).to(dtype).reshape(shape)
    if swap and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    parts = list(chunks(SlotTensor(tensor, 40, tensor.nbytes), limit))
    assert b"".join(bits(part.tensor) for part in parts) == bits(tensor)
    assert all(0 < part.bytes == part.tensor.nbytes <= limit for part in parts)
    starts = [40 + sum(part.bytes for part in parts[:n]) for n in range(len(parts))]
    assert [part.offset for part in parts] == starts
