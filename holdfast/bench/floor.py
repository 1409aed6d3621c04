"""The least that protecting must cost: plain sockets between processes that carry the same bytes.

``python -m holdfast.bench.floor`` runs one of these processes, each of which stands for one SMP. It opens a given
number of connections to each of the other processes. Each end of a connection has a thread: the sender sends memory
that holds the state, piece by piece, and the receiver receives all pieces into one buffer. A *plain* round does only
that. A *folded* round also digests each received piece once and adds it to parity by XOR once. The process takes orders
on standard input, one JSON value per line.
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
from holdfast.smp_daemon.shared.processes import own_command, own_environment
from holdfast.smp_daemon.shared.records import digest

PIECE_BYTES = 256 << 10
"""Bytes per call. They fit the L2 cache; of 128 KiB to 2 MiB, plain sockets took the least processor time with this."""

DEADLINE_S = 60.0
ANSWER_S = 600.0
"""Timeout for one answer of a process, in seconds. The process has its own timeouts for whatever it waits for."""

ROUNDS = ("plain", "folded")


@dataclass(frozen=True, slots=True)
class Wires:
    """Which processes are connected, and what their connections carry.

    Attributes:
        processes: number of processes.
        connections: number of connections from a process to each of its targets.
        bytes: bytes that each connection carries in a round; a multiple of `PIECE_BYTES`.
        oneway: whether only process 0 sends, to process 1. Otherwise every process sends to every other.
        tls: whether connections use TLS as SMPs do, with the credentials of each process.
    """

    processes: int
    connections: int
    bytes: int
    oneway: bool = False
    tls: bool = False

    def targets(self, index: int) -> list[int]:
        """The processes that process `index` sends to."""
        if self.oneway:
            return [1] if index == 0 else []
        return [other for other in range(self.processes) if other != index]

    def sources(self, index: int) -> list[int]:
        """The processes that process `index` receives from."""
        return [other for other in range(self.processes) if index in self.targets(other)]

    @property
    def total_bytes(self) -> int:
        """Bytes that all connections together carry in a round."""
        return sum(len(self.targets(i)) for i in range(self.processes)) * self.connections * self.bytes


@dataclass(frozen=True, slots=True)
class Carried:
    """Result of one round: seconds of wall time, and of processor time (user and system) for each process."""

    bytes: int
    seconds: float
    cpu_s: list[float]


class Floor:
    """A context manager that starts, connects and ends the processes. In between they run rounds. Not thread-safe."""

    def __init__(self, wires: Wires, environment: Mapping[str, str]) -> None:
        self.wires = wires
        self._environment = environment
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Floor:
        command = own_command("holdfast.bench.floor", "--processes", str(self.wires.processes))
        command += ["--connections", str(self.wires.connections), "--bytes", str(self.wires.bytes)]
        command += [*(["--oneway"] if self.wires.oneway else []), *(["--tls"] if self.wires.tls else [])]
        with self._stack:
            for index in range(self.wires.processes):
                process = subprocess.Popen(
                    [*command, "--index", str(index)],
                    env=own_environment(self._environment),
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
        """Run one round of a kind in `ROUNDS`. Blocks."""
        began = time.perf_counter()
        for process in self._processes:
            tell(process, kind)
        cpu_s = [float(answer(process)) for process in self._processes]
        return Carried(self.wires.total_bytes, time.perf_counter() - began, cpu_s)


def tell(process: subprocess.Popen[str], order: Any) -> None:
    """Send an order to a process that reads orders from its standard input, as JSON."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise _ended(process) from error


def answer(process: subprocess.Popen[str]) -> Any:
    """The next answer of a process. Blocks.

    Raises:
        DeadlineExceeded: there was no answer for `ANSWER_S`.
        HoldfastError: the process ended, or its answer is an error.
    """
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
    """End a process by closing its standard input; after `DEADLINE_S`, kill it. Blocks until it has ended."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has already ended, with input unread
        process.stdin.close()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


class _Side:
    """One process's ends of all its connections. Used by its main thread; in a round, each end has a pool thread."""

    def __init__(self, index: int, wires: Wires) -> None:
        self._wires = wires
        self._index = index
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listening.getsockname()[1]
        self._works: dict[str, list[Callable[[], None]]] = {kind: [] for kind in ROUNDS}
        self._pool: ThreadPoolExecutor

    def connect(self, ports: Sequence[int]) -> None:
        """Connect to all targets, and accept the connections of all sources. `ports` has the port of each process."""
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
        """Run one round of a kind in `ROUNDS`. Returns the processor seconds that it took."""
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
    """Set up a connection, with TLS if wanted. It is blocking, so that one call can receive a whole piece; the kernel
    applies the deadline."""
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
    """A function that digests a piece and XORs it into `parity`. A round goes through `parity` once per source."""
    codec = choose_codec(2, 1)

    def fold(piece: memoryview, index: int) -> None:
        start = index * PIECE_BYTES % parity.nbytes
        digest(piece)
        codec.accumulate(0, piece, {0: parity[start : start + PIECE_BYTES]})

    return fold


def whole_pieces(count: int) -> int:
    """`count` rounded down to a multiple of `PIECE_BYTES`."""
    return count // PIECE_BYTES * PIECE_BYTES


def memory(count: int) -> memoryview:
    """`count` bytes in a memory mapping of their own, with all pages allocated."""
    view = memoryview(mmap.mmap(-1, count))
    for start in range(0, count, PIECE_BYTES):
        view[start : start + PIECE_BYTES] = bytes([start // PIECE_BYTES % 255 + 1]) * min(PIECE_BYTES, count - start)
    return view


def main() -> None:
    """Run one process: print its port, read the ports of all, then run a round for each order until its input ends."""
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
