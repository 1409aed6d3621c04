"""A trainer as users write it, in a simulation: modules, optimizers, generators and data, under all of the hook.

Nothing of holdfast's capture and restore is replaced here. What is not real is what is around it: the process group
(`chaos.sim.trainer.SimMember`), and that copies have awaits in them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from holdfast.chaos.sim.plan import DrawnState
from holdfast.chaos.sim.scheduler import active
from holdfast.chaos.sim.trainer import Steps
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor, Transfer
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.options import Options
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import CopyJob

WIDTH = 5
ROWS = 4
SAMPLES = 24
PASSED = 20
"""Samples of a pass through a `DataLoader`."""

OVERFLOWS = 2.0**127
"""A loss that is scaled by this has gradients that are infinite, until the scaler has gone back a few times."""

Meet = Callable[[Any], list[Any]]
"""Gives what every rank gave, in rank order; blocks. Raises if one is gone."""


# ---------------------------------------------------------------------- one process's random generators


class Generators:
    """The global random generators of Python, NumPy and torch, as one simulated process has them.

    All processes share one thread, and so these: what one of them had is kept while others draw.
    """

    _holder: ClassVar[Generators | None] = None

    def __init__(self, seed: str) -> None:
        self._states: tuple[Any, ...] | None = None  # while another process draws
        number = random.Random(seed).getrandbits(31)
        self.hold()
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    def hold(self) -> None:
        """From now on this process draws."""
        assert torch.is_grad_enabled(), "a task gave way where gradients are off, which goes for the whole thread"
        before = Generators._holder
        if before is self:
            return
        if before is not None:
            before._states = _generators()
        Generators._holder = self
        if self._states is not None:
            _put_back(self._states)

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[None]:
        """After the block they are this real process's again, as they were."""
        before = _generators()
        try:
            yield
        finally:
            cls._holder = None
            _put_back(before)


def _generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put_back(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# ---------------------------------------------------------------------- what a user's script is made of


class CallCounter(nn.Module):
    """Counts how often it runs, and keeps that beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * (1 + self.count / 64)

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


class Net(nn.Module):
    """A layer for every kind of state that a module can have."""

    def __init__(self, kinds: frozenset[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        layers: list[nn.Module] = [self.first, nn.Tanh()]
        if "buffers" in kinds:
            layers.append(nn.BatchNorm1d(WIDTH))
        if "dropout" in kinds:
            layers.append(nn.Dropout(0.3))
        if "extra state" in kinds:
            layers.append(CallCounter())
        self.thawing: nn.Linear | None = None
        if "thaws" in kinds or "frozen" in kinds:
            self.thawing = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            layers.append(self.thawing)
        self.layers = nn.Sequential(*layers)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) if "bfloat16" in kinds else None
        self.turned = nn.Parameter(torch.randn(3, WIDTH).t()) if "strided" in kinds else None
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        if self.narrow is not None:
            x = x + self.narrow(x.bfloat16()).float()
        if self.turned is not None:
            x = x + (x @ self.turned) @ self.turned.t()
        out: torch.Tensor = self.last(x)
        return out


class Replica(DistributedDataParallel):
    """What holdfast takes for data parallelism: each rank has all of the module. The script averages gradients."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


class Loader:
    """Goes through numbers in an order of its own, pass after pass."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.order:
            self.order = torch.randperm(SAMPLES).tolist()
        return self.order.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class SimScript:
    """One rank's: it makes all anew in each life, enters the hook, and trains.

    Args:
        drawn: what it has.
        seed: of its first weights, the same on all ranks if they are replicas, and of its generators.
        meet: how its ranks average gradients.
        sleep: for some of a step's time.

    Attributes:
        boundary: its state as the turn of the loop began that is under way; `NEVER` while the model runs for another
            end than to begin one.
    """

    def __init__(self, drawn: DrawnState, seed: int, rank: int, meet: Meet, sleep: Callable[[], None]) -> None:
        self.coord = f"dp{rank}"
        self._drawn = drawn
        self._kinds = kinds = frozenset(drawn.kinds)
        self._meet = meet
        self._sleep = sleep
        generators = Generators(f"weights {seed} {0 if drawn.replicated else rank}")
        active().current.on_turn = generators.hold
        self._net = Net(kinds)
        self._model: nn.Module = Replica(self._net) if drawn.replicated else self._net
        self._samples = torch.randn(SAMPLES, WIDTH)
        self._optimizers = _optimizers(drawn, self._net)
        self._schedule = torch.optim.lr_scheduler.StepLR(self._optimizers[0], 2, 0.5) if "schedule" in kinds else None
        self._average = (
            {name: p.detach().clone() for name, p in self._net.named_parameters()} if "average" in kinds else None
        )
        self._scaler = (
            torch.amp.GradScaler("cpu", init_scale=OVERFLOWS, growth_interval=3) if "scaler" in kinds else None
        )
        self._loader = Loader() if "loader" in kinds else None
        self._own = torch.Generator() if "own generator" in kinds else None
        passed = TensorDataset(self._samples[:PASSED])
        self._passed = DataLoader(passed, ROWS, shuffle=True) if drawn.loop == "data" else None
        self._losses: list[float] = []
        self.boundary = State({})
        self._reading: Iterator[torch.Tensor] = iter(())  # outlives the loop, or its pass over the data would be left
        seeded = random.Random(f"data {seed} {rank}").getrandbits(31)
        torch.manual_seed(seeded)
        np.random.seed(seeded)
        random.seed(seeded)

    # ------------------------------------------------------------------ as it would be written

    def hook(self, options: Options, system: Any) -> SnapshotHook:
        """``InMemorySnapshot(model, optim, ...)``, and what it is told to track."""
        extra = {"loader": self._loader, "scaler": self._scaler}
        adapter = _NumberedAdapter(self._model, self._optimizers, self._schedule, extra)
        adapter.coord = self.coord
        hook = SnapshotHook(adapter, options)
        hook.system = system
        if self._average is not None:
            hook.track("average", tensors=self._average, changes="after step")
        if self._own is not None:
            hook.track("noise", self._own.get_state, self._own.set_state, when="step")
        if "plain values" in self._kinds:
            hook.track("losses", lambda: list(self._losses), self._take_losses)
        return hook

    def train(self, snap: SnapshotHook, to_do: Steps) -> None:
        """As many steps more."""
        batches = self._reading = self._batches(snap)
        while to_do.left:
            self.boundary = self.state()
            if self._drawn.declared and self._passed is None:
                snap.begin()
            batch = next(batches)
            number = snap.step
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss = self._model(batch).square().sum()
            if "written in a step" in self._kinds:
                self._net.last.bias.data.add_(0.125)
            self._sleep()
            with active().without_awaits():  # the engine of autograd is one for all who share a thread
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            to_do.begun()
            self._average_gradients()
            for optimizer in self._optimizers:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
            skipped = False
            if self._scaler is not None:
                before = self._scaler.get_scale()
                self._scaler.update()
                skipped = self._scaler.get_scale() < before
            self._between(number + 1, float(loss.detach()), skipped)
        self.boundary = self.state()

    def _batches(self, snap: SnapshotHook) -> Iterator[torch.Tensor]:
        while self._passed is not None:
            for (batch,) in snap.data(self._passed):
                yield self._augmented(batch)
        while True:
            yield self._augmented(self._batch())

    def _batch(self) -> torch.Tensor:
        if self._loader is not None:
            return self._samples[[next(self._loader) for _ in range(ROWS)]]
        return torch.randn(ROWS, WIDTH)

    def _augmented(self, x: torch.Tensor) -> torch.Tensor:
        if "numpy" in self._kinds:
            x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape).astype(np.float32))
        if "python" in self._kinds:
            x = x * random.uniform(0.9, 1.1)
        if self._own is not None:
            x = x + torch.randn(x.shape, generator=self._own) / 8
        return x

    def _average_gradients(self) -> None:
        mine = [p.grad for p in self._net.parameters() if p.grad is not None]
        everyones = self._meet([gradient.clone() for gradient in mine])
        if self._drawn.replicated:
            for gradient, all_of_it in zip(mine, zip(*everyones, strict=True), strict=True):
                gradient.copy_(torch.stack(all_of_it).mean(0))

    def _between(self, step: int, loss: float, skipped: bool) -> None:
        """What scripts do between two steps; `skipped`: no optimizer has stepped, as gradients were infinite."""
        kinds = self._kinds
        if self._drawn.loop == "probes":
            self.boundary = NEVER
            self._model(self._samples[:ROWS])
            self._sleep()
            self._net.last.weight.data.nan_to_num_(0.5, 0.5, -0.5).mul_(0.99)  # what is infinite would stay as it is
        if self._schedule is not None and not skipped:
            self._schedule.step()
        self._losses = [*self._losses[-3:], loss]
        with torch.no_grad():
            if "clamped" in kinds:
                self._net.first.weight.clamp_(-0.4, 0.4)
            if "written by data" in kinds:
                self._net.last.weight.data.mul_(0.97)
            if "other memory" in kinds and step % 3 == 2:
                self._net.last.bias.data = self._net.last.bias.data.clone() + 0.01
            if self._average is not None:
                for name, p in self._net.named_parameters():
                    self._average[name].lerp_(p.detach(), 0.3)
            if "evaluation" in kinds:
                self._evaluate()
        if "thaws" in kinds and step == self._drawn.thaws and self._net.thawing is not None:
            self._net.thawing.requires_grad_(True)

    def _evaluate(self) -> None:
        """With the averaged weights, which are given back."""
        held = {name: p.detach().clone() for name, p in self._net.named_parameters()}
        for name, p in self._net.named_parameters():
            p.copy_(held[name] if self._average is None else self._average[name])
        self._model.eval()
        self._model(self._samples[:ROWS])
        self._model.train()
        for name, p in self._net.named_parameters():
            p.copy_(held[name])

    def _take_losses(self, losses: list[float]) -> None:
        self._losses = list(losses)

    # ------------------------------------------------------------------ what it has in its hands

    def state(self) -> State:
        """All of it as it is now, read by other means than holdfast's."""
        return State({**self._late(), **self._early()})

    def _early(self) -> dict[str, bytes]:
        """What reading a batch changes."""
        _, numbers, *others = np.random.get_state()
        return {
            "python's generator": repr(random.getstate()).encode(),
            "numpy's generator": np.asarray(numbers).tobytes() + repr(others).encode(),
            "torch's generator": _bytes(torch.get_rng_state()),
            "own generator": b"" if self._own is None else _bytes(self._own.get_state()),
            "loader": b"" if self._loader is None else repr(self._loader.order).encode(),
        }

    def _late(self) -> dict[str, bytes]:
        found: dict[str, Any] = {}
        for name, tensor in [*self._net.named_parameters(), *self._net.named_buffers()]:
            found[name] = tensor
            found[f"{name} is trained"] = tensor.requires_grad
        for number, optimizer in enumerate(self._optimizers):
            for at, group in enumerate(optimizer.param_groups):
                plain = {key: value for key, value in group.items() if key != "params"}
                found[f"optimizer {number}, group {at}"] = sorted(plain.items())
                for place, parameter in enumerate(group["params"]):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        found[f"optimizer {number}, group {at}, {place}, {key}"] = value
        for name, module in self._net.named_modules():
            if isinstance(module, CallCounter):
                found[f"{name} has run"] = module.count
        for name, tensor in (self._average or {}).items():
            found[f"average of {name}"] = tensor
        found["schedule"] = None if self._schedule is None else sorted(self._schedule.state_dict().items())
        found["scaler"] = None if self._scaler is None else sorted(self._scaler.state_dict().items())
        found["losses"] = self._losses if "plain values" in self._kinds else None
        found["in training"] = self._net.training
        return {name: _bytes(value) for name, value in found.items()}


def _optimizers(drawn: DrawnState, net: Net) -> list[torch.optim.Optimizer]:
    kinds: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }
    make = kinds[drawn.optimizer]
    if "two optimizers" not in drawn.kinds:
        return [make(list(net.parameters()))]
    last = list(net.last.parameters())
    others = [p for p in net.parameters() if all(p is not other for other in last)]
    return [make(others), torch.optim.SGD(last, lr=0.1, momentum=0.5)]


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return repr(value).encode()


@dataclass(frozen=True, eq=False)
class State:
    """A rank's whole state; `parts`: by what they are called. One that is None is not known, and equals any other."""

    parts: Mapping[str, bytes | None]

    def missing(self, slot: bytes) -> str:
        """Which tensor in the slot is none of these, or of their parts; empty: all are.

        Read as any reader of safetensors would.
        """
        header = json.loads(slot[8 : 8 + int.from_bytes(slot[:8], "little")])
        begin = 8 + int.from_bytes(slot[:8], "little")
        for name, leaf in header.items():
            if not name.startswith(TENSORS):
                continue
            first, last = leaf["data_offsets"]
            held = slot[begin + first : begin + last]
            if not any(held in part for part in self.parts.values() if part is not None):
                return str(name)
        return ""

    def differing(self, other: State) -> list[str]:
        """What is not the same in both."""
        names = self.parts.keys() | other.parts.keys()
        return sorted(name for name in names if not self._is_alike(other, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and not self.differing(other)

    def of_a_new_rank(self, others: Collection[State], before: State | None, beside: Collection[State]) -> State:
        """All as the first rank has it, but for its generators: those go on where they were. Those that all ranks had
        alike when it was last there went on without it: if all have them alike now, so has the new one, else they are
        anything, as they are for a rank that is new."""

        def its(name: str) -> bytes | None:
            if before is None:
                return None
            if not beside or any(each.parts[name] != before.parts[name] for each in beside):
                return before.parts[name]
            alike = all(each.parts[name] == self.parts[name] for each in others)
            return self.parts[name] if alike else None

        return State({**self.parts, **{name: its(name) for name in STREAMS}})

    def _is_alike(self, other: State, name: str) -> bool:
        mine, its = self.parts.get(name, b""), other.parts.get(name, b"")
        return mine is None or its is None or mine == its


NEVER = State({})
"""What no snapshot may be of that is sealed: the step that it is taken for does not begin there."""

STREAMS = ("python's generator", "numpy's generator", "torch's generator")

TENSORS = ("model", "optim", "tracked")
"""Names of leaves that are tensors of a script's begin with one of them."""


# ---------------------------------------------------------------------- where the oracle looks


class _NumberedAdapter(TorchAdapter):
    """A rank knows its number from the launcher."""

    coord = ""

    def coordinate(self) -> str:
        return self.coord


class ObservedCapture(Capture):
    """Tells what the script has in its hands when a snapshot of it is taken."""

    on_begin: Callable[[SnapshotId, str], None]

    def begin(self, snapshot: SnapshotId, *arguments: Any, **options: Any) -> CopyJob:
        job = super().begin(snapshot, *arguments, **options)
        self.on_begin(snapshot, self._coord)
        return job


class SteppingEngine(CpuEngine):
    """`CpuEngine`, with awaits before, in the middle and after."""

    def mark(self) -> Transfer:
        active().point()
        return super().mark()

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        half = len(pieces) // 2
        for some in (pieces[:half], pieces[half:]):
            active().point()
            super().copy(some, slot, pause)

    def finish(self) -> None:
        active().point()
