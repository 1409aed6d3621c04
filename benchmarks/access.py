"""The cost of authentication between SMPs: ``python -m benchmarks.access``. Measures all kinds in one run, in turns.

A child process serves units through the same gate and listener as an SMP; this process fetches them into its own
memory. Reports throughput (also as a ratio to the plain connection), CPU time of both sides, and the time to connect
and to make a gRPC call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.net.gate import Gate
from holdfast.smp_daemon.net.peers import AtEnd, PeerClient, PeerServer
from holdfast.smp_daemon.service import SocketListener, bind_tcp
from holdfast.smp_daemon.shared.credentials import current
from holdfast.smp_daemon.shared.messages import PeerControl, Pong
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from tests.access_kit import Authority, credentials, token_file

JOB = "bench"
UNIT_BYTES = 4 << 20
KINDS = ("plain", "token", "mTLS", "token and mTLS")


class Units:
    """A conversation that sends the same unit every time."""

    unit = memoryview(bytearray(os.urandom(UNIT_BYTES)))

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime}, self.unit if message["op"] == "unit" else None

    def ended(self) -> None:
        """Nothing to do."""


def pong(request: PeerControl, at_end: AtEnd) -> Pong:
    return Pong(job=JOB, node="node0", epoch=1, revision=0)


def serve() -> None:
    """The child process: serves until its standard input ends."""
    gate = Gate(current(), JOB)
    listener = SocketListener(bind_tcp("127.0.0.1", 0), lambda sock: Units(), gate.admit)
    control = PeerServer(gate, pong, "127.0.0.1", 0, MACHINE)
    control.start()
    print(json.dumps([listener.port, control.port]), flush=True)
    sys.stdin.read()
    control.close()
    gate.close()
    listener.close()


@dataclass
class Side:
    """One kind of connection, and its measurements."""

    environment: dict[str, str]
    process: subprocess.Popen[str]
    bulk: tuple[str, int]
    control: tuple[str, int]
    bytes_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    connect_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)


def start(kind: str, base: Path) -> Side:
    environment = token_file(base / f"token-{kind}") if "token" in kind else {}
    environment |= Authority(base / f"ca-{kind}").environment() if "mTLS" in kind else {}
    with credentials(environment):
        command = [sys.executable, "-m", "benchmarks.access", "--serve"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    bulk, control = json.loads(process.stdout.readline())
    return Side(environment, process, ("127.0.0.1", bulk), ("127.0.0.1", control))


def measure(side: Side, units: int) -> None:
    """Measure one kind for one turn."""
    into = memoryview(bytearray(UNIT_BYTES))
    with credentials(side.environment):
        began = time.perf_counter()
        stream = connect(side.bulk, job=JOB)
        before, _ = call(stream, {"op": "hello"})
        side.connect_s.append(time.perf_counter() - began)
        began, mine = time.perf_counter(), time.process_time()
        reply: Message = {}
        for _ in range(units):
            reply, _ = call(stream, {"op": "unit"})
            stream.receive_into(into)
        seconds = time.perf_counter() - began
        assert bytes(into[:8]) != bytes(8)
        cpu_s = time.process_time() - mine + reply["cpu_s"] - before["cpu_s"]
        side.bytes_per_s.append(units * UNIT_BYTES / seconds)
        side.cpu_s_per_gb.append(cpu_s / (units * UNIT_BYTES / 1e9))
        stream.close()
        client = PeerClient(JOB)
        client.ping(side.control, 10.0)
        began = time.perf_counter()
        for _ in range(50):
            client.ping(side.control, 10.0)
        side.call_s.append((time.perf_counter() - began) / 50)
        client.close()


def report(sides: dict[str, Side]) -> dict[str, Any]:
    kinds = {
        kind: {
            "GB/s": round(statistics.median(side.bytes_per_s) / 1e9, 3),
            "CPU s/GB": round(statistics.median(side.cpu_s_per_gb), 3),
            "connect ms": round(statistics.median(side.connect_s) * 1e3, 2),
            "gRPC call ms": round(statistics.median(side.call_s) * 1e3, 3),
        }
        for kind, side in sides.items()
    }
    plain = sides["plain"]
    for kind, side in sides.items():
        turns = [b / a for a, b in zip(plain.bytes_per_s, side.bytes_per_s, strict=True)]
        kinds[kind]["throughput to plain"] = round(statistics.median(turns), 3)
    return {
        "date": time.strftime("%F %T", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "unit_bytes": UNIT_BYTES,
        "turns": len(plain.bytes_per_s),
        "kinds": kinds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.access", description=__doc__)
    parser.add_argument("--units", type=int, default=128, help="of 4 MiB, in each turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as base:
        sides = {kind: start(kind, Path(base)) for kind in KINDS}
        try:
            for _ in range(parsed.turns):
                for side in sides.values():
                    measure(side, parsed.units)
        finally:
            for side in sides.values():
                side.process.communicate(timeout=30)
    text = json.dumps(report(sides), indent=1)
    print(text)
    if parsed.json:
        parsed.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
