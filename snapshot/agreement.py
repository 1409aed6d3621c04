"""Agreement between ranks over the job's own process group, on CPU tensors. No leader, no extra store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from smp_daemon.errors import HoldfastError
from snapshot.routes import groups, hops

COLLECTIVE_DEADLINE_S = 120.0
PATIENCE_S = COLLECTIVE_DEADLINE_S / 4
"""So often ranks hear of each other while one of them works for long."""

Result = Callable[[], list[int]]
T = TypeVar("T")


class AgreementLost(HoldfastError):
    """Another rank is gone, or did not take part in time."""


class Agreement(Protocol):
    """Collectives that every rank calls in the same order. Not thread-safe.

    Attributes:
        rank: the caller's place in what `gather` gives.
    """

    rank: int

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in rank order. Blocks; raises `AgreementLost`."""
        ...

    def minimum(self, values: Sequence[int] | Callable[[], Sequence[int]]) -> Result:
        """Starts an element-wise minimum over all ranks; calling the result, in any thread, waits for it.

        Values that are not there yet may be given by what waits for them; it is called in another thread.
        """
        ...

    def patiently(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, once every rank is done with its own, which may take some much longer than a
        collective call may take: a lost node's state has to come from others. Blocks.

        `work` makes no collective call; it may run in another thread. Raises `AgreementLost` as soon as a rank is gone.
        """
        ...

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        """Fill every tensor, in place, with what the rank it is paired with has in it; its bytes enter each node once.
        Blocks.

        Args:
            sets: of ranks that share; the same on every rank.
            nodes: of every rank.
            pieces: (rank, flat tensor), the same on every rank of the caller's set, in the same order.
        """
        ...

    def close(self) -> None:
        """Give the process group back. No collective call; nothing may be called after it."""
        ...


class Alone:
    """A job of one process."""

    rank = 0

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def minimum(self, values: Sequence[int] | Callable[[], Sequence[int]]) -> Result:
        return lambda: list(values() if callable(values) else values)

    def patiently(self, work: Callable[[], T]) -> T:
        return work()

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        """There is nobody to spread to."""

    def close(self) -> None:
        """Nothing to give back."""


class Group:
    """All ranks of an initialised `torch.distributed`, on a gloo group of our own."""

    def __init__(self) -> None:
        """A collective call."""
        timeout = timedelta(seconds=COLLECTIVE_DEADLINE_S)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._size = dist.get_world_size()
        self._starter = ThreadPoolExecutor(1, "holdfast-agree")  # starting a collective takes longer than all the rest
        self.rank = dist.get_rank()

    def gather(self, data: bytes) -> list[bytes]:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self._run(lambda: dist.all_gather(counts, torch.tensor([len(data)]), group=self._group))
        lengths = [int(count) for count in counts]
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._size)]
        self._run(lambda: dist.all_gather(everyone, mine, group=self._group))
        return [bytes(part[:length].numpy()) for part, length in zip(everyone, lengths, strict=True)]

    def minimum(self, values: Sequence[int] | Callable[[], Sequence[int]]) -> Result:
        def start() -> tuple[Any, torch.Tensor]:
            tensor = torch.tensor(values() if callable(values) else values, dtype=torch.int64)
            return dist.all_reduce(tensor, dist.ReduceOp.MIN, self._group, async_op=True), tensor

        started = self._starter.submit(start)  # one thread, so that all ranks start collectives in the same order

        def result() -> list[int]:
            work, tensor = self._run(started.result)
            self._run(work.wait)
            return tensor.tolist()

        return result

    def patiently(self, work: Callable[[], T]) -> T:
        return work_in_rounds(self, work)

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        for members in sets:
            if len(members) > 1:
                mine = pieces if self.rank in members else []
                self._run(partial(self._spread_among, list(members), mine, nodes))

    def _spread_among(
        self, members: list[int], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        made = {ranks: self._new_group(ranks) for ranks in groups(members, nodes)}
        for owner, tensor in pieces:
            content = tensor.view(torch.uint8).cpu()
            for root, ranks in hops(owner, members, nodes):
                if self.rank in ranks:
                    dist.broadcast(content, root, group=made[ranks])
            if content.data_ptr() != tensor.data_ptr():
                tensor.view(torch.uint8).copy_(content)
        for ranks, group in made.items():
            if self.rank in ranks:
                dist.destroy_process_group(group)

    @staticmethod
    def _new_group(ranks: Sequence[int]) -> Any:
        """A collective call of all ranks, also of those that are not in it."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S), backend="gloo")

    def close(self) -> None:
        self._starter.shutdown()
        dist.destroy_process_group(self._group)

    def _run(self, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except RuntimeError as error:
            raise AgreementLost(f"another rank is gone or too slow: {error}") from error


def default_agreement() -> Agreement:
    """Over the job's process group if there are others in it, else alone."""
    return Group() if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else Alone()


def work_in_rounds(agreement: Agreement, work: Callable[[], T]) -> T:
    """`Agreement.patiently`, by `Agreement.minimum`: while a thread works, the ranks meet until all are done."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="holdfast-work", daemon=True).start()
    while True:
        wait([outcome], PATIENCE_S)
        if agreement.minimum([int(outcome.done())])() == [1]:
            return outcome.result()
