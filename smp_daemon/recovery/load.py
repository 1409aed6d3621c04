"""A shard from other SMPs, several at a time: the threads that carry out what `smp_daemon.recovery.asking` decides.

Each ask has a connection and a buffer of its own, so an answer that comes late, or is called off in the middle, never
touches the slot: only the first that is whole is copied there. `LANES` bounds threads, `LANES` and `IDLE` connections,
and `LANES` and `SUMS` buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.ec import TooManyErasures, choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.asking import LANES, Ask, Asking, How, Verdict, Ways
from holdfast.smp_daemon.recovery.fetch import digests_of
from holdfast.smp_daemon.shared import fields
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
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.stored import StoredUnit, padding_of, place_of, stored_units
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import Message

IDLE = 8
"""Connections kept open for the next ask."""

MICROSECONDS = 1e6
MAX_WAIT_US = 1 << 40

log = get_log(__name__)


@dataclass(slots=True)
class _Sum:
    """A unit that is summed here: its terms, and what they say of its digest."""

    units: dict[int, memoryview] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Job:
    """An ask, and what it takes to carry it out: `length` bytes come back, into `buffer`."""

    ask: Ask
    message: Message
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
        self._backend = backend
        self._midway: Callable[[], None] | None = midway
        self._count = -(-out.nbytes // self._layout.unit_bytes)
        self._changed = system.Condition()
        self._asking = Asking(self._count, self._ways, by_chain=by_chain)
        self._terms: dict[int, dict[int, StoredUnit]] = {}
        self._sums: dict[int, _Sum] = {}
        self._open: dict[int, Links] = {}
        self._called_off: set[int] = set()
        self._idle: list[tuple[Address, Links]] = []
        self._buffers: list[memoryview] = []
        self._writing = 0
        self._received = 0
        self._failure: Exception | None = None
        self._damage: dict[int, DamagedSnapshot] = {}
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
        message, length = self._message(ask, self._unit(ask.unit).nbytes)
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(self._layout.unit_bytes))
        links = self._open[ask.number] = self._take_links(ask.through[0])
        return _Job(ask, message, links, buffer, length)

    def _carry_out(self, job: _Job) -> None:
        """Ask, wait for the answer, and do with it what is to be done."""
        ask, links, buffer = job.ask, job.links, job.buffer
        unit, out = self._unit(ask.unit), buffer[: job.length]
        try:
            links.connect(ask.through[0], self._layout.job)
            with self._changed:
                if ask.number in self._called_off or self._is_over():
                    raise SmpUnavailable("called off")
            reply = links.call(ask.through[0], job.message, out)
            waits = self._check(ask, reply, out)
        except HoldfastError as error:
            links.close()
            with self._changed:
                self._buffers.append(buffer)
                self._failed(ask, error)
            return
        with self._changed:
            self._give_back(ask, links)
            verdict = self._asking.answered(ask, self._system.monotonic(), waits)
            self._received += job.length if verdict is not Verdict.DROP else 0
            if ask.how is How.TERM and verdict in (Verdict.KEEP, Verdict.SUM):
                self._keep(ask, reply, buffer, unit.nbytes)
            elif verdict is Verdict.DROP:
                self._buffers.append(buffer)
            if verdict not in (Verdict.WRITE, Verdict.SUM):
                return
            self._writing += 1
        damage: DamagedSnapshot | None = None
        try:
            if verdict is Verdict.WRITE:
                np.copyto(np.frombuffer(unit, np.uint8), np.frombuffer(out, np.uint8))
            else:
                damage = self._sum_up(ask.unit, unit)
        finally:
            with self._changed:
                self._writing -= 1
        with self._changed:
            self._finish(ask.unit, damage)
            if verdict is Verdict.WRITE:
                self._buffers.append(buffer)

    def _finish(self, index: int, damage: DamagedSnapshot | None) -> None:
        total = self._sums.pop(index, None)
        if total is not None:
            self._buffers += total.units.values()
        if damage is not None:
            self._damage[index] = damage
            self._asking.spoilt(index)
        else:
            self._terms.pop(index, None)
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
            group, stripe, number = place_of(self._layout, self._coord, index)
        except Unrecoverable:
            return Ways(holders)
        terms = {unit.number: unit for unit in stored_units(self._sources, group, stripe) if unit.number != number}
        self._terms[index] = terms
        zeros = [other for other in padding_of(self._layout, group, stripe) if other != number]
        needed = self._layout.stripes(group).data - len(zeros)
        return Ways(holders, {other: unit.address for other, unit in terms.items()}, needed)

    def _message(self, ask: Ask, length: int) -> tuple[Message, int]:
        """What to send, and how many bytes come back."""
        common = {"job": self._layout.job, "snapshot": self._sources.snapshot}
        if ask.how is How.WHOLE:
            return common | {"op": "shard_unit", "coord": self._coord, "unit": ask.unit}, length
        terms = self._terms[ask.unit]
        if ask.how is How.TERM:
            return common | terms[ask.terms[0]].what, terms[ask.terms[0]].length
        group, stripe, number = place_of(self._layout, self._coord, ask.unit)
        stripes = self._layout.stripes(group)
        codec = choose_codec(stripes.data, stripes.parity, self._backend)
        zeros = [other for other in padding_of(self._layout, group, stripe) if other != number]
        factors = codec.coefficients([*ask.terms, *zeros], number)
        chain = [
            {"at": list(terms[term].address), "what": terms[term].what, "factor": factors.get(term, 0)}
            for term in ask.terms
        ]
        position = stripes.data_positions(stripe)[number]
        return common | {"op": "partial", "terms": chain, "length": length, "position": position}, length

    def _check(self, ask: Ask, reply: Message, out: memoryview) -> tuple[float, ...]:
        """Raises unless it is what was sealed; how long each helper of a chain waited for the next, in seconds."""
        expected = "expected" if ask.how is How.CHAIN else "digest"
        if digest(out) != fields.number(reply, expected):
            self._counters.add(units_damaged=1)
            raise DamagedSnapshot(f"unit {ask.unit} of {self._coord} does not match its digest")
        return waits_of(reply)

    def _keep(self, ask: Ask, reply: Message, buffer: memoryview, length: int) -> None:
        """A term has come: as long as the unit, with zeros where it is shorter."""
        term = self._terms[ask.unit][ask.terms[0]]
        if term.length < length:
            np.frombuffer(buffer, np.uint8)[term.length : length] = 0
        total = self._sums.setdefault(ask.unit, _Sum())
        total.units[term.number] = buffer
        total.digests |= digests_of(reply)

    def _sum_up(self, index: int, out: memoryview) -> DamagedSnapshot | None:
        """Compute a unit from its terms, in place; what is wrong with it, if anything."""
        group, stripe, number = place_of(self._layout, self._coord, index)
        stripes, total = self._layout.stripes(group), self._sums[index]
        units = {term: buffer[: out.nbytes] for term, buffer in total.units.items()}
        zeros = memoryview(bytes(out.nbytes))
        units |= {other: zeros for other in padding_of(self._layout, group, stripe) if other != number}
        choose_codec(stripes.data, stripes.parity, self._backend).reconstruct(units, {number: out})
        expected = total.digests.get(stripes.data_positions(stripe)[number])
        if expected is not None and digest(out) == expected:
            return None
        self._counters.add(units_damaged=1)
        return DamagedSnapshot(f"unit {number} of stripe {stripe} was computed and does not match its digest")

    def _refusal(self, index: int) -> HoldfastError:
        """Why a unit cannot be had."""
        if index in self._damage:
            return self._damage[index]
        try:
            group, stripe, _ = place_of(self._layout, self._coord, index)
            total = self._sums.get(index)
            units = {number: memoryview(b"") for number in total.units} if total is not None else {}
            stripes = self._layout.stripes(group)
            choose_codec(stripes.data, stripes.parity, self._backend).reconstruct(units, {0: memoryview(b"")})
        except TooManyErasures as error:
            return Unrecoverable(f"stripe {stripe} of group {group}: {error}")
        except Unrecoverable as error:
            return error
        return Unrecoverable(f"unit {index} of {self._coord} cannot be had")

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


def waits_of(reply: Message) -> tuple[float, ...]:
    """How long each helper of a chain, but the last, waited for the next, in seconds. Raises `ProtocolError`."""
    said = reply.get("waits", [])
    if not isinstance(said, list):
        raise ProtocolError("'waits' must be a list of microseconds")
    return tuple(fields.number({"wait": wait}, "wait", MAX_WAIT_US) / MICROSECONDS for wait in said)
