"""Agreement between ranks over the job's own process group, on CPU tensors. No leader, no extra store."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.collective.meeting import MEETING_DEADLINE_S, Meeting

COLLECTIVE_DEADLINE_S = 120.0
"""How long ranks wait for each other at least; if the job's own process group waits longer, so do we. A rank that is
gone is noticed at once."""

PATIENCE_S = COLLECTIVE_DEADLINE_S / 4
"""So often ranks hear of each other while one of them works for long."""

log = get_log(__name__)

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

    def leave(self) -> None:
        """Have nobody wait for this rank: it does not take part in the next collective call, or was interrupted in the
        last. The others lose it at once when they make theirs, and every call here raises `AgreementLost`, until all
        have met. No collective call; harmless if it was called before.
        """
        ...

    def meet(self, step: int) -> bool:
        """To be called by who has left, after every step with its number: whether all ranks are together again.

        Blocks for seconds at most, and only once all have left and have come to the step that they then agree on.
        """
        ...

    def meet_at_end(self, deadline_s: float) -> bool:
        """As `meet`, but once, by who has ended well, and waits for the others until the deadline."""
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

    def leave(self) -> None:
        """Nobody waits."""

    def meet(self, step: int) -> bool:
        return True

    def meet_at_end(self, deadline_s: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""


class Group:
    """All ranks of an initialised `torch.distributed`, on a gloo group of our own."""

    def __init__(self) -> None:
        """A collective call."""
        self._deadline = timedelta(seconds=max(COLLECTIVE_DEADLINE_S, job_deadline_s()))
        self._group: Any = dist.new_group(backend="gloo", timeout=self._deadline)
        self._ranks: Any = self._group._get_backend(torch.device("cpu"))
        self._size = dist.get_world_size()
        self._least = _c10d().AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN
        self._starter = ThreadPoolExecutor(1, "holdfast-agree")  # starting a collective takes longer than all the rest
        self.rank = dist.get_rank()
        name = self.gather(uuid.uuid4().hex.encode())[0].decode()
        self._store: Any = _c10d().PrefixStore(f"holdfast {name}", _c10d()._get_default_store())
        self._meeting: Meeting | None = None

    def gather(self, data: bytes) -> list[bytes]:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self._gather(counts, torch.tensor([len(data)]))
        lengths = [int(count) for count in counts]
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._size)]
        self._gather(everyone, mine)
        return [bytes(part[:length].numpy()) for part, length in zip(everyone, lengths, strict=True)]

    def _gather(self, everyone: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._run(lambda: self._together().allgather([everyone], [mine]).wait())

    def minimum(self, values: Sequence[int] | Callable[[], Sequence[int]]) -> Result:
        def start() -> tuple[Any, torch.Tensor]:
            tensor = torch.tensor(values() if callable(values) else values, dtype=torch.int64)
            return self._together().allreduce([tensor], self._least), tensor

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

    def leave(self) -> None:
        registered, ranks = self._group, self._ranks
        self._group = self._ranks = None
        if ranks is None:
            return
        if registered in _c10d()._world.pg_map:
            dist.destroy_process_group(registered)
        # its end may wait for a call that is under way, and that for another rank
        threading.Thread(target=_let_go, args=([registered, ranks],), name="holdfast-leave", daemon=True).start()

    def meet(self, step: int) -> bool:
        try:
            return self._join(self._meetings().come(step))
        except RuntimeError as error:
            log.info("the ranks did not meet after step %d: %s", step, error)
            return False

    def meet_at_end(self, deadline_s: float) -> bool:
        try:
            return self._join(self._meetings().come_last(deadline_s))
        except RuntimeError as error:
            log.warning("the ranks did not meet at the end: %s", error)
            return False

    def _join(self, name: str | None) -> bool:
        """Be one group with all ranks, who are all here. Raises `RuntimeError` if that fails."""
        if name is None:
            return False
        soon = timedelta(seconds=MEETING_DEADLINE_S)
        ranks = _c10d().ProcessGroupGloo(_c10d().PrefixStore(name, self._store), self.rank, self._size, soon)
        ranks.allreduce([torch.ones(1)], self._least).wait()
        ranks._set_default_timeout(self._deadline)
        self._ranks = ranks
        self._meetings().went_well()
        return True

    def _meetings(self) -> Meeting:
        """Over a connection of its own: the job may wait in a call of its store for long. Raises `RuntimeError`."""
        if self._meeting is None:
            self._store = self._store.clone()
            self._store.set_timeout(timedelta(seconds=MEETING_DEADLINE_S))
            self._meeting = Meeting(self._store, self.rank, self._size)
        return self._meeting

    def _together(self) -> Any:
        """The group. Raises `AgreementLost` if this rank has left it."""
        if self._ranks is None:
            raise AgreementLost("this rank has left the others")
        return self._ranks

    def close(self) -> None:
        self._starter.shutdown()
        self.leave()

    def _run(self, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except RuntimeError as error:
            raise AgreementLost(f"another rank is gone or too slow: {error}") from error


def _c10d() -> Any:
    """What torch has below its collectives, where it has any."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


def _let_go(references: list[Any]) -> None:
    """Give up the last references to something, whose end may take a while."""
    references.clear()


def job_deadline_s() -> float:
    """How long the job's own process group waits for a rank; 0 if it does not say."""
    group = _c10d()._get_default_group()
    found = 0.0
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):  # no backend is there for this device, or one of another kind
            found = max(found, group._get_backend(device).options._timeout.total_seconds())
    return found


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


# ---------------------------------------------------------------------- routes of a spread: pure
#
# A broadcast among ranks of several nodes may bring the same bytes into a node as often as it has ranks there. So where
# a set of replicas has several on a node and is on several nodes, bytes go from their owner to the others on its node,
# from the first rank of that node to the first of every other, and from each of these to the rest of its node.


class Hop(NamedTuple):
    """One broadcast: from a rank to all of some ranks, itself among them. These ascend."""

    root: int
    ranks: tuple[int, ...]


def groups(members: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks that ever broadcast together, in the same order on every rank.

    Args:
        members: the ranks of a set of replicas.
        nodes: of every rank.
    """
    by_node = _by_node(members, nodes)
    firsts = tuple(sorted(ranks[0] for ranks in by_node))
    if len(by_node) in (1, len(members)):
        return [tuple(sorted(members))]
    return [firsts, *(ranks for ranks in by_node if len(ranks) > 1)]


def hops(owner: int, members: Sequence[int], nodes: Sequence[str]) -> list[Hop]:
    """Which broadcasts bring what `owner` has to all `members`, in this order; each is among one of `groups`."""
    found = groups(members, nodes)
    if len(found) == 1 and owner in found[0]:
        return [Hop(owner, found[0])]
    firsts, *within = found
    own = next((ranks for ranks in within if owner in ranks), None)
    path = [Hop(owner, own)] if own is not None else []
    path.append(Hop(owner if own is None else own[0], firsts))
    return path + [Hop(ranks[0], ranks) for ranks in within if ranks != own]


def _by_node(members: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(members):
        found.setdefault(nodes[rank], []).append(rank)
    return [tuple(ranks) for ranks in found.values()]
