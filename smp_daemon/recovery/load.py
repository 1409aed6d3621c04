"""A shard from other SMPs, several at a time: the threads that carry out what `smp_daemon.recovery.asking` decides.

Each ask has a connection and a buffer of its own, so an answer that comes late, or is called off in the middle, never
touches the slot: only the first that is whole is copied there. `LANES` bounds threads, `LANES` and `IDLE` connections,
and `LANES` and `SUMS` buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.asking import LANES, AnswerUse, Ask, Asking, How, Ways
from holdfast.smp_daemon.recovery.units import Computation, UnitReader, place_of, waits_of
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
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import Message

IDLE = 8
"""Connections kept open for the next ask."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """An ask, and what it takes to carry it out: `length` bytes come back, into `buffer`."""

    ask: Ask
    what: Message
    links: Links
    buffer: memoryview
    length: int


class Load:
    """One shard on its way here. Make it, `run` it once."""

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
            out: where the shard goes, all of it.
            by_chain: whether helpers may pass sums on; else every term comes here.
            midway: called once, before the unit in the middle is asked for; everything waits for it.
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
        self._changed = system.Condition()
        self._asking = Asking(self._count, self._ways, by_chain=by_chain)
        self._computations: dict[int, Computation] = {}
        self._open: dict[int, Links] = {}
        self._called_off: set[int] = set()
        self._idle: list[tuple[Address, Links]] = []
        self._buffers: list[memoryview] = []
        self._writing = 0
        self._received = 0
        self._failure: Exception | None = None
        self._refusals: dict[int, HoldfastError] = {}
        self._episodes = Episodes(log)

    def run(self) -> int:
        """Fill `out`; bytes that came over the network for it, without what nobody waited for any more. Blocks until
        nothing writes to `out`.

        A thread that waits for somebody who does not answer is left to its deadline, and touches nothing then.

        Raises:
            Unrecoverable: nobody holds a unit, and too little of its stripe is left.
            DamagedSnapshot: what was computed for one does not match its digest.
        """
        for _ in range(min(LANES, 2 * self._count)):
            self._system.Thread(target=self._lane, name="load", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() and not self._writing)
            for links in self._open.values():
                links.interrupt()
            while self._idle:
                self._idle.pop()[1].close()
            if self._asking.again:
                self._counters.add(units_asked_again=self._asking.again)
            if self._failure is not None:
                raise self._failure
            if self._asking.hopeless is not None:
                raise self._refusal(self._asking.hopeless)
            text = "%s is here; units that somebody did not give were had from others"
            self._episodes.end("source", text, self._coord, extra=self._about())
            return self._received

    # ------------------------------------------------------------------ lanes

    def _lane(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._carry_out(job)
        except Exception as error:  # a bug, too, must end the load and not leave it waiting
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Blocks until there is something to ask for; None: the load is over."""
        with self._changed:
            while not self._is_over():
                now = self._system.monotonic()
                ask = self._asking.next(now)
                self._call_off()
                if ask is not None:
                    if self._midway is not None and ask.unit >= self._count // 2:
                        midway, self._midway = self._midway, None
                        midway()
                    job = self._job_of(ask)
                    if self._asking.has_more(now):
                        self._changed.notify_all()
                    return job
                if self._asking.over:
                    break
                self._changed.wait(self._asking.wait_s(now))
            self._changed.notify_all()
            return None

    def _job_of(self, ask: Ask) -> _Job:
        what, length = self._what(ask)
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(self._layout.unit_bytes))
        links = self._open[ask.number] = self._take_links(ask.through[0])
        return _Job(ask, what, links, buffer, length)

    def _carry_out(self, job: _Job) -> None:
        """Ask, wait for the answer, and do with it what is to be done."""
        ask, links, buffer = job.ask, job.links, job.buffer
        unit, out = self._unit(ask.unit), buffer[: job.length]
        try:
            links.connect(ask.through[0], self._layout.job)
            with self._changed:
                if ask.number in self._called_off or self._is_over():
                    raise SmpUnavailable("called off")
            self._reader.send(links, ask.through[0], job.what)
            field = "expected" if ask.how is How.CHAIN else "digest"
            reply = self._reader.receive(links, ask.through[0], out, field)
            waits = waits_of(reply)
        except HoldfastError as error:
            links.close()
            with self._changed:
                self._buffers.append(buffer)
                self._failed(ask, error)
            return
        with self._changed:
            self._give_back(ask, links)
            verdict = self._asking.answered(ask, self._system.monotonic(), waits)
            self._received += job.length if verdict is not AnswerUse.DROP else 0
            if ask.how is How.TERM and verdict in (AnswerUse.KEEP, AnswerUse.SUM):
                self._computations[ask.unit].add(ask.terms[0], buffer, reply)
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
                self._computations[ask.unit].finish(unit)
        except DamagedSnapshot as error:
            refusal = error
        finally:
            with self._changed:
                self._writing -= 1
        with self._changed:
            self._finish(ask.unit, refusal)
            if verdict is AnswerUse.WRITE:
                self._buffers.append(buffer)

    def _finish(self, index: int, refusal: HoldfastError | None) -> None:
        computation = self._computations.get(index)
        if computation is not None:
            self._buffers += computation.buffers.values()
            computation.buffers.clear()
        if refusal is not None:
            self._refusals[index] = refusal
            self._asking.spoilt(index)
        else:
            self._computations.pop(index, None)
            self._asking.written(index)
            self._call_off()
        if self._is_over():
            self._changed.notify_all()

    def _failed(self, ask: Ask, error: HoldfastError) -> None:
        ours = ask.number in self._called_off
        self._open.pop(ask.number)
        self._called_off.discard(ask.number)
        broke, silent = isinstance(error, SmpUnavailable), isinstance(error, DeadlineExceeded)
        self._asking.failed(ask, self._system.monotonic(), broke=broke, silent=silent)
        if ours or self._is_over():
            return
        known = broke or silent or isinstance(error, DamagedSnapshot | ProtocolError)
        if not known and ask.how is not How.CHAIN:
            self._failure = self._failure or error
        address = ask.through[0]
        text = "%s does not give unit %d of %s, %s: %s"
        extra = about(self._sources.snapshot, coord=self._coord, peer=address)
        self._episodes.begin("source", text, address, ask.unit, self._coord, ask.how.value, error, extra=extra)
        self._changed.notify_all()

    # ------------------------------------------------------------------ what is asked, and what comes

    def _ways(self, index: int) -> Ways:
        holders = self._sources.holders(self._coord)
        try:
            place = place_of(self._layout, self._coord, index)
        except Unrecoverable as error:
            self._refusals[index] = error
            return Ways(holders)
        found = self._computations[index] = Computation(self._reader, place, self._unit(index).nbytes)
        return Ways(holders, {number: unit.address for number, unit in found.operands.items()}, found.needed)

    def _what(self, ask: Ask) -> tuple[Message, int]:
        """What to request, and how many bytes come back."""
        length = self._unit(ask.unit).nbytes
        if ask.how is How.WHOLE:
            return {"op": "shard_unit", "coord": self._coord, "unit": ask.unit}, length
        computation = self._computations[ask.unit]
        if ask.how is How.CHAIN:
            return computation.chain(ask.terms), length
        operand = computation.operands[ask.terms[0]]
        return operand.what, operand.length

    def _refusal(self, index: int) -> HoldfastError:
        """Why a unit cannot be had."""
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
        return Links(self._counters)

    def _give_back(self, ask: Ask, links: Links) -> None:
        self._open.pop(ask.number)
        if ask.number in self._called_off:
            self._called_off.remove(ask.number)
            links.close()
            return
        self._idle.append((ask.through[0], links))
        if len(self._idle) > IDLE:
            self._idle.pop(0)[1].close()

    def _call_off(self) -> None:
        for number in self._asking.called_off():
            if number in self._open:
                self._called_off.add(number)
                self._open[number].interrupt()

    def _unit(self, index: int) -> memoryview:
        length = self._layout.unit_bytes
        return self._out[index * length : (index + 1) * length]

    def _is_over(self) -> bool:
        return self._failure is not None or self._asking.over

    def _about(self) -> dict[str, Any]:
        return about(self._sources.snapshot, coord=self._coord)
