"""Persistent connections from this SMP to others, with their traffic counted. One owner thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.messages import PeerRequest, introduced
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.shared.transport import Message, SocketStream, connect, receive_reply


class Links:
    """One connection to each address in use. Calls raise as `SocketStream` does. Not thread-safe, except `interrupt`.

    A broken connection is dropped, and the next `send` opens a new one.

    Attributes:
        digest: xxh3-64 of the raw bytes of the last reply that had any.
    """

    def __init__(
        self,
        counters: Counters,
        deadline_s: float = CALL_DEADLINE_S,
        network: Network = MACHINE,
        source: str = "",
        patience: Callable[[Address, float], None] | None = None,
    ) -> None:
        """
        Args:
            deadline_s: timeout for each reply.
            patience: see `SocketStream.patience`; gets the address as its first argument.
            source: address of this machine to connect from; empty: the system chooses.
        """
        self._counters = counters
        self._deadline_s = deadline_s
        self._network = network
        self._source = source
        self._patience = patience
        self._streams: dict[Address, SocketStream] = {}
        self.digest = 0

    def connect(self, address: Address, job: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Connect to `address`, unless connected. `interrupt` does not reach a connection that is being opened."""
        if address not in self._streams:
            stream = connect(address, deadline_s, job, self._network, self._source)
            stream.set_deadline(self._deadline_s)
            if self._patience is not None:
                stream.patience = partial(self._patience, address)
            self._streams[address] = stream

    def set_deadline(self, seconds: float) -> None:
        """Set the timeout for each reply from now on."""
        self._deadline_s = seconds
        for stream in self._streams.values():
            stream.set_deadline(seconds)

    def send(self, address: Address, message: PeerRequest, payload: memoryview | None = None) -> None:
        """Send a message; its reply is `receive`d later, in order."""
        self.connect(address, message.job)
        try:
            self._streams[address].send(introduced(message), payload)
        except ProtocolError:
            raise  # the message is too long, and nothing of it was sent
        except BaseException:
            self.drop(address)
            raise
        if payload is not None:
            self._counters.add(bytes_sent=payload.nbytes)

    def receive(self, address: Address, out: memoryview | None = None) -> Message:
        """The reply to the oldest unanswered message. Its raw bytes must fill `out` exactly.

        Raises:
            HoldfastError: the error that the other side replied with, or one from `SocketStream.receive`.
            ProtocolError: the reply has another number of raw bytes; the connection is closed.
            SmpUnavailable: the connection is closed, and the reply is lost.
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
        return reply

    def call(self, address: Address, message: PeerRequest, out: memoryview | None = None) -> Message:
        """Send and receive."""
        self.send(address, message)
        return self.receive(address, out)

    def drop(self, address: Address) -> None:
        """Close a connection; outstanding replies are lost."""
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.close()

    def interrupt(self) -> None:
        """Close every connection, from any thread. Calls that wait on one, or use it next, raise `SmpUnavailable`."""
        for stream in list(self._streams.values()):
            stream.close()

    def close(self) -> None:
        """Close all connections."""
        for address in list(self._streams):
            self.drop(address)
