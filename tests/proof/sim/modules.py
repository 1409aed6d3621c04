"""Simulated trainers as users write them: modules, optimizers, generators and data, under the whole hook.

holdfast's capture and restore are the real ones here. Only two things are simulated: the process group
(`sim.trainer.SimMember`), and the awaits within copies.
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

from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.copy.engines import CpuEngine, Pause, SlotTensor, Transfer
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.first_turns import Checks
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.options import Options
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.orders import Due, SnapshotCopy
from holdfast.snapshot.step.turns import FIRST_TURNS
from tests.proof.sim.plan import LATE, DrawnState
from tests.proof.sim.scheduler import active
from tests.proof.sim.trainer import Steps

WIDTH = 5
ROWS = 4
SAMPLES = 24
PASSED = 20
"""Number of samples in one pass through a `DataLoader`."""

OVERFLOWS = 2.0**127
"""The scaler's first scale: gradients of the scaled loss are infinite until the scaler has lowered it a few times."""

Meet = Callable[[Any], list[Any]]
"""Returns the values of all ranks, in rank order. Blocks. Raises if a rank is gone."""


# ---------------------------------------------------------------------- one process's random generators


class Generators:
    """One simulated process's states of the global random generators of Python, NumPy and torch.

    All simulated processes share one thread, and so these generators: the state of one is saved while another draws.
    """

    _holder: ClassVar[Generators | None] = None

    def __init__(self, seed: str) -> None:
        self._states: tuple[Any, ...] | None = None  # saved while another process draws
        number = random.Random(seed).getrandbits(31)
        self.hold()
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    def hold(self) -> None:
        """Switch the global generators to this process."""
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
        """Give the generators back to the real process after the block, in the state that they had before it."""
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


# ---------------------------------------------------------------------- the parts of a user's script


class CallCounter(nn.Module):
    """Counts how often it runs, and saves the count as extra state."""

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
    """A model with a layer for each kind of module state in `kinds`."""

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
    """A module that holdfast takes for DDP: each rank has all of it. The script averages the gradients."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


class Loader:
    """Yields the numbers of all samples in random order, pass after pass.

    It counts in a tensor how often it gave each, and saves that very tensor, which the next batch changes.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.given = torch.zeros(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.order:
            self.order = torch.randperm(SAMPLES).tolist()
        number = self.order.pop()
        self.given[number] += 1
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])
        self.given.copy_(state["given"])


class SimScript:
    """The training script of one rank. It makes everything anew in each life, enters the hook, and trains.

    Args:
        drawn: what state the script has.
        seed: seed of the first weights, which are the same on all ranks if these are replicas, and of the generators.
        meet: exchanges gradients between the ranks.
        sleep: sleeps for part of a step.

    Attributes:
        boundary: the state at the start of the current turn of the loop; `NEVER` while the model runs between two
            steps, where none begins.
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
        self._reading: Iterator[torch.Tensor] = iter(())  # kept: closing it ends the pass over the data
        seeded = random.Random(f"data {seed} {rank}").getrandbits(31)
        torch.manual_seed(seeded)
        np.random.seed(seeded)
        random.seed(seeded)

    # ------------------------------------------------------------------ as a user would write it

    def hook(self, options: Options, system: Any) -> SnapshotHook:
        """``InMemorySnapshot(model, optim, ...)``, with everything that it is told to track."""
        extra = {"loader": self._loader, "scaler": self._scaler}
        adapter = _NumberedAdapter(self._model, self._optimizers, self._schedule, extra)
        adapter.coord = self.coord
        hook = SnapshotHook(adapter, options)
        hook.system = system
        hook.checks = Checks(reading=False)  # the script that they would read is the whole simulation
        if self._average is not None:
            hook.track("average", tensors=self._average, changes="after step")
        if self._own is not None:
            hook.track("noise", self._own.get_state, self._own.set_state, when="step")
        if "plain values" in self._kinds:
            hook.track("losses", lambda: list(self._losses), self._take_losses)
        return hook

    def train(self, snap: SnapshotHook, to_do: Steps) -> None:
        """Train until `to_do` has no steps left."""
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
            with active().without_awaits():  # tasks share a thread, and so its autograd engine
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
        snap.finish()  # the last pass need not be read to its end

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
        """What scripts do between two steps. `skipped`: no optimizer has stepped, as gradients were infinite."""
        kinds = self._kinds
        if self._drawn.loop == "probes" and (self._drawn.declared or step > FIRST_TURNS):  # else it is refused
            self.boundary = NEVER
            self._model(self._samples[:ROWS])
            self._sleep()
            self._net.last.weight.data.nan_to_num_(0.5, 0.5, -0.5).mul_(0.99)  # mul_ alone leaves infinity as it is
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
        kept = self._optimizers[0].state.get(self._net.first.weight)
        if kept and LATE in kinds and step >= self._drawn.thaws:
            kept["since"] = float(step)

    def _evaluate(self) -> None:
        """Run the model with the averaged weights, then put its own back."""
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

    # ------------------------------------------------------------------ its state, for the oracle

    def state(self) -> State:
        """The whole state as it is now, read without holdfast's code."""
        return State({**self._late(), **self._early()})

    def state_to_begin_with(self, rewind: Callable[[], None]) -> State:
        """The state that the first step after a restart begins with: `rewind` puts generators back for it."""
        before, own = _generators(), None if self._own is None else self._own.get_state()
        rewind()
        state = self.state()
        _put_back(before)
        if self._own is not None and own is not None:
            self._own.set_state(own)
        return state

    def _early(self) -> dict[str, bytes]:
        """The state that reading a batch changes."""
        _, numbers, *others = np.random.get_state()
        return {
            "python's generator": repr(random.getstate()).encode(),
            "numpy's generator": np.asarray(numbers).tobytes() + repr(others).encode(),
            "torch's generator": _bytes(torch.get_rng_state()),
            "own generator": b"" if self._own is None else _bytes(self._own.get_state()),
            "loader": b"" if self._loader is None else repr(self._loader.order).encode() + _bytes(self._loader.given),
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
    """A rank's whole state. `parts`: the bytes of each part by name; None means unknown, and equals anything."""

    parts: Mapping[str, bytes | None]

    def missing(self, slot: bytes) -> str:
        """Return the name of the first tensor in the slot whose bytes no part of this state contains; empty if none.

        The slot is read as any reader of safetensors would read it.
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
        """The names of the parts that differ."""
        names = self.parts.keys() | other.parts.keys()
        return sorted(name for name in names if not self._is_alike(other, name))

    def lacking(self, other: State) -> list[str]:
        """The names of the parts that the other state has and this one has not."""
        return sorted(other.parts.keys() - self.parts.keys())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and not self.differing(other)

    def of_a_new_rank(self, others: Collection[State], before: State | None, beside: Collection[State]) -> State:
        """The state of a rank that joins: that of the first rank, except for the generators.

        A generator of the rank's own goes on where the rank left it. A generator that all ranks had in the same state
        has gone on without this rank: if it is still the same on all ranks, the new rank gets it too. Otherwise its
        state is unknown, as are all generators of a rank that was never there.
        """

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
"""The state of a snapshot that must never be sealed, as it is taken where no step begins."""

STREAMS = ("python's generator", "numpy's generator", "torch's generator")

TENSORS = ("model", "optim", "tracked")
"""Prefixes of the names of leaves that are tensors of a script."""


# ---------------------------------------------------------------------- what the oracle observes


class _NumberedAdapter(TorchAdapter):
    """`TorchAdapter` with a coordinate from the launcher."""

    coord = ""

    def coordinate(self) -> str:
        return self.coord


class ObservedCapture(Capture):
    """`Capture` that calls `on_begin` for each snapshot of a script that it begins."""

    on_begin: Callable[[SnapshotId, str], None]

    def begin(self, due: Due, *, declared: bool) -> SnapshotCopy:
        copy = super().begin(due, declared=declared)
        self.on_begin(due.snapshot, self._coord)
        return copy


class SteppingEngine(CpuEngine):
    """`CpuEngine` with awaits before, in the middle of and after a copy."""

    def mark(self) -> Transfer:
        active().point()
        return super().mark()

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Pause,
        digests: UnitDigests | None = None,
    ) -> None:
        half = len(pieces) // 2
        for some in (pieces[:half], pieces[half:]):
            active().point()
            super().copy(some, slot, pause, digests)

    def finish(self) -> None:
        active().point()
