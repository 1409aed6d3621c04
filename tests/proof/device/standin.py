"""The emulated device as torch and holdfast see it.

`EmulatedCuda` replaces CUDA in a process. Inside `installed`, the tensors that it made report ``cuda:0``, or another of
its devices, as their device. Torch operations on them are queued and done late, and holdfast's copy engines use
`EmulatedRuntime`. The kernels are the CPU's, so results equal those of the CPU to the last bit.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.system import System
from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_runtime import Runtime, _own_stream
from holdfast.snapshot.copy.devices import DeviceEngines, engine_of
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.runs import Runs
from tests.proof.device.driver import Driver, DriverGraph, DriverStream
from tests.proof.device.memory import DeviceMemory
from tests.proof.device.queues import DeviceQueue, Queues, RecordedGraph

REFUSED = 2
ALREADY = 712
STUCK_S = 0.2
"""Timeout of a thread that waits for a device that does nothing, in seconds. With a real device it is a minute."""

_ASKS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"}
"""Operations that return a value to the host, and so wait for the device."""

_DEVICE, _IS_CUDA, _IS_CPU = (getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))

_NO_KERNEL = {torch.uint16, torch.uint32, torch.uint64, torch.complex32, getattr(torch, "float8_e8m0fnu", None)}
"""What torch has no kernels of CUDA for in operations on lists of tensors."""

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class EmulatedCuda:
    """The emulated devices of one process.

    Args:
        order: `queues.LAZY`, `queues.EAGER`, or a seed.
        devices: number of devices.
        driver: does the work in place of `order`. holdfast then uses it as it uses a real one.

    Attributes:
        defaults: the default stream of each device.
        refused: called with the number of a registration; returns whether to refuse it.
        registered: host memory that devices can access: lengths by address.
        log: registrations, refusals and unregistrations, with addresses.
        copies: number of copies that runtimes have queued.
        fail_at: number of the copy that fails; None: none does.
    """

    def __init__(self, order: str | int = "lazy", devices: int = 1, driver: Driver | None = None) -> None:
        self.driver = driver
        self.queues: Any = driver or Queues(order)
        self.memory = DeviceMemory(self._allocate) if driver else DeviceMemory()
        self.defaults: list[Any] = (
            list(driver.defaults) if driver else [self.queues.stream(number) for number in range(devices)]
        )
        self.registered: dict[int, int] = {}
        self.refused: Callable[[int], bool] = lambda nth: False
        self.log: list[tuple[str, int]] = []
        self.copies = 0
        self.fail_at: int | None = None
        self._local = threading.local()
        self._process = os.getpid()  # its forks cannot use the device

    # ------------------------------------------------------------------ for scripts

    def tensor(self, like: torch.Tensor, device: int = 0) -> torch.Tensor:
        """A copy of `like` on the device."""
        block = self.memory.of(like)
        if block is not None:
            self.wait_for(self.current(block.device))
        with quiet():
            plain = like.detach().resolve_conj().resolve_neg()
            made = self.empty(plain.shape, plain.stride() if _is_dense(plain) else None, plain.dtype, device)
            value = plain.clone()
        self.current(device).queue(_copy(self.memory.raw(made), value))
        return made

    def empty(
        self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: int = 0
    ) -> torch.Tensor:
        """An uninitialised tensor of the device."""
        with quiet():
            strides = torch.empty(tuple(shape), device="meta").stride() if strides is None else strides
            return self.memory.tensor(device, self.current(device), tuple(shape), tuple(strides), dtype)

    def current(self, device: int) -> Any:
        """This thread's current stream of a device."""
        found: Any = getattr(self._local, f"stream{device}", self.defaults[device])
        return found

    @contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        """Make a stream this thread's current one in this block."""
        name = f"stream{stream.device}"
        before = self.current(stream.device)
        setattr(self._local, name, stream)
        number = None if self.driver is None else self.driver.number
        if self.driver is not None:
            self.driver.bind(stream.device)  # as torch does, which makes its device the current one, too
        try:
            yield stream
        finally:
            setattr(self._local, name, before)
            if self.driver is not None:
                self.driver.bind(number)

    def capturing(self) -> bool:
        """Whether what this thread queues is being recorded into a graph."""
        return any(self.current(number).graph is not None for number in range(len(self.defaults)))

    def synchronize(self) -> None:
        """Do all work that can be done."""
        self.queues.touch("a synchronisation")
        self.queues.run()
        self.queues.fail_if_broken()

    def graph(self, device: int = 0) -> Any:
        """Make an empty graph."""
        return DriverGraph() if self.driver else RecordedGraph(self.queues, lambda: self.current(device))

    @contextmanager
    def capture(self, device: int = 0) -> Iterator[RecordedGraph]:
        """Record what the block queues on the current stream, instead of doing it."""
        graph = self.graph(device)
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()

    def to(self, module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
        """Move a module to the device, in place."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = self.tensor(tensor.data, device)
        return module

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The device that a tensor reports; None: it is in host memory."""
        block = self.memory.of(tensor)
        return None if block is None else torch.device("cuda", block.device)

    def engines(self, devices: Collection[torch.device] = ()) -> DeviceEngines:
        """Copy engines for these devices."""
        if self.driver is not None:
            return DeviceEngines(devices)

        def made(device: torch.device, pages: Pages) -> CopyEngine:
            if device.type != "cuda":
                return engine_of(device, pages)
            return CudaEngine(EmulatedRuntime(self, device.index or 0), pages)

        return DeviceEngines(devices, made)

    @contextmanager
    def installed(self) -> Iterator[EmulatedCuda]:
        """Give this process these devices in this block, and in threads that holdfast starts in it."""
        standin = self

        class Thread(threading.Thread):
            def run(self) -> None:
                with _ReportDevice(standin), _QueueOperations(standin):
                    super().run()

        with ExitStack() as stack:
            for name, replacement in self._functions().items():
                stack.enter_context(patch.object(torch.cuda, name, replacement))
            if self.driver is None:
                for place in ("rank", "memory"):
                    stack.enter_context(patch(f"holdfast.snapshot.{place}.DeviceEngines", self.engines))
            else:
                stack.callback(_own_stream.cache_clear)
                stack.callback(self.driver.rest)
                stack.enter_context(patch.object(torch, "empty", self._empty(torch.empty)))
                stack.enter_context(patch.object(DriverGraph, "current", lambda: self.current(0), create=True))
            stack.enter_context(patch.object(System, "Thread", Thread))
            stack.enter_context(_ReportDevice(self))
            stack.enter_context(_QueueOperations(self))
            yield self

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Replacements for functions of `torch.cuda`: all devices draw from the host's generator."""
        driver = self.driver
        found: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_initialized": lambda: self.memory.used and os.getpid() == self._process,
            "is_current_stream_capturing": self.capturing,
            "CUDAGraph": DriverGraph if driver else RecordedGraph,
            "current_device": lambda: 0,
            "device_count": lambda: len(self.defaults),
            "get_device_properties": lambda device: None,
            "get_rng_state_all": lambda: [torch.get_rng_state() for _ in self.defaults],
            "set_rng_state": lambda state, device: torch.set_rng_state(state),
            "manual_seed_all": lambda seed: None,
        }
        if driver is not None:
            found |= {
                "current_device": lambda: driver.number,
                "set_device": lambda device: driver.bind(torch.device(device).index),
                "device": driver.device,
                "stream": self.stream,
                "current_stream": lambda device=None: self.current(driver.number if device is None else device.index),
                "ExternalStream": lambda handle, device: DriverStream(driver, device.index, handle),
                "cudart": driver.cudart,
            }
        return found

    def _allocate(self, size: int) -> Any:
        assert self.driver is not None
        return (ctypes.c_char * size).from_address(self.driver.memory("cuMemAlloc_v2", size))

    def _empty(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``torch.empty``, in any thread: memory of a device, or pinned."""

        def empty(*shape: Any, **options: Any) -> torch.Tensor:
            place = torch.device(options.get("device") or "cpu")
            if options.get("pin_memory"):
                assert self.driver is not None
                count = int(shape[0])
                memory = (ctypes.c_char * count).from_address(self.driver.memory("cuMemHostAlloc", count))
                return torch.frombuffer(memory, dtype=torch.uint8)
            if place.type != "cuda":
                return plain(*shape, **options)
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            dtype = options.get("dtype") or torch.get_default_dtype()
            return self.empty(tuple(sizes), None, dtype, place.index or 0)

        return empty

    # ------------------------------------------------------------------ what torch is asked to do

    def operate(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Queue a torch operation if any of its tensors is on a device, and return its future result."""
        leaves = [leaf for leaf in pytree.tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)]
        places = {block.device for leaf in leaves if (block := self.memory.of(leaf)) is not None}
        name = function.overloadpacket.__name__
        if not places or function.is_view or name in ("_unsafe_view", "_reshape_alias", "detach", "alias", "set_"):
            return function(*arguments, **options)
        if len(places) > 1 and name != "copy_":
            raise RuntimeError(f"{name}: tensors are on several devices: {sorted(places)}")
        if name.startswith("_foreach") and not _NO_KERNEL.isdisjoint(leaf.dtype for leaf in leaves):
            raise NotImplementedError(f"{name} is not implemented for {sorted({str(leaf.dtype) for leaf in leaves})}")
        device = min(places)
        stream = self.current(device)
        if name in _ASKS:
            self.wait_for(stream)
            return function(*arguments, **options)
        written = _written(function, arguments, options)
        if written and self.memory.of(written[0]) is None:  # a copy to the host
            self.wait_for(stream)
            return function(*arguments, **options)
        if torch.Tag.nondeterministic_seeded in function.tags:
            return self._draw(function, arguments, options, stream, written)
        promised = self._promised(function, arguments, options, device)
        if name not in _EMPTY:
            raw_arguments, raw_options = pytree.tree_map_only(torch.Tensor, self._kept, (arguments, options))
            fresh = [
                None if any(each is mine for mine in leaves) else self.memory.raw(each)
                for each in pytree.tree_leaves(promised)
                if isinstance(each, torch.Tensor)
            ]

            does = _copied_through_floats if name == "_foreach_copy_" else function

            def work() -> None:
                found = [
                    each
                    for each in pytree.tree_leaves(does(*raw_arguments, **raw_options))
                    if isinstance(each, torch.Tensor)
                ]
                for target, source in zip(fresh, found, strict=True):
                    if target is not None:
                        target.copy_(source)

            stream.queue(_quietly(work))
        return promised

    def wait_for(self, stream: DeviceQueue) -> None:
        """Do work until the stream has done everything that is queued by now."""
        self.queues.touch("a synchronisation")
        event = stream.record_event()
        self.queues.run(event)
        self.queues.fail_if_broken()

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """An operand of a queued operation: device memory as it will be then, host memory as it is now."""
        return self.memory.raw(tensor) if self.memory.of(tensor) is not None else tensor.clone()

    def _draw(
        self, function: Any, arguments: Any, options: Any, stream: DeviceQueue, written: list[torch.Tensor]
    ) -> Any:
        """Run an operation that draws random numbers, which advances the generator at once, since it is the host's."""
        self.wait_for(stream)
        if not written:
            return pytree.tree_map_only(
                torch.Tensor, lambda made: self.tensor(made, stream.device), function(*arguments, **options)
            )
        value = written[0].clone()
        function(value, *arguments[1:], **options)
        stream.queue(_copy(self.memory.raw(written[0]), value))
        return written[0]

    def _promised(self, function: Any, arguments: Any, options: Any, device: int) -> Any:
        """The result of a queued operation: its tensors exist now, and get their values later."""
        known: dict[int, torch.Tensor] = {}

        def shape_of(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made = made.conj() if tensor.is_conj() else made
            known[id(made)] = tensor
            held.append(made)
            return made

        held: list[torch.Tensor] = []
        meta_arguments, meta_options = pytree.tree_map_only(torch.Tensor, shape_of, (arguments, options))
        if isinstance(meta_options.get("device"), torch.device):
            meta_options["device"] = torch.device("meta")
        found = function(*meta_arguments, **meta_options)
        return pytree.tree_map_only(
            torch.Tensor,
            lambda made: (
                known.get(id(made)) if id(made) in known else self.empty(made.shape, made.stride(), made.dtype, device)
            ),
            found,
        )


class EmulatedRuntime(Runtime):
    """What one emulated device does in place of CUDA."""

    def __init__(self, standin: EmulatedCuda, number: int = 0) -> None:
        self.device = torch.device("cuda", number)
        self.one_queue = False
        self._standin = standin
        self._number = number

    def enter_thread(self) -> None:
        """An emulated device has no contexts."""

    def capturing(self) -> bool:
        return self._standin.current(self._number).graph is not None

    def current_stream(self) -> Any:
        return self._standin.current(self._number)

    def own_stream(self, name: str) -> Any:
        return self._standin.queues.stream(self._number, training=False)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with self._standin.stream(stream), self._standin.queues.relaxed():
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        memory = self._standin.memory
        with quiet():
            to, read = memory.raw(target), memory.raw(source)
        self._queue(lambda: to.copy_(read))

    def copy_runs(self, table: Runs) -> None:
        for source, target, count in table.tolist():
            self._check_reach(source, count)
            self._check_reach(target, count)
            self._queue(partial(ctypes.memmove, target, source, count))

    def allocation_of(self, tensor: torch.Tensor) -> int:
        with quiet():
            block = self._standin.memory.of(tensor)
        return 0 if block is None else block.address

    def copy_parts(self, parts: Sequence[Runs]) -> None:
        for part in parts:
            self.copy_runs(part)
            if not self.one_queue:
                self.separate()

    def separate(self) -> None:
        """Queue a kernel that does nothing."""
        self._standin.current(self._number).queue(lambda: None)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._standin.empty(shape, None, dtype, self._number)

    def pinned(self, count: int) -> torch.Tensor:
        self._standin.queues.touch("an allocation of pinned memory")
        with quiet():
            made = torch.zeros(count, dtype=torch.uint8)
        self._standin.registered[made.data_ptr()] = count
        return made

    def wait(self, event: Any, begun: Any = None) -> None:
        queues = self._standin.queues
        queues.touch("a query")
        if threading.current_thread() is not threading.main_thread():
            queues.let_others_run()
        limit = time.monotonic() + STUCK_S
        while not event.passed:
            if queues.work_one() or not (begun is None or begun.passed):
                limit = time.monotonic() + STUCK_S
            elif time.monotonic() > limit:
                raise DeadlineExceeded("the device is stuck")
            queues.fail_if_broken()

    def register(self, address: int, count: int) -> int:
        standin = self._standin
        standin.queues.touch("a registration")
        nth = sum(kind != "unregister" for kind, _ in standin.log)
        if address in standin.registered:
            return ALREADY
        if standin.refused(nth):
            standin.log.append(("refuse", address))
            return REFUSED
        standin.log.append(("register", address))
        standin.registered[address] = count
        return 0

    def unregister(self, address: int) -> int:
        standin = self._standin
        standin.queues.touch("an unregistration")
        standin.log.append(("unregister", address))
        return 0 if standin.registered.pop(address, None) else 1

    def _queue(self, work: Callable[[], object]) -> None:
        standin = self._standin
        standin.copies += 1
        number = standin.copies

        def transfer() -> None:
            if number == standin.fail_at:
                standin.queues.fault = "an illegal memory access was encountered"
                return
            work()

        standin.current(self._number).queue(_quietly(transfer))

    def _check_reach(self, address: int, count: int) -> None:
        """Raise `RuntimeError` for host memory that is not within one registered range."""
        if self._standin.memory.find(address) is not None:
            return
        for start, length in self._standin.registered.items():
            if start <= address and address + count <= start + length:
                return
        raise RuntimeError(f"{count} bytes at {address:#x}: host memory that is not within one registered range")


class _QueueOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes this thread's torch operations to the devices."""

    def __init__(self, standin: EmulatedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._standin = standin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._standin.operate(func, args, kwargs or {})


class _ReportDevice(TorchFunctionMode):
    """Makes tensors report their emulated device, and makes transfers to the host wait for it. For one thread."""

    def __init__(self, standin: EmulatedCuda) -> None:
        super().__init__()
        self._standin = standin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        standin = self._standin
        mine = args[0] if args and isinstance(args[0], torch.Tensor) else None
        place = None if mine is None else standin.device_of(mine)
        if place is not None:
            if func == _DEVICE:
                return place
            if func == _IS_CUDA:
                return True
            if func == _IS_CPU:
                return False
            if func in (torch.Tensor.cpu, torch.Tensor.tolist):
                standin.wait_for(standin.current(place.index))
                with quiet():
                    here = mine.detach().clone()  # type: ignore[union-attr]
                    return here if func is torch.Tensor.cpu else here.tolist()
            if func is torch.Tensor.numpy:
                raise TypeError(f"can't convert {place} device type tensor to numpy: use Tensor.cpu() first")
        goal = _cuda_in((*args[1:], *options.values())) if mine is not None else _cuda_in(tuple(options.values()))
        if goal is None:
            return func(*args, **options)
        if mine is not None and func is torch.Tensor.to:
            there = mine if place == goal else standin.tensor(mine, goal.index or 0)
            dtype = next((each for each in (*args[1:], *options.values()) if isinstance(each, torch.dtype)), mine.dtype)
            return there if dtype == there.dtype else there.to(dtype)
        options["device"] = torch.device("cpu")
        return standin.tensor(func(*args, **options), goal.index or 0)


def _copied_through_floats(targets: list[torch.Tensor], sources: list[torch.Tensor], *_: Any) -> None:
    """CUDA's kernel for lists of tensors computes with 32 bits: a NaN of fewer is no longer the same after it."""
    for target, source in zip(targets, sources, strict=True):
        narrow = source.is_floating_point() and source.itemsize < 4
        target.copy_(source.float() if narrow else source)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill all memory between the first and the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()


def _cuda_in(values: tuple[Any, ...]) -> torch.device | None:
    for value in values:
        if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
            return torch.device(value)
    return None


def _written(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operation writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = (
            options.get(argument.name)
            if argument.kwarg_only
            else (arguments[place] if place < len(arguments) else None)
        )
        found += [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    return found


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    return _quietly(lambda: target.copy_(source))


def _quietly(work: Callable[[], object]) -> Callable[[], None]:
    def done() -> None:
        with quiet():
            work()

    return done


@contextmanager
def quiet() -> Iterator[None]:
    """Let torch do operations at once in this block, without emulation or gradients."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
