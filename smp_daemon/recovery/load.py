"""Loads a shard from several SMPs at a time: the threads that carry out what `smp_daemon.recovery.requests` decides.

Each request has its own connection and buffer, so an answer that comes late, or is cancelled midway, never touches the
slot: only the first complete answer is copied there. `MAX_IN_FLIGHT` bounds the number of threads, together with `IDLE`
the connections, and together with `MAX_SUMS` the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.requests import MAX_IN_FLIGHT, AnswerUse, How, RequestScheduler, UnitRequest, Ways
from holdfast.smp_daemon.recovery.units import Computation, UnitReader, place_of
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import ParityUnit, PartialSum, ShardUnit, UnitReply
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.system import MACHINE, System

IDLE = 8
"""Most idle connections that are kept open for later requests."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A request with everything needed to carry it out: `length` bytes come back, into `buffer`."""

    request: UnitRequest
    what: ShardUnit | ParityUnit | PartialSum
    links: Links
    buffer: memoryview
    length: int


class Load:
    """The transfer of one shard to this node. Make it, and call `run` once."""

    def __init__(
        self,
        sources: Sources,
        coord: str,
        out: memoryview,
        counters: Counters,
        backend: str,
        *,
        by_chain: bool,
        midway: Callable[[], None],
        system: System = MACHINE,
    ) -> None:
        """
        Args:
            out: where the whole shard goes.
            by_chain: whether helpers may pass sums on; otherwise every operand comes here.
            midway: called once, before the middle unit is requested. All threads wait for it: the lock is held.
        """
        self._system = system
        self._sources = sources
        self._layout = sources.layout
        self._coord = coord
        self._out = out
        self._counters = counters
        self._reader = UnitReader(sources, counters, backend)
        self._midway: Callable[[], None] | None = midway
        self._count = -(-out.nbytes // self._layout.unit_bytes)
        # Guards `_midway` and all fields below. Notified when there may be something to request, or when the load is
        # over. The worker threads and the caller of `run` take it, never with the store's lock held. While they hold it
        # they take no locks but those of streams, counters and logs. Connections and buffers belong to the thread that
        # carries out the request; other threads may only `interrupt` a connection. A unit of `out` and its computation
        # belong to the one thread whose answer the scheduler chose.
        self._changed = system.Condition()
        self._scheduler = RequestScheduler(self._count, self._ways, by_chain=by_chain)
        self._computations: dict[int, Computation] = {}
        self._open: dict[int, Links] = {}
        self._cancelled: set[int] = set()
        self._idle: list[tuple[Address, Links]] = []
        self._buffers: list[memoryview] = []
        self._writing = 0
        self._received = 0
        self._failure: Exception | None = None
        self._refusals: dict[int, HoldfastError] = {}
        self._episodes = Episodes(log)

    def run(self) -> int:
        """Fill `out`. Returns the bytes that came over the network for it, without answers that were dropped. Blocks
        until no thread writes to `out`.

        A thread that still waits for a source is left to run into its deadline, and writes nothing then.

        Raises:
            Unrecoverable: no SMP gives a unit, and too little of its stripe is left.
            DamagedSnapshot: a computed unit does not match its digest.
        """
        for _ in range(min(MAX_IN_FLIGHT, 2 * self._count)):
            self._system.Thread(target=self._worker, name="load", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() and not self._writing)
            for links in self._open.values():
                links.interrupt()
            while self._idle:
                self._idle.pop()[1].close()
            if self._scheduler.hedged:
                self._counters.add(units_requested_again=self._scheduler.hedged)
            if self._failure is not None:
                raise self._failure
            if self._scheduler.hopeless is not None:
                raise self._refusal(self._scheduler.hopeless)
            text = "%s is loaded; units that a source did not give came from others"
            self._episodes.end("source", text, self._coord, extra=self._about())
            return self._received

    # ------------------------------------------------------------------ threads

    def _worker(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._carry_out(job)
        except Exception as error:  # even a bug must end the load, not leave `run` waiting
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next(self) -> _Fetch | None:
        """Block until there is something to request; None: the load is over."""
        with self._changed:
            while not self._is_over():
                now = self._system.monotonic()
                request = self._scheduler.next(now)
                self._cancel()
                if request is not None:
                    if self._midway is not None and request.unit >= self._count // 2:
                        midway, self._midway = self._midway, None
                        midway()
                    job = self._job_of(request)
                    if self._scheduler.has_more(now):
                        self._changed.notify_all()
                    return job
                if self._scheduler.over:
                    break
                self._changed.wait(self._scheduler.wait_s(now))
            self._changed.notify_all()
            return None

    def _job_of(self, request: UnitRequest) -> _Fetch:
        what, length = self._what(request)
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(self._layout.unit_bytes))
        links = self._open[request.number] = self._take_links(request.through[0])
        return _Fetch(request, what, links, buffer, length)

    def _carry_out(self, job: _Fetch) -> None:
        """Send the request, wait for the answer, and use it. Holds the lock only for bookkeeping."""
        request, links, buffer = job.request, job.links, job.buffer
        unit, out = self._unit(request.unit), buffer[: job.length]
        try:
            address = self._connect(job)
            with self._changed:
                if request.number in self._cancelled or self._is_over():
                    raise SmpUnavailable("cancelled")
            self._reader.send(links, address, job.what)
            reply: UnitReply | None = None
            waits: tuple[float, ...] = ()
            if request.how is How.CHAIN:
                waits = self._reader.receive_sum(links, address, out)
            else:
                reply = self._reader.receive(links, address, out)
        except HoldfastError as error:
            links.close()
            with self._changed:
                self._buffers.append(buffer)
                self._failed(request, error)
            return
        with self._changed:
            self._give_back(request, links)
            verdict = self._scheduler.answered(request, self._system.monotonic(), waits)
            self._received += job.length if verdict is not AnswerUse.DROP else 0
            if reply is not None and request.how is How.OPERAND and verdict in (AnswerUse.KEEP, AnswerUse.SUM):
                self._computations[request.unit].add(request.operands[0], buffer, reply)
            elif verdict is AnswerUse.DROP:
                self._buffers.append(buffer)
            if verdict not in (AnswerUse.WRITE, AnswerUse.SUM):
                return
            self._writing += 1
        refusal: HoldfastError | None = None
        try:
            if verdict is AnswerUse.WRITE:
                np.copyto(np.frombuffer(unit, np.uint8), np.frombuffer(out, np.uint8))
            else:
                self._computations[request.unit].finish(unit)
        except DamagedSnapshot as error:
            refusal = error
        finally:
            with self._changed:
                self._writing -= 1
        with self._changed:
            self._finish(request.unit, refusal)
            if verdict is AnswerUse.WRITE:
                self._buffers.append(buffer)

    def _connect(self, job: _Fetch) -> Address:
        """Connect to the node that is asked, and return the address used. Requests use its addresses in turn."""
        ways = self._layout.ways_to(job.request.through[0])
        first = job.request.number % len(ways)
        problem: HoldfastError | None = None
        for address in (*ways[first:], *ways[:first]):
            try:
                job.links.connect(address, self._layout.job)
                return address
            except (SmpUnavailable, DeadlineExceeded) as error:
                problem = error
        assert problem is not None
        raise problem

    def _finish(self, index: int, refusal: HoldfastError | None) -> None:
        computation = self._computations.get(index)
        if computation is not None:
            self._buffers += computation.buffers.values()
            computation.buffers.clear()
        if refusal is not None:
            self._refusals[index] = refusal
            self._scheduler.spoilt(index)
        else:
            self._computations.pop(index, None)
            self._scheduler.written(index)
            self._cancel()
        if self._is_over():
            self._changed.notify_all()

    def _failed(self, request: UnitRequest, error: HoldfastError) -> None:
        ours = request.number in self._cancelled
        self._open.pop(request.number)
        self._cancelled.discard(request.number)
        broke, silent = isinstance(error, SmpUnavailable), isinstance(error, DeadlineExceeded)
        self._scheduler.failed(request, self._system.monotonic(), broke=broke, silent=silent)
        if ours or self._is_over():
            return
        known = broke or silent or isinstance(error, DamagedSnapshot | ProtocolError)
        if not known and request.how is not How.CHAIN:
            self._failure = self._failure or error
        address = request.through[0]
        text = "%s does not give unit %d of %s, requested as %s: %s"
        extra = about(self._sources.snapshot, coord=self._coord, peer=address)
        self._episodes.begin("source", text, address, request.unit, self._coord, request.how.value, error, extra=extra)
        self._changed.notify_all()

    # ------------------------------------------------------------------ what is requested

    def _ways(self, index: int) -> Ways:
        holders = self._sources.holders(self._coord)
        try:
            place = place_of(self._layout, self._coord, index)
        except Unrecoverable as error:
            self._refusals[index] = error
            return Ways(holders)
        found = self._computations[index] = Computation(self._reader, place, self._unit(index).nbytes)
        return Ways(holders, {number: unit.address for number, unit in found.operands.items()}, found.needed)

    def _what(self, request: UnitRequest) -> tuple[ShardUnit | ParityUnit | PartialSum, int]:
        """What to request, and how many bytes come back."""
        length = self._unit(request.unit).nbytes
        if request.how is How.WHOLE:
            return ShardUnit(self._coord, request.unit), length
        computation = self._computations[request.unit]
        if request.how is How.CHAIN:
            return computation.chain(request.operands), length
        operand = computation.operands[request.operands[0]]
        return operand.what, operand.length

    def _refusal(self, index: int) -> HoldfastError:
        """The error that says why a unit cannot be got."""
        if index not in self._refusals:
            try:
                self._computations[index].finish(memoryview(bytearray(self._unit(index).nbytes)))
            except HoldfastError as error:
                return error
        return self._refusals[index]

    # ------------------------------------------------------------------ connections and buffers

    def _take_links(self, address: Address) -> Links:
        for place, (other, links) in enumerate(self._idle):
            if other == address:
                del self._idle[place]
                return links
        return Links(self._counters, system=self._system)

    def _give_back(self, request: UnitRequest, links: Links) -> None:
        self._open.pop(request.number)
        if request.number in self._cancelled:
            self._cancelled.remove(request.number)
            links.close()
            return
        self._idle.append((request.through[0], links))
        if len(self._idle) > IDLE:
            self._idle.pop(0)[1].close()

    def _cancel(self) -> None:
        for number in self._scheduler.cancelled():
            if number in self._open:
                self._cancelled.add(number)
                self._open[number].interrupt()

    def _unit(self, index: int) -> memoryview:
        length = self._layout.unit_bytes
        return self._out[index * length : (index + 1) * length]

    def _is_over(self) -> bool:
        return self._failure is not None or self._scheduler.over

    def _about(self) -> dict[str, Any]:
        return about(self._sources.snapshot, coord=self._coord)
