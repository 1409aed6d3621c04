"""Checks the whole path from a training loop to its slots, on a device: compares each slot with a synchronising twin.

The loop has state of every kind that is captured differently: buffers on the device, frozen weights, an average that
code between steps updates, a fused optimizer, and memory that is freed and reused at once. The twin is the same loop
without holdfast; it waits for the device at each boundary and clones everything. `FAULTS` are ways to break holdfast
that the comparison must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch

from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.messages import SlotFile
from holdfast.smp_daemon.shared.trainer_slots import TrainerSlots
from holdfast.snapshot.copy.cuda import CudaEngine, CudaTransfer
from holdfast.snapshot.copy.cuda_runtime import DeviceEvent
from holdfast.snapshot.copy.devices import DeviceEngines
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.copy.witness import StateChanged
from holdfast.snapshot.step.capture import Staging
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.orders import SnapshotCopy
from tests.proof.device.standin import EmulatedCuda

DRAINED = 3
"""How often the loop waits until its snapshots are protected, in steps: it has only as many slots."""

DRAIN_S = 60.0
"""How long that may take, also on a busy machine, in seconds."""

FAULT_STEPS = 15
"""Number of steps of a loop that shows a fault."""

CAPTURED = 5
"""The step from which on such a loop replays its optimizer's step, if it does."""

LATE_S = 0.03
"""How long a device that copies late rests before it does, in seconds."""

State = dict[str, bytes]


class SeamDevice(Protocol):
    """The device that the loop runs on."""

    name: str

    def installed(self) -> AbstractContextManager[object]:
        """Make the device available in this block."""
        ...

    def own_stream(self) -> AbstractContextManager[object]:
        """Make a stream other than the default one current in this block."""
        ...

    def delay(self) -> None:
        """Keep the current stream busy for a while before its next work."""
        ...

    def batch(self, values: torch.Tensor) -> torch.Tensor:
        """A batch on the device. Does not wait for the device."""
        ...

    def synchronize(self) -> None:
        """Block until the device has done everything."""
        ...

    def event(self) -> DeviceEvent:
        """A point behind all that was queued on the current stream."""
        ...

    def engines(self) -> DeviceEngines:
        """Copy engines for the host and this device."""
        ...

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        """Record what the block queues into a graph that `graph` made."""
        ...

    def graph(self) -> Any: ...


class Cpu:
    """The CPU in place of a device: no work is late, and there are no graphs."""

    name = "cpu"

    def installed(self) -> AbstractContextManager[object]:
        return nullcontext()

    own_stream = installed

    def batch(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def delay(self) -> None:
        """Do nothing: a CPU has no queue."""

    def synchronize(self) -> None:
        """Do nothing: all work is done already."""

    def event(self) -> DeviceEvent:
        raise NotImplementedError("a CPU has no queue")

    def engines(self) -> DeviceEngines:
        return DeviceEngines()

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        raise NotImplementedError("a CPU has no graphs")

    def graph(self) -> Any:
        raise NotImplementedError("a CPU has no graphs")


class Emulated:
    """An emulated device. Results are those of the CPU. `late_copies`: see `Real`; only with a driver."""

    name = "cuda:0"

    def __init__(self, standin: EmulatedCuda, *, late_copies: bool = False) -> None:
        self.standin = standin
        self._late_copies = late_copies

    @contextmanager
    def installed(self) -> Iterator[None]:
        late = copying_late(lambda engine: engine.stream.hold(LATE_S)) if self._late_copies else nullcontext()
        with self.standin.installed(), late:
            yield

    def own_stream(self) -> AbstractContextManager[object]:
        return self.standin.stream(self.standin.queues.stream(0))

    def batch(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.name)

    def delay(self) -> None:
        if self.standin.driver is not None and not self._late_copies:  # without one, the order of work decides
            self.standin.current(0).hold(LATE_S)

    def synchronize(self) -> None:
        self.standin.synchronize()

    def event(self) -> DeviceEvent:
        event: DeviceEvent = self.standin.current(0).record_event()
        self.standin.wait_for(self.standin.current(0))  # nobody else does its work
        return event

    def engines(self) -> DeviceEngines:
        return self.standin.engines({torch.device(self.name)})

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()

    def graph(self) -> Any:
        return self.standin.graph()


class Real:
    """The first CUDA device of this machine. Training is late on it, and copies come at once; or the other way round,
    with `late_copies`."""

    name = "cuda:0"
    cycles = 50_000_000

    def __init__(self, *, late_copies: bool = False) -> None:
        self._late_copies = late_copies

    def installed(self) -> AbstractContextManager[object]:
        def rest(engine: CudaEngine) -> None:
            torch.cuda._sleep(3 * self.cycles)  # type: ignore[no-untyped-call]

        return copying_late(rest) if self._late_copies else nullcontext()

    def own_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def event(self) -> DeviceEvent:
        return cast(DeviceEvent, torch.cuda.current_stream().record_event())

    def engines(self) -> DeviceEngines:
        return DeviceEngines({torch.device(self.name)})

    def batch(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory().to(self.name, non_blocking=True)

    def delay(self) -> None:
        if not self._late_copies:
            torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        return torch.cuda.graph(graph)

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()


@contextmanager
def copying_late(rest: Callable[[Any], None]) -> Iterator[None]:
    """Let the stream of an engine `rest` before each of its copies: on a device, work on it comes as soon as it can."""
    queue = CudaEngine.queue

    def late(engine: CudaEngine, *given: Any) -> Iterator[Any]:
        rest(engine)
        return queue(engine, *given)

    with patch.object(CudaEngine, "queue", late):
        yield


@dataclass(frozen=True, slots=True)
class SeamLoop:
    """Options of the loop.

    Attributes:
        steps: number of steps.
        own_stream: whether the loop runs on a stream other than the default one.
        moves: whether weights move to other memory in each step, and their old memory is overwritten.
        captured: the step from which on the optimizer's step is replayed from a CUDA graph; 0: never.
        turns: how the loop says where its steps begin: by ``steps`` or ``data``; empty: it does not.
    """

    steps: int = 30
    own_stream: bool = False
    moves: bool = False
    captured: int = 0
    turns: str = ""


@dataclass(slots=True)
class SeamOutcome:
    """The outcome of a loop.

    Attributes:
        steps: number of steps of the loop.
        taken: steps whose slot was sealed.
        wrong: names and steps of tensors that differ from the twin's.
        early: which of them are what the twin had a step before.
        given_up: number of snapshots that were given up because they would not have been exact.
        changed: how many of them because the hook saw that the state changed while it was copied.
        failure: the error that ended the loop, if any.
    """

    steps: int
    taken: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    given_up: int = 0
    changed: int = 0
    failure: str = ""

    @property
    def wrong_names(self) -> set[str]:
        """Names of the tensors that differ in any step."""
        return {each.partition(" of step ")[0] for each in self.wrong}

    @property
    def exact(self) -> bool:
        """Whether snapshots were taken up to the end, all of them right, and none given up."""
        to_the_end = max(self.taken, default=0) > self.steps - 2 * DRAINED
        return to_the_end and not (self.wrong or self.given_up or self.failure)


class Training:
    """Model, optimizer and average, on a device.

    Attributes:
        step: the current step.
    """

    def __init__(self, device: SeamDevice, loop: SeamLoop) -> None:
        self._device = device
        self._loop = loop
        torch.manual_seed(3)
        layers: list[torch.nn.Module] = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16)]
        self.model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.model[2].requires_grad_(False)
        self.model.to(device.name)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._graph: Any = None
        self.step = 0

    def run(
        self,
        begins: Callable[[int], None],
        turns: Callable[[int], Iterable[int]] = range,
        note: Callable[[int, float], None] | None = None,
    ) -> None:
        """Train.

        Args:
            begins: called where a step begins.
            turns: makes the sequence of step numbers from their count.
            note: called with the loss of each step, after waiting for the device.
        """
        for step in turns(self._loop.steps):
            self.step = step
            generator = torch.Generator().manual_seed(step)
            batch = self._device.batch(torch.randn(12, 8, generator=generator))
            begins(step)
            self._device.delay()
            loss = self.model(batch).square().mean()
            loss.backward()
            if note is not None:
                note(step, loss.item())
            elif step % 5 == 4:
                loss.item()  # otherwise the loop would run ever further ahead of the device
            self._device.delay()
            self._step(step)
            self.optimizer.zero_grad(set_to_none=not self._loop.captured)
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)
            if self._loop.moves:
                for parameter in self.model.parameters():
                    parameter.data = parameter.data.clone()
                [torch.full_like(p, 7.0) for p in self.model.parameters()]  # reuses the old memory of the weights

    def state(self) -> State:
        """The current state, by name. Waits for the device."""
        tensors = {**self.model.state_dict(), **{f"average.{name}": each for name, each in self.average.items()}}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number}.{key}": value for key, value in state.items()}
        return {name: _bytes(torch.as_tensor(value)) for name, value in tensors.items()}

    def _step(self, step: int) -> None:
        captured = self._loop.captured
        if not captured or step < captured:
            self.optimizer.step()
            return
        if self._graph is None:
            self._graph = self._device.graph()
            for group in self.optimizer.param_groups:
                group["capturable"] = True
            with self._device.capture(self._graph):
                self.optimizer.step()
        self._graph.replay()


def twin(device: SeamDevice, loop: SeamLoop) -> dict[int, State]:
    """The state with which each step begins, from a run without holdfast and without graphs."""
    found: dict[int, State] = {}
    loop = replace(loop, captured=0)
    with device.installed(), device.own_stream() if loop.own_stream else nullcontext():
        training = Training(device, loop)

        def note(step: int) -> None:
            found[step] = training.state()

        training.run(note)
    return found


def observe(device: SeamDevice, loop: SeamLoop, wanted: dict[int, State], arena: Path, job: str) -> SeamOutcome:
    """Train with a snapshot at every step, and compare each slot with the `wanted` state of its step."""
    outcome = SeamOutcome(loop.steps)
    seal, abort = Copier._seal, SnapshotCopy.abort

    def aborting(copy: SnapshotCopy, error: HoldfastError) -> None:
        outcome.changed += isinstance(error, StateChanged)
        abort(copy, error)

    def sealing(copier: Copier, copy: SnapshotCopy) -> None:
        form, step = copy.order.form, copy.snapshot.step
        assert copy.slot is not None
        held = {_bytes(read_leaf(copy.slot.view, offset, leaf)) for offset, leaf in form.offsets.values()}
        wrong = [name for name, content in wanted[step].items() if content not in held]
        outcome.wrong += [f"{name} of step {step}" for name in wrong]
        before = wanted.get(step - 1, {})
        outcome.early += [f"{name} of step {step}" for name in wrong if before.get(name) in held]
        seal(copier, copy)
        outcome.taken.append(step)

    with device.installed(), device.own_stream() if loop.own_stream else nullcontext():
        training = Training(device, loop)
        hook = InMemorySnapshot(training.model, training.optimizer, job=job, arena=arena, every=1, strict=True)
        hook.track("average", tensors=training.average, changes="after step")
        try:
            noting = patch.object(Copier, "_seal", sealing), patch.object(SnapshotCopy, "abort", aborting)
            with noting[0], noting[1], hook as snap:

                def begins(step: int) -> None:
                    if step % DRAINED == 0:
                        snap.drain(DRAIN_S)

                turns: dict[str, Callable[[int], Iterable[int]]] = {
                    "": range,
                    "steps": snap.steps,
                    "data": lambda steps: snap.data(range(steps)),
                }
                training.run(begins, turns[loop.turns])
        except (HoldfastError, RuntimeError) as error:
            outcome.failure = str(error)
    outcome.given_up = hook.statistics.failed
    return outcome


def _bytes(tensor: torch.Tensor) -> bytes:
    here = tensor.detach().cpu().contiguous().reshape(-1)
    return here.view(torch.uint8).numpy().tobytes() if here.numel() else b""


# ---------------------------------------------------------------------- broken on purpose


@contextmanager
def no_fence() -> Iterator[None]:
    """Do not let the optimizer wait for the copy."""
    with patch.object(CudaTransfer, "fence", lambda transfer: None):
        yield


@contextmanager
def early_mark() -> Iterator[None]:
    """Let each copy wait for the boundary before its own."""
    made = CudaTransfer.__init__
    events: list[Any] = []

    def make(transfer: CudaTransfer, engine: Any) -> None:
        made(transfer, engine)
        events.append(transfer._ready)
        transfer._ready = events[max(0, len(events) - 2)]

    with patch.object(CudaTransfer, "__init__", make):
        yield


@contextmanager
def early_give_back() -> Iterator[None]:
    """Let copies made at the beginning of a step be overwritten by the next step, perhaps before they are in a slot."""
    take, kept = Staging.take, dict[Staging, Any]()

    def taking(staging: Staging, pieces: Any) -> Any:
        if staging in kept:
            staging.give_back(kept.pop(staging))
        staged = kept[staging] = take(staging, pieces)
        return staged

    with patch.object(Staging, "take", taking):
        yield


@contextmanager
def no_finish() -> Iterator[None]:
    """Seal slots while copies to them are still in progress. Slots stay mapped, or the process would crash instead."""
    mapped, kept = TrainerSlots._map_file, list[Any]()

    def keep(slots: TrainerSlots, slot: SlotFile) -> Any:
        kept.append(mapped(slots, slot))
        return kept[-1]

    with (
        patch.object(CudaTransfer, "finish", CudaTransfer._over),
        patch.object(TrainerSlots, "_map_file", keep),
    ):
        yield


@contextmanager
def live_buffers() -> Iterator[None]:
    """Do not copy what a forward may change at the beginning of the step."""
    with patch.object(Staging, "take", lambda staging, pieces: tuple(pieces)):
        yield


@contextmanager
def deaf_to_replays() -> Iterator[None]:
    """Do not report again at replays what was reported during a capture."""
    with patch("holdfast.snapshot.step.graphs.Graphs.say", lambda graphs, what, *, after=False: what()):
        yield


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break holdfast.

    Attributes:
        broken: breaks it within a block.
        shows: whether an outcome has the sign of this fault. That a loop fails somehow is none.
        late: whether a device shows it that copies state late; see `Real`.
        captured: see `SeamLoop`.
    """

    broken: Callable[[], AbstractContextManager[None]]
    shows: Callable[[SeamOutcome], bool]
    late: bool = True
    captured: int = 0

    @property
    def loop(self) -> SeamLoop:
        """A loop that shows it."""
        return SeamLoop(steps=FAULT_STEPS, captured=self.captured)


def _of_the_step_before(outcome: SeamOutcome) -> bool:
    """Copies came too early: the step before had not computed yet what they should hold. The hook may see that itself.
    Which tensors depends on how soon the host queues the copies; those at the beginning of a step always come early."""
    return outcome.changed > 0 or bool(outcome.early)


def _of_the_step(outcome: SeamOutcome) -> bool:
    """The optimizer ran before the copy. The hook itself sees that, and seals nothing that is wrong."""
    return outcome.changed > 0 and not outcome.wrong


def _of_the_forward(outcome: SeamOutcome) -> bool:
    """Only what a forward changes has another value."""
    return bool(outcome.wrong) and outcome.wrong_names <= {
        f"1.{name}" for name, _ in torch.nn.BatchNorm1d(1).named_buffers()
    }


def _unheard(outcome: SeamOutcome) -> bool:
    """No snapshot was taken once the optimizer's step came from a graph. The capture itself is heard, as a step; so the
    step behind it may still be snapshotted, if a slot was not free a step earlier."""
    return len(outcome.taken) > 0 and max(outcome.taken) <= CAPTURED + 1


FAULTS = {
    "no-fence": Fault(no_fence, _of_the_step),
    "early-mark": Fault(early_mark, _of_the_step_before, late=False),
    "early-give-back": Fault(early_give_back, _of_the_forward),
    "no-finish": Fault(no_finish, _of_the_forward),
    "live-buffers": Fault(live_buffers, _of_the_forward),
    "deaf-to-replays": Fault(deaf_to_replays, _unheard, late=False, captured=CAPTURED),
}


def missed(fault: Fault, made: Callable[[bool], SeamDevice], beside: SeamDevice, base: Path) -> str:
    """Break holdfast, and look for the fault's sign. Empty if it is there, and the same loop on the same device is
    exact without the fault; else what came instead.

    Args:
        made: makes a device, which copies late or not.
        beside: see `twin`.
        base: an empty directory on tmpfs.
    """
    wanted = twin(beside, fault.loop)
    outcomes = []
    for name, broken in (("whole", nullcontext), ("broken", fault.broken)):
        with broken():
            outcomes.append(observe(made(fault.late), fault.loop, wanted, base / name, "seam"))
    whole, outcome = outcomes
    if not whole.exact:
        return f"without the fault: {whole}"
    return "" if fault.shows(outcome) else f"no sign of it: {outcome}"
