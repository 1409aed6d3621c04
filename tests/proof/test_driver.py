"""holdfast's own calls into CUDA, on a driver of ours with a device that works in a thread; see `device/libcuda.c`.

Faults are planted in an order of work that a device has: training is late, or copies are.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.records import Unit, digest
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.copy import cuda_driver, cuda_runtime, pages, runs
from holdfast.snapshot.copy.cuda import BEING_TRANSFERRED, CudaEngine
from holdfast.snapshot.copy.cuda_runtime import Runtime
from holdfast.snapshot.copy.engines import SlotTensor, address_of, load_threads
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.tensors import DTYPES, octets
from holdfast.snapshot.state import rng
from holdfast.snapshot.step import gradients as watched_gradients
from holdfast.snapshot.step.capture import Staging
from holdfast.snapshot.step.gradients import Gradients
from tests.deadlines import DEADLINE_S
from tests.proof.device import driver
from tests.proof.device.driver import Driver
from tests.proof.device.queues import EAGER, LAZY
from tests.proof.device.seam import (
    FAULTS,
    Cpu,
    Emulated,
    SeamLoop,
    SeamOutcome,
    missed,
    observe,
    twin,
)
from tests.proof.device.standin import EmulatedCuda

SEED = 7
BUFFERS = load_threads() + BEING_TRANSFERRED
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        driver.library()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def arena() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield base / "seam"
    shutil.rmtree(base)


@pytest.fixture
def gpu() -> Iterator[EmulatedCuda]:
    with EmulatedCuda(driver=Driver(SEED)).installed() as made:
        yield made


def driver_of(gpu: EmulatedCuda) -> Driver:
    assert gpu.driver is not None
    return gpu.driver


def engine_on(gpu: EmulatedCuda) -> CudaEngine:
    gpu.tensor(torch.ones(1))
    return CudaEngine(Runtime(torch.device("cuda", 0)), Pages())


def copied(engine: CudaEngine, *tensors: torch.Tensor) -> list[bool]:
    """Copy tensors to a slot that the device may write to, if it can; return which of them are there as they were."""
    wanted, pieces = [tensor.cpu() for tensor in tensors], pieces_of(tensors)
    slot = memoryview(mmap.mmap(-1, pieces[-1].offset + pieces[-1].bytes))
    engine.prepare([slot], nullcontext)
    transfer = engine.mark()
    transfer.copy(pieces, slot, lambda count: True)
    transfer.guard()
    transfer.fence()
    for tensor in tensors:
        tensor.fill_(9)
    transfer.finish()
    return [
        bytes(slot[piece.offset : piece.offset + piece.bytes]) == octets(value.contiguous()).numpy().tobytes()
        for piece, value in zip(pieces, wanted, strict=True)
    ]


def pieces_of(tensors: Sequence[torch.Tensor]) -> tuple[SlotTensor, ...]:
    """The tensors, one behind the other in a slot."""
    pieces: list[SlotTensor] = []
    for tensor in tensors:
        at = pieces[-1].offset + pieces[-1].bytes if pieces else 4096
        pieces.append(SlotTensor(tensor, at, tensor.nbytes))
    return tuple(pieces)


def seen(loop: SeamLoop, arena: Path, order: str | int, connections: int = 8, **how: int) -> tuple[SeamOutcome, Driver]:
    made = Driver(order, connections=connections)
    for name, value in how.items():
        made.set(name, value)
    return observe(Emulated(EmulatedCuda(driver=made)), loop, twin(Cpu(), loop), arena, "seam"), made


# ---------------------------------------------------------------------- the whole way


@pytest.mark.parametrize(
    ("order", "own_stream", "ring", "one_queue"),
    [
        (LAZY, False, False, False),
        (LAZY, True, True, True),
        (EAGER, True, False, True),
        (EAGER, False, True, False),
        (1, False, False, True),
        (2, True, True, False),
        (3, True, False, False),
    ],
)
def test_every_slot_is_what_a_twin_that_synchronises_has(
    arena: Path, monkeypatch: pytest.MonkeyPatch, order: str | int, own_stream: bool, ring: bool, one_queue: bool
) -> None:
    monkeypatch.setenv(ONE_QUEUE, "1" if one_queue else "8")
    loop = SeamLoop(steps=12, own_stream=own_stream)
    connections = 1 if one_queue else 8
    outcome, made = seen(loop, arena, order, connections, refuse_from=1 if ring else 1 << 30)
    assert outcome.exact, outcome
    assert bool(made.get("waited_kernels")) is not one_queue, "kernels of training must not wait for copies"


@pytest.mark.parametrize("order", [LAZY, EAGER])
def test_so_it_is_where_an_optimizer_is_replayed_from_a_graph(arena: Path, order: str) -> None:
    outcome, _ = seen(SeamLoop(steps=12, captured=4), arena, order)
    assert outcome.exact, outcome


def test_a_device_that_takes_no_host_addresses_gets_none(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, made = seen(SeamLoop(steps=9), arena, EAGER, sees_host=0)
    assert outcome.exact, outcome
    assert made.get("sticky") == 0
    monkeypatch.setattr(cuda_driver, "takes_host_addresses", lambda number: True)
    outcome, _ = seen(SeamLoop(steps=9), arena.with_name("other"), EAGER, sees_host=0)
    assert "illegal memory access" in outcome.failure


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_broken_on_purpose_is_found_by_its_own_sign(arena: Path, name: str) -> None:
    def made(late_copies: bool) -> Emulated:
        return Emulated(EmulatedCuda(driver=Driver(LAZY)), late_copies=late_copies)

    assert not missed(FAULTS[name], made, Cpu(), arena)


# ---------------------------------------------------------------------- calls into the driver


def test_without_a_context_the_driver_refuses_and_a_thread_that_has_entered_has_one(gpu: EmulatedCuda) -> None:
    runtime = Runtime(torch.device("cuda", 0))
    source, target = gpu.tensor(torch.arange(8.0)), gpu.empty((8,), None, torch.float32)
    stream = runtime.own_stream("copies")
    table = runs.make_runs([(source.data_ptr(), target.data_ptr(), 32)])
    said: list[str] = []

    def work(enter: bool) -> None:
        try:
            if enter:
                runtime.enter_thread()
            cuda_driver.queue_copies([table], stream.cuda_stream)  # type: ignore[attr-defined]
            said.append("queued")
        except RuntimeError as error:
            said.append(str(error))

    for enter in (False, True):
        thread = threading.Thread(target=work, args=(enter,))
        thread.start()
        thread.join(DEADLINE_S)
    assert "invalid device context" in said[0]
    assert said[1:] == ["queued"]


def test_an_engine_is_the_first_thing_that_a_thread_makes_on_a_device(gpu: EmulatedCuda) -> None:
    """Threads of a pool fill a device, and a program may make an engine before anything else."""
    said: list[str] = []

    def work() -> None:
        [engine] = made
        source, target = torch.arange(50), torch.zeros(50, dtype=torch.int64)
        there = gpu.empty((50,), None, torch.int64)
        filling = engine.fill()
        with filling.taking() as take:
            memory = source.view(torch.uint8).numpy().data
            unit = Unit(memory, digest(memory))
            assert take([(unit, runs.make_runs([(source.data_ptr(), there.data_ptr(), 400)]))]) == [True]
        filling.finish()
        with engine.on_stream("a test"):
            engine.ring.store(runs.make_runs([(there.data_ptr(), target.data_ptr(), 400)]))
            engine.ring.land()
        said.append("alike" if torch.equal(source, target) else "not alike")

    def first() -> None:
        made.append(CudaEngine(Runtime(torch.device("cuda", 0)), Pages()))

    made: list[CudaEngine] = []
    for each in (first, work):
        thread = threading.Thread(target=each)
        thread.start()
        thread.join(DEADLINE_S)
    assert said == ["alike"]


def test_several_devices_of_one_process_each_do_their_own_work() -> None:
    """The training thread stays on the first one; work on a stream needs the context of its device."""
    devices = [torch.device("cuda", number) for number in range(3)]
    with EmulatedCuda(driver=Driver(SEED, devices=3)).installed() as gpu:
        live = [gpu.tensor(torch.randn(40, 50), number) for number in (2, 0, 1, 2)]
        live.append(gpu.tensor(torch.randn(30, 20), 1).t())
        wanted, pieces = [tensor.cpu() for tensor in live], pieces_of(live)
        engines = gpu.engines(devices)
        slot = memoryview(mmap.mmap(-1, pieces[-1].offset + pieces[-1].bytes))
        engines.prepare([slot], nullcontext)
        transfer = engines.mark()
        sample = engines.sample(pieces, 3)

        def copy() -> None:
            engines.enter_thread()
            transfer.copy(pieces, slot, lambda count: True)
            after = transfer.sample(pieces, 3)
            transfer.guard()
            transfer.finish()
            said.append(bool((after.read() == sample.read()).all()))

        said: list[bool] = []
        thread = MACHINE.Thread(target=copy)
        thread.start()
        thread.join(DEADLINE_S)
        assert said == [True]
        transfer.fence()
        for tensor in live:
            tensor.fill_(9)
        engines.load(pieces, slot)
        assert [tensor.cpu().tolist() for tensor in live] == [value.tolist() for value in wanted]
        assert torch.cuda.current_device() == 0
        assert driver_of(gpu).get("registered") == 1, "for all of them"
        engines.close()
        assert driver_of(gpu).get("registered") == 0


def test_no_slot_is_unregistered_while_any_device_may_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "DEADLINE_S", 0.05)
    with EmulatedCuda(driver=Driver(SEED, devices=2)).installed() as gpu:
        live = [gpu.tensor(torch.ones(500), number) for number in range(2)]
        engines = gpu.engines({torch.device("cuda", number) for number in range(2)})
        slot = memoryview(mmap.mmap(-1, 8192))
        engines.prepare([slot], nullcontext)
        [_, (other, pieces)] = engines.parts(pieces_of(live))
        assert isinstance(other, CudaEngine)
        other.stream.hold(1.0)  # type: ignore[attr-defined]
        transfer = engines.mark()
        transfer.copy(pieces, slot, lambda count: True)
        with pytest.raises(DeadlineExceeded, match="cuda:1"):
            engines.close()
        assert driver_of(gpu).get("registered") == 1
        monkeypatch.setattr(cuda_runtime, "DEADLINE_S", DEADLINE_S)
        engines.close()
        assert driver_of(gpu).get("registered") == 0


def test_work_on_a_stream_of_another_device_is_refused() -> None:
    with EmulatedCuda(driver=Driver(SEED, devices=2)).installed() as gpu:
        source, target = gpu.tensor(torch.ones(9), 1), gpu.empty((9,), None, torch.float32, 1)
        stream = Runtime(torch.device("cuda", 1)).own_stream("copies")
        table = runs.make_runs([(source.data_ptr(), target.data_ptr(), 36)])
        with pytest.raises(RuntimeError, match="resource handle"):
            cuda_driver.queue_copies([table], stream.cuda_stream)  # type: ignore[attr-defined]


def test_a_fork_of_the_process_leaves_the_device_alone(gpu: EmulatedCuda) -> None:
    """As a worker of a data loader does: CUDA cannot be used there."""
    engine = engine_on(gpu)
    assert copied(engine, gpu.tensor(torch.ones(300))) == [True]
    pid = os.fork()
    if not pid:
        used = cuda_runtime.uses_cuda() or "cuda" in rng.capture()
        del engine
        gc.collect()
        os._exit(1 if used else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert copied(engine, gpu.tensor(torch.ones(300))) == [True]
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_are_copied_packed_and_staged(gpu: EmulatedCuda, dtype: torch.dtype) -> None:
    engine = engine_on(gpu)
    noise = torch.randint(0, 2 if dtype is torch.bool else 200, (64, 8 * dtype.itemsize), dtype=torch.uint8)
    plain, turned = gpu.tensor(noise.view(dtype)), gpu.tensor(noise.view(dtype)).t()
    staged = Staging().take(pieces_of([plain, turned]))
    assert [piece.tensor.cpu().view(torch.uint8).tolist() for piece in staged[:1]] == [noise.tolist()]
    assert copied(engine, plain, turned) == [True, True]


@pytest.mark.parametrize("own", [True, False], ids=["own stream", "default stream"])
def test_copies_are_queued_in_one_batch_or_one_by_one(gpu: EmulatedCuda, own: bool) -> None:
    """CUDA batches nothing on its default stream."""
    runtime = Runtime(torch.device("cuda", 0))
    sources = [gpu.tensor(torch.arange(n)) for n in (1, 9, 300)]
    targets = [runtime.pinned(tensor.nbytes) for tensor in sources]
    table = runs.make_runs([(s.data_ptr(), t.data_ptr(), s.nbytes) for s, t in zip(sources, targets, strict=True)])
    gpu.synchronize()
    stream = runtime.own_stream("copies") if own else gpu.defaults[0]
    with runtime.on(stream):
        runtime.copy_runs(table)
        runtime.wait(stream.record_event())
    assert [target.tolist() for target in targets] == [list(s.cpu().numpy().tobytes()) for s in sources]


@pytest.mark.parametrize("knows", [True, False], ids=["cudaMalloc", "mapped"])
def test_no_copy_goes_from_one_allocation_into_the_next(
    gpu: EmulatedCuda, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that fill theirs follow each other without gaps, on the device as in the slot."""
    engine = engine_on(gpu)
    live = [gpu.tensor(torch.full((4 * mmap.PAGESIZE,), i, dtype=torch.uint8)) for i in range(3)]
    live += torch.split(live.pop(), mmap.PAGESIZE)
    assert {b.data_ptr() - a.data_ptr() - a.nbytes for a, b in itertools.pairwise(live)} == {0}
    if not knows:
        monkeypatch.setattr(cuda_driver, "allocation_of", lambda address: 0)
    assert copied(engine, *live) == [True] * 6
    assert sum(map(len, engine.table(pieces_of(live)).batches)) == 3, "parts of one allocation are copied at once"
    monkeypatch.setattr(engine.runtime, "allocation_of", lambda tensor: 0)
    with pytest.raises(HoldfastError, match="CUDA error 1"):
        copied(engine, *live)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_threads_of_ours_break_no_capture_and_others_do(gpu: EmulatedCuda, mode: str) -> None:
    engine = engine_on(gpu)
    live = gpu.tensor(torch.ones(500))
    sample = engine.sample((SlotTensor(live, 0, live.nbytes),), 1)
    slot = memoryview(mmap.mmap(-1, 8192))
    engine.prepare([slot], nullcontext)
    transfer = engine.mark()

    def ours() -> None:
        engine.enter_thread()
        transfer.copy((SlotTensor(live, 0, live.nbytes),), slot, lambda count: True)
        transfer.finish()

    def careless() -> None:
        engine.enter_thread()
        event = gpu.current(0).record_event()
        with pytest.raises(RuntimeError, match="capturing") if mode == "global" else nullcontext():
            event.query()

    own = gpu.queues.stream(0)
    works: list[tuple[Callable[[], object], bool]] = [(sample.read, False), (ours, False), (careless, mode == "global")]
    for work, ruined in works:
        graph = gpu.graph()
        with gpu.stream(own):
            graph.capture_begin(mode)
            assert engine.capturing()
            live.mul_(2)
            thread = MACHINE.Thread(target=work)
            thread.start()
            thread.join(DEADLINE_S)
            with pytest.raises(RuntimeError, match="during capture") if ruined else nullcontext():
                graph.capture_end()
    assert bytes(slot[: live.nbytes]) == torch.ones(500).numpy().tobytes()
    gpu.synchronize()


@pytest.mark.parametrize("asks", [True, False], ids=["as it is", "without asking for captures"])
def test_gradients_that_are_kept_are_not_looked_at_within_a_capture(
    gpu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """To read a value waits for the device, which invalidates a capture."""
    model, given = torch.nn.Linear(8, 4), gpu.tensor(torch.ones(3, 8))
    gpu.to(model)
    gradients = Gradients([model], lambda text, *values: None, lambda: None)

    def backward() -> None:
        model(given).square().mean().backward()

    for _ in range(3):
        backward()
        gradients.stepped()
    if not asks:
        monkeypatch.setattr(watched_gradients, "capturing", lambda: False)
    graph = gpu.graph()
    with gpu.stream(gpu.queues.stream(0)), nullcontext() if asks else pytest.raises(RuntimeError, match="captur"):
        graph.capture_begin()
        try:
            backward()
        finally:
            graph.capture_end()
        graph.replay()
    gradients.remove()


def test_a_refused_registration_and_one_that_others_made(gpu: EmulatedCuda) -> None:
    runtime = Runtime(torch.device("cuda", 0))
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = address_of(memoryview(memory))
    assert runtime.register(address, mmap.PAGESIZE) == 0
    assert runtime.register(address, mmap.PAGESIZE) == 712
    driver_of(gpu).set("refuse_from", 1)
    assert runtime.register(address + mmap.PAGESIZE, mmap.PAGESIZE) == 2
    assert driver_of(gpu).get("registered") == 1
    assert runtime.unregister(address) == 0
    assert runtime.unregister(address) == 713


def test_no_memory_on_the_device_fails_the_copy_and_nothing_else(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    turned, plain = gpu.tensor(torch.randn(300, 200)).t(), gpu.tensor(torch.randn(400))
    assert copied(engine, turned, plain) == [True, True]
    turned, plain = gpu.tensor(torch.randn(3000, 200)).t(), gpu.tensor(torch.randn(400))
    driver_of(gpu).set("memory_left", 0)
    with pytest.raises(HoldfastError, match="out of memory"):
        copied(engine, turned, plain)
    driver_of(gpu).set("memory_left", 1 << 30)
    engine.settle()
    assert copied(engine, turned, plain) == [True, True]


def test_no_memory_for_a_pinned_buffer_fails_the_copy_and_nothing_else(gpu: EmulatedCuda) -> None:
    driver_of(gpu).set("refuse_from", 1)  # so copies go through pinned buffers
    engine, live = engine_on(gpu), gpu.tensor(torch.randn(400))
    driver_of(gpu).set("pinned_left", 0)
    for _ in range(2 * BUFFERS):
        with pytest.raises(HoldfastError, match="out of memory"):
            copied(engine, live)
        engine.settle()
    driver_of(gpu).set("pinned_left", 1 << 40)
    assert copied(engine, live) == [True]


def test_copies_that_a_driver_refuses_use_up_no_pinned_buffer(
    gpu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_of(gpu).set("refuse_from", 1)
    engine, live = engine_on(gpu), gpu.tensor(torch.randn(400))
    with monkeypatch.context() as refusing:
        refusing.setattr(cuda_driver, "queue", lambda *given: 1)
        for _ in range(2 * BUFFERS):
            with pytest.raises(HoldfastError, match="CUDA error 1"):
                copied(engine, live)
            engine.settle()
    assert copied(engine, live) == [True]


def test_an_error_that_sticks_is_said_once_for_each_slot(
    gpu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "REGISTER_BYTES", mmap.PAGESIZE)
    engine, slots = engine_on(gpu), [memoryview(mmap.mmap(-1, 20 * mmap.PAGESIZE)) for _ in range(2)]
    engine.prepare(slots, nullcontext)
    live = gpu.tensor(torch.ones(9))
    driver_of(gpu).set("fail_copy", 1)
    with pytest.raises(HoldfastError, match="illegal memory access"):
        engine.fetch([live])()
    engine.close()
    assert len(caplog.records) == 2


def test_an_error_of_the_device_surfaces_and_sticks(gpu: EmulatedCuda) -> None:
    engine = engine_on(gpu)
    live = gpu.tensor(torch.ones(100))
    [piece] = pieces_of([live])
    slot = memoryview(mmap.mmap(-1, piece.offset + piece.bytes))
    engine.prepare([slot], nullcontext)
    driver_of(gpu).set("fail_copy", 1)
    transfer = engine.mark()
    with pytest.raises(HoldfastError, match="illegal memory access"):
        transfer.copy((piece,), slot, lambda count: True)
        transfer.finish()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.synchronize()


def test_a_device_that_is_busy_with_training_is_waited_for_and_one_that_is_stuck_is_not(
    gpu: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(gpu)
    monkeypatch.setattr(cuda_runtime, "DEADLINE_S", 0.05)
    live, slot = gpu.tensor(torch.ones(100)), memoryview(mmap.mmap(-1, 8192))
    engine.prepare([slot], nullcontext)
    gpu.synchronize()
    going = threading.Event()
    gpu.current(0).queue(lambda: going.wait(DEADLINE_S))  # a step that takes long
    transfer = engine.mark()
    transfer.copy((SlotTensor(live, 0, live.nbytes),), slot, lambda count: True)
    said: list[str] = []

    def finish() -> None:
        transfer.finish()
        said.append("there")

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join(0.2)
    assert not said
    going.set()
    thread.join(DEADLINE_S)
    assert said == ["there"]
    assert bytes(slot[:400]) == torch.ones(100).numpy().tobytes()
    transfer = engine.mark()
    gpu.synchronize()
    driver_of(gpu).set("stuck", 1)
    transfer.copy((SlotTensor(live, 0, live.nbytes),), slot, lambda count: True)
    with pytest.raises(DeadlineExceeded):
        transfer.finish()
    driver_of(gpu).set("stuck", 0)
    transfer.settle()
    engine.close()
    assert driver_of(gpu).get("registered") == 0


def test_a_process_uses_the_device_once_it_has_something_there() -> None:
    made = EmulatedCuda(driver=Driver(SEED))
    with made.installed():
        found: list[Any] = [sorted(rng.capture())]
        made.tensor(torch.ones(1))
        found.append(sorted(rng.capture()))
    assert found == [["numpy", "python", "torch"], ["cuda", "numpy", "python", "torch"]]
    assert not cuda_runtime.uses_cuda()
