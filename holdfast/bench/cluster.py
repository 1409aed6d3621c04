"""Real SMPs on this machine, for benchmarks, and one process that acts as the trainer of all of them.

``python -m holdfast.bench.cluster`` runs as a process that takes orders on standard input, one JSON object per line,
and answers each with one JSON object. `holdfast bench node` also runs this file with the code of another checkout, so
it must import nothing from its own folder.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import holdfast
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Wiring
from holdfast.ec.codec import as_array
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, plan_slot, write_stamp
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.resume.arrange import arrange, node_of_rank, parse_protect

LOST = 1
"""Index of the node that loses its memory."""

SLOTS = 2
DEADLINE_S = 120.0
PAUSE_S = 0.9
"""How long to hold back encoding while all nodes seal, in seconds. SMPs grant at most a second."""

ATTEMPTS = 5
"""How many snapshots to try until one is sealed within `PAUSE_S`, which may fail on a busy machine."""


@dataclass(frozen=True, slots=True)
class Protected:
    """Times of one snapshot of all nodes. Processor time is user plus system time, summed over all SMPs.

    Attributes:
        bytes: size of all shards together.
        seal_s, seal_cpu_s: time to seal, which digests every byte, node by node.
        seconds, cpu_s: time from then until every node has committed its parity and heard that the others have.
    """

    bytes: int
    seal_s: float
    seal_cpu_s: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class NodeRecovered:
    """Times of the recovery of a lost node's shard.

    Attributes:
        bytes: size of the shard.
        cpu_s: processor time of all SMPs together.
        sent, received: bytes that each node sent to, and received from, other SMPs.
    """

    bytes: int
    seconds: float
    cpu_s: float
    sent: list[int]
    received: list[int]


class Cluster:
    """SMPs that hold one shard each. Not thread-safe; every call blocks.

    Attributes:
        nodes, clients: the nodes and the connections to their SMPs, in the order of their shards.
        content: the bytes of every shard.
    """

    def __init__(
        self,
        base: Path,
        content: memoryview,
        nodes: int,
        stack: ExitStack,
        settings: Mapping[str, str] | None = None,
        places: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        """Start the SMPs; closing `stack` ends them.

        Args:
            settings: additional environment variables for the SMPs.
            places: for each node its addresses, separated by commas, and where it starts, see `chaos.runner.within`. If
                empty, all nodes are on loopback.

        Raises:
            HoldfastError: an SMP cannot start.
        """
        job = "bench"
        self.content = content
        self._settings = dict(settings or {})
        places = places or [(f"127.0.0.{211 + i}", ()) for i in range(nodes)]
        self.nodes = [VirtualNode(i, 0, hosts, base, job) for i, (hosts, _) in enumerate(places)]
        for node, (_, place) in zip(self.nodes, places, strict=True):
            node.place = place
        self.clients: list[SmpClient] = []
        self._formats: list[SlotFormat] = []
        self._slots: dict[int, TakenSlot] = {}
        self._layout: Layout
        self._newest: SnapshotId | None = None
        self._step = 0
        self._epoch = 1
        for node in self.nodes:
            stack.callback(node.close)
            node.launch(Wiring("", []), self._settings)
        stack.callback(self._close)
        for node in self.nodes:
            node.wait_ready()
            self.clients.append(SmpClient(node.arena, job))
            leaf = Leaf("state", "U8", (len(content),))
            self._formats.append(plan_slot(job, f"dp{node.index}", [leaf], 64))

    def configure(self, protect: str) -> None:
        """Give all SMPs a layout, for which they reserve memory: `SLOTS` slots per shard."""
        ranks = [
            node_of_rank(client.inventory(), f"dp{i}", form.total_bytes)
            for i, (client, form) in enumerate(zip(self.clients, self._formats, strict=True))
        ]
        self._layout = arrange("bench", self._epoch, ranks, parse_protect(protect), SLOTS)
        for client in self.clients:
            client.join(self._epoch)
        for client in self.clients:
            client.configure(self._layout)

    def write(self) -> SnapshotId:
        """Write the next snapshot into its slots, and return its id."""
        self._step += 1
        snapshot = SnapshotId(self._epoch, self._step)
        keep = [self._newest] if self._newest else []
        for i, client in enumerate(self.clients):
            slot = self._slots[i] = client.take(f"dp{i}", keep)
            self._write(slot.view, i, snapshot)
        return snapshot

    def seal(self, snapshot: SnapshotId) -> None:
        """Seal the snapshot, node by node: its SMP digests and commits it."""
        keep = [self._newest] if self._newest else []
        for i, client in enumerate(self.clients):
            client.seal(snapshot, f"dp{i}", self._slots[i], keep, self._newest)

    def await_protected(self, snapshot: SnapshotId) -> None:
        """Wait until every node says that the snapshot is protected. Raises `DeadlineExceeded`."""
        for i, client in enumerate(self.clients):
            if client.await_outcome(snapshot, DEADLINE_S) is not SnapshotOutcome.PROTECTED:
                raise DeadlineExceeded(f"node {i} did not protect {snapshot} in {DEADLINE_S:.0f} s")
        self._newest = snapshot

    def protect(self) -> Protected:
        """Protect a snapshot, and time sealing and encoding separately: the SMPs pause encoding until all have sealed.

        Raises:
            DeadlineExceeded: in each of `ATTEMPTS` attempts, sealing took longer than the pause.
        """
        for _ in range(ATTEMPTS):
            snapshot = self.write()
            sent = self._sent()
            for client in self.clients:
                client.board.pause(0, time.monotonic() + PAUSE_S)
            before, began = self._cpu_s(), time.perf_counter()
            self.seal(snapshot)
            sealed_at, sealed_cpu_s = time.perf_counter(), self._cpu_s()
            held_back = self._sent() == sent
            start, start_cpu_s = time.perf_counter(), self._cpu_s()
            for client in self.clients:
                client.board.resume(0)
            self.await_protected(snapshot)
            done, done_cpu_s = time.perf_counter(), self._cpu_s()
            if held_back:
                return Protected(
                    bytes=len(self.content) * len(self.nodes),
                    seal_s=sealed_at - began,
                    seal_cpu_s=sealed_cpu_s - before,
                    seconds=done - start,
                    cpu_s=done_cpu_s - start_cpu_s,
                )
        raise DeadlineExceeded(
            f"{len(self.nodes)} nodes did not seal {len(self.content):,} bytes each within {PAUSE_S:g} s: use smaller "
            "shards, or an idle machine"
        )

    def recover(self, method: str) -> NodeRecovered:
        """Make `LOST` lose its memory, and time how its replacement rebuilds the shard.

        Args:
            method: see `recovery.rebuild.recover`.
        """
        assert self._newest is not None
        node = self.nodes[LOST]
        self.clients[LOST].close()
        node.power_cut()
        node.launch(Wiring("", []), self._settings | {"HOLDFAST_REBUILD": method})
        node.wait_ready()
        self.clients[LOST] = SmpClient(node.arena, "bench")
        plan = plan_restore([client.inventory() for client in self.clients], self._layout.coords)
        if plan is None or plan.snapshot != self._newest:
            raise HoldfastError(f"{self._newest} was protected, but cannot be restored")
        self._epoch += 1
        for client in self.clients:
            client.join(self._epoch)
        counted = [client.counters() for client in self.clients]
        before, began = self._cpu_s(), time.perf_counter()
        shard = self.clients[LOST].recover(plan.sources, f"dp{LOST}")
        seconds, cpu_s = time.perf_counter() - began, self._cpu_s() - before
        offset, leaf = self._formats[LOST].offsets["state"]
        if shard.how != "rebuilt" or shard.view[offset : offset + leaf.bytes] != self.content:
            raise HoldfastError(f"the lost shard came back {shard.how}: it was not rebuilt, or its bytes are wrong")
        sent, received = (
            [client.counters()[name] - early[name] for client, early in zip(self.clients, counted, strict=True)]
            for name in ("bytes_sent", "bytes_received")
        )
        return NodeRecovered(len(self.content), seconds, cpu_s, sent, received)

    def _write(self, slot: memoryview, index: int, snapshot: SnapshotId) -> None:
        form = self._formats[index]
        slot[: len(form.header)] = form.header
        write_stamp(slot, snapshot)
        offset, leaf = form.offsets["state"]
        np.copyto(as_array(slot[offset : offset + leaf.bytes]), as_array(self.content))
        offset, capacity = form.record
        slot[offset : offset + capacity] = b"{}".ljust(capacity)

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(node.pid) for node in self.nodes)

    def _sent(self) -> int:
        return sum(client.counters()["bytes_sent"] for client in self.clients)

    def _close(self) -> None:
        for client in self.clients:
            client.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process: all its threads, including those that have ended."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3): in nanoseconds; /proc has only hundredths of 1 s


def random_content(count: int, seed: int) -> memoryview:
    """`count` random bytes in a memory mapping of their own."""
    content = memoryview(mmap.mmap(-1, count))
    content[:] = np.random.default_rng(seed).bytes(count)
    return content


def main() -> None:
    """Carry out the orders on standard input, ``{"do": "protect"}`` or ``{"do": "recover"}``, until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--protect", required=True)
    parser.add_argument("--shard-bytes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    try:
        with Scratch("bench") as scratch, ExitStack() as stack:
            content = random_content(options.shard_bytes, options.seed)
            # Without the scrub, whose reads would disturb the measurement.
            cluster = Cluster(scratch.path, content, options.nodes, stack, {"HOLDFAST_SCRUB": "0"})
            cluster.configure(options.protect)
            _answer({"code": str(Path(holdfast.__file__).parent.parent)})
            for line in sys.stdin:
                order = json.loads(line)
                _answer(asdict(cluster.protect() if order["do"] == "protect" else cluster.recover("chain")))
    except HoldfastError as error:
        _answer({"error": str(error)})


def _answer(found: Mapping[str, object]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
