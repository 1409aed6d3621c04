"""Connections from this SMP to others, kept open, and what goes over them counted. One owner thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.messages import PeerRequest, introduced
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import Message, SocketStream, connect, receive_reply


class Links:
    """A connection to each address that was asked for; calls raise as `Stream` does. Not thread-safe, save `interrupt`.

    A connection that breaks is forgotten, and the next `send` makes a new one.

    Attributes:
        bytes_received: raw bytes that came with replies.
        digest: xxh3-64 of those that came with the last reply that had any.
    """

    def __init__(
        self,
        counters: Counters,
        deadline_s: float = CALL_DEADLINE_S,
        system: System = MACHINE,
        source: str = "",
        patience: Callable[[Address, float], None] | None = None,
    ) -> None:
        """
        Args:
            deadline_s: how long each answer may take.
            patience: see `SocketStream.patience`; of which address it is, it is told first.
            source: address of this machine that connections come from; empty: whichever the system chooses.
        """
        self._counters = counters
        self._deadline_s = deadline_s
        self._system = system
        self._source = source
        self._patience = patience
        self._streams: dict[Address, SocketStream] = {}
        self.bytes_received = 0
        self.digest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, address: Address, job: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Have a connection to `address`. While it is made `interrupt` does not reach it."""
        if address not in self._streams:
            stream = connect(address, deadline_s, job, self._system, self._source)
            stream.set_deadline(self._deadline_s)
            if self._patience is not None:
                stream.patience = partial(self._patience, address)
            self._streams[address] = stream

    def send(self, address: Address, message: PeerRequest, payload: memoryview | None = None) -> None:
        """Send a message; its reply is `receive`d later, in order."""
        self.connect(address, message.job)
        try:
            self._streams[address].send(introduced(message), payload)
        except ProtocolError:
            raise  # it is too long, and nothing of it was sent
        except BaseException:
            self.drop(address)
            raise
        if payload is not None:
            self._counters.add(bytes_sent=payload.nbytes)

    def receive(self, address: Address, out: memoryview | None = None) -> Message:
        """The reply to the oldest message without one; the raw bytes with it must just fill `out`.

        Raises:
            HoldfastError: the other side's error, or what `Stream.receive` raises.
            ProtocolError: the reply has another number of raw bytes; the connection is over.
            SmpUnavailable: the connection is over, and the reply with it.
        """
        stream = self._streams.get(address)
        if stream is None:
            raise SmpUnavailable(f"the connection to {address} is over")
        try:
            reply, payload = receive_reply(stream)
        except BaseException:
            if stream.closed:
                self.drop(address)
            raise
        if payload != (out.nbytes if out is not None else 0):
            self.drop(address)
            raise ProtocolError(f"{address} sent {payload} bytes where {out.nbytes if out else 0} were expected")
        if out is not None:
            try:
                self.digest = stream.receive_into(out)
            except BaseException:
                self.drop(address)
                raise
            self._counters.add(bytes_received=payload)
            self.bytes_received += payload
        return reply

    def call(self, address: Address, message: PeerRequest, out: memoryview | None = None) -> Message:
        """Send and receive."""
        self.send(address, message)
        return self.receive(address, out)

    def drop(self, address: Address) -> None:
        """End a connection; replies that were still to come are lost."""
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.close()

    def interrupt(self) -> None:
        """End every connection from another thread: who waits on one, or uses it next, gets `SmpUnavailable`."""
        for stream in list(self._streams.values()):
            stream.close()

    def close(self) -> None:
        """End all of them."""
        for address in list(self._streams):
            self.drop(address)
