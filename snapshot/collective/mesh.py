"""Messages between ranks: gloo connections of our own, opened on first use, and the collective calls built on them.

Gloo's own collectives are rings of 2 (P - 1) hops, and its groups connect every pair of ranks on creation. The calls
here take O(log P) messages. Every route uses distances that are powers of two, so a rank exchanges messages with the
same few ranks in all of them, and opens `sockets_needed` connections at most, whatever it takes part in.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import HoldfastError

T = TypeVar("T")

_AGREE, _UP, _DOWN, _SPREAD = range(4)
"""Tags. Messages between two ranks with the same tag arrive in the order in which they were sent."""

CLOSING_S = 2.0
"""Timeout for closing connections when this rank ends. A rank that does not answer may hold that up."""

FRAME = 64
"""A message of a minimum has a multiple of this many integers. Gloo aborts a process that is sent more than it awaits,
as it was by a rank elsewhere in its loop."""

_live: weakref.WeakSet[Mesh] = weakref.WeakSet()
"""Meshes whose thread may still run; they are closed when the process ends."""


ELSEWHERE = "another rank makes another call: it is elsewhere in its loop, or has left it"


class AgreementLost(HoldfastError):
    """Another rank is gone, did not take part in time, or took part in another call."""


class Mesh:
    """One rank's connections to the few ranks that it exchanges messages with.

    One thread makes all calls, in the order in which they were submitted. So all ranks make them in the same order, and
    messages travel while the training thread computes. Only that thread uses the connections. They close when the
    thread ends, or as soon as a call fails, so that ranks that wait for this one notice at once.

    Args:
        store: contains no keys of another mesh.
        deadline: how long a call waits for another rank.
    """

    def __init__(self, store: Any, rank: int, size: int, deadline: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.deadline = deadline
        gloo = c10d().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = deadline
        options._devices = [_device(gloo, name) for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
        self._connections: Any = gloo(store, rank, size, options)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: it may wait for a rank that never comes, which must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="holdfast-agree", daemon=True)
        self._thread.start()
        _live.add(self)

    def end(self) -> None:
        """Accept no more calls; calls that were submitted are still made. Does not block."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """After `end`: block until the connections are closed, for `seconds` at most. If the thread closed them while
        the interpreter shuts down, the process would crash."""
        self._thread.join(seconds)

    # ------------------------------------------------------------------ calls, which all ranks make in the same order

    def minimum(self, values: Callable[[], Sequence[int]], among: Sequence[int]) -> Future[list[int]]:
        """The element-wise minimum over ranks. `values` is called in the thread of the mesh, and may block there."""
        return self._submit(lambda: self._minimum(list(values()), among))

    def gather(self, data: bytes, among: Sequence[int]) -> Future[list[bytes]]:
        """The data of the ranks `among`, in their order. Each rank receives it once, whatever the lengths."""
        return self._submit(lambda: self._gather(data, among))

    def tell(self, data: bytes, root: int, among: Sequence[int]) -> Future[bytes]:
        """The data of `root`, one of the ranks `among`."""
        return self._submit(lambda: self._tell(data, root, among))

    def spread(self, pieces: Iterable[tuple[torch.Tensor, Sequence[Hop]]]) -> Future[None]:
        """Fill each flat tensor through its broadcasts. All ranks in them pass the same hops in the same order."""
        return self._submit(lambda: self._spread(pieces))

    # ------------------------------------------------------------------ the thread of the mesh; only it runs the calls

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, future = asked
            try:
                future.set_result(call())
            except RuntimeError as error:
                self._connections = None
                # Only the text of `error`: the error itself refers to the connections and would keep them open.
                future.set_exception(AgreementLost(f"another rank is gone or too slow: {error}"))
            except BaseException as error:
                future.set_exception(error)
            del call, future, asked
        self._connections = None

    def _start(self, name: str, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        if self._connections is None:
            raise RuntimeError("the connections were lost in an earlier call")
        return getattr(self._connections, name)([tensor], rank, tag)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self._start("send", tensor, rank, tag).wait(self.deadline)

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self._start("recv", tensor, rank, tag).wait(self.deadline)

    def _minimum(self, mine: list[int], among: Sequence[int]) -> list[int]:
        place, size, length = among.index(self.rank), len(among), [len(mine), -len(mine)]
        least = torch.tensor(length + mine + [0] * (-(len(mine) + 2) % FRAME), dtype=torch.int64)
        theirs = torch.empty_like(least)
        for distance in distances(size) if mine else ():
            # In this order: a send to a rank that is gone fails at once, and what arrives for a buffer that is gone by
            # then keeps Gloo's loop busy for good, so that the connections would never be closed.
            leaving = self._start("send", least, among[(place + distance) % size], _AGREE)
            arriving = self._start("recv", theirs, among[(place - distance) % size], _AGREE)
            arriving.wait(self.deadline)
            leaving.wait(self.deadline)
            torch.minimum(least, theirs, out=least)
        found: list[int] = least.tolist()
        if found[:2] != length:
            raise AgreementLost(ELSEWHERE)
        return found[2 : len(mine) + 2]

    def _gather(self, data: bytes, among: Sequence[int]) -> list[bytes]:
        here = branch(among.index(self.rank), 0, len(among))
        parts = [data]
        for child in here.children:
            parts += _unpack(self._take(among[child], _UP))
        packed = _pack(parts)
        if here.parent is not None:
            self._give(packed, among[here.parent], _UP)
        return _unpack(self._broadcast(packed, among[0], among))

    def _tell(self, data: bytes, root: int, among: Sequence[int]) -> bytes:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return self._broadcast(content, root, among).numpy().tobytes()

    def _broadcast(self, content: torch.Tensor, root: int, among: Sequence[int]) -> torch.Tensor:
        """The bytes of `root`, whatever their number; other ranks' are not looked at."""
        here = branch(among.index(self.rank), among.index(root), len(among))
        if here.parent is not None:
            content = self._take(among[here.parent], _DOWN)
        for child in reversed(here.children):
            self._give(content, among[child], _DOWN)
        return content

    def _spread(self, pieces: Iterable[tuple[torch.Tensor, Sequence[Hop]]]) -> None:
        for tensor, route in pieces:
            content = tensor.view(torch.uint8).cpu()
            for root, ranks in route:
                if self.rank in ranks:
                    here = branch(ranks.index(self.rank), ranks.index(root), len(ranks))
                    if here.parent is not None:
                        self._receive(content, ranks[here.parent], _SPREAD)
                    for child in reversed(here.children):
                        self._send(content, ranks[child], _SPREAD)
            if content.data_ptr() != tensor.data_ptr():
                tensor.view(torch.uint8).copy_(content)

    def _give(self, content: torch.Tensor, rank: int, tag: int) -> None:
        self._send(torch.tensor([content.numel()]), rank, tag)
        if content.numel():
            self._send(content, rank, tag)

    def _take(self, rank: int, tag: int) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        self._receive(length, rank, tag)
        content = torch.empty(int(length), dtype=torch.uint8)
        if content.numel():
            self._receive(content, rank, tag)
        return content


def close(meshes: Sequence[Mesh]) -> None:
    """End the meshes, and wait until their connections are closed, for `CLOSING_S` at most; see `Mesh.join`."""
    limit = time.monotonic() + CLOSING_S
    for mesh in meshes:
        mesh.end()
    for mesh in meshes:
        mesh.join(max(0.0, limit - time.monotonic()))


@atexit.register
def _close_what_is_left() -> None:
    close(list(_live))


def _pack(parts: Sequence[bytes]) -> torch.Tensor:
    """The number of parts, the length of each, and then the parts."""
    lengths = np.array([len(parts), *map(len, parts)], dtype=np.int64)
    return torch.frombuffer(bytearray(lengths.tobytes() + b"".join(parts)), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> list[bytes]:
    data = packed.numpy().data
    count = int.from_bytes(data[:8], "little")
    lengths = np.frombuffer(data, dtype=np.int64, count=count, offset=8)
    ends = 8 * (count + 1) + np.cumsum(lengths)
    return [bytes(data[end - length : end]) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _device(gloo: Any, interface: str) -> Any:
    """The network interface that connections use; if empty, the one that this host's name resolves to."""
    if interface:
        return gloo.create_device(interface=interface, lazy_init=True)
    return gloo.create_default_device(lazy_init=True)


def c10d() -> Any:
    """The layer below torch's collectives. Imported on use, as torch may be built without it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


def distances(size: int) -> list[int]:
    """How far each rank of `size` sends in each round of a dissemination, after which all ranks have heard from all.

    In a round with distance d, rank r sends what it knows to r + d, and receives from r - d (modulo `size`). The
    operation must be idempotent: unless `size` is a power of two, some values arrive twice. (Hensgen, Finkel, Manber,
    "Two algorithms for barrier synchronization", IJPP 17(1), 1988.)
    """
    return [1 << i for i in range((size - 1).bit_length())]


class Branch(NamedTuple):
    """A rank's neighbours in a binomial tree.

    Attributes:
        parent: None at the root.
        children: the nearest first. The subtree of a child has as many ranks as the child is away from here, or as many
            as are left. So the subtrees, in this order, cover consecutive ranks.
    """

    parent: int | None
    children: tuple[int, ...]


def branch(rank: int, root: int, size: int) -> Branch:
    """The neighbours of `rank` in the tree of `size` ranks whose root is `root`."""
    place = (rank - root) % size
    reach = place & -place or size
    away = [distance for distance in distances(size) if distance < reach and place + distance < size]
    parent = None if place == 0 else (rank - reach) % size
    return Branch(parent, tuple((rank + distance) % size for distance in away))


def sockets_needed(size: int) -> int:
    """Maximum number of connections that a rank of `size` opens for all of the above."""
    return min(size - 1, 2 * len(distances(size)))


# ---------------------------------------------------------------------- routes of a spread
#
# A broadcast among ranks of several nodes may bring the same bytes into a node once for each rank there. So if a set of
# replicas spans several nodes and has several ranks on one of them, bytes go from their owner to the other ranks on its
# node, from the first rank of that node to the first rank of every other node, and from there to the rest of that node.


class Hop(NamedTuple):
    """One broadcast, from `root` to `ranks`, which ascend and include the root."""

    root: int
    ranks: tuple[int, ...]


def hops(owner: int, members: Sequence[int], nodes: Sequence[str]) -> list[Hop]:
    """The broadcasts, in order, that bring the data of `owner` to all `members`.

    Args:
        members: the ranks of a set of replicas.
        nodes: the node of every rank.
    """
    by_node: dict[str, list[int]] = {}
    for rank in sorted(members):
        by_node.setdefault(nodes[rank], []).append(rank)
    if len(by_node) in (1, len(members)):
        return [Hop(owner, tuple(sorted(members)))]
    within = [tuple(ranks) for ranks in by_node.values() if len(ranks) > 1]
    own = next((ranks for ranks in within if owner in ranks), None)
    firsts = tuple(sorted(ranks[0] for ranks in by_node.values()))
    path = [Hop(owner, own)] if own is not None else []
    path.append(Hop(owner if own is None else own[0], firsts))
    return path + [Hop(ranks[0], ranks) for ranks in within if ranks != own]
