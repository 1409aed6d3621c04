"""The whole way from a training loop to its slots, on a device: every slot is compared with a twin that synchronises.

The loop has state of every kind that takes a way of its own: buffers on the device, frozen weights, an average that
code between steps moves, a fused optimizer, memory that is let go of and handed out again at once. The twin is the same
loop without holdfast, which waits for the device at each boundary and clones everything. `FAULTS` are ways to break
holdfast that the comparison must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch

from holdfast import InMemorySnapshot
from holdfast.chaos.device.queues import EAGER
from holdfast.chaos.device.standin import ImaginedCuda
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.copy.cuda import CudaTransfer
from holdfast.snapshot.copy.devices import DeviceEngines
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.step.capture import Staging
from holdfast.snapshot.step.copier import Copier, CopyJob

DRAINED = 3
"""After so many steps the loop waits until its snapshots are protected: there are no more slots than that."""

DRAIN_S = 10.0

State = dict[str, bytes]


class SeamDevice(Protocol):
    """Where the loop runs."""

    name: str

    def installed(self) -> AbstractContextManager[object]:
        """In this block it is there."""
        ...

    def own_stream(self) -> AbstractContextManager[object]:
        """In this block another stream than the default one is current."""
        ...

    def delay(self) -> None:
        """The device has something to do first, for a while."""
        ...

    def synchronize(self) -> None:
        """Block until the device has done everything."""
        ...

    def engines(self) -> DeviceEngines:
        """Copy engines of the host and of it."""
        ...

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        """What the block queues is recorded into what `graph` gave."""
        ...

    def graph(self) -> Any: ...


class Cpu:
    """No device: nothing is late, and there are no graphs."""

    name = "cpu"

    def installed(self) -> AbstractContextManager[object]:
        return nullcontext()

    own_stream = installed

    def delay(self) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Everything is done."""

    def engines(self) -> DeviceEngines:
        return DeviceEngines()

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        raise NotImplementedError("a CPU does at once what it is asked to")

    def graph(self) -> Any:
        raise NotImplementedError("a CPU does at once what it is asked to")


class Imagined:
    """A stand-in. Results are those of the CPU."""

    name = "cuda:0"

    def __init__(self, standin: ImaginedCuda) -> None:
        self.standin = standin

    def installed(self) -> AbstractContextManager[object]:
        return self.standin.installed()

    def own_stream(self) -> AbstractContextManager[object]:
        return self.standin.stream(self.standin.queues.stream(0))

    def delay(self) -> None:
        """It is late anyway."""

    def synchronize(self) -> None:
        self.standin.synchronize()

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
    """The first CUDA device of this machine."""

    name = "cuda:0"
    cycles = 50_000_000

    def installed(self) -> AbstractContextManager[object]:
        return nullcontext()

    def own_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def engines(self) -> DeviceEngines:
        return DeviceEngines({torch.device(self.name)})

    def delay(self) -> None:
        torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        return torch.cuda.graph(graph)

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()


@dataclass(frozen=True, slots=True)
class SeamLoop:
    """How the loop is.

    Attributes:
        steps: how many.
        own_stream: it runs on another stream than the default one.
        moves: its weights get other memory in each step, and what they had is used for something else.
        captured: from this step on the optimizer's step is replayed from a CUDA graph; 0: never.
        turns: how it says where its steps begin: by ``steps`` or ``data``; empty: it does not.
    """

    steps: int = 30
    own_stream: bool = False
    moves: bool = False
    captured: int = 0
    turns: str = ""


@dataclass(slots=True)
class SeamOutcome:
    """What came of it.

    Attributes:
        taken: steps of which a slot was sealed. wrong: what of which of them is not as the twin has it.
        given_up: how many snapshots were, as they would not have been exact. failure: what the loop ended with.
        steps: of how many it was.
    """

    steps: int
    taken: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    given_up: int = 0
    failure: str = ""

    @property
    def exact(self) -> bool:
        """Whether snapshots were taken up to the end, all of them right, and none given up."""
        to_the_end = max(self.taken, default=0) > self.steps - 2 * DRAINED
        return to_the_end and not (self.wrong or self.given_up or self.failure)


class Training:
    """Model, optimizer and average, on a device.

    Attributes:
        step: the one at hand.
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
            turns: gives the numbers of the steps, from how many there are to be.
            note: told of the loss of each step, for which the device is waited for.
        """
        for step in turns(self._loop.steps):
            self.step = step
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(12, 8, generator=generator).to(self._device.name)
            begins(step)
            self._device.delay()
            loss = self.model(batch).square().mean()
            loss.backward()
            if note is not None:
                note(step, loss.item())
            elif step % 5 == 4:
                loss.item()  # else it would run ahead of the device for ever
            self._device.delay()
            self._step(step)
            self.optimizer.zero_grad(set_to_none=not self._loop.captured)
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)
            if self._loop.moves:
                for parameter in self.model.parameters():
                    parameter.data = parameter.data.clone()
                [torch.full_like(p, 7.0) for p in self.model.parameters()]  # in the memory that they had

    def state(self) -> State:
        """All of it, as it is now. Waits for the device."""
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
    """The state with which each step begins. Graphs are not needed for that."""
    found: dict[int, State] = {}
    loop = replace(loop, captured=0)
    with device.installed(), device.own_stream() if loop.own_stream else nullcontext():
        training = Training(device, loop)

        def note(step: int) -> None:
            found[step] = training.state()

        training.run(note)
    return found


def observe(device: SeamDevice, loop: SeamLoop, wanted: dict[int, State], arena: Path, job: str) -> SeamOutcome:
    """Train with a snapshot at every step, and compare each slot with what is `wanted` of that step."""
    outcome = SeamOutcome(loop.steps)
    seal = Copier._seal

    def sealing(copier: Copier, copy: CopyJob) -> None:
        form, step = copy.form, copy.snapshot.step
        held = {_bytes(read_leaf(copy.slot, offset, leaf)) for offset, leaf in form.offsets.values()}
        outcome.wrong += [f"{name} of step {step}" for name, content in wanted[step].items() if content not in held]
        seal(copier, copy)
        outcome.taken.append(step)

    with device.installed(), device.own_stream() if loop.own_stream else nullcontext():
        training = Training(device, loop)
        hook = InMemorySnapshot(
            training.model, training.optimizer, job=job, arena=arena, overhead_budget=0.0, strict=True
        )
        hook.track("average", tensors=training.average, changes="after step")
        try:
            with patch.object(Copier, "_seal", sealing), hook as snap:

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
    """The optimizer does not wait for the copy."""
    with patch.object(CudaTransfer, "fence", lambda transfer: None):
        yield


@contextmanager
def early_mark() -> Iterator[None]:
    """The copy waits for the boundary before its own."""
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
    """Copies made as a step begins are overwritten by the next, though they may not be in a slot yet."""
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
    """What is still under way is sealed."""
    with patch.object(CudaTransfer, "finish", CudaTransfer._over):
        yield


@contextmanager
def live_buffers() -> Iterator[None]:
    """What a forward may change is not copied as the step begins."""
    with patch.object(Staging, "take", lambda staging, pieces: tuple(pieces)):
        yield


@contextmanager
def deaf_to_replays() -> Iterator[None]:
    """Nobody listens to what a graph does."""
    with patch("holdfast.snapshot.step.graphs.Graphs.say", lambda graphs, what, *, after=False: what()):
        yield


SHOWN_BY = {"early-mark": EAGER}
"""On an imagined device: faults that show where it copies at once. All others show where it is late."""

FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], SeamLoop]] = {
    "no-fence": (no_fence, SeamLoop()),
    "early-mark": (early_mark, SeamLoop()),
    "early-give-back": (early_give_back, SeamLoop()),
    "no-finish": (no_finish, SeamLoop()),
    "live-buffers": (live_buffers, SeamLoop()),
    "deaf-to-replays": (deaf_to_replays, SeamLoop(captured=5)),
}
"""By name: how to break it, and a loop that shows it."""
