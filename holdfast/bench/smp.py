"""The second half of ``holdfast bench ec``: real SMPs on this machine protect and rebuild, compared with memcpy.

Four SMPs hold one shard each. *Protect* is the time from the first seal until all four say that the snapshot is
protected: reading every byte for its digest, sending it, checking it, adding it to the parity. *Rebuild* is the time
in which an empty replacement gets a lost node's shard back. memcpy moves the bytes of all four shards, or of the one,
in one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Wiring
from holdfast.ec.codec import as_array
from holdfast.smp_daemon.recovery.rebuild import METHODS
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.scratch import Scratch
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, plan_slot, write_stamp
from holdfast.snapshot.resume.arrange import RankInfo, arrange, parse_protect

NODES = 4
LOST = 1
DEADLINE_S = 120.0
JOB = "bench"


@dataclass(frozen=True, slots=True)
class ProtectRow:
    """Protecting one snapshot of four nodes.

    Attributes:
        bytes: of the four shards together.
        sent_bytes: by all SMPs together, to protect one snapshot.
        arena_bytes: of one node, in shared memory.
        high_water_bytes: most memory that one SMP process ever had resident, its arena and its code included.
    """

    protect: str
    nodes: int
    bytes: int
    seconds: float
    gb_s: float
    memcpy_gb_s: float
    ratio: float
    sent_bytes: int
    arena_bytes: int
    high_water_bytes: int


@dataclass(frozen=True, slots=True)
class RebuildRow:
    """Rebuilding one lost shard.

    Attributes:
        bytes: of the shard.
        received_bytes: by the replacement.
        sent_bytes, helpers_received_bytes: by each of the others, in order.
    """

    protect: str
    method: str
    bytes: int
    seconds: float
    memcpy_gb_s: float
    ratio: float
    received_bytes: int
    sent_bytes: tuple[int, ...]
    helpers_received_bytes: tuple[int, ...]


def measure(protect: str, shard_bytes: int, seed: int, repeats: int) -> tuple[ProtectRow, list[RebuildRow]]:
    """Start four SMPs, protect `repeats` snapshots, lose a node, rebuild it in every way. Blocks; cleans up.

    Raises:
        HoldfastError: there is too little shared memory, or an SMP failed.
    """
    with Scratch("bench") as scratch, ExitStack() as stack:
        content = memoryview(mmap.mmap(-1, shard_bytes))
        content[:] = np.random.default_rng(seed).bytes(shard_bytes)
        cluster = _Cluster(scratch.path, content, stack)
        cluster.configure(protect)
        times = [cluster.protect(step) for step in range(1, repeats + 2)][1:]  # the first prepares tables and pages
        protected = cluster.protect_row(protect, times)
        rebuilt = [cluster.rebuild_row(protect, method, epoch) for epoch, method in enumerate(METHODS, 2)]
    return protected, rebuilt


class _Cluster:
    """Four SMPs, and one process that is the trainer of each of them."""

    def __init__(self, base: Path, content: memoryview, stack: ExitStack) -> None:
        self._content = content
        self._nodes = [VirtualNode(i, 0, f"127.0.0.{211 + i}", base, JOB) for i in range(NODES)]
        self._clients: list[SmpClient] = []
        self._formats: list[SlotFormat] = []
        self._layout: Layout
        self._protected: SnapshotId | None = None
        for node in self._nodes:
            stack.callback(node.close)
            node.launch(Wiring("", []))
        for node in self._nodes:
            node.wait_ready()
            self._clients.append(SmpClient(node.arena, JOB))
            leaf = Leaf("state", "U8", (len(content),))
            self._formats.append(plan_slot(JOB, f"dp{node.index}", [leaf], 64))
        stack.callback(self._close)

    def configure(self, protect: str) -> None:
        """Have memory reserved, with two slots a shard."""
        self._layout = arrange(JOB, 1, [self._rank(i) for i in range(NODES)], parse_protect(protect), 2)
        for client in self._clients:
            client.join(1)
        for client in self._clients:
            client.configure(self._layout)

    def protect(self, step: int) -> tuple[float, float]:
        """Write, seal and see a snapshot protected: seconds that it took, and that memcpy took."""
        snapshot = SnapshotId(1, step)
        keep = [self._protected] if self._protected else []
        for i, client in enumerate(self._clients):
            self._write(client.begin(snapshot, f"dp{i}", keep, self._protected), i, snapshot)
        memcpy_s = NODES * self._memcpy()
        began = time.perf_counter()
        for i, client in enumerate(self._clients):
            client.seal(snapshot, f"dp{i}")
        for i, client in enumerate(self._clients):
            if client.await_outcome(snapshot, DEADLINE_S) is not SnapshotOutcome.PROTECTED:
                raise DeadlineExceeded(f"node {i} did not protect {snapshot} in {DEADLINE_S:.0f} s")
        self._protected = snapshot
        return time.perf_counter() - began, memcpy_s

    def protect_row(self, protect: str, times: Sequence[tuple[float, float]]) -> ProtectRow:
        """The medians of what `protect` returned."""
        seconds, memcpy_s = (statistics.median(column) for column in zip(*times, strict=True))
        count = NODES * len(self._content)
        sent = sum(client.counters()["bytes_sent"] for client in self._clients)
        return ProtectRow(
            protect=protect,
            nodes=NODES,
            bytes=count,
            seconds=rounded(seconds),
            gb_s=rounded(count / seconds / 1e9),
            memcpy_gb_s=rounded(count / memcpy_s / 1e9),
            ratio=rounded(memcpy_s / seconds),
            sent_bytes=sent // (len(times) + 1),
            arena_bytes=max(_arena_bytes(node.arena) for node in self._nodes),
            high_water_bytes=max(_high_water_bytes(node.pid) for node in self._nodes),
        )

    def rebuild_row(self, protect: str, method: str, epoch: int) -> RebuildRow:
        """Lose a node, replace it, and have its shard computed by one of `METHODS`."""
        assert self._protected is not None
        node = self._nodes[LOST]
        self._clients[LOST].close()
        node.power_cut()
        node.launch(Wiring("", []), {"HOLDFAST_REBUILD": method})
        node.wait_ready()
        self._clients[LOST] = SmpClient(node.arena, JOB)
        plan = plan_restore([client.inventory() for client in self._clients], self._layout.coords)
        if plan is None or plan.snapshot != self._protected:
            raise HoldfastError(f"{self._protected} was protected and cannot be had")
        for client in self._clients:
            client.join(epoch)
        before = [client.counters() for client in self._clients]
        memcpy_s = self._memcpy()
        began = time.perf_counter()
        shard = self._clients[LOST].recover(plan.sources, f"dp{LOST}")
        seconds = time.perf_counter() - began
        offset, leaf = self._formats[LOST].offsets["state"]
        if shard.how != "rebuilt" or shard.view[offset : offset + leaf.bytes] != self._content:
            raise HoldfastError(f"the shard came back {shard.how}, and not as it was")
        after = [client.counters() for client in self._clients]
        sent, received = (
            [late[name] - early[name] for early, late in zip(before, after, strict=True)]
            for name in ("bytes_sent", "bytes_received")
        )
        return RebuildRow(
            protect=protect,
            method=method,
            bytes=len(self._content),
            seconds=rounded(seconds),
            memcpy_gb_s=rounded(len(self._content) / memcpy_s / 1e9),
            ratio=rounded(memcpy_s / seconds),
            received_bytes=received.pop(LOST),
            sent_bytes=tuple(count for i, count in enumerate(sent) if i != LOST),
            helpers_received_bytes=tuple(received),
        )

    def _rank(self, index: int) -> RankInfo:
        return RankInfo.of(f"dp{index}", self._clients[index].inventory(), self._formats[index].total_bytes)

    def _write(self, slot: memoryview, index: int, snapshot: SnapshotId) -> None:
        form = self._formats[index]
        slot[: len(form.header)] = form.header
        write_stamp(slot, snapshot)
        offset, leaf = form.offsets["state"]
        np.copyto(as_array(slot[offset : offset + leaf.bytes]), as_array(self._content))
        offset, capacity = form.record
        slot[offset : offset + capacity] = b"{}".ljust(capacity)

    def _memcpy(self) -> float:
        """Seconds in which one thread copies a shard's bytes into memory that is there."""
        target = memoryview(mmap.mmap(-1, len(self._content)))
        target[:] = self._content
        source, to = as_array(self._content).ctypes.data, as_array(target).ctypes.data
        began = time.perf_counter()
        ctypes.memmove(to, source, len(self._content))
        return time.perf_counter() - began

    def _close(self) -> None:
        for client in self._clients:
            client.close()


def grid(rows: Sequence[ProtectRow]) -> list[list[str]]:
    """The table of protecting, its header first."""
    header = ["code", "data", "seconds", "x memcpy", "GB/s", "sent", "arena", "most memory", "beyond arena"]
    return [
        header,
        *(
            [
                row.protect,
                _mib(row.bytes),
                f"{row.seconds:.2f}",
                f"{row.ratio:.3f}",
                f"{row.gb_s:.2f}",
                _mib(row.sent_bytes),
                _mib(row.arena_bytes),
                _mib(row.high_water_bytes),
                _mib(row.high_water_bytes - row.arena_bytes),
            ]
            for row in rows
        ),
    ]


def rebuild_grid(rows: Sequence[RebuildRow]) -> list[list[str]]:
    """The table of rebuilding, its header first."""
    header = ["code", "by", "shard", "seconds", "x memcpy", "into new node", "out of others", "into others"]
    return [
        header,
        *(
            [
                row.protect,
                row.method,
                _mib(row.bytes),
                f"{row.seconds:.3f}",
                f"{row.ratio:.3f}",
                _mib(row.received_bytes),
                _mib(*row.sent_bytes),
                _mib(*row.helpers_received_bytes),
            ]
            for row in rows
        ),
    ]


def _mib(*counts: int) -> str:
    return "/".join(f"{count / 2**20:.0f}" for count in counts) + " MiB"


def _arena_bytes(arena: Path) -> int:
    return sum(path.stat().st_size for path in arena.iterdir() if path.suffix in (".safetensors", ".parity"))


def _high_water_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise HoldfastError(f"the kernel does not say how much memory process {pid} has had")


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")
