"""How fast this machine is at each part of protecting a snapshot: the first half of ``holdfast bench node``.

Each part alternates with memcpy of as many bytes in as many threads. The buffers are larger than the last-level cache,
because training state is.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from holdfast.bench.floor import DEADLINE_S, PIECE_BYTES, Floor, Wires, memory, whole_pieces
from holdfast.bench.machine import rounded
from holdfast.ec import choose_codec
from holdfast.ec.codec import Buffer, as_array
from holdfast.smp_daemon.shared.credentials import TLS_ENVS
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.smp_daemon.shared.settings import TLS_NAME
from holdfast.snapshot.copy.runs import copy, make_runs

PARTS = {
    "copy": "copied from memory to memory, by stores that bypass the cache where there are such",
    "digest": "read and digested",
    "fold_xor": "of data units added to parity, m = 1",
    "fold_gf": "of data units added to one parity unit, m = 2",
}
"""For each part, what its rate counts: bytes that are ..."""

CACHES = 2
"""Least size of the bytes that are read, in multiples of the last-level cache."""

LEAST_BYTES = 64 << 20
UNIT_BYTES = 2 << 20
"""How many bytes to digest or fold in one call."""


@dataclass(frozen=True, slots=True)
class PartRate:
    """The rate of one of `PARTS`.

    Attributes:
        bytes_per_s: bytes per second of wall time, all threads together.
        bytes_per_core_s: bytes per second of processor time, which other work on the machine disturbs less.
        memcpy_bytes_per_core_s: the same for memcpy.
        ratio: `bytes_per_core_s` divided by memcpy's.
    """

    part: str
    threads: int
    bytes_per_s: float
    bytes_per_core_s: float
    memcpy_bytes_per_core_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SocketRate:
    """The rate of loopback sockets from one process to another, with a thread at each end of a connection.

    Attributes:
        bytes_per_s: bytes per second of wall time, all connections together.
        send_bytes_per_core_s, receive_bytes_per_core_s: bytes per second of processor time of the sending and of the
            receiving process.
    """

    connections: int
    tls: bool
    bytes_per_s: float
    send_bytes_per_core_s: float
    receive_bytes_per_core_s: float


def measure_parts(cores: int, rounds: int, most_bytes: int) -> list[PartRate]:
    """Measure every part with one thread, and with one thread per core.

    Args:
        most_bytes: most bytes to read in one pass, however large the cache is.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    found = []
    for threads in sorted({1, cores}):
        share = min(max(CACHES * last_cache_bytes(), LEAST_BYTES), most_bytes) // threads
        share = max(UNIT_BYTES, share // UNIT_BYTES * UNIT_BYTES)
        need, room = 2 * share * threads, psutil.virtual_memory().available
        if need > room / 2:
            raise ConfigError(f"the buffers need {need:,} bytes, over half of the {room:,} that are free: use --quick")
        sources, targets = ([memory(share) for _ in range(threads)] for _ in range(2))
        copies = [partial(_memcpy, *pair) for pair in zip(sources, targets, strict=True)]
        with ThreadPoolExecutor(threads) as pool:
            for part in PARTS:
                works = [_work(part, source, target) for source, target in zip(sources, targets, strict=True)]
                found.append(_in_turn(part, threads, share * threads, works, copies, pool, rounds))
    return found


def _work(part: str, source: Buffer, target: Buffer) -> Callable[[], object]:
    if part == "copy":
        runs = make_runs([(as_array(source).ctypes.data, as_array(target).ctypes.data, source.nbytes)])
        return partial(copy, runs)
    if part == "digest":
        return partial(digest_units, source, UNIT_BYTES)
    codec, row = (choose_codec(7, 1), 0) if part == "fold_xor" else (choose_codec(6, 2), 1)

    def fold() -> None:
        unit = source[:UNIT_BYTES]  # always the same one, so it is cached, as a unit just received and digested is
        for start in range(0, target.nbytes, UNIT_BYTES):
            codec.accumulate(1, unit, {row: target[start : start + UNIT_BYTES]})

    return fold


def _memcpy(source: Buffer, target: Buffer) -> None:
    ctypes.memmove(as_array(target).ctypes.data, as_array(source).ctypes.data, source.nbytes)


def _in_turn(
    part: str,
    threads: int,
    total: int,
    works: Sequence[Callable[[], object]],
    copies: Sequence[Callable[[], object]],
    pool: ThreadPoolExecutor,
    rounds: int,
) -> PartRate:
    times = [(*_together(pool, works), *_together(pool, copies)) for _ in range(rounds + 1)]
    seconds, cpu_s, _, memcpy_cpu_s = map(statistics.median, zip(*times[1:], strict=True))  # the first is a warm-up
    return PartRate(
        part=part,
        threads=threads,
        bytes_per_s=rounded(total / seconds),
        bytes_per_core_s=rounded(total / cpu_s),
        memcpy_bytes_per_core_s=rounded(total / memcpy_cpu_s),
        ratio=rounded(memcpy_cpu_s / cpu_s),
    )


def _together(pool: ThreadPoolExecutor, works: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Run each of `works` once, all at the same time in threads of their own. Returns wall and processor seconds."""
    barrier = threading.Barrier(len(works))

    def timed(work: Callable[[], object]) -> tuple[float, float, float]:
        barrier.wait(DEADLINE_S)
        began, used = time.perf_counter(), time.thread_time()
        work()
        used = time.thread_time() - used  # before the wall time, which must be the longer of the two
        return began, time.perf_counter(), used

    began, ended, cpu_s = zip(*pool.map(timed, works), strict=True)
    return max(ended) - min(began), sum(cpu_s)


def measure_sockets(
    connections: Sequence[int], total: int, rounds: int, environment: Mapping[str, str], *, tls: bool
) -> list[SocketRate]:
    """Measure plain sockets with each number of connections.

    Args:
        total: bytes to send per round.
        environment: environment of the processes; with `tls` it must name certificates.

    Raises:
        HoldfastError: a process failed.
    """
    found = []
    for count in connections:
        share = max(PIECE_BYTES, whole_pieces(total // count))
        with Floor(Wires(2, count, share, oneway=True, tls=tls), environment) as floor:
            carried = [floor.round("plain") for _ in range(rounds + 1)][1:]
        seconds, send_s, receive_s = (
            statistics.median(column) for column in zip(*((each.seconds, *each.cpu_s) for each in carried), strict=True)
        )
        count_bytes = floor.wires.total_bytes
        rates = (rounded(count_bytes / each) for each in (seconds, send_s, receive_s))
        found.append(SocketRate(count, tls, *rates))
    return found


def certificates(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables to add to `environment` so that it names certificates: none if it has them; else a new one's.

    The new certificate is made in `folder`.

    Raises:
        ConfigError: a certificate is needed, and ``openssl`` is missing or failed to make one.
    """
    if all(environment.get(name) for name in TLS_ENVS):
        return {}
    cert, key = folder / "cert.pem", folder / "key.pem"
    key.touch(mode=0o600)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=smp", "-addext", f"subjectAltName=DNS:{TLS_NAME.default}"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60.0
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{', '.join(TLS_ENVS)} are not set, and openssl makes no certificate: {error}") from error
    return dict(zip(TLS_ENVS, (str(cert), str(key), str(cert)), strict=True)) | {TLS_NAME.variable: TLS_NAME.default}


def last_cache_bytes() -> int:
    """Size of the largest cache that the kernel lists; 0 if it lists none."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] if text[-1:] in "KMG" else int(text))
    return max(sizes)
