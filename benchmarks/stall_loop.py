r"""One rank of the comparison: a training loop that saves its state with one system, and measures the cost.

Every system runs in this loop: same state, same step, same machine. Start it once per rank; rank 0 writes the rows:

    python stall_loop.py --system benchmarks.systems.dcp:AsyncThread --rank 0 --world 1 \
        --port 29600 --folder /dev/shm/trial --out rows.json

An iteration begins right after ``optimizer.step()``: `save` if one is due, `poll`, forward, backward, `before_step`,
``optimizer.step()``. Ranks hold different states, as with sharding, and synchronise in each iteration, as a reduction
of gradients would. A round is a block without saves and a block with saves; the cost of saves is relative to the blocks
without saves before and after.

With ``--device cuda`` each rank's state is on its own GPU, and an iteration ends when the device has finished it, as in
loops that read the loss. In between, the host runs ahead: blocking it there has no cost in itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeVar, cast

HERE = Path(__file__).resolve().parent
# This folder goes and the root comes last: neither ec.py here nor ec/ there may shadow a package of that name.
sys.path[:] = [*(path for path in sys.path if path != str(HERE)), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as under torchrun; also for processes that systems start

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.systems.common import DEADLINE_S, buffered, live_state, release_heap, settle, until  # noqa: E402

T = TypeVar("T")

WIDE, NARROW = 2048, 1334
WARM_UP_STEPS = 3
EXTRA_SAVES = 3
"""Number of saves that only measure the time until the save survives a kill."""

CHECKED_SAVES = 3
"""Number of consecutive saves before the restores, so that older saves exist beside the newest."""

RESTORES = 3
STEADY = 0.05
"""A row is steady once the standard error of its lost time is below this many copies of the state."""

SAMPLE_S = 0.02
POLL_S = 0.001


class System(Protocol):
    """A way to save the training state.

    Attributes:
        name: the name in the rows.
        version: version of the package that does the work.
    """

    name: str
    version: str

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path
    ) -> None: ...

    def save(self, step: int) -> None:
        """Called right after ``optimizer.step()``, on all ranks at the same step. May block."""

    def accepted(self) -> bool:
        """Whether the newest `save` was begun. A system may skip a save while earlier ones are in progress, or give it
        up before the following step."""

    def revoke(self) -> None:
        """Called if another rank has not begun the newest `save`, which then counts on no rank. Only systems that skip
        saves need it."""

    def before_step(self) -> None:
        """Called right before each ``optimizer.step()``: blocks until the live state may be changed."""

    def poll(self) -> None:
        """Called once per iteration, equally often on all ranks, for periodic work of the system."""

    def survives_kill(self) -> bool:
        """Whether the newest save would now survive a SIGKILL of this trainer."""

    def done(self) -> bool:
        """Whether the newest save is complete, including the deletion of older ones."""

    def wait(self) -> None:
        """Block until done, on all ranks.

        Raises:
            TimeoutError: it took more than `DEADLINE_S`.
        """

    def restore(self) -> None:
        """Load the newest save into the live model and optimizer."""

    def extra_bytes(self) -> int:
        """Memory in use beyond that before this object was made, in bytes. The results of all ranks are added up."""

    def processor_s(self) -> float:
        """Processor time used so far by this trainer and by the system's processes, in seconds. The results of all
        ranks are added up."""

    def close(self) -> None:
        """End the processes and remove the files of this system."""


class Iteration(NamedTuple):
    """Seconds of one iteration, and of the system's calls in it."""

    total: float
    save: float
    poll: float
    before_step: float

    @property
    def stall(self) -> float:
        return self.save + self.poll + self.before_step


@dataclass(frozen=True, slots=True)
class Block:
    """A block of iterations with saves.

    Attributes:
        saves: indices of the iterations that started a save.
        asked: number of saves that were due.
        window: number of iterations until the last save was done, from the start of the block.
        survived_s: seconds from a save until it was seen to survive a kill, if that was before the next save.
        processor_s: processor time of all iterations; see `System.processor_s`.
    """

    iterations: list[Iteration]
    saves: list[int]
    asked: int
    window: int
    survived_s: list[float]
    processor_s: float

    def stalls(self) -> list[float]:
        """For each save, the time spent in the system until the save was done or the next one was started."""
        ends = [*self.saves[1:], self.window]
        return [
            sum(iteration.stall for iteration in self.iterations[begin:end])
            for begin, end in zip(self.saves, ends, strict=True)
        ]

    def lost_s(self, plain_s: float) -> float:
        """Training time lost to one save, on average."""
        return (sum(it.total for it in self.iterations[: self.window]) - self.window * plain_s) / len(self.saves)

    def extra_processor_s(self, plain_s: float) -> float:
        """Processor time of one save, on average. `plain_s`: that of an iteration without saves."""
        return (self.processor_s - len(self.iterations) * plain_s) / len(self.saves)

    def inflation(self, plain_s: float, every: int) -> float:
        """Mean time of an iteration with a save every `every` iterations, as a multiple of one without saves."""
        excess = sum(it.total for it in self.iterations) - len(self.iterations) * plain_s
        return 1 + excess / (len(self.saves) * every * plain_s)


class Plain(NamedTuple):
    """A block of iterations without saves: seconds of each, and processor time of one."""

    totals: list[float]
    processor_s: float


@dataclass(slots=True)
class Measured:
    """One rank's measurements for one frequency of saves. Lists are per round, save or restore, in order."""

    plain_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    inflation: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    floor_processor_s: list[float] = field(default_factory=list)
    survived_in_loop_s: list[float] = field(default_factory=list)
    survived_s: list[float | None] = field(default_factory=list)
    survived_node_s: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    device_extra_bytes: int = 0
    restore_s: list[float] = field(default_factory=list)
    restored: bool = True
    taken: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison. Times are those of the slowest rank; bytes and tensors are totals over all ranks.

    Attributes:
        protect: how a snapshot is protected against the loss of a node; None if it is not.
        every: iterations from one save to the next.
        stall_p50_ms, stall_p99_ms: time in `save`, `before_step` and `poll` for one save.
        lost_s: all training time lost to one save: stall, and slower iterations until it is done.
        memcpy_floor_s: time to copy the state once into memory that is already mapped, on all ranks at the same time.
            From a GPU: into pinned memory.
        step_s: median time of an iteration without saves.
        noise: standard error of `lost_ratio`; None after a single round. rounds: number of rounds.
        processor_s: processor time that one save takes, of trainers and the system's processes together, a rank.
        processor_ratio: the same, divided by that of one copy of the state.
        inflation: mean time of an iteration with saves at this frequency, as a multiple of `step_s`.
        survives_kill_s: time from the start of `save` until it survives a kill of the trainer, with no iterations.
        survives_kill_in_loop_s: the same in the loop; checked between iterations, so up to one iteration too long.
        survives_node_s: time until a save is done, for systems that protect against the loss of a node.
        extra_bytes: peak of host memory during a save, beyond that of training.
        device_extra_bytes: the same for GPU memory.
        taken: saves that were begun, as a fraction of those due.
        restored: whether every restore brought back all bytes as they were when the newest save was started.
    """

    system: str
    protect: str | None
    ranks: int
    every: int
    stall_p50_ms: float
    stall_p99_ms: float
    lost_s: float
    memcpy_floor_s: float
    lost_ratio: float
    noise: float | None
    rounds: int
    processor_s: float
    processor_ratio: float
    step_s: float
    inflation: float
    survives_kill_s: float | None
    survives_kill_in_loop_s: float | None
    survives_node_s: float | None
    extra_bytes: int
    device_extra_bytes: int
    restore_s: float | None
    restored: bool
    taken: float
    state_bytes: int
    tensors: int
    version: str


class Training:
    """One rank's model, its optimizer and one fixed batch."""

    def __init__(self, layers: int, batch: int, rank: int, device: torch.device) -> None:
        torch.manual_seed(rank)
        self.device = device
        sizes = [WIDE if i % 2 == 0 else NARROW for i in range(layers + 1)]
        linears = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(sizes)]
        self.model = nn.Sequential(*linears).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, foreach=True)
        self._inputs = torch.randn(batch, sizes[0]).to(device)
        self._targets = torch.randn(batch, sizes[-1]).to(device)

    def gradients(self) -> None:
        loss = nn.functional.mse_loss(self.model(self._inputs), self._targets)
        torch.autograd.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state(self) -> list[torch.Tensor]:
        return [tensor for part in live_state(self.model, self.optimizer).values() for tensor in part.values()]

    def digests(self) -> list[int]:
        """A checksum of each tensor: the sum of its words, which changes if any single word does."""
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in self.state()]
        words = [octets.view(torch.int64 if octets.numel() % 8 == 0 else torch.int32) for octets in flat]
        return [int(some.sum(dtype=torch.int64)) for some in words]


class Meeting:
    """Synchronises the ranks over its own process group: systems use the default group, some of them from threads."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
        self._vote = torch.zeros(1, dtype=torch.int32)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def all(self, mine: bool) -> bool:
        self._vote.fill_(mine)
        dist.all_reduce(self._vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(self._vote.item())

    def gather(self, mine: T) -> list[T]:
        gathered: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=self._group)
        return cast(list[T], gathered)


class Floor:
    """The lowest cost of any copy of the state: one copy per tensor into a private, already mapped buffer, which is
    pinned for a GPU."""

    def __init__(self, training: Training) -> None:
        self._device = training.device
        self._pairs = buffered(training.state())

    def measure(self) -> tuple[float, float]:
        """Seconds of one copy, and of processor time."""
        settle(self._device)
        begin, began = time.perf_counter(), time.thread_time()
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        settle(self._device)
        return time.perf_counter() - begin, time.thread_time() - began


class Loop:
    """Trains, saves and measures, on one rank."""

    def __init__(self, training: Training, system: System, floor: Floor, meeting: Meeting) -> None:
        self._training = training
        self._system = system
        self._floor = floor
        self._meeting = meeting
        self._step = 0

    def measure(self, every: int, rounds: int, block: int, until_s: float = 0.0) -> Measured:
        """Measure this rank's part of one row.

        Args:
            rounds: least number of rounds.
            until_s: until when (`time.monotonic`) more rounds are run, unless the row is steady.
        """
        measured = Measured()
        self._warm_up()
        before = self._plain(block)
        measured.plain_s += before.totals
        slowest: list[float] = []
        while len(slowest) < rounds or self._goes_on(slowest, measured.floor_s, until_s):
            self._meeting.barrier()
            floor_s, floor_processor_s = self._floor.measure()
            measured.floor_s.append(floor_s)
            measured.floor_processor_s.append(floor_processor_s)
            saving, after = self._saving(block, every), self._plain(block)
            step_s = statistics.median(before.totals + after.totals)
            measured.lost_s.append(saving.lost_s(step_s))
            measured.processor_s.append(saving.extra_processor_s((before.processor_s + after.processor_s) / 2))
            measured.inflation.append(saving.inflation(step_s, every))
            measured.stall_s += saving.stalls()
            measured.taken.append(len(saving.saves) / saving.asked)
            measured.survived_in_loop_s += saving.survived_s
            measured.plain_s += after.totals
            slowest.append(max(self._meeting.gather(measured.lost_s[-1])))
            before = after
        survivals = [self._survival() for _ in range(EXTRA_SAVES)]
        measured.survived_s = [kill_s for kill_s, _ in survivals]
        measured.survived_node_s = [node_s for _, node_s in survivals]
        measured.extra_bytes, measured.device_extra_bytes = self._most_memory()
        measured.restore_s, measured.restored = self._restores(min(every, 2))
        return measured

    def _goes_on(self, lost_s: Sequence[float], floor_s: Sequence[float], until_s: float) -> bool:
        """Whether any rank asks for another round: there is time for it, and the row is not steady yet."""
        is_wanted = noise_of(lost_s) > STEADY * statistics.median(floor_s) and time.monotonic() < until_s
        return not self._meeting.all(not is_wanted)

    def _iterate(self, save: bool = False) -> Iteration:
        self._step += 1
        begin = time.perf_counter()
        if save:
            self._system.save(self._step)
        saved = time.perf_counter()
        self._system.poll()
        polled = time.perf_counter()
        self._training.gradients()
        self._meeting.barrier()  # where ranks would reduce their gradients
        computed = time.perf_counter()
        self._system.before_step()
        free = time.perf_counter()
        self._training.update()
        settle(self._training.device)
        end = time.perf_counter()
        return Iteration(end - begin, saved - begin, polled - saved, free - computed)

    def _save(self) -> None:
        self._step += 1
        self._system.save(self._step)

    def _warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self._iterate()
        self._meeting.barrier()
        give_up = time.monotonic() + DEADLINE_S
        self._iterate(save=True)
        while not self._meeting.all(self._system.accepted()):  # memory is reserved while training runs
            self._iterate(save=True)
            if time.monotonic() > give_up:
                raise TimeoutError(f"no save was begun in {DEADLINE_S:.0f} s")
        self._system.wait()

    def _plain(self, iterations: int) -> Plain:
        self._meeting.barrier()
        began_s = self._system.processor_s()
        totals = [self._iterate().total for _ in range(iterations)]
        return Plain(totals, (self._system.processor_s() - began_s) / iterations)

    def _saving(self, iterations: int, every: int) -> Block:
        """Run `iterations` with saves, and then more until the last save is done on all ranks."""
        done: list[Iteration] = []
        saves: list[int] = []
        survived_s: list[float] = []
        window: int | None = None
        watching = False
        begin = 0.0
        last_save = (iterations - 1) // every * every
        give_up = time.monotonic() + DEADLINE_S
        self._meeting.barrier()
        began_s = self._system.processor_s()
        while len(done) < iterations or not self._meeting.all(window is not None):
            save = len(done) < iterations and len(done) % every == 0
            begin_of_save = time.perf_counter()
            done.append(self._iterate(save))
            if save and self._meeting.all(self._system.accepted()):
                saves.append(len(done) - 1)
                watching, begin = True, begin_of_save
            elif save:
                self._system.revoke()
            if watching and self._system.survives_kill():
                watching = False
                survived_s.append(time.perf_counter() - begin)
            if window is None and len(done) > last_save and self._system.done():
                window = len(done)
            if len(done) > iterations and time.monotonic() > give_up:
                raise TimeoutError(f"the saves of a block took more than {DEADLINE_S:.0f} s")
        processor_s = self._system.processor_s() - began_s
        return Block(done, saves, -(-iterations // every), cast(int, window), survived_s, processor_s)

    def _survival(self) -> tuple[float | None, float]:
        """Seconds until a save survives a kill (None: never), and until it is done. No iterations run meanwhile."""
        self._iterate()
        self._meeting.barrier()
        survived: float | None = None
        begin = time.perf_counter()
        self._save()

        def settled() -> bool:
            nonlocal survived
            self._system.poll()
            if survived is None and self._system.survives_kill():
                survived = time.perf_counter() - begin
            return self._meeting.all(survived is not None or self._system.done())

        until(settled, "a save", pause_s=POLL_S)
        self._system.wait()
        return survived, time.perf_counter() - begin

    def _most_memory(self) -> tuple[int, int]:
        """The peak of host and of device memory that the system uses during one save, in bytes.

        Iterations run meanwhile, because writing to pages may copy them. Their own peak is measured without a save and
        subtracted.
        """
        self._meeting.barrier()
        release_heap()
        rest = self._system.extra_bytes()
        with Sampler(self._system.extra_bytes) as training, MostOnDevice(self._training.device) as training_there:
            for _ in range(WARM_UP_STEPS):
                self._iterate()
        self._meeting.barrier()
        release_heap()
        with Sampler(self._system.extra_bytes) as saving, MostOnDevice(self._training.device) as saving_there:
            self._iterate(save=True)
            self._iterate_until_done()
        return saving.most - (training.most - rest), saving_there.most - training_there.most

    def _iterate_until_done(self) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not self._meeting.all(self._system.done()):
            self._iterate()
            if time.monotonic() > give_up:
                raise TimeoutError(f"a save took more than {DEADLINE_S:.0f} s")

    def _restores(self, gap: int) -> tuple[list[float], bool]:
        """Seconds of each restore, and whether all restores brought back the state of the newest save."""
        saved: list[int] = []
        for _ in range(CHECKED_SAVES):
            self._iterate_until_done()
            saved = self._training.digests()
            self._meeting.barrier()
            self._iterate(save=True)
            for _ in range(gap - 1):
                self._iterate()
        self._iterate_until_done()
        seconds: list[float] = []
        same = True
        for _ in range(RESTORES):
            self._iterate()
            self._meeting.barrier()
            begin = time.perf_counter()
            self._system.restore()
            seconds.append(time.perf_counter() - begin)
            same &= self._training.digests() == saved
        return seconds, same


class Sampler:
    """The maximum of samples that a thread takes while the context is open."""

    def __init__(self, sample: Callable[[], int]) -> None:
        self._sample = sample
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.most = 0

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_S):
                self.most = max(self.most, self._sample())
        except BaseException as error:  # `__exit__` raises it again
            self._failure = error

    def __enter__(self) -> Self:
        self.most = self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self.most = max(self.most, self._sample())


class MostOnDevice:
    """The peak of GPU memory that torch allocated while the context was open, in bytes; 0 for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most = 0

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.most = torch.cuda.max_memory_allocated(self._device)


def noise_of(values: Sequence[float]) -> float:
    """The standard error of the median of values that scatter as if drawn; infinite for fewer than two."""
    if len(values) < 2:
        return math.inf
    return math.sqrt(math.pi / 2 / len(values)) * statistics.stdev(values)


def make_row(ranks: Sequence[Measured], every: int, system: System, state_bytes: int, tensors: int) -> Row:
    """One row from the measurements of all ranks: the slowest rank of each round, save or restore, then the median."""

    def median(values: Sequence[Sequence[float]]) -> float:
        return statistics.median(slowest(values))

    def slowest(values: Sequence[Sequence[float]]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*values, strict=True)]

    stalls_ms = [seconds * 1e3 for seconds in slowest([rank.stall_s for rank in ranks])]
    losses = slowest([rank.lost_s for rank in ranks])
    lost_s = statistics.median(losses)
    processor_s = statistics.fmean(statistics.median(rank.processor_s) for rank in ranks)
    floor_processor_s = statistics.fmean(statistics.median(rank.floor_processor_s) for rank in ranks)
    floor_s = median([rank.floor_s for rank in ranks])
    restored = all(rank.restored for rank in ranks)
    survived = [[seconds for seconds in rank.survived_s if seconds is not None] for rank in ranks]
    all_survived = all(len(seconds) == EXTRA_SAVES for seconds in survived)
    in_loop = [statistics.median(rank.survived_in_loop_s) for rank in ranks if rank.survived_in_loop_s]
    return Row(
        system=system.name,
        protect=getattr(system, "protect", None),
        ranks=len(ranks),
        every=every,
        stall_p50_ms=float(np.percentile(stalls_ms, 50)),
        stall_p99_ms=float(np.percentile(stalls_ms, 99)),
        lost_s=lost_s,
        memcpy_floor_s=floor_s,
        lost_ratio=lost_s / floor_s,
        noise=noise_of(losses) / floor_s if len(losses) > 1 else None,
        rounds=len(losses),
        processor_s=processor_s,
        processor_ratio=processor_s / floor_processor_s,
        step_s=max(statistics.median(rank.plain_s) for rank in ranks),
        inflation=median([rank.inflation for rank in ranks]),
        survives_kill_s=median(survived) if all_survived else None,
        survives_kill_in_loop_s=max(in_loop, default=None),
        survives_node_s=median([rank.survived_node_s for rank in ranks]) if hasattr(system, "protect") else None,
        extra_bytes=sum(rank.extra_bytes for rank in ranks),
        device_extra_bytes=sum(rank.device_extra_bytes for rank in ranks),
        restore_s=median([rank.restore_s for rank in ranks]) if restored else None,
        restored=restored,
        taken=statistics.fmean(ranks[0].taken),
        state_bytes=state_bytes,
        tensors=tensors,
        version=system.version,
    )


def load_system(spec: str) -> type[System]:
    """Import the class named by ``module:Class``."""
    module, _, name = spec.partition(":")
    return cast(type[System], getattr(importlib.import_module(module), name))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of the comparison of ways to save the training state.")
    parser.add_argument(
        "--system", required=True, metavar="MODULE:CLASS", help="such as benchmarks.systems.none:Nothing"
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="free on this machine; the ranks meet there")
    parser.add_argument("--folder", type=Path, required=True, help="on tmpfs, the same for all ranks")
    parser.add_argument("--every", default="1,10", help="steps from one save to the next; a row for each")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long rounds may go on, unless rows are steady")
    parser.add_argument("--block", type=int, default=10, help="steps in a block")
    parser.add_argument("--layers", type=int, default=16, help="32.8 MB of state each")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPU of the rank's number")
    parser.add_argument("--out", type=Path, required=True, help="rank 0 writes the rows there, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rank, world = arguments.rank, arguments.world
    os.environ |= {  # as set by torchrun
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(arguments.port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    logging.disable(logging.INFO)  # some systems write lines for every save
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"  # DCP needs one per kind of memory
    dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_S))
    meeting = Meeting()
    training = Training(arguments.layers, arguments.batch, rank, device)
    for _ in range(WARM_UP_STEPS):  # before the system is made, as Adam allocates its moments at the first step
        training.gradients()
        training.update()
    state = training.state()
    floor = Floor(training)
    floor.measure()
    saves = arguments.folder / f"saves-{arguments.port}"
    saves.mkdir(parents=True, exist_ok=True)
    meeting.barrier()
    system = load_system(arguments.system)(training.model, training.optimizer, rank, world, saves)
    loop = Loop(training, system, floor, meeting)
    state_bytes = sum(meeting.gather(sum(tensor.nbytes for tensor in state)))
    tensors = sum(meeting.gather(len(state)))
    rows = []
    intervals = [int(text) for text in arguments.every.split(",")]
    began_s = time.monotonic()
    for number, every in enumerate(intervals, 1):
        until_s = began_s + arguments.seconds * number / len(intervals)
        measured = meeting.gather(loop.measure(every, arguments.rounds, arguments.block, until_s))
        rows.append(asdict(make_row(measured, every, system, state_bytes, tensors)))
    system.close()
    meeting.barrier()
    if rank == 0:
        shutil.rmtree(saves)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
