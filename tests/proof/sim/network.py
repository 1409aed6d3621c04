"""Sockets between simulated processes: bytes take time, connections break, hosts fall silent, bits flip in transit.

`shared.transport` gets `SimSocket` in place of `socket.socket`, so frames, deadlines and errors are those of
production. A stream stays in order, as with TCP. Bytes are lost only with their connection. What was in transit on a
connection that breaks may still arrive, late. A message that is sent again on another connection may thus arrive twice,
or overtake the first copy.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.proof.sim.costs import Costs
from tests.proof.sim.memory import Disk
from tests.proof.sim.scheduler import Scheduler, active
from tests.proof.sim.tasks import SimProcess, Task

FIRST_PORT = 20_000
HELD_EVERY_S = 0.2
"""How long bytes wait at a cut link before they try again to pass, in seconds."""

Address = tuple[str, int] | str


class Network:
    """All hosts and the links between them.

    Attributes:
        latency_s: mean time that bytes take from host to host.
        flip_chance: probability that a bit of a payload flips in transit.
        break_chance: probability that a connection breaks when bytes are sent; also that a gRPC call or reply is lost,
            or a call repeated.
        capacity: how many writes may be in transit or unread on a connection before the sender blocks.
        counts: faults that struck, by kind.
        listeners, servers: listening sockets, and gRPC servers, by address.
        cut, dark: hosts that are cut off for a while, and hosts that are lost.
        sides: hosts that are gone together, by the number of their side; all others are on side 0. Nothing passes from
            side to side.
        disk: holds the names of local sockets.
        costs: how long raw bytes take; None: no time, whatever their number.
        serving: the numbers of the tasks that answer other hosts; see `tests.proof.sim.costs`.
    """

    def __init__(self, scheduler: Scheduler, disk: Disk) -> None:
        self.scheduler = scheduler
        self.disk = disk
        self.random = scheduler.random
        self.latency_s = 0.0005
        self.flip_chance = 0.0
        self.break_chance = 0.0
        self.capacity = 64
        self.counts: Counter[str] = Counter()
        self.listeners: dict[Address, SimSocket] = {}
        self.servers: dict[str, Any] = {}
        self.cut: set[str] = set()
        self.dark: set[str] = set()
        self.sides: dict[str, int] = {}
        self.costs: Costs | None = None
        self.serving: set[int] = set()
        self._streams: Counter[tuple[str, str]] = Counter()
        self._port = FIRST_PORT

    @contextmanager
    def stream(self, sender: str, receiver: str) -> Iterator[int]:
        """Bytes go from one host to another within the block. Gives how many streams share the busier of the two cards
        as it begins: each gets that part of its rate."""
        ways = [("out", sender), ("in", receiver)]
        self._streams.update(ways)
        try:
            yield max(self._streams[way] for way in ways)
        finally:
            self._streams.subtract(ways)

    def free_port(self) -> int:
        """Return a port that was never used before."""
        self._port += 1
        return self._port

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing can pass between two hosts now."""
        if one == other or not (self.cut or self.dark or self.sides):
            return False
        if self.sides.get(one, 0) != self.sides.get(other, 0):
            return True
        return one in self.cut or other in self.cut or one in self.dark or other in self.dark

    def is_dark(self, one: str, other: str) -> bool:
        """Whether nothing can ever pass between two hosts again."""
        return bool(self.dark) and one != other and (one in self.dark or other in self.dark)

    def delay_s(self, one: str, other: str) -> float:
        """Draw how long something takes from host to host; 0 within one host."""
        if one == other:
            return 0.0
        return self.random.random() * 2 * self.latency_s

    def lose_host(self, host: str) -> None:
        """Cut a host off for ever without closing its connections: peers that wait for it wait until a deadline."""
        self.dark.add(host)

    def repair(self) -> None:
        """Restore all cut links, and let nothing break or flip from now on."""
        self.cut.clear()
        self.flip_chance = self.break_chance = 0.0


_network: Network | None = None


def network() -> Network:
    """The network of the current run."""
    assert _network is not None
    return _network


def use(one: Network) -> None:
    """Put all sockets made from now on into this network."""
    global _network
    _network = one


class SimSocket:
    """The part of `socket.socket` that `smp_daemon.shared.transport` uses."""

    def __init__(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> None:
        self._network = network()
        self._scheduler = active()
        self.process: SimProcess = self._scheduler.current.process
        self._local = family == socket.AF_UNIX
        self._timeout: float | None = None
        self._address: Address = ("", 0)
        self.peer: SimSocket | None = None
        self._inbox: deque[bytes] = deque()
        self._offset = 0
        self._wire: deque[tuple[float, bytes]] = deque()
        self._backlog: deque[SimSocket] = deque()
        self._waiting: list[Task] = []
        self._ended = self._reset = self._closed = self._shut = self._listening = self._answers = False
        self._adopt(self.process)

    def _adopt(self, process: SimProcess) -> None:
        self.process = process
        process.on_death[id(self)] = self._owner_died

    # ------------------------------------------------------------------ set-up

    def setsockopt(self, *arguments: object) -> None:
        """Does nothing: options have no effect here."""

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """Return the credentials of a local peer, the only option that is read."""
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())

    def settimeout(self, seconds: float | None) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the socket is closed")
        self._timeout = seconds

    def bind(self, address: Any) -> None:
        if self._local:
            self._network.disk.touch(address)
            self._address = address
            return
        host, port = address
        port = port or self._network.free_port()
        if (host, port) in self._network.listeners:
            raise OSError(errno.EADDRINUSE, "the address is taken")
        self._address = (host, port)

    def listen(self, backlog: int) -> None:
        self._listening = True
        self._network.listeners[self._address] = self

    def getsockname(self) -> Any:
        return self._address

    def getpeername(self) -> Any:
        """Return an address of another machine, whose users nobody is asked for."""
        return "192.0.2.1", 0

    def fileno(self) -> int:
        return -1 if self._closed else 3

    # ------------------------------------------------------------------ connections

    def connect(self, address: Any) -> None:
        self._scheduler.point()
        target: Address = str(address) if self._local else (str(address[0]), int(address[1]))
        if not self._local:
            self._pass_link(str(target[0]))
        listener = self._network.listeners.get(target)
        if listener is None or not listener.process.alive or listener._closed:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        far = SimSocket(socket.AF_UNIX if self._local else socket.AF_INET)
        far._answers = not self._local
        far.process.on_death.pop(id(far), None)
        far._adopt(listener.process)
        self.peer, far.peer = far, self
        listener._backlog.append(far)
        listener._wake()

    def _pass_link(self, host: str) -> None:
        """Wait until the other host is reached. Raises `TimeoutError` after the socket's timeout."""
        scheduler, here = self._scheduler, self.process.host
        end = None if self._timeout is None else scheduler.now + self._timeout
        while self._network.is_cut(here, host):
            if end is not None and scheduler.now >= end:
                raise TimeoutError("the host does not answer")
            scheduler.sleep(min(1.0, end - scheduler.now) if end is not None else 1.0)
        delay = self._network.delay_s(here, host)
        if delay:
            scheduler.sleep(delay)

    def accept(self) -> tuple[SimSocket, Any]:
        self._scheduler.point()
        while not self._backlog:
            if self._closed or self._shut:
                raise OSError(errno.EINVAL, "the socket does not listen any more")
            self._wait("accept")
        return self._backlog.popleft(), ("peer", 0)

    # ------------------------------------------------------------------ bytes

    def sendall(self, data: Any) -> None:
        self._scheduler.point()
        payload = isinstance(data, memoryview)
        content = bytes(data)
        if self._closed or self._reset or self._shut:
            self._check_open()
        peer = self.peer
        if peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if not self._local:
            content = self._hazards(content, payload)
            if payload and self._network.costs is not None:
                self._take_time(peer, self._network.costs.first_s("network", len(content)))
        while len(peer._wire) + len(peer._inbox) >= self._network.capacity and not peer._closed:
            self._wait("send")
            self._check_open()
        if peer._closed:
            if not self._is_cut(peer):  # the bytes are lost, and answered with a reset
                delay = self._network.delay_s(self.process.host, peer.process.host)
                self._scheduler.at(self._scheduler.now + delay, self._be_reset)
            return
        delay = 0.0 if self._local else self._network.delay_s(self.process.host, peer.process.host)
        if not delay and not peer._wire and not self._is_cut(peer):
            peer._inbox.append(content)
            peer._wake()
            return
        last = peer._wire[-1][0] if peer._wire else 0.0
        peer._wire.append((max(last, self._scheduler.now + delay), content))
        if len(peer._wire) == 1:
            self._scheduler.at(peer._wire[0][0], peer._arrive)

    def recv_into(self, buffer: Any) -> int:
        self._scheduler.point()
        if self._answers:
            self._network.serving.add(self._scheduler.current.number)
        while not self._inbox:
            if self._closed:
                raise OSError(errno.EBADF, "the socket is closed")
            if self._reset:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
            if self._shut or (self._ended and not self._wire):
                return 0
            self._wait("receive")
        first = self._inbox[0]
        view = memoryview(buffer)
        count = min(len(view), len(first) - self._offset)
        view[:count] = first[self._offset : self._offset + count]
        self._offset += count
        if self._offset == len(first):
            self._inbox.popleft()
            self._offset = 0
            if self.peer is not None and self.peer._waiting:
                self.peer._wake()
        return count

    def shutdown(self, how: int) -> None:
        if self.peer is None and not self._listening:
            raise OSError(errno.ENOTCONN, "not connected")
        self._shut = True
        self._wake()
        self._say_goodbye(reset=False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.process.on_death.pop(id(self), None)
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for waiting in self._backlog:
            waiting.close()
        self._wake()
        self._say_goodbye(reset=bool(self._inbox))

    # ------------------------------------------------------------------ inside

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the socket is closed")
        if self._reset:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
        if self._shut:
            raise BrokenPipeError(errno.EPIPE, "the connection is shut")

    def _is_cut(self, peer: SimSocket) -> bool:
        net = self._network
        return (
            bool(net.cut or net.dark or net.sides)
            and not self._local
            and net.is_cut(self.process.host, peer.process.host)
        )

    def send_series(self, count: int) -> None:
        """Wait as long as it takes to send all but the last of the units that a unit of `count` bytes stands for."""
        peer, costs = self.peer, self._network.costs
        if costs is not None and peer is not None:
            with self._network.stream(self.process.host, peer.process.host) as share:
                self._spend(share * costs.rest_s("network", count))

    def _take_time(self, peer: SimSocket, alone_s: float) -> None:
        """Wait as long as a network card takes to send what it would send in `alone_s` if it sent nothing else."""
        with self._network.stream(self.process.host, peer.process.host) as share:
            self._spend(min(share * alone_s, self._timeout or math.inf))
            if self._timeout is not None and share * alone_s > self._timeout:
                raise TimeoutError("timed out")

    def _spend(self, seconds: float) -> None:
        """Be busy for so long, unless the connection ends."""
        end = self._scheduler.now + seconds
        while self._scheduler.now < end:
            self._waiting.append(self._scheduler.current)
            self._scheduler.block("send", end - self._scheduler.now)
            self._check_open()

    def _hazards(self, content: bytes, payload: bool) -> bytes:
        """Return the bytes, perhaps with one flipped bit. Raises `ConnectionResetError` if the connection breaks."""
        net = self._network
        if net.break_chance and net.random.random() < net.break_chance:
            self._break(net.random.random() < 0.5)
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
        if payload and content and net.flip_chance and net.random.random() < net.flip_chance:
            net.counts["flip-in-flight"] += 1
            bit = int(net.random.random() * len(content) * 8)
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)
        return content

    def _break(self, arrives: bool) -> None:
        """Break the connection, here at once. At the peer too, or, if `arrives`, after all bytes in transit."""
        peer = self.peer
        self._network.counts["broken connection" + (", rest arrives" if arrives else "")] += 1
        self._reset = True
        self._wake()
        if peer is None:
            return
        if arrives:
            peer._ended = True
        else:
            peer._reset = True
            peer._wire.clear()
        peer._wake()

    def _arrive(self) -> None:
        """Timer: deliver the bytes that are due, unless the link is cut."""
        if self._closed or not self._wire or self.peer is None:
            return
        now = self._scheduler.now
        if self._is_cut(self.peer):
            if not self._network.is_dark(self.process.host, self.peer.process.host):
                self._scheduler.at(now + HELD_EVERY_S, self._arrive)
            return
        while self._wire and self._wire[0][0] <= now:
            self._inbox.append(self._wire.popleft()[1])
        if self._wire:
            self._scheduler.at(self._wire[0][0], self._arrive)
        self._wake()

    def _say_goodbye(self, reset: bool) -> None:
        peer = self.peer
        if peer is None or peer._closed:
            return
        if self._is_cut(peer):
            return  # the peer does not hear of it
        if reset:
            peer._reset = True
        peer._ended = True
        peer._wake()

    def _be_reset(self) -> None:
        self._reset = True
        self._wake()

    def _owner_died(self) -> None:
        self._closed = True
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for waiting in self._backlog:
            waiting._say_goodbye(reset=True)
        self._say_goodbye(reset=self._network.random.random() < 0.5)

    def _wait(self, where: str) -> None:
        self._waiting.append(self._scheduler.current)
        if not self._scheduler.block(where, self._timeout):
            if self._scheduler.current in self._waiting:
                self._waiting.remove(self._scheduler.current)
            raise TimeoutError("timed out")

    def _wake(self) -> None:
        if self._waiting:
            self._scheduler.wake(self._waiting)
