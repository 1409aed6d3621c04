"""The target of the attacks: two SMPs that hold a protected snapshot."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

import grpc

from holdfast.smp_daemon.net.peers import METHOD
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import socket_path
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, Ground, SmpProcess, run_on

BUDGET_BYTES = 64 << 20
"""Upper limit for the memory that an attack may add to an SMP."""

SPARE_FILES = 4
"""Number of descriptors that gRPC and others may open and close at any time."""

HELD = {"op": "shard", "job": JOB, "coord": "dp0"}
"""A harmless request, which any SMP of the job may make on the port for raw bytes."""

Address = Path | tuple[str, int]


class Victim:
    """Two SMPs, their trainers, and a snapshot that is protected on both."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.smps = ground.smps(2)
        self.run = run_on(self.smps, [[3000], [3000]])
        self.snapshot: SnapshotId = self.run.protect(1)
        self._before = {smp.name: (anonymous_bytes(smp), open_files(smp)) for smp in self.smps}
        self.check()
        self._before = {smp.name: (anonymous_bytes(smp), open_files(smp)) for smp in self.smps}

    @property
    def smp(self) -> SmpProcess:
        return self.smps[0]

    @property
    def local(self) -> Path:
        """The socket for trainers of the first SMP."""
        return socket_path(self.smp.arena)

    @property
    def control(self) -> tuple[str, int]:
        return self.smp.control

    def check(self) -> None:
        """Assert that the attack had no effect on either SMP."""
        for smp in self.smps:
            bytes_before, files_before = self._before[smp.name]
            assert smp.process.poll() is None, f"{smp.name} is gone: {smp.bugs()}"
            assert not smp.bugs()
            limit = time.monotonic() + DEADLINE_S / 4
            while open_files(smp) > files_before + SPARE_FILES:
                assert time.monotonic() < limit, f"{open_files(smp)} descriptors are open, {files_before} were"
                select.select([], [], [], 0.02)
            assert anonymous_bytes(smp) - bytes_before < BUDGET_BYTES
        plan = self.run.plan()
        assert plan.snapshot == self.snapshot
        for trainer in self.run:
            assert trainer.recover(plan).view == trainer.image(self.snapshot)
            assert trainer.client.scrub()["damaged"] == 0


def anonymous_bytes(smp: SmpProcess) -> int:
    """Anonymous resident memory of an SMP, without its mapped files."""
    for line in Path(f"/proc/{smp.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def open_files(smp: SmpProcess) -> int:
    return len(list(Path(f"/proc/{smp.process.pid}/fd").iterdir()))


def dial(address: Address, deadline_s: float = DEADLINE_S) -> socket.socket:
    """A connection without a handshake."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(deadline_s)
    sock.connect(str(address) if isinstance(address, Path) else address)
    return sock


def tell(address: Address, data: bytes, *, end: bool = True) -> bytes:
    """Send `data`, and end our side if `end`. Returns everything that arrives until the other side ends."""
    heard = b""
    with dial(address) as sock:
        try:
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                heard += more
        except TimeoutError:
            raise
        except OSError:  # the other side closed the connection first
            pass
    return heard


def frame(body: bytes, *, magic: bytes = b"HFST", length: int | None = None, payload: int = 0) -> bytes:
    """A message as on the wire, or a forged one with another magic or length."""
    return magic + struct.pack("<IQ", len(body) if length is None else length, payload) + body


def ask_control(address: tuple[str, int], message: dict[str, Any]) -> dict[str, Any]:
    """The reply to one message over gRPC, sent without a token."""
    return json.loads(say_control(address, json.dumps(message).encode()))  # type: ignore[no-any-return]


def say_control(address: tuple[str, int], body: bytes, metadata: tuple[tuple[str, bytes], ...] = ()) -> bytes:
    """The reply to raw bytes over gRPC, sent with `metadata`. Raises `grpc.RpcError` if the call is refused."""
    with grpc.insecure_channel("{}:{}".format(*address)) as channel:
        reply: bytes = channel.unary_unary(METHOD, None, None)(body, timeout=DEADLINE_S, metadata=metadata)
    return reply


def ask(address: Address, message: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
    """The reply to one message, sent on its own connection."""
    heard = tell(address, frame(json.dumps(message).encode(), payload=len(payload)) + payload)
    length, _ = struct.unpack_from("<IQ", heard, 4)
    reply: dict[str, Any] = json.loads(heard[16 : 16 + length])
    return reply
