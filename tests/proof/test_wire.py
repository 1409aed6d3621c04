"""The network between virtual nodes: what is done to packets, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import arena_base
from tests.deadlines import DEADLINE_S
from tests.proof.chaos.faults import CATALOGUE
from tests.proof.chaos.network.impairments import BUFFER_S, KINDS, OVERTAKEN_S, Impairment, after_all
from tests.proof.chaos.network.namespaces import inhabitants, inside, unavailable
from tests.proof.chaos.network.packets import UnitTracker, addresses, flipped
from tests.proof.chaos.network.wire import Wire

SEED = 20261122
A, B, C = (socket.inet_aton(f"10.77.0.{number}") for number in (1, 2, 3))

wired = pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces here: {unavailable()}")

# ---------------------------------------------------------------------- packets


def packet(data: bytes, *, sequence: int = 0, source: bytes = A, target: bytes = B, port: int = 5000) -> bytes:
    """An IPv4 packet that carries TCP, with the right checksum."""
    tcp = struct.pack(">HHIIBBHHH", port, 6000, sequence, 0, 5 << 4, 0x10, 1000, 0, 0) + data
    tcp = tcp[:16] + struct.pack(">H", checksum(source, target, tcp)) + tcp[18:]
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0, source, target)
    return ip + tcp


def checksum(source: bytes, target: bytes, tcp: bytes) -> int:
    """The checksum of a segment whose checksum field is 0; 0 for a segment whose checksum is right (RFC 9293)."""
    text = source + target + struct.pack(">BBH", 0, 6, len(tcp)) + tcp
    total = sum(struct.unpack(f">{(len(text) + 1) // 2}H", text.ljust((len(text) + 1) // 2 * 2, b"\0")))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(~total & 0xFFFF)


@pytest.mark.parametrize("length", [1, 2, 3, 100, 1001])
def test_a_flipped_bit_leaves_a_checksum_that_fits(length: int) -> None:
    source = random.Random(SEED)
    sound = packet(source.randbytes(length))
    for bit in [40 * 8, (40 + length) * 8 - 1, *(source.randrange(40 * 8, (40 + length) * 8) for _ in range(50))]:
        spoilt = flipped(sound, bit)
        assert checksum(A, B, spoilt[20:]) == 0, f"bit {bit}"
        changed = int.from_bytes(sound[40:], "little") ^ int.from_bytes(spoilt[40:], "little")
        assert changed == 1 << bit - 40 * 8


def test_a_bit_outside_the_data_is_not_flipped() -> None:
    for bit in (0, 40 * 8 - 1, 50 * 8):
        with pytest.raises(ValueError, match=f"bit {bit} "):
            flipped(packet(b"0123456789"), bit)


def test_what_is_not_ipv4_has_no_addresses() -> None:
    assert addresses(packet(b"x")) == (A, B)
    assert addresses(b"\x60" + bytes(40)) is None
    assert addresses(b"\x45") is None


def frame(text: bytes, raw: int) -> bytes:
    return struct.pack("<4sIQ", b"HFST", len(text), raw) + text


@pytest.mark.parametrize("first", [0, (1 << 32) - 30], ids=["from 0", "around the end"])
def test_raw_bytes_are_found_and_nothing_else_is(first: int) -> None:
    head, raw = frame(b'{"op":"accumulate"}', 1000), bytes(1000)
    stream = head + raw + frame(b"{}", 0) + head + raw
    kinds = "f" * len(head) + "r" * 1000 + "f" * 18 + "f" * len(head) + "r" * 1000
    units = UnitTracker()
    for size in (700, 300, 61, len(stream)):  # the same bytes again in other pieces, as after losses
        seen = 0
        for start in range(0, len(stream), size):
            piece = stream[start : start + size]
            found = units.within(packet(piece, sequence=(first + start) % (1 << 32)))
            if found is not None:
                assert set(kinds[start + found[0] - 40 : start + found[1] - 40]) == {"r"}
                seen += found[1] - found[0]
        assert seen >= 1000, f"in pieces of {size}"


def test_other_connections_have_no_units() -> None:
    units = UnitTracker()
    units.within(packet(frame(b"{}", 100)))
    assert units.within(packet(bytes(50), sequence=18)) == (40, 90)
    assert units.within(packet(bytes(50), sequence=18, port=5001)) is None
    assert units.within(packet(b"PRI * HTTP/2.0")) is None
    assert units.within(packet(b"")) is None


# ---------------------------------------------------------------------- impairments


def impairment(kind: str, *hosts: bytes, amount: int = 0, until_s: float = 100.0) -> Impairment:
    return Impairment(kind, frozenset(hosts), amount, SEED, until_s)


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("partition", {(A, B), (B, A), (A, C), (C, A)}),
        ("mute-node", {(A, B), (A, C)}),
        ("deaf-node", {(B, A), (C, A)}),
    ],
)
def test_links_are_closed_for_a_while(kind: str, gone: set[tuple[bytes, bytes]]) -> None:
    closed = impairment(kind, A, until_s=5.0)
    for link in [(x, y) for x in (A, B, C) for y in (A, B, C) if x != y]:
        assert closed.on(b"", link, None, 4.9) == ([] if link in gone else [(4.9, b"")])
        assert closed.on(b"", link, None, 5.0) == [(5.0, b"")]
    assert closed.hits == len(gone)


def test_a_partition_between_two_sets_closes_no_link_within_one() -> None:
    closed = impairment("partition", A, B)
    assert closed.on(b"", (A, B), None, 0.0) == [(0.0, b"")]
    assert closed.on(b"", (A, C), None, 0.0) == closed.on(b"", (C, B), None, 0.0) == []


@pytest.mark.parametrize("kind", ["lose-packets", "reorder-packets", "repeat-packets"])
def test_so_many_percent_are_hit(kind: str) -> None:
    spoiling = impairment(kind, A, amount=20)
    results = [spoiling.on(b"x", (A, B), None, 0.0) for _ in range(5000)]
    assert spoiling.hits / 5000 == pytest.approx(0.2, abs=0.03)
    hit = [result for result in results if result != [(0.0, b"x")]]
    assert len(hit) == spoiling.hits
    for result in hit:
        assert len(result) == {"lose-packets": 0, "reorder-packets": 1, "repeat-packets": 2}[kind]
        assert all(at == 0.0 or OVERTAKEN_S[0] <= at <= OVERTAKEN_S[1] for at, _ in result)


def test_late_packets_stay_in_order() -> None:
    late = impairment("delay-packets", A, amount=100)
    times = [late.on(b"x", (A, B), None, number * 0.001)[0][0] for number in range(500)]
    assert times == sorted(times)
    assert all(at - number * 0.001 >= 0.05 for number, at in enumerate(times))
    assert max(at - number * 0.001 for number, at in enumerate(times)) <= 0.15


def test_a_throttled_link_carries_no_more_than_it_may() -> None:
    slow = impairment("throttle", A, amount=100)  # kB/s
    due = [result for _ in range(1000) for result in slow.on(bytes(1000), (A, B), None, 0.0)]
    assert due[-1][0] == pytest.approx(len(due) * 1000 / 100_000)
    assert BUFFER_S <= due[-1][0] <= BUFFER_S + 0.02
    assert slow.on(bytes(1000), (B, A), None, 0.0)[0][0] == pytest.approx(0.01)


def test_so_many_bits_flip_and_only_in_units() -> None:
    spoiling = impairment("flip-in-flight", A, amount=3)
    sound = packet(bytes(100))
    for _ in range(1000):
        ((_, other),) = spoiling.on(sound, (A, B), None, 0.0)
        assert other == sound
    seen = [spoiling.on(sound, (A, B), (60, 80), 0.0)[0][1] for _ in range(1000)]
    spoilt = [each for each in seen if each != sound]
    assert len(spoilt) == spoiling.hits == 3
    for each in spoilt:
        assert sum(byte.bit_count() for byte in each[60:80]) == 1
        assert each[40:60] + each[80:] == sound[40:60] + sound[80:]


def test_impairments_act_one_after_another() -> None:
    both = [impairment("repeat-packets", A, amount=90), impairment("delay-packets", A, amount=10)]
    results = [after_all(both, b"x", (A, B), None, 0.0) for _ in range(100)]
    assert {len(result) for result in results} == {1, 2}
    assert all(at >= 0.005 for result in results for at, _ in result)


def test_each_fault_of_the_wire_is_an_impairment() -> None:
    assert {kind.name for kind in CATALOGUE.values() if kind.wired} == KINDS.keys()


# ---------------------------------------------------------------------- a real network


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    try:
        yield made
    finally:
        left = made.close()
    assert left == []


def connected(here: str, there: str) -> tuple[socket.socket, socket.socket]:
    """A connection from node 1 to node 2."""
    with inside(there):
        listening = socket.create_server(("10.77.0.2", 0))
    with listening, inside(here):
        one = socket.create_connection(listening.getsockname(), DEADLINE_S)
        other, _ = listening.accept()
    for end in (one, other):
        end.settimeout(DEADLINE_S)
    return one, other


def carry(one: socket.socket, other: socket.socket, data: bytes) -> bytes:
    """Send `data` through a connection; return what comes out."""
    sending = threading.Thread(target=one.sendall, args=(data,))
    sending.start()
    found = bytearray()
    while len(found) < len(data):
        found += other.recv(1 << 20)
    sending.join()
    return bytes(found)


@wired
@pytest.mark.cluster
def test_tcp_makes_up_for_all_that_a_network_does(wire: Wire) -> None:
    one, other = connected(wire.open("10.77.0.1"), wire.open("10.77.0.2"))
    data = random.Random(SEED).randbytes(2_000_000)
    wire.impair("lose-packets", ["10.77.0.1"], amount=5, seed=1, for_s=0)
    wire.impair("delay-packets", ["10.77.0.2"], amount=2, seed=2, for_s=0)
    wire.impair("reorder-packets", ["10.77.0.1"], amount=10, seed=3, for_s=0)
    wire.impair("repeat-packets", ["10.77.0.1"], amount=20, seed=4, for_s=0)
    with one, other:
        assert carry(one, other, data) == data
    assert all(packets > 0 for _, packets in wire.hits()), wire.hits()


@wired
@pytest.mark.cluster
def test_bits_flip_in_raw_bytes_and_arrive(wire: Wire) -> None:
    one, other = connected(wire.open("10.77.0.1"), wire.open("10.77.0.2"))
    wire.impair("flip-in-flight", ["10.77.0.1"], amount=5, seed=SEED, for_s=0)
    head = frame(b'{"op":"accumulate"}', 1 << 20)
    sound = (head + bytes(1 << 20)) * 2
    with one, other:
        spoilt = carry(one, other, sound)
    assert spoilt.count(head) == 2
    assert sum(byte.bit_count() for byte in spoilt.replace(head, b"")) == 5
    assert wire.hits() == [("flip-in-flight", 5)]


@wired
@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "node"), [("partition", 1), ("mute-node", 1), ("deaf-node", 2)])
def test_nothing_comes_through_until_it_is_over(wire: Wire, kind: str, node: int) -> None:
    one, other = connected(wire.open("10.77.0.1"), wire.open("10.77.0.2"))
    with one, other:
        wire.impair(kind, [f"10.77.0.{node}"], amount=0, seed=0, for_s=0.4)
        one.sendall(b"x")
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.recv(1)
        other.settimeout(DEADLINE_S)
        assert other.recv(1) == b"x"  # the kernel retransmits it
    assert wire.hits()[0][1] > 0


@wired
@pytest.mark.cluster
def test_an_unplugged_node_says_nothing_and_another_takes_its_place(wire: Wire) -> None:
    here, there = wire.open("10.77.0.1"), wire.open("10.77.0.2")
    one, other = connected(here, there)
    with one, other:
        wire.unplug("10.77.0.2")
        one.sendall(b"x")
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)  # no end of file, no reset
    wire.unplug("10.77.0.2")  # again: harmless
    with pytest.raises(ConfigError, match=r"namespace .*gone"), inside(there):
        pass
    with inside(wire.open("10.77.0.3")):
        listening = socket.create_server(("10.77.0.3", 0))
    with listening, inside(here), socket.create_connection(listening.getsockname(), DEADLINE_S) as again:
        again.sendall(b"y")


@wired
@pytest.mark.cluster
def test_a_process_that_stays_in_a_namespace_is_left_over() -> None:
    wire = Wire()
    with inside(wire.open("10.77.0.1")):
        staying = subprocess.Popen(["sleep", "60"])
    try:
        assert [str(staying.pid) in left for left in wire.close()] == [True]
    finally:
        staying.kill()
        staying.wait(DEADLINE_S)


@wired
@pytest.mark.cluster
def test_nothing_is_left_when_its_owner_is_killed() -> None:
    text = (
        "from tests.proof.chaos.network.wire import Wire\n"
        "wire = Wire()\n"
        "path = wire.open('10.77.0.1')\n"
        "import os; print(path.split('/')[2], os.stat(path).st_ino, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        forwarder, inode = (int(word) for word in owner.stdout.readline().split())
    ended = os.pidfd_open(forwarder)
    try:
        assert inhabitants({inode}) == []  # no process is in it: the forwarder's descriptor keeps it alive
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(DEADLINE_S)
        assert select.select([ended], [], [], DEADLINE_S)[0], "the forwarder lives on"
    finally:
        os.close(ended)
    assert inhabitants({inode}) == []


RUN = """
import json, os, psutil
from holdfast.chaos.cluster import TARGET
from holdfast.chaos.launcher import Launcher
from tests.proof.chaos.cluster import ChaosCluster
from tests.proof.chaos.faults import Fault
from tests.proof.chaos.scenario import WORKLOAD

def tell(event):
    if event["kind"] == "fault":
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        here, *inodes = (os.stat(f"/proc/{pid}/ns/net").st_ino for pid in ["self", *pids])
        print(json.dumps({"pids": pids, "inodes": sorted(set(inodes) - {here})}), flush=True)

with Launcher(["holdfast.chaos.drill", "tests.proof.chaos.workload"]) as launcher:
    args = {"job": WORKLOAD, "seed": 1, "steps": 9, "snapshots": True, "hook": {"protect": "auto"}}
    cluster = ChaosCluster(
        launcher, nodes=3, ranks_per_node=1, target=TARGET, args=args, on_event=tell, wired=True
    )
    cluster.add(Fault("rank1", "train.step", 3, "partition", (1,), for_s=100.0))
    cluster.run()
"""


@pytest.mark.needs("torch")
@wired
@pytest.mark.cluster
def test_nothing_is_left_of_a_run_that_is_killed() -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    with runner.stdout:
        told = json.loads(runner.stdout.readline())
    waiting = {pid: os.pidfd_open(pid) for pid in told["pids"]}
    try:
        assert len(waiting) == 8  # a zygote, a forwarder, three SMPs and three trainers
        assert len(told["inodes"]) == 3 and len(inhabitants(set(told["inodes"]))) == 6
        runner.kill()
        runner.wait(DEADLINE_S)
        for pid, ended in waiting.items():
            assert select.select([ended], [], [], DEADLINE_S)[0], f"process {pid} lives on"
    finally:
        runner.kill()
        for ended in waiting.values():
            os.close(ended)
        for path in (*arena_base().glob(f".virtual-{runner.pid}-*"), *arena_base().glob(f".launcher-{runner.pid}-*")):
            shutil.rmtree(path, ignore_errors=True)  # an SMP may be removing its own meanwhile
    assert inhabitants(set(told["inodes"])) == []


def test_without_root_it_is_refused_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("tests.proof.chaos.network.wire.unavailable", unavailable.__wrapped__)
    with pytest.raises(ConfigError, match="needs root"):
        Wire()


def test_a_device_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        pytest.skip("needs root and /dev/net/tun, which is then hidden")
    real = os.open

    def refuse(path: str, *arguments: int) -> int:
        if path == "/dev/net/tun":
            raise FileNotFoundError(2, "nothing there", path)
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    assert re.fullmatch("/dev/net/tun .*: nothing there", unavailable.__wrapped__())
