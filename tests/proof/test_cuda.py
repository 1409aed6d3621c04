"""State on a device is copied into slots and comes back, in whatever order the device does its work."""

from __future__ import annotations

import itertools
import logging
import mmap
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, StaleEpoch
from holdfast.smp_daemon.shared.records import Unit, digest
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.copy import cuda, cuda_runtime, pages, runs
from holdfast.snapshot.copy.cuda import CudaEngine, chunks
from holdfast.snapshot.copy.cuda_runtime import Runtime
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor, Table, Transfer, address_of, load_threads
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.tensors import flat, leaf_of
from holdfast.snapshot.copy.witness import StateChanged, WatchedPieces, Witness
from tests.deadlines import DEADLINE_S
from tests.proof.device import standin
from tests.proof.device.queues import EAGER, LAZY, DeviceQueueEvent
from tests.proof.device.standin import EmulatedCuda, EmulatedRuntime
from tests.unit.test_engines import Pauses

PAGE = mmap.PAGESIZE
CHUNK = PAGE // 4
RANGE = 2 * PAGE
ORDERS = [LAZY, EAGER, 1, 2, 3]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(cuda, "GROUP_BYTES", CHUNK)
    monkeypatch.setattr(cuda, "REGISTER_BYTES", RANGE)
    monkeypatch.setattr(pages, "REGISTER_BYTES", RANGE)
    monkeypatch.setattr(standin, "STUCK_S", 0.01)


@pytest.fixture(params=["registered", "ring"])
def gpu(request: pytest.FixtureRequest) -> Iterator[EmulatedCuda]:
    """A device that may write to slots, and one that may not."""
    made = EmulatedCuda()
    made.refused = lambda nth: request.param == "ring"
    with made.installed():
        yield made


@pytest.fixture
def one() -> Iterator[EmulatedCuda]:
    with EmulatedCuda().installed() as made:
        yield made


def engine_on(gpu: EmulatedCuda) -> CudaEngine:
    return CudaEngine(EmulatedRuntime(gpu), Pages())


def turn() -> AbstractContextManager[None]:
    return nullcontext()


def new_slot(count: int = 5 * PAGE) -> memoryview:
    return memoryview(mmap.mmap(-1, count))


def prepared(engine: CudaEngine, *slots: memoryview) -> memoryview:
    """Register the slots, or a new one, with the device; return the first."""
    slots = slots or (new_slot(),)
    engine.prepare(slots, turn)
    return slots[0]


def place(*tensors: torch.Tensor, at: int = 64) -> list[SlotTensor]:
    pieces = []
    for i, tensor in enumerate(tensors):
        pieces.append(SlotTensor(tensor, at, tensor.nbytes, f"w{i}"))
        at += tensor.nbytes
    return pieces


def bits(tensor: torch.Tensor) -> bytes:
    values = flat(tensor.cpu().resolve_conj().resolve_neg().contiguous())
    return bytes(values.view(torch.uint8).tolist()) if values.numel() else b""


def content(slot: memoryview, pieces: list[SlotTensor]) -> list[bytes]:
    return [bytes(slot[piece.offset : piece.offset + piece.bytes]) for piece in pieces]


def on_host() -> list[torch.Tensor]:
    """Tensors that exceed a chunk, cross a registration, are scattered, conjugated, negated or empty."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return [
        noise(RANGE // 4 + 12),
        noise(30, 40),
        noise(4, 700),
        noise(40, dtype=torch.complex64),
        noise(0, 3),
        noise(),
        torch.arange(7, dtype=torch.uint8),
    ]


def state(gpu: EmulatedCuda) -> list[torch.Tensor]:
    """The same tensors on the device, some of them through other views."""
    plain, turned, thinned, conjugated, *rest = [gpu.tensor(tensor) for tensor in on_host()]
    return [plain, turned.t(), thinned[:, ::2], conjugated.conj(), *rest]


def copied(engine: CudaEngine, gpu: EmulatedCuda, slot: memoryview) -> None:
    transfer = engine.mark()
    transfer.copy(place(gpu.tensor(torch.ones(3))), slot, Pauses())
    transfer.finish()


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("refused", [False, True], ids=["registered", "ring"])
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_a_slot_holds_the_state_of_its_boundary(order: str | int, refused: bool, own: bool) -> None:
    gpu = EmulatedCuda(order)
    gpu.refused = lambda nth: refused
    stream = gpu.queues.stream(0) if own else gpu.defaults[0]
    with gpu.installed(), gpu.stream(stream):
        engine = engine_on(gpu)
        slots = [new_slot(), new_slot()]
        engine.prepare(slots, turn)
        live = state(gpu)
        pieces = place(*live)
        for step in range(4):
            for tensor in live:
                tensor.mul_(2).add_(step)
            transfer = engine.mark()
            wanted = [tensor.clone() for tensor in live]
            transfer.copy(pieces, slots[step % 2], Pauses())
            transfer.guard()
            transfer.fence()
            for tensor in live:
                tensor.fill_(99)
            transfer.finish()
            assert content(slots[step % 2], pieces) == [bits(tensor) for tensor in wanted]
            for tensor, value in zip(live, wanted, strict=True):
                tensor.copy_(value)
        engine.close()
        assert gpu.registered.keys().isdisjoint(address for kind, address in gpu.log if kind == "register")


def test_a_slot_that_nobody_needs_any_more_is_left_with_nothing_registered(one: EmulatedCuda) -> None:
    engine, turns = engine_on(one), itertools.count()

    @contextmanager
    def turn() -> Iterator[None]:
        yield
        if next(turns):
            raise StaleEpoch("over")

    slot = new_slot()
    with pytest.raises(StaleEpoch, match="over"):
        engine.prepare([slot], turn)
    assert [kind for kind, _ in one.log] == ["register", "register", "unregister", "unregister"]
    assert not one.registered


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("refused", [False, True], ids=["registered", "ring"])
def test_a_load_fills_live_tensors_behind_what_is_queued(order: str | int, refused: bool) -> None:
    gpu = EmulatedCuda(order)
    gpu.refused = lambda nth: refused
    with gpu.installed():
        engine = engine_on(gpu)
        live = state(gpu)
        pieces = place(*live)
        slot = prepared(engine)
        slot[:] = random.Random(5).randbytes(slot.nbytes)
        for tensor in live:
            tensor.fill_(7)  # an initialization that is still queued
        engine.load(pieces, slot)
        gpu.queues.run()
        assert [bits(tensor) for tensor in live] == content(slot, pieces)


@pytest.mark.parametrize("odd", [True, False], ids=["only odd ones", "none"])
def test_a_slot_may_have_no_plain_tensors(gpu: EmulatedCuda, odd: bool) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    pieces = place(*[gpu.tensor(torch.ones(30, 20)).t()] * odd)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    transfer.finish()
    assert content(slot, pieces) == [bits(piece.tensor) for piece in pieces]


def test_several_threads_fill_a_device_from_memory_that_it_does_not_know(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live = one.tensor(torch.zeros(40 * CHUNK, dtype=torch.uint8))
    source = np.frombuffer(random.Random(3).randbytes(live.nbytes), np.uint8).copy()
    live.fill_(9)
    fill = engine.fill()
    starts = range(0, live.nbytes, 300)
    taken: list[bool] = []

    def work(first: int) -> None:
        with fill.taking() as take:
            for some in (starts[first::5][i : i + 3] for i in range(0, len(starts), 3)):
                units = []
                for at in some:
                    part = source[at : at + 300].data
                    table = runs.make_runs([(address_of(part), live.data_ptr() + at, part.nbytes)])
                    units.append((Unit(part, digest(part) ^ (at == damaged)), table))
                taken.extend(take(units))

    damaged = starts[17]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    fill.finish()
    assert taken.count(False) == 1
    source[damaged : damaged + 300] = 9
    assert bits(live) == source.tobytes(), "nothing of the damaged one got there"
    assert len(one.registered) <= load_threads() + cuda.BEING_TRANSFERRED


def test_nothing_outside_the_pieces_is_written(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    transfer = engine.mark()
    transfer.copy(place(gpu.tensor(torch.full((3000,), 7, dtype=torch.uint8)), at=100), slot, Pauses())
    transfer.finish()
    assert bytes(slot) == bytes(100) + b"\x07" * 3000 + bytes(slot.nbytes - 3100)


def test_the_training_thread_neither_blocks_nor_waits_for_the_device(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live = state(one)
    transfer = engine.mark()
    transfer.copy(place(*live), prepared(engine), Pauses())
    sample = engine.sample(place(*live), 1)
    given = engine.fetch([live[0]])
    behind = transfer.sample(place(*live), 1)
    transfer.guard()
    transfer.fence()
    assert one.queues.done == 0
    transfer.finish()
    assert one.queues.done > 0
    assert np.array_equal(sample.read(), behind.read())
    assert given()[0].tobytes() == bits(live[0])


def test_copies_that_follow_each_other_are_one_run(one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 4 * CHUNK)
    engine = engine_on(one)
    whole = one.tensor(torch.arange(3 * CHUNK // 4, dtype=torch.int32))
    slot = prepared(engine)
    transfer = engine.mark()
    before = one.copies
    pieces = place(*torch.split(whole, 50))
    transfer.copy(pieces, slot, Pauses())
    assert one.copies == before + 1
    transfer.finish()
    assert b"".join(content(slot, pieces)) == bits(whole)


def test_what_comes_late_belongs_to_the_boundary_of_its_job(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live, late = one.tensor(torch.ones(30)), one.tensor(torch.full((30,), 2.0))
    slot = prepared(engine)
    first = engine.mark()
    pieces = place(live, late)
    first.copy(pieces[:1], slot, Pauses())
    first.guard()
    second = engine.mark()  # the next step has begun
    first.copy(pieces[1:], slot, Pauses())
    first.fence()
    first.finish()
    assert content(slot, pieces) == [bits(live), bits(late)]
    second.guard()  # nothing that the step changes is copied under this mark
    second.fence()
    second.copy(pieces[1:], slot, Pauses())
    second.finish()


def test_where_all_is_copied_as_the_step_begins_the_fence_has_nothing_to_wait_for(one: EmulatedCuda) -> None:
    engines = one.engines({torch.device("cuda", 0)})
    staged = one.tensor(torch.ones(30))
    pieces, slot = place(staged), new_slot()
    transfer = engines.mark()
    transfer.copy((), slot, Pauses())
    transfer.guard()
    transfer.fence()
    transfer.copy(pieces, slot, Pauses())
    transfer.finish()
    assert content(slot, pieces) == [bits(staged)]
    engines.close()


def test_a_copy_that_was_not_queued_as_a_whole_before_the_fence_fails(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    slot = prepared(engine)
    transfer = engine.mark()
    transfer.copy(place(*state(one)), slot, lambda count: fence_from_training(transfer))
    with pytest.raises(HoldfastError, match="may have changed"):
        transfer.finish()
    transfer = engine.mark()
    transfer.copy(place(*state(one)), slot, Pauses())
    transfer.guard()
    transfer.fence()
    transfer.finish()


def fence_from_training(transfer: Transfer) -> bool:
    training = threading.Thread(target=transfer.fence)
    training.start()
    training.join(DEADLINE_S)
    assert not training.is_alive()
    return True


def test_others_get_their_turn_after_each_chunk(one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(one)
    queued: list[int] = []
    copy_parts = engine.runtime.copy_parts

    def noted(parts: Sequence[runs.Runs]) -> None:
        queued.extend(int(part[:, 2].sum()) for part in parts)
        copy_parts(parts)

    monkeypatch.setattr(engine.runtime, "copy_parts", noted)
    transfer = engine.mark()
    seen = Pauses()
    tensor = one.tensor(torch.zeros(RANGE + 100, dtype=torch.uint8))
    transfer.copy(place(tensor, at=0), prepared(engine), seen)
    assert queued == [CHUNK] * (RANGE // CHUNK) + [100]
    assert set(seen) == {0}  # the copy is not paced
    transfer.finish()


def test_a_pause_that_raises_ends_the_copy_and_once_settled_leaves_the_slot_alone(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    live = gpu.tensor(torch.full((RANGE,), 7, dtype=torch.uint8))
    left = 3

    def pause(count: int) -> bool:
        nonlocal left
        left -= 1
        if not left:
            raise HoldfastError("given up")
        return True

    transfer = engine.mark()
    with pytest.raises(HoldfastError, match="given up"):
        transfer.copy(place(live, at=0), slot, pause)
    transfer.settle()
    slot[:] = bytes(slot.nbytes)  # the slot has a new owner
    gpu.queues.run()
    engine.close()
    assert bytes(slot) == bytes(slot.nbytes)


def test_what_is_copied_is_held_until_it_is_copied(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    live = [gpu.tensor(torch.arange(900.0)), gpu.tensor(torch.arange(1200.0).reshape(40, 30)).t()]
    wanted = [bits(tensor) for tensor in live]
    pieces = place(*live)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    kept, sizes = content, [(piece.offset, piece.bytes) for piece in pieces]
    blocks = {gpu.memory.of(tensor) for tensor in live}
    engine.forget()
    del pieces, live  # the training loop lets go of the memory
    for count in (900, 1200):
        assert gpu.memory.of(gpu.tensor(torch.full((count,), 5.0))) not in blocks
    transfer.finish()
    assert [bytes(slot[at : at + count]) for at, count in sizes] == wanted
    del kept
    assert gpu.memory.of(gpu.tensor(torch.full((900,), 5.0))) in blocks


def test_tensors_elsewhere_are_refused_before_anything_is_queued(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    transfer = engine.mark()
    with pytest.raises(ConfigError, match="meta"):
        transfer.copy(place(one.tensor(torch.zeros(3)), torch.zeros(3, device="meta")), new_slot(), Pauses())
    assert one.copies == 0


# ---------------------------------------------------------------------- the witness


def test_bytes_may_be_under_way_when_a_copy_returns(one: EmulatedCuda) -> None:
    assert engine_on(one).queues


@pytest.mark.parametrize("turn", range(12))
def test_a_sample_is_the_same_bytes_as_of_host_memory(one: EmulatedCuda, turn: int) -> None:
    plain, turned, thinned, conjugated, *rest = on_host()
    here = place(plain, turned.t(), thinned[:, ::2], conjugated.conj(), *rest)
    on_device, of_host = engine_on(one).sample(place(*state(one)), turn), CpuEngine().sample(here, turn)
    for name in ("index", "start", "length", "place"):
        assert getattr(on_device, name).tolist() == getattr(of_host, name).tolist()
    assert (on_device.read() == of_host.read()).all()
    assert on_device.read().any(axis=1).sum() >= 3


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_only_so_many_pieces_are_looked_at_a_turn_and_soon_all(
    one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    monkeypatch.setattr(cuda, "SAMPLED", 3)
    engine = engine_on(one)
    pieces = place(*[one.tensor(torch.full((4,), float(i))) for i in range(8)])
    seen: set[int] = set()
    for turn in range(5, 5 + 24 * interval, interval):
        sample = engine.sample(pieces, turn)
        assert len(sample.index) == 3
        values = sample.read()[:, :16].copy().view("f4")
        assert values.tolist() == [[float(i)] * 4 for i in sample.index]
        assert engine.sample(pieces, turn).index.tolist() == sample.index.tolist()
        seen.update(sample.index.tolist())
    assert seen == set(range(8))


def test_a_sample_of_nothing_asks_the_device_nothing(one: EmulatedCuda) -> None:
    for tensors in ((), (one.empty((0, 3), None, torch.float32),)):
        sample = engine_on(one).sample(place(*tensors), 4)
        assert (len(sample.index), len(sample.read())) == (0, 0)
    assert not one.defaults[0].work


def test_a_device_that_fails_while_it_is_looked_at_fails_the_snapshot(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live = state(one)
    sample = engine.sample(place(*live), 1)
    one.queues.fault = "an illegal memory access"
    with pytest.raises(HoldfastError, match=f"cuda:0: {one.queues.fault}"):
        sample.read()
    with pytest.raises(HoldfastError, match=r"look at .*failed"):
        engine.sample(place(*live), 1)
    one.queues.fault = ""
    one.queues.stuck = True
    with pytest.raises(DeadlineExceeded):
        engine.sample(place(*live), 1).read()


def test_what_changes_while_it_is_copied_is_named(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    live = [gpu.tensor(torch.full((n,), 1.0)) for n in (3, 500, 40)]
    pieces = place(*live)
    slot = prepared(engine)
    for changing in (None, 1):
        witness = Witness(engine, WatchedPieces(pieces), 3)
        transfer = engine.mark()
        transfer.copy(pieces, slot, Pauses())
        if changing is not None:
            live[changing].data.fill_(2)
        witness.look(transfer)
        transfer.guard()
        transfer.fence()
        transfer.finish()
        if changing is None:
            witness.check(slot)
        else:
            with pytest.raises(StateChanged, match=rf"^w{changing} changed"):
                witness.check(slot)


def test_a_torn_copy_of_what_was_changed_back_is_named(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live = [one.tensor(torch.full((500,), 1.0)), one.tensor(torch.full((20, 30), 1.0)).t()]
    pieces = place(*live)
    slot = prepared(engine)
    witness = Witness(engine, WatchedPieces(pieces), 3)
    for tensor in live:
        tensor.data.fill_(2)
    transfer = engine.mark()
    transfer.copy(pieces, slot, Pauses())
    transfer.finish()
    for tensor in live:
        tensor.data.fill_(1)
    witness.look(engine.mark())
    assert witness.rewritten() == []
    with pytest.raises(StateChanged, match=r"^w0, w1 changed"):
        witness.check(slot)


# ---------------------------------------------------------------------- registration


def test_a_slot_is_registered_once_in_pieces_and_in_turns(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    slot = new_slot(5 * PAGE - 100)
    inside: list[bool] = []
    turns = 0

    class Turn:
        def __enter__(self) -> None:
            nonlocal turns
            turns += 1

        def __exit__(self, *error: object) -> None:
            inside.append(len(one.log) == turns)

    for _ in range(3):
        engine.prepare([slot, memoryview(slot)], Turn)
        copied(engine, one, slot)
    base = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
    assert one.log == [("register", base + start) for start in (0, RANGE, 2 * RANGE)]
    assert [one.registered[address] for _, address in one.log] == [RANGE, RANGE, PAGE]
    assert inside == [True] * 3


def test_what_nobody_prepared_goes_through_the_ring_and_is_not_registered_beside_a_step(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    slot = new_slot()
    copied(engine, one, slot)
    assert bytes(slot[64:76]) == bits(torch.ones(3))
    assert not one.log


def test_several_devices_register_a_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, known = EmulatedCuda(devices=2), Pages()
    with gpu.installed():
        engines = [CudaEngine(EmulatedRuntime(gpu, number), known) for number in range(2)]
        slot = new_slot()
        for engine in engines:
            engine.prepare([slot], turn)
        assert len(gpu.log) == 3
        pieces = [place(gpu.tensor(torch.full((9,), float(i)), i), at=100 * i) for i in range(2)]
        transfers = [engine.mark() for engine in engines]
        for transfer, some in zip(transfers, pieces, strict=True):
            transfer.copy(some, slot, Pauses())
        for transfer in transfers:
            transfer.finish()
        assert [content(slot, some) for some in pieces] == [[bits(some[0].tensor)] for some in pieces]
        with pytest.raises(ConfigError, match=r"on cuda:1, .* cuda:0"):
            engines[0].mark().copy(pieces[1], slot, Pauses())


def test_pages_that_somebody_else_has_registered_are_left_to_him(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    slot = new_slot()
    base = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
    one.registered[base + RANGE] = RANGE
    engine.prepare([slot], turn)
    copied(engine, one, slot)
    engine.close()
    assert base + RANGE in one.registered
    assert [address - base for kind, address in one.log if kind == "register"] == [0, 2 * RANGE]


def test_a_refused_registration_is_undone_logged_once_and_not_tried_again(
    one: EmulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    one.refused = lambda nth: nth >= 2
    engine = engine_on(one)
    slots = [new_slot(), new_slot()]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.prepare(slots, turn)
    for slot in slots:
        copied(engine, one, slot)
        assert bytes(slot[64:76]) == bits(torch.ones(3))
    base = torch.frombuffer(slots[0], dtype=torch.uint8).data_ptr()
    assert one.log == [
        ("register", base),
        ("register", base + RANGE),
        ("refuse", base + 2 * RANGE),
        ("unregister", base + RANGE),
        ("unregister", base),
    ]
    assert len(caplog.records) == 1
    assert "error 2" in caplog.text


def test_a_slot_that_nobody_holds_is_unregistered_before_its_mapping_goes(
    one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(one)
    mapping = mmap.mmap(-1, PAGE)
    mapped = weakref.ref(mapping)
    old = memoryview(mapping)
    del mapping
    engine.prepare([old], turn)
    copied(engine, one, old)
    del old
    assert mapped() is not None
    seen: list[bool] = []
    unregister = engine.runtime.unregister

    def noted(address: int) -> int:
        seen.append(mapped() is not None)
        return unregister(address)

    monkeypatch.setattr(engine.runtime, "unregister", noted)
    copied(engine, one, prepared(engine, new_slot(PAGE)))
    assert seen == [True]
    assert mapped() is None
    assert [kind for kind, _ in one.log] == ["register", "register", "unregister"]


def test_a_slot_is_not_unregistered_while_something_is_under_way_to_it(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    old = prepared(engine)
    transfer = engine.mark()
    transfer.copy(place(*state(one)), old, Pauses())
    del old
    copied(engine, one, prepared(engine))
    assert not [kind for kind, _ in one.log if kind == "unregister"]
    transfer.finish()
    copied(engine, one, prepared(engine))
    assert [kind for kind, _ in one.log].count("unregister") == 6


def test_close_waits_unregisters_everything_and_may_be_called_again(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    mapping = mmap.mmap(-1, 5 * PAGE)
    mapped = weakref.ref(mapping)
    slot = memoryview(mapping)
    del mapping
    engine.prepare([slot], turn)
    engine.mark().copy(place(one.tensor(torch.ones(2000))), slot, Pauses())
    engine.close()
    assert bytes(slot[64:8064]) == bits(torch.ones(2000))
    assert one.registered == {}
    engine.close()
    assert sum(kind == "unregister" for kind, _ in one.log) == 3
    del slot
    assert mapped() is None


# ---------------------------------------------------------------------- captures of graphs


def test_threads_of_ours_break_no_capture(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    live = one.tensor(torch.ones(500))
    slot = prepared(engine)
    transfer = engine.mark()
    sample, given = engine.sample(place(live), 1), engine.fetch([live])

    def copying() -> None:
        engine.enter_thread()
        transfer.copy(place(live), slot, Pauses())
        transfer.finish()

    def reading() -> None:  # as the thread does in which ranks agree: it does nothing else with the device
        sample.read()
        given()

    def careless() -> None:
        with pytest.raises(RuntimeError, match="during"):
            engine.runtime.pinned(10)

    for work, ruined in ((copying, ""), (reading, ""), (careless, "memory during")):
        thread = MACHINE.Thread(target=work)
        if ruined:
            with pytest.raises(RuntimeError, match=ruined), one.capture():
                live.mul_(2)
                thread.start()
                thread.join(DEADLINE_S)
            continue
        with one.capture():
            assert engine.capturing()
            live.mul_(2)
            thread.start()
            thread.join(DEADLINE_S)
        assert not engine.capturing()
        assert bytes(slot[64:68]) == bits(torch.ones(1))


# ---------------------------------------------------------------------- memory that goes


def test_memory_that_is_released_while_it_is_copied_is_named(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    for released in (0, 1, None):
        live = [gpu.tensor(torch.ones(500)), gpu.tensor(torch.ones(20, 30)).t()]
        transfer = engine.mark()
        transfer.copy(place(*live), slot, Pauses())
        if released is None:
            transfer.finish()
            continue
        there = live[released]
        there.set_(gpu.tensor(torch.ones(600)).untyped_storage(), 0, there.size(), there.stride())
        with pytest.raises(HoldfastError, match=f"released .*: w{released}$"):
            transfer.finish()


def test_the_memory_of_a_piece_is_known_by_its_storage_too() -> None:
    pieces = place(torch.ones(9), torch.ones(9)[4:], torch.ones(0))
    table = Table(pieces)
    assert table.moved() == []
    for piece in pieces[:2]:
        piece.tensor.untyped_storage().resize_(0)
    pieces.clear()  # what was given is held all the same
    assert table.moved() == ["w0", "w1"]


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    whole = torch.ones(10)
    part = whole[4:]
    leaf_of("w", part)
    whole.untyped_storage().resize_(20)
    for tensor in (whole, part):
        with pytest.raises(ConfigError, match=r"^w has no memory"):
            leaf_of("w", tensor)
    leaf_of("w", whole[:3])


# ---------------------------------------------------------------------- one queue for all streams


@pytest.mark.parametrize("one_queue", [False, True])
def test_with_one_queue_no_kernel_waits_for_a_copy(one: EmulatedCuda, one_queue: bool) -> None:
    """Kernels of training that are launched after it would wait, too."""
    engine = engine_on(one)
    runtime = engine.runtime
    runtime.one_queue = one_queue
    slot, live = prepared(engine), state(one)
    queued: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("copy", "copy_runs", "separate", "wait"):
            known = getattr(runtime, name)

            def noted(*args: object, name: str = name, known: Callable[..., object] = known) -> object:
                queued.append(name)
                return known(*args)

            patched.setattr(runtime, name, noted)
        transfer = engine.mark()
        transfer.copy(place(*live), slot, Pauses())
    kernels = [i for i, name in enumerate(queued) if name in ("copy", "separate")]
    waiting = [i for i in kernels if "copy_runs" in queued[:i] and queued[i - 1] != "wait"]
    assert bool(waiting) is not one_queue
    transfer.finish()
    assert content(slot, place(*live)) == [bits(tensor) for tensor in live]


def test_with_one_queue_few_chunks_are_queued_before_somebody_waits_for_them(
    one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training asks the device for comes behind them."""
    engine = engine_on(one)
    monkeypatch.setattr(DeviceQueueEvent, "query", lambda event: event.passed)  # the device gets nowhere
    engine.runtime.one_queue = True
    slot, live = prepared(engine, new_slot(20 * PAGE)), one.tensor(torch.arange(16 * PAGE) % 251).to(torch.uint8)
    early: list[int] = []

    def pause(count: int) -> bool:
        early.append(one.copies)
        return len(early) > 20

    transfer = engine.mark()
    before = one.copies
    transfer.copy(place(live), slot, pause)
    assert early[19] - before == cuda.AHEAD and one.copies - before >= 16 * PAGE // CHUNK
    monkeypatch.undo()
    transfer.finish()
    assert content(slot, place(live)) == [bits(live)]


def test_a_copy_of_many_chunks_is_queued_in_few_parts(one: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_CHUNKS", 3)
    engine = engine_on(one)
    parts: list[int] = []
    monkeypatch.setattr(engine.runtime, "separate", lambda: parts.append(one.copies))
    slot, live = prepared(engine, new_slot(20 * PAGE)), one.tensor(torch.arange(16 * PAGE) % 251).to(torch.uint8)
    transfer = engine.mark()
    transfer.copy(place(live), slot, Pauses())
    transfer.finish()
    assert len(parts) == 3
    assert content(slot, place(live)) == [bits(live)]


# ---------------------------------------------------------------------- errors


def test_an_error_of_the_device_surfaces_in_finish(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    slot = prepared(engine)
    live = gpu.tensor(torch.zeros(2 * CHUNK, dtype=torch.uint8))
    gpu.fail_at = gpu.copies + 2
    transfer = engine.mark()
    transfer.copy(place(live), slot, Pauses())
    transfer.guard()
    transfer.fence()
    with pytest.raises(HoldfastError, match="illegal memory access"):
        transfer.finish()
    transfer = engine.mark()  # the device no longer answers, which the training thread learns elsewhere
    transfer.fence()
    with pytest.raises(HoldfastError, match="illegal memory access"):
        transfer.copy(place(live), slot, Pauses())


def test_a_fence_that_fails_makes_the_copy_fail(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    transfer = engine.mark()
    transfer.copy(place(*state(one)), prepared(engine), Pauses())
    transfer.guard()
    one.queues.fault = "out of memory"
    transfer.fence()
    one.queues.fault = ""
    with pytest.raises(HoldfastError, match="out of memory"):
        transfer.finish()


def test_a_device_that_is_stuck_is_noticed_and_its_pages_stay(one: EmulatedCuda) -> None:
    engine = engine_on(one)
    slot = prepared(engine)
    transfer = engine.mark()
    transfer.copy(place(*state(one)), slot, Pauses())
    one.queues.stuck = True
    for wait in (transfer.settle, engine.close):
        with pytest.raises(DeadlineExceeded):
            wait()
    assert len(one.registered) == 3
    one.queues.stuck = False
    engine.close()
    assert len(one.registered) == 0


@dataclass
class Countdown:
    """An event that has passed at the nth query."""

    left: int

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_waiting_has_a_deadline_from_when_the_device_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = object.__new__(Runtime)  # made without a device
    runtime.device = torch.device("cuda:1")
    countdown = Countdown(3)
    runtime.wait(countdown)
    assert countdown.left == 0
    monkeypatch.setattr(cuda_runtime, "DEADLINE_S", 0.0)
    with pytest.raises(DeadlineExceeded, match="cuda:1"):
        runtime.wait(Countdown(1000))
    runtime.wait(Countdown(50), begun=Countdown(50))  # work of training comes first, however long it takes
    with pytest.raises(DeadlineExceeded, match="cuda:1"):
        runtime.wait(Countdown(1000), begun=Countdown(50))


def test_without_a_cuda_device_there_is_no_runtime() -> None:
    with pytest.raises(ConfigError, match="cpu"):
        Runtime(torch.device("cpu"))


# ---------------------------------------------------------------------- chunks


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
