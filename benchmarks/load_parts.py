"""Parts of `benchmarks/load.py`: shaped links between namespaces, a file server and its readers, and SMPs.

``python -m benchmarks.load_parts serve HOST BYTES`` and ``... read HOST PORT BYTES`` are the file server and a reader;
``... smp ARGUMENTS`` is an SMP that never steals work from slow sources.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Wiring
from holdfast.ec.codec import as_array
from holdfast.smp_daemon.service import SocketListener, bind_tcp
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.plan import RestorePlan, plan_restore
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, write_stamp
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.snapshot.resume.arrange import arrange, node_of_rank, parse_protect
from tests.proof.chaos.network.namespaces import inside, place_of

JOB = "bench-load"
UNIT_BYTES = 2 << 20
READERS = 4
"""Connections of one node to the file server: as many as the units it has in flight from SMPs."""

DEADLINE_S = 300.0
SWITCH = "switch"
NUMBERS = itertools.count()
WITH, WITHOUT = "holdfast.smp_daemon", "benchmarks.load_parts"
"""The modules that run an SMP that steals work from slow sources, and one that does not."""


def run(*command: str) -> None:
    """Run a command that must succeed; raises `HoldfastError`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HoldfastError(f"{' '.join(command)}: {done.stderr.strip()}")


def new_namespace(stack: ExitStack) -> int:
    """Make an unnamed network namespace; return the pid of the process that keeps it until `stack` closes."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    stack.callback(holder.wait)
    assert holder.stdin is not None
    stack.callback(holder.stdin.close)
    path, mine = Path(f"/proc/{holder.pid}/ns/net"), Path("/proc/self/ns/net").stat().st_ino
    limit = time.monotonic() + 10.0
    while path.stat().st_ino == mine:
        if time.monotonic() > limit:
            raise DeadlineExceeded("unshare made no namespace")
    run("nsenter", f"--net={path}", "ip", "link", "set", "lo", "up")
    return holder.pid


class Links:
    """Hosts in unnamed network namespaces, connected by one bridge; each link has a rate per direction.

    Needs root. The bridge is made in this process's namespace, which should therefore be a new one.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pids: dict[str, int] = {}
        self._ports: dict[str, str] = {}
        run("ip", "link", "add", SWITCH, "type", "bridge")
        stack.callback(run, "ip", "link", "del", SWITCH)
        run("ip", "link", "set", SWITCH, "up")

    def add(self, host: str) -> str:
        """Add a host with an address; return the path of its namespace. The host disappears with this process."""
        self._pids[host] = pid = new_namespace(self._stack)
        path = f"/proc/{pid}/ns/net"
        number = next(NUMBERS)  # devices outlive their namespace for a while, so names are not reused
        port, near = f"port{number}", f"near{number}"
        self._ports[host] = port
        run("ip", "link", "add", port, "type", "veth", "peer", "name", near)
        run("ip", "link", "set", near, "netns", str(pid), "name", "eth0")
        run("ip", "link", "set", port, "master", SWITCH, "up")
        inside_it = ("nsenter", f"--net={path}", "ip")
        run(*inside_it, "addr", "add", f"{host}/16", "dev", "eth0")
        run(*inside_it, "link", "set", "eth0", "up")
        return path

    def shape(self, host: str, rate: float) -> None:
        """Limit the link of `host` to `rate` bytes per second in each direction from now on."""
        pid = self._pids[host]
        rule = ("root", "tbf", "rate", f"{int(rate * 8)}bit", "burst", "128kb", "latency", "200ms")
        run("tc", "qdisc", "replace", "dev", self._ports[host], *rule)
        run("nsenter", f"--net=/proc/{pid}/ns/net", "tc", "qdisc", "replace", "dev", "eth0", *rule)


# ---------------------------------------------------------------------- a file server


class FileServer:
    """Serves units of a file that it holds in memory, like infinitely fast disks behind one network link."""

    def __init__(self, host: str, length: int) -> None:
        self._content = memoryview(bytearray(np.random.default_rng(1).bytes(length)))
        self._digests = [digest(self._content[at : at + UNIT_BYTES]) for at in range(0, length, UNIT_BYTES)]
        self.listener = SocketListener(bind_tcp(host, 0), lambda sock: self)

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        index = int(message["unit"])
        unit = self._content[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]
        return {"digest": self._digests[index]}, unit

    def ended(self) -> None:
        """Nothing to clean up."""


def serve(host: str, length: int) -> None:
    """Run the file server until standard input ends."""
    server = FileServer(host, length)
    print(server.listener.port, flush=True)
    sys.stdin.read()
    server.listener.close()


def read(host: str, port: int, length: int) -> None:
    """Read the file into shared memory and check it, after a line on standard input.

    Prints ``ready`` before that line, and the seconds afterwards.
    """
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="bench-load-") as file:
        os.posix_fallocate(file.fileno(), 0, length)
        out = memoryview(mmap.mmap(file.fileno(), length))
        streams = [connect((host, port)) for _ in range(READERS)]
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        lock, units = threading.Lock(), iter(range(-(-length // UNIT_BYTES)))

        def work(stream: Any) -> None:
            while True:
                with lock:
                    index = next(units, None)
                if index is None:
                    return
                unit = out[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]
                reply, _ = call(stream, {"unit": index})
                stream.receive_into(unit)
                if digest(unit) != reply["digest"]:
                    raise HoldfastError("a unit was damaged")

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(work, streams))
        print(time.monotonic() - began, flush=True)


def line_of(stream: IO[str]) -> str:
    """The next line that a process prints. Blocks; raises `DeadlineExceeded`."""
    if not select.select([stream], [], [], DEADLINE_S)[0]:
        raise DeadlineExceeded("a process said nothing")
    return stream.readline().strip()


def part(namespace: str, stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    """Start a file server or reader in a namespace. The server ends when its standard input is closed."""
    with inside(namespace):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load_parts", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    stack.callback(process.wait)
    assert process.stdin is not None
    stack.callback(process.stdin.close)
    return process


def read_all(host: str, port: int, length: int, namespaces: Sequence[str]) -> float:
    """Seconds until readers in all `namespaces`, started together, have read `length` bytes from the file server."""
    with ExitStack() as stack:
        readers = [part(namespace, stack, "read", host, str(port), str(length)) for namespace in namespaces]
        for reader in readers:
            assert reader.stdout is not None
            if line_of(reader.stdout) != "ready":
                raise HoldfastError("a reader did not start")
        began = time.monotonic()
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
        for reader in readers:
            assert reader.stdout is not None
            float(line_of(reader.stdout))
        return time.monotonic() - began


# ---------------------------------------------------------------------- SMPs


class Fleet:
    """One SMP per host, each with a shard of the same length, and one protected snapshot of these shards."""

    def __init__(self, hosts: dict[str, str], base: Path, shard_bytes: int, protect: str, stack: ExitStack) -> None:
        """`hosts`: the namespace of each address."""
        self.content = memoryview(bytearray(np.random.default_rng(2).bytes(shard_bytes)))
        self.nodes = [VirtualNode(i, 0, host, base, JOB) for i, host in enumerate(hosts)]
        for node, namespace in zip(self.nodes, hosts.values(), strict=True):
            node.place = place_of(namespace)
            stack.callback(node.close)
            node.launch(Wiring("", []))
        for node in self.nodes:
            node.wait_ready()
        self.clients = [SmpClient(node.arena, JOB) for node in self.nodes]
        stack.callback(self._close_clients)
        self._epoch = 1
        leaf = Leaf("state", "U8", (shard_bytes,))
        self.forms = [plan_slot(JOB, f"dp{i}", [leaf], 64) for i in range(len(self.nodes))]
        ranks = [
            node_of_rank(client.inventory(), f"dp{i}", self.forms[i].total_bytes)
            for i, client in enumerate(self.clients)
        ]
        self.layout = arrange(JOB, 1, ranks, parse_protect(protect), 2)
        self._each(lambda i: self.clients[i].join(1))
        self._each(lambda i: self.clients[i].configure(self.layout))
        self._each(self._write_and_seal)
        for client in self.clients:
            if client.await_outcome(SnapshotId(1, 1), DEADLINE_S) is not SnapshotOutcome.PROTECTED:
                raise DeadlineExceeded("the snapshot was not protected")

    def _close_clients(self) -> None:
        for client in self.clients:
            client.close()

    def _each(self, work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(work, range(len(self.nodes))))

    def _write_and_seal(self, index: int) -> None:
        taken, form = self.clients[index].take(f"dp{index}", []), self.forms[index]
        slot = taken.view
        slot[: len(form.header)] = form.header
        write_stamp(slot, SnapshotId(1, 1))
        offset, leaf = form.offsets["state"]
        np.copyto(as_array(slot[offset : offset + leaf.bytes]), as_array(self.content))
        offset, capacity = form.record
        slot[offset : offset + capacity] = b"{}".ljust(capacity)
        self.clients[index].seal(SnapshotId(1, 1), f"dp{index}", taken, [])

    def replace(self, index: int, *, module: str = WITH) -> None:
        """Lose a node and start an empty replacement, which runs `module` as its SMP."""
        before, self.nodes[index] = (
            self.nodes[index],
            VirtualNode(index, 0, self.nodes[index].host, self.nodes[index].memory.parent, JOB, module),
        )
        self.clients[index].close()
        before.power_cut()
        self.nodes[index].place = before.place
        self.nodes[index].launch(Wiring("", []))
        self.nodes[index].wait_ready()
        self.clients[index] = SmpClient(self.nodes[index].arena, JOB)

    def plan(self) -> RestorePlan:
        """The restore plan of a restart. Also makes every node join a new epoch."""
        plan = plan_restore([client.inventory() for client in self.clients], self.layout.coords)
        if plan is None or plan.snapshot != SnapshotId(1, 1):
            raise HoldfastError("the protected snapshot cannot be had")
        self._epoch += 1
        self._each(lambda i: self.clients[i].join(self._epoch))
        return plan

    def recover(self, moves: dict[int, int]) -> tuple[float, list[RecoveredShard]]:
        """Seconds until every node ``i`` holds the shard of node ``moves[i]``, starting together; and the shards."""
        plan = self.plan()

        def one(move: tuple[int, int]) -> RecoveredShard:
            return self.clients[move[0]].recover(plan.sources, f"dp{move[1]}")

        began = time.monotonic()
        with ThreadPoolExecutor(len(moves)) as pool:
            shards = list(pool.map(one, moves.items()))
        seconds = time.monotonic() - began
        for shard, coord in zip(shards, moves.values(), strict=True):
            offset, leaf = self.forms[coord].offsets["state"]
            if shard.view[offset : offset + leaf.bytes] != self.content:
                raise HoldfastError("a shard did not come back as it was")
        return seconds, shards

    def received(self) -> int:
        """Bytes that all SMPs have received from each other."""
        return sum(client.counters()["bytes_received"] for client in self.clients)


def smp_without_stealing() -> None:
    """Run an SMP that considers no source slow, and no request late before the network timeout."""
    from holdfast.smp_daemon.__main__ import main
    from holdfast.smp_daemon.recovery import ways

    def never(self: object, address: object) -> bool:
        return False

    ways.Speeds.is_slow = never  # type: ignore[method-assign]
    ways.FIRST_PATIENCE_S = ways.LEAST_PATIENCE_S = 2 * CALL_DEADLINE_S
    main()


def _main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "serve":
        serve(arguments[0], int(arguments[1]))
    elif what == "read":
        read(arguments[0], int(arguments[1]), int(arguments[2]))
    else:
        smp_without_stealing()


if __name__ == "__main__":
    _main()
