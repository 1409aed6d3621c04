"""The wire's process: passes packets between the TUN devices of nodes, and impairs them on request.

It exchanges JSON lines over one socket (file descriptor in argument 1), one answer to each request:

    in   {"op": "open", "host"}   {"op": "close", "host"}   {"op": "hits"}
         {"op": "impair", "kind", "hosts", "amount", "seed", "for_s"}: for_s of 0 is until the end
    out  {"namespace": path, "inode"}   {}   {}   {"hits": [[kind, packets], ...]}

It ends when its socket closes, and is killed when its parent dies; its devices disappear with it.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import json
import math
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from tests.proof.chaos.network import namespaces
from tests.proof.chaos.network.impairments import Impairment, after_all
from tests.proof.chaos.network.packets import UnitTracker, addresses

MTU_BYTES = 9000
BATCH = 64
"""Maximum number of packets that are read from one device before the others get their turn."""

PR_SET_PDEATHSIG = 1


class Forwarder:
    """The forwarder's loop, with the devices by address, all impairments, and the packets that are on their way."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""
        self._devices: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}
        self._impairments: list[Impairment] = []
        self._units = UnitTracker()
        self._late: list[tuple[float, int, bytes, bytes]] = []
        self._numbers = itertools.count()
        self._poll = select.epoll()

    def run(self) -> None:
        """Serve until the other end of the channel closes."""
        self._poll.register(self._channel, select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready = {fd for fd, _ in self._poll.poll(wait_s)}
            for device in ready - {self._channel.fileno()}:
                self._take(device)
            self._send_what_is_due()
            if self._channel.fileno() in ready and not self._listen():  # last: it may close devices that are ready
                return

    # ------------------------------------------------------------------ packets

    def _take(self, device: int) -> None:
        for _ in range(BATCH):
            try:
                packet = os.read(device, MTU_BYTES)
            except BlockingIOError:
                return
            link = addresses(packet)
            if link is None or link[1] not in self._devices:
                continue  # IPv6, which no node uses, or a packet for a node that is gone
            now = time.monotonic()
            unit = self._units.within(packet)  # also without impairments, to know all connections
            for at, each in after_all(self._impairments, packet, link, unit, now):
                if at <= now:
                    self._put(link[1], each)
                else:
                    heapq.heappush(self._late, (at, next(self._numbers), link[1], each))

    def _send_what_is_due(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._late)
            self._put(target, packet)

    def _put(self, target: bytes, packet: bytes) -> None:
        device = self._devices.get(target)
        if device is not None:  # None: it was closed while the packet was on its way
            try:
                os.write(device, packet)
            except BlockingIOError:
                pass  # its queue is full: the packet is lost, as on any network

    # ------------------------------------------------------------------ requests

    def _listen(self) -> bool:
        try:
            data = self._channel.recv(1 << 16)
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._channel.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")
        except (ConnectionResetError, BrokenPipeError):  # the other end was closed before it had read everything
            return False
        return bool(data)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "open":
            return self._open(message["host"])
        if message["op"] == "close":
            self._close(socket.inet_aton(message["host"]))
            return {}
        if message["op"] == "impair":
            until_s = time.monotonic() + message["for_s"] if message["for_s"] else math.inf
            hosts = frozenset(socket.inet_aton(host) for host in message["hosts"])
            self._impairments.append(Impairment(message["kind"], hosts, message["amount"], message["seed"], until_s))
            return {}
        assert message["op"] == "hits"
        return {"hits": [[each.kind, each.hits] for each in self._impairments]}

    def _open(self, host: str) -> dict[str, Any]:
        address = socket.inet_aton(host)
        namespace, device = namespaces.make(host, MTU_BYTES)
        self._namespaces[address], self._devices[address] = namespace, device
        self._poll.register(device, select.EPOLLIN)
        return {"namespace": f"/proc/{os.getpid()}/fd/{namespace}", "inode": os.fstat(namespace).st_ino}

    def _close(self, address: bytes) -> None:
        if address not in self._devices:
            return  # a node may be lost twice before it is replaced
        device = self._devices.pop(address)
        self._poll.unregister(device)
        os.close(device)
        os.close(self._namespaces.pop(address))


def main() -> None:
    """``python -m tests.proof.chaos.network.forwarder FD``"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Forwarder(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
