"""The second half of ``benchmarks.ec``: real SMPs on this machine protect and rebuild, compared with memcpy.

Four SMPs hold one shard each. *Protect* is the time from the first seal until all four say that the snapshot is
protected: every byte is read for its digest, sent, checked, and added to the parity. *Rebuild* is the time that an
empty replacement takes to get a lost node's shard back. For comparison, memcpy copies the bytes of all four shards, or
of the lost one, in one thread.
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

from holdfast.bench.cluster import LOST, Cluster, random_content
from holdfast.bench.machine import rounded
from holdfast.ec.codec import as_array
from holdfast.report import Report
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.errors import HoldfastError

NODES = 4


@dataclass(frozen=True, slots=True)
class ProtectRow:
    """Result of protecting snapshots of four nodes.

    Attributes:
        bytes: size of the four shards together.
        ratio: throughput divided by memcpy's.
        sent_bytes: bytes that all SMPs together sent to protect one snapshot.
        arena_bytes: shared memory of one node's arena; the largest of the four.
        high_water_bytes: most memory that any SMP process ever had resident, including its arena and its code.
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
    """Result of rebuilding one lost shard.

    Attributes:
        bytes: size of the shard.
        ratio: throughput divided by memcpy's.
        received_bytes: bytes that the replacement received.
        sent_bytes, helpers_received_bytes: bytes that each of the other nodes sent and received, in order.
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
    """Start four SMPs, protect `repeats` snapshots, then rebuild a lost node by every method. Blocks; cleans up.

    Raises:
        HoldfastError: there is too little shared memory, or an SMP failed.
    """
    with Scratch("bench") as scratch, ExitStack() as stack:
        cluster = Cluster(scratch.path, random_content(shard_bytes, seed), NODES, stack)
        cluster.configure(protect)
        times = [_protect(cluster) for _ in range(repeats + 1)][1:]  # the first is a warm-up: tables and pages
        protected = _protect_row(cluster, protect, times)
        rebuilt = [_rebuild_row(cluster, protect, method) for method in ("chain", "decode")]
    return protected, rebuilt


def _protect(cluster: Cluster) -> tuple[float, float]:
    """Protect a snapshot. Returns the seconds from its seal until it was protected, and the seconds of memcpy."""
    snapshot = cluster.write()
    memcpy_s = NODES * _memcpy(cluster.content)
    began = time.perf_counter()
    cluster.seal(snapshot)
    cluster.await_protected(snapshot)
    return time.perf_counter() - began, memcpy_s


def _protect_row(cluster: Cluster, protect: str, times: Sequence[tuple[float, float]]) -> ProtectRow:
    """The row for the medians of `times`, which `_protect` returned."""
    seconds, memcpy_s = (statistics.median(column) for column in zip(*times, strict=True))
    count = NODES * len(cluster.content)
    sent = sum(client.counters()["bytes_sent"] for client in cluster.clients)
    return ProtectRow(
        protect=protect,
        nodes=NODES,
        bytes=count,
        seconds=rounded(seconds),
        gb_s=rounded(count / seconds / 1e9),
        memcpy_gb_s=rounded(count / memcpy_s / 1e9),
        ratio=rounded(memcpy_s / seconds),
        sent_bytes=sent // (len(times) + 1),
        arena_bytes=max(_arena_bytes(node.arena) for node in cluster.nodes),
        high_water_bytes=max(_high_water_bytes(node.pid) for node in cluster.nodes),
    )


def _rebuild_row(cluster: Cluster, protect: str, method: str) -> RebuildRow:
    memcpy_s = _memcpy(cluster.content)
    found = cluster.recover(method)
    return RebuildRow(
        protect=protect,
        method=method,
        bytes=found.bytes,
        seconds=rounded(found.seconds),
        memcpy_gb_s=rounded(found.bytes / memcpy_s / 1e9),
        ratio=rounded(memcpy_s / found.seconds),
        received_bytes=found.received[LOST],
        sent_bytes=tuple(count for i, count in enumerate(found.sent) if i != LOST),
        helpers_received_bytes=tuple(count for i, count in enumerate(found.received) if i != LOST),
    )


def _memcpy(content: memoryview) -> float:
    """Seconds that one thread takes to copy a shard's bytes into memory whose pages are allocated."""
    target = memoryview(mmap.mmap(-1, len(content)))
    target[:] = content
    source, to = as_array(content).ctypes.data, as_array(target).ctypes.data
    began = time.perf_counter()
    ctypes.memmove(to, source, len(content))
    return time.perf_counter() - began


def protect_report(rows: Sequence[ProtectRow]) -> Report:
    """The table of protecting."""
    header = ["code", "data", "seconds", "x memcpy", "GB/s", "sent", "arena", "most memory", "beyond arena"]
    return Report(
        header,
        [
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
        ],
        "four SMPs protect a snapshot",
        left=2,
    )


def rebuild_report(rows: Sequence[RebuildRow]) -> Report:
    """The table of rebuilding."""
    header = ["code", "by", "shard", "seconds", "x memcpy", "into new node", "out of others", "into others"]
    return Report(
        header,
        [
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
        ],
        "an empty node gets a lost shard back",
        left=2,
    )


def _mib(*counts: int) -> str:
    return "/".join(f"{count / 2**20:.0f}" for count in counts) + " MiB"


def _arena_bytes(arena: Path) -> int:
    return sum(path.stat().st_size for path in arena.iterdir() if path.suffix in (".safetensors", ".parity"))


def _high_water_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise HoldfastError(f"the kernel does not say how much memory process {pid} has had")
