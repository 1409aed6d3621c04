r"""One rank of the comparison: a training loop that saves its state with one system, and what that costs.

Every system runs in this loop: same state, same step, same machine. Start it once a rank; rank 0 writes the rows:

    python stall_loop.py --system systems.dcp:AsyncThread --rank 0 --world 1 --port 29600 \
        --folder /dev/shm/trial --out rows.json

An iteration begins right after ``optimizer.step()``: `save` if one is due, `poll`, forward, backward, `before_step`,
``optimizer.step()``. Ranks hold different states, as with sharding, and meet in each iteration, as all that reduce
gradients do. A round is a block without saves and a block with; what saves cost is counted against the blocks without
on both sides.

With ``--device cuda`` the state is on a GPU, one for each rank, and an iteration ends when the device is done with it,
as where the loss is looked at. The host runs ahead in between: to block it there costs nothing by itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
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

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(path for path in sys.path if path != HERE), HERE]  # last: ec.py here must not hide the package ec
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, for the processes that systems start too

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from systems.common import DEADLINE_S, buffered, live_state, release_heap, settle, until  # noqa: E402
from torch import nn  # noqa: E402

T = TypeVar("T")

WIDE, NARROW = 2048, 1334
WARM_UP_STEPS = 3
EXTRA_SAVES = 3
"""Saves in which the loop only watches for the moment from which the save survives a kill."""

CHECKED_SAVES = 3
"""Saves in a row before the restores, so that the newest is not alone."""

RESTORES = 3
SAMPLE_S = 0.02
POLL_S = 0.001


class System(Protocol):
    """A way to save the training state.

    Attributes:
        name: as it stands in the rows.
        version: of the package that does the work.
    """

    name: str
    version: str

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path
    ) -> None: ...

    def save(self, step: int) -> None:
        """Called right after ``optimizer.step()``, on all ranks at the same step. May block."""

    def accepted(self) -> bool:
        """Whether the newest `save` was begun: a system may skip one while those before are not done, or give it up
        before the step that follows."""

    def revoke(self) -> None:
        """Another rank has not begun the newest `save`: it counts on none. Only for systems that skip saves."""

    def before_step(self) -> None:
        """Called right before each ``optimizer.step()``: blocks until the live state may be changed."""

    def poll(self) -> None:
        """Called once in each iteration, equally often on all ranks, for what the system does from time to time."""

    def survives_kill(self) -> bool:
        """Whether the newest save would now survive a SIGKILL of this trainer."""

    def done(self) -> bool:
        """Nothing of the newest save is in progress, deleting older ones included."""

    def wait(self) -> None:
        """Block until done, on all ranks.

        Raises:
            TimeoutError: it took more than `DEADLINE_S`.
        """

    def restore(self) -> None:
        """Load the newest save into the live model and optimizer."""

    def extra_bytes(self) -> int:
        """Memory in use beyond what it was before this object was made. Summed over the ranks."""

    def close(self) -> None:
        """End the processes and remove the files of this system."""


class Iteration(NamedTuple):
    """Seconds of one iteration, and of the calls in it."""

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
        saves: at which of the iterations one was started.
        asked: how many saves were asked for.
        window: how many iterations there were from the first save until the last was done.
        survived_s: seconds from each save until it was seen to survive a kill, for those that were before the next.
    """

    iterations: list[Iteration]
    saves: list[int]
    asked: int
    window: int
    survived_s: list[float]

    def stalls(self) -> list[float]:
        """For each save, all time spent in the system until it was done or the next was started."""
        ends = [*self.saves[1:], self.window]
        return [
            sum(iteration.stall for iteration in self.iterations[begin:end])
            for begin, end in zip(self.saves, ends, strict=True)
        ]

    def lost_s(self, plain_s: float) -> float:
        """Training time lost to one save, on average."""
        return (sum(it.total for it in self.iterations[: self.window]) - self.window * plain_s) / len(self.saves)

    def inflation(self, plain_s: float, every: int) -> float:
        """Mean time of an iteration with a save every so many, as a multiple of one without."""
        excess = sum(it.total for it in self.iterations) - len(self.iterations) * plain_s
        return 1 + excess / (len(self.saves) * every * plain_s)


@dataclass(slots=True)
class Measured:
    """What one rank measured for one frequency of saves. Lists of rounds, of saves or of restores, in order."""

    plain_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    inflation: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
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
    """One line of the comparison. Times are of the slowest rank, bytes and tensors of all ranks together.

    Attributes:
        protect: how the snapshot is protected from the loss of a node, if it is.
        every: iterations from one save to the next.
        stall_p50_ms, stall_p99_ms: time in `save`, `before_step` and `poll` that belongs to one save.
        lost_s: all training time lost to one save: stall, and slower iterations until it is done.
        memcpy_floor_s: copying the state once into memory that is there already, all ranks at the same time. From a
            GPU: into pinned memory.
        step_s: median iteration without saves.
        inflation: mean iteration with saves at this frequency, as a multiple of `step_s`.
        survives_kill_s: from the start of `save` until the trainer may be killed, while no iterations run.
        survives_kill_in_loop_s: the same while they do, looked at between iterations, so up to one of them too long.
        extra_bytes: most memory in use during a save beyond that of the training. Not on a GPU: see there.
        device_extra_bytes: the same of the memory of GPUs.
        taken: saves that were begun, as a part of those asked for.
        restored: all bytes of the state were, after each restore, what they were when the newest save was started.
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
    """The model, its optimizer and one fixed batch: a rank's share of a job."""

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
        """A sum over all words of each tensor, which any change of a word changes."""
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in self.state()]
        words = [octets.view(torch.int64 if octets.numel() % 8 == 0 else torch.int32) for octets in flat]
        return [int(some.sum(dtype=torch.int64)) for some in words]


class Meeting:
    """Where the ranks meet: a group of its own, as systems use the default one, some of them from threads."""

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
    """The least that any copy of the state costs: one copy a tensor into a private buffer that is there already; from a
    GPU, a pinned one."""

    def __init__(self, training: Training) -> None:
        self._device = training.device
        self._pairs = buffered(training.state())

    def measure(self) -> float:
        settle(self._device)
        begin = time.perf_counter()
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        settle(self._device)
        return time.perf_counter() - begin


class Loop:
    """Trains, saves and measures, on one rank."""

    def __init__(self, training: Training, system: System, floor: Floor, meeting: Meeting) -> None:
        self._training = training
        self._system = system
        self._floor = floor
        self._meeting = meeting
        self._step = 0

    def measure(self, every: int, rounds: int, block: int) -> Measured:
        """All of one row that this rank can measure."""
        measured = Measured()
        self._warm_up()
        plain: list[list[float]] = []
        blocks: list[Block] = []
        for _ in range(rounds):
            self._meeting.barrier()
            measured.floor_s.append(self._floor.measure())
            plain.append(self._plain(block))
            blocks.append(self._saving(block, every))
        plain.append(self._plain(block))
        for saving, before, after in zip(blocks, plain[:-1], plain[1:], strict=True):
            step_s = statistics.median(before + after)
            measured.lost_s.append(saving.lost_s(step_s))
            measured.inflation.append(saving.inflation(step_s, every))
            measured.stall_s += saving.stalls()
            measured.taken.append(len(saving.saves) / saving.asked)
            measured.survived_in_loop_s += saving.survived_s
        measured.plain_s = [seconds for seconds_of_block in plain for seconds in seconds_of_block]
        survivals = [self._survival() for _ in range(EXTRA_SAVES)]
        measured.survived_s = [kill_s for kill_s, _ in survivals]
        measured.survived_node_s = [node_s for _, node_s in survivals]
        measured.extra_bytes, measured.device_extra_bytes = self._most_memory()
        measured.restore_s, measured.restored = self._restores(min(every, 2))
        return measured

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
        while not self._meeting.all(self._system.accepted()):  # memory is made ready beside the training
            self._iterate(save=True)
            if time.monotonic() > give_up:
                raise TimeoutError(f"no save was begun in {DEADLINE_S:.0f} s")
        self._system.wait()

    def _plain(self, iterations: int) -> list[float]:
        self._meeting.barrier()
        return [self._iterate().total for _ in range(iterations)]

    def _saving(self, iterations: int, every: int) -> Block:
        """So many iterations with saves, and then as many as it takes until the last save is done on all ranks."""
        done: list[Iteration] = []
        saves: list[int] = []
        survived_s: list[float] = []
        window: int | None = None
        watching = False
        begin = 0.0
        last_save = (iterations - 1) // every * every
        give_up = time.monotonic() + DEADLINE_S
        self._meeting.barrier()
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
        return Block(done, saves, -(-iterations // every), cast(int, window), survived_s)

    def _survival(self) -> tuple[float | None, float]:
        """Seconds until a save survives a kill, or None if it is done and does not; and until it is done. No iterations
        run."""
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
        """Most bytes in use by the system from one save until it is done, of the machine and of the device.

        Iterations run meanwhile, as what they write to may have to be copied first. The most that they themselves have
        in use for a time is measured without a save, and subtracted.
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
        """Seconds of each restore, and whether all of them brought back the state of the newest save."""
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
    """The largest of many samples, taken in a thread while the context is open."""

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
        except BaseException as error:  # raised again on leaving the context
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
    """The most that torch had of a GPU's memory while the context was open, in bytes; 0 for a CPU."""

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


def make_row(ranks: Sequence[Measured], every: int, system: System, state_bytes: int, tensors: int) -> Row:
    """One row from what all ranks measured: for each round, save or restore the slowest rank, then the median."""

    def median(values: Sequence[Sequence[float]]) -> float:
        return statistics.median(slowest(values))

    def slowest(values: Sequence[Sequence[float]]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*values, strict=True)]

    stalls_ms = [seconds * 1e3 for seconds in slowest([rank.stall_s for rank in ranks])]
    lost_s = median([rank.lost_s for rank in ranks])
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
    """The class that ``module:Class`` names."""
    module, _, name = spec.partition(":")
    return cast(type[System], getattr(importlib.import_module(module), name))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of the comparison of ways to save the training state.")
    parser.add_argument("--system", required=True, metavar="MODULE:CLASS", help="such as systems.dcp:AsyncThread")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="free on this machine; the ranks meet there")
    parser.add_argument("--folder", type=Path, required=True, help="on tmpfs, the same for all ranks")
    parser.add_argument("--every", default="1,10", help="steps from one save to the next; a row for each")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--block", type=int, default=10, help="steps in a block")
    parser.add_argument("--layers", type=int, default=16, help="32.8 MB of state each")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPU of the rank's number")
    parser.add_argument("--out", type=Path, required=True, help="rank 0 writes the rows there, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rank, world = arguments.rank, arguments.world
    os.environ |= {  # what torchrun says to its ranks
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
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"  # DCP wants one for each kind of memory
    dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_S))
    meeting = Meeting()
    training = Training(arguments.layers, arguments.batch, rank, device)
    for _ in range(WARM_UP_STEPS):  # before the system is made: Adam makes its moments at its first step
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
    for every in map(int, arguments.every.split(",")):
        measured = meeting.gather(loop.measure(every, arguments.rounds, arguments.block))
        rows.append(asdict(make_row(measured, every, system, state_bytes, tensors)))
    system.close()
    meeting.barrier()
    if rank == 0:
        shutil.rmtree(saves)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
