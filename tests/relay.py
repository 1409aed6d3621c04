"""A relay between two SMPs that damages messages or cuts connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.smp_daemon.service import bind_tcp
from tests.deadlines import DEADLINE_S


class Relay:
    """Forwards connections to `target`, in threads of its own. Made by `relaying`.

    Attributes:
        address: the address that it listens on.
        spoilt, cuts: number of messages damaged, and of connections cut.
        connections: number of connections accepted.
        once: refuse all further connections after one has been cut.
    """

    def __init__(self, target: tuple[str, int], flips: list[int], cut_after: list[int]) -> None:
        """
        Args:
            flips: for each of the first messages with raw bytes, in either direction, the index of the bit to flip.
            cut_after: for each of the first connections, the number of raw bytes to the target before it is cut.
        """
        self.target = target
        self.spoilt = 0
        self.cuts = 0
        self.connections = 0
        self.once = False
        self._flips = flips
        self._cut_after = cut_after
        self._lock = threading.Lock()  # guards `_flips`, `_cut_after`, `cuts` and `spoilt`
        self._listening = bind_tcp(target[0], 0)
        self.address = (target[0], int(self._listening.getsockname()[1]))
        self._ends = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for sock in list(self._ends):
            _shut(sock)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for sock in self._ends:
            _shut(sock)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                coming, _ = self._listening.accept()
                self.connections += 1
                if self.once and self.cuts:
                    coming.close()
                    continue
                going = socket.create_connection(self.target, DEADLINE_S)
            except OSError:
                return  # the test is over
            going.settimeout(None)
            self._ends += [coming, going]
            with self._lock:
                budget = self._cut_after.pop(0) if self._cut_after else None
            for pair, limit in (((coming, going), budget), ((going, coming), None)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(*pair, limit)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while head := source.recv(16, socket.MSG_WAITALL):
                target.sendall(head + source.recv(int.from_bytes(head[4:8], "little"), socket.MSG_WAITALL))
                length = int.from_bytes(head[8:16], "little")
                body = self._spoil(bytearray(source.recv(length, socket.MSG_WAITALL)) if length else bytearray())
                if limit is not None and passed + len(body) > limit:
                    target.sendall(body[: limit - passed])
                    with self._lock:
                        self.cuts += 1
                    break
                passed += len(body)
                target.sendall(body)
        except OSError:
            pass  # one side has ended
        _shut(source)
        _shut(target)

    def _spoil(self, body: bytearray) -> bytearray:
        with self._lock:
            if body and self._flips:
                bit = self._flips.pop(0)
                body[bit // 8 % len(body)] ^= 1 << bit % 8
                self.spoilt += 1
        return body


@contextmanager
def relaying(
    target: tuple[str, int], *, flips: list[int] | None = None, cut_after: list[int] | None = None
) -> Iterator[Relay]:
    """A relay for a ``with`` block."""
    relay = Relay(target, flips or [], cut_after or [])
    try:
        yield relay
    finally:
        relay.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already shut down
