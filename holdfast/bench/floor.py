"""What protecting must cost at the least: plain sockets between processes that carry the same bytes.

``python -m holdfast.bench.floor`` is one of these processes, as each SMP is one. Each connects to every other as often
as it is told, and each end of a connection has a thread: one sends memory that holds the state, piece by piece, the
other receives into one buffer again and again. *Plain* is no more than that. *Folded* also digests what was received,
once, and adds it to parity by XOR, once. It does what it is told on standard input, one word a line.
"""

from __future__ import annotations

import argparse
import json
import mmap
import select
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.ec import choose_codec
from holdfast.smp_daemon.shared.credentials import current
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.records import digest

PIECE_BYTES = 256 << 10
"""Of one call. They fit the second cache; of 128 KiB to 2 MiB these took plain sockets the least processor time."""

DEADLINE_S = 60.0
ANSWER_S = 600.0
"""What a process may take for one answer: it has deadlines of its own for all that it waits for."""

ROUNDS = ("plain", "folded")


@dataclass(frozen=True, slots=True)
class Wires:
    """Who is connected to whom.

    Attributes:
        connections: from each process to each that it sends to.
        bytes: that each connection carries in a round: whole pieces.
        oneway: whether process 0 alone sends, to process 1; else every process to every other.
        tls: whether each connection is the project's TLS, with this process's credentials.
    """

    processes: int
    connections: int
    bytes: int
    oneway: bool = False
    tls: bool = False

    def targets(self, index: int) -> list[int]:
        """Whom that process sends to."""
        if self.oneway:
            return [1] if index == 0 else []
        return [other for other in range(self.processes) if other != index]

    def sources(self, index: int) -> list[int]:
        """Whom it receives from."""
        return [other for other in range(self.processes) if index in self.targets(other)]

    @property
    def total_bytes(self) -> int:
        """Carried in a round by all connections."""
        return sum(len(self.targets(i)) for i in range(self.processes)) * self.connections * self.bytes


@dataclass(frozen=True, slots=True)
class Carried:
    """One round: seconds on the clock, and processor seconds (user and system) of each process."""

    bytes: int
    seconds: float
    cpu_s: list[float]


class Floor:
    """Processes that are connected, and do a round when told. Not thread-safe; a context manager that ends them."""

    def __init__(self, wires: Wires, environment: Mapping[str, str]) -> None:
        self.wires = wires
        self._environment = environment
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Floor:
        command = [sys.executable, "-m", "holdfast.bench.floor", "--processes", str(self.wires.processes)]
        command += ["--connections", str(self.wires.connections), "--bytes", str(self.wires.bytes)]
        command += [*(["--oneway"] if self.wires.oneway else []), *(["--tls"] if self.wires.tls else [])]
        with self._stack:
            for index in range(self.wires.processes):
                process = subprocess.Popen(
                    [*command, "--index", str(index)],
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._stack.callback(end, process)
                self._processes.append(process)
            ports = [answer(process) for process in self._processes]
            for process in self._processes:
                tell(process, ports)
            for process in self._processes:
                answer(process)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def round(self, kind: str) -> Carried:
        """Carry the bytes once, by one of `ROUNDS`."""
        began = time.perf_counter()
        for process in self._processes:
            tell(process, kind)
        cpu_s = [float(answer(process)) for process in self._processes]
        return Carried(self.wires.total_bytes, time.perf_counter() - began, cpu_s)


def tell(process: subprocess.Popen[str], order: Any) -> None:
    """Give a process that serves its standard input an order, as JSON."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise _ended(process) from error


def answer(process: subprocess.Popen[str]) -> Any:
    """Its answer. Blocks; raises `HoldfastError` if it ended instead."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], ANSWER_S)[0]:
        raise DeadlineExceeded(f"process {process.pid} of the benchmark said nothing for {ANSWER_S:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise _ended(process)
    found = json.loads(line)
    if isinstance(found, dict) and "error" in found:
        raise HoldfastError(str(found["error"]))
    return found


def _ended(process: subprocess.Popen[str]) -> HoldfastError:
    return HoldfastError(f"process {process.pid} of the benchmark has ended, with status {process.wait(DEADLINE_S)}")


def end(process: subprocess.Popen[str]) -> None:
    """Have it end, as it does with its standard input; blocks until it has."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended already, with something unread
        process.stdin.close()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


class _Side:
    """The ends of all connections of one process."""

    def __init__(self, index: int, wires: Wires) -> None:
        self._wires = wires
        self._index = index
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listening.getsockname()[1]
        self._works: dict[str, list[Callable[[], None]]] = {kind: [] for kind in ROUNDS}
        self._pool: ThreadPoolExecutor

    def connect(self, ports: Sequence[int]) -> None:
        """Connect to all, and be connected to."""
        wires = self._wires
        expected = len(wires.sources(self._index)) * wires.connections
        with ThreadPoolExecutor(1) as accepting:
            accepted = accepting.submit(lambda: [self._accept() for _ in range(expected)])
            outgoing = [
                self._connect(ports[target]) for target in wires.targets(self._index) for _ in range(wires.connections)
            ]
            incoming = accepted.result(DEADLINE_S)
        data = max(1, len(wires.sources(self._index)))
        for sock in outgoing:
            state = memory(wires.bytes)
            for kind in ROUNDS:
                self._works[kind].append(partial(_send, sock, state))
        for sock in incoming:
            piece, parity = memory(PIECE_BYTES), memory(max(PIECE_BYTES, whole_pieces(wires.bytes // data)))
            self._works["plain"].append(partial(_receive, sock, wires.bytes, piece, lambda piece, index: None))
            self._works["folded"].append(partial(_receive, sock, wires.bytes, piece, _fold(parity)))
        self._pool = ThreadPoolExecutor(max(1, len(outgoing) + len(incoming)))

    def round(self, kind: str) -> float:
        """Do it; processor seconds that it took."""
        before = time.process_time()
        for done in [self._pool.submit(work) for work in self._works[kind]]:
            done.result()
        return time.process_time() - before

    def _accept(self) -> socket.socket:
        self._listening.settimeout(DEADLINE_S)
        sock, _ = self._listening.accept()
        return _made_ready(sock, self._wires.tls, server=True)

    def _connect(self, port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        return _made_ready(sock, self._wires.tls, server=False)


def _made_ready(sock: socket.socket, tls: bool, *, server: bool) -> socket.socket:
    """Blocking, so that one call may take a whole piece, with the deadline left to the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(DEADLINE_S), 0))
    if not tls:
        return sock
    known = current().tls
    assert known is not None
    if server:
        return known.server.wrap_socket(sock, server_side=True)
    return known.client.wrap_socket(sock, server_hostname=known.name)


def _send(sock: socket.socket, state: memoryview) -> None:
    for start in range(0, state.nbytes, PIECE_BYTES):
        sock.sendall(state[start : start + PIECE_BYTES])


def _receive(sock: socket.socket, count: int, piece: memoryview, use: Callable[[memoryview, int], None]) -> None:
    whole = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    for index in range(count // PIECE_BYTES):
        rest = piece
        while rest:
            got = sock.recv_into(rest, 0, whole)
            if not got:
                raise SmpUnavailable("the other end has closed a connection")
            rest = rest[got:]
        use(piece, index)


def _fold(parity: memoryview) -> Callable[[memoryview, int], None]:
    """Digest a piece and XOR it into `parity`, which is gone through as often as there are data units a stripe."""
    codec = choose_codec(2, 1)

    def fold(piece: memoryview, index: int) -> None:
        start = index * PIECE_BYTES % parity.nbytes
        digest(piece)
        codec.accumulate(0, piece, {0: parity[start : start + PIECE_BYTES]})

    return fold


def whole_pieces(count: int) -> int:
    """The most bytes that are whole pieces, of so many."""
    return count // PIECE_BYTES * PIECE_BYTES


def memory(count: int) -> memoryview:
    """So many bytes that are there, in pages of their own."""
    view = memoryview(mmap.mmap(-1, count))
    for start in range(0, count, PIECE_BYTES):
        view[start : start + PIECE_BYTES] = bytes([start // PIECE_BYTES % 255 + 1]) * min(PIECE_BYTES, count - start)
    return view


def main() -> None:
    """One process: says its port, hears those of all, and does a round for each word until its input ends."""
    parser = argparse.ArgumentParser()
    for name in ("index", "processes", "connections", "bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--oneway", action="store_true")
    parser.add_argument("--tls", action="store_true")
    told = parser.parse_args()
    end = _Side(told.index, Wires(told.processes, told.connections, told.bytes, told.oneway, told.tls))
    _say(end.port)
    ports = sys.stdin.readline()
    if not ports:
        return
    end.connect(json.loads(ports))
    _say("connected")
    for line in sys.stdin:
        _say(end.round(json.loads(line)))


def _say(found: object) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
