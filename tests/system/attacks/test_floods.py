"""Connections by the thousand to the gRPC port, which authenticate nothing and are never closed."""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from holdfast.smp_daemon.net.gate import PLACES
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.handshake import HANDSHAKE_DEADLINE_S
from tests.access_kit import credentials, token_file
from tests.deadlines import DEADLINE_S
from tests.scripts import started
from tests.smp_kit import JOB, SmpProcess, limited, playground, read_line, run_on
from tests.system.attacks.victim import dial, open_files

FILES = 1024
"""Descriptors that each SMP may have, as is usual."""

SETTINGS, ACKNOWLEDGED = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS + ACKNOWLEDGED
"""What a client of gRPC says first. With it a connection lasts for ever, as far as gRPC is concerned."""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")

FLOOD = """
import os, resource, socket, sys, time
host, port, data = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
os.setgid(65534); os.setuid(65534)
socks = []
for _ in range(900):
    sock = socket.socket()
    sock.settimeout(5)
    try:
        sock.connect((host, port))
        sock.sendall(data)
    except OSError:
        continue
    socks.append(sock)
print(len(socks), flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(address: tuple[str, int], data: bytes) -> Iterator[None]:
    """900 connections of another user, which are held."""
    command = [sys.executable, "-c", FLOOD, address[0], str(address[1]), data.hex()]
    with started(command) as process:
        assert int(read_line(process.stdout)) > 0
        yield


@as_root
@pytest.mark.parametrize("data", [b"", HTTP2], ids=["silent", "http2"])
def test_snapshots_are_protected_while_another_user_floods_the_port(data: bytes) -> None:
    with playground(own_python=True) as ground, ExitStack() as stack:
        with limited(resource.RLIMIT_NOFILE, FILES):
            smps = ground.smps(2)
        run = run_on(smps, [[3000], [3000]])
        run.protect(1)
        for _ in range(3):
            stack.enter_context(flood(smps[0].control, data))
        most = 0
        for step in range(2, 6):
            run.protect(step)
            most = max(most, open_files(smps[0]))
        assert most < FILES / 2, "the other half is for trainers and raw bytes"
        with PeerClient(JOB) as newcomer:  # as an SMP whose node has just come back
            assert newcomer.ping(smps[0].control, DEADLINE_S, starting=True).node == "node0"


def all_ended(socks: list[socket.socket], deadline_s: float) -> bool:
    """Whether the other side ends all of these connections in time."""
    limit, open_yet = time.monotonic() + deadline_s, set(socks)
    while open_yet and time.monotonic() < limit:
        for sock in select.select(list(open_yet), [], [], 0.1)[0]:
            try:
                if sock.recv(1 << 16):
                    continue
            except OSError:
                pass
            open_yet.discard(sock)
    return not open_yet


def test_whoever_has_no_token_is_ended_in_time_and_the_oldest_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ground = stack.enter_context(playground())
        stack.enter_context(credentials(token_file(tmp_path / "token", secrets.token_hex(32))))
        smp = ground.smp()
        peer = stack.enter_context(PeerClient(JOB))
        assert peer.ping(smp.control, DEADLINE_S).node == "node0"
        began = time.monotonic()
        socks = [stack.enter_context(dial(smp.control)) for _ in range(2 * PLACES)]
        for sock in socks:
            sock.sendall(HTTP2)
        assert all_ended(socks[:PLACES], DEADLINE_S)
        if time.monotonic() - began < HANDSHAKE_DEADLINE_S:
            assert not all_ended(socks[PLACES:], 0.0), "those who came last still had time"
        assert all_ended(socks[PLACES:], DEADLINE_S)
        assert peer.ping(smp.control, DEADLINE_S).node == "node0"


def test_a_connection_that_was_let_in_is_kept() -> None:
    """However long it is idle, and however many others come."""
    with playground() as ground, ExitStack() as stack:
        smp = ground.smp()
        address = "{}:{}".format(*smp.control)
        states: list[grpc.ChannelConnectivity] = []
        channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
        ask = channel.unary_unary("/holdfast.Smp/Ask", None, None)
        ask(json.dumps({"op": "ping", "job": JOB}).encode(), timeout=DEADLINE_S)
        channel.subscribe(states.append)
        silent = [stack.enter_context(dial(smp.control)) for _ in range(2 * PLACES)]
        for sock in silent:
            sock.sendall(HTTP2)
        assert all_ended(silent, DEADLINE_S)
        assert set(states) <= {grpc.ChannelConnectivity.READY}, states


def test_the_port_takes_a_share_of_the_descriptors_only() -> None:
    """gRPC itself closes what is too much, without waiting for anybody to look."""
    with playground(own_python=True) as ground, ExitStack() as stack:
        with limited(resource.RLIMIT_NOFILE, 256):
            smp: SmpProcess = ground.smp()
        most = 0
        for _ in range(300):
            stack.enter_context(dial(smp.control)).sendall(HTTP2)
            most = max(most, open_files(smp))
        assert most < 256 / 2
