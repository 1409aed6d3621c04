"""``python benchmarks/persist.py --markdown FILE``: the cost of persisting for a job, and the gain of compression.

*Format*: the state of a small, briefly trained model in the persisted format: uncompressed, with zstandard, and with
zstandard on byte planes. Speeds are those of one thread, compared with memcpy of the same bytes in the same run.

*Steps*: a job takes a snapshot after every step, and its SMP persists one from time to time. Steps during which the SMP
was writing are compared with the other steps of the same run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import io

import numpy as np
import torch

from holdfast import InMemorySnapshot
from holdfast.bench.machine import describe, machine
from holdfast.smp_daemon.persist import shardfile
from holdfast.smp_daemon.persist.shardfile import Encoder, Header
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.paths import arena_base
from holdfast.smp_daemon.shared.records import digest

UNIT = 2 << 20
ROUNDS = 5


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768, help="of the model of the first part (default 768)")
    parser.add_argument("--layers", type=int, default=6, help="of the job of the second part (default 6)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long that job trains (default 60)")
    parser.add_argument("--every", default="3s", help="how often it persists (default 3s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    began = os.getloadavg()[0]
    formats = list(formats_of(state_of(arguments.width)))
    lines = steps_of(arguments.layers, arguments.seconds, arguments.every)
    text = "\n".join(
        [
            "# What persisting costs, and what compression is worth",
            "",
            f"{datetime.now(UTC).isoformat(timespec='seconds')}, {describe(machine())}; load average {began:.1f} "
            f"before and {os.getloadavg()[0]:.1f} after. `python benchmarks/persist.py {' '.join(sys.argv[1:])}`",
            "",
            "## Format",
            "",
            "Ratio: bytes in memory to bytes stored. Write and read: one thread's processor time, beside memcpy of the "
            "same bytes (1.00 is as fast as memcpy), digests included.",
            "",
            "| state | stored | ratio | write, GB/s | × memcpy | read, GB/s | × memcpy |",
            "|---|---|---|---|---|---|---|",
            *formats,
            "",
            "## Steps",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


# ---------------------------------------------------------------------- format


def state_of(width: int) -> dict[str, tuple[int, np.ndarray]]:
    """The element width and the bytes of each kind of training state, after 60 steps of a small model."""
    teacher = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 16))
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()
    ).append(torch.nn.Linear(width, 16))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        x = torch.randn(32, width)
        with torch.no_grad():
            y = teacher(x)
        torch.autograd.backward(torch.nn.functional.mse_loss(model(x), y))
        optim.step()
        optim.zero_grad()
    parameters = list(model.parameters())

    def together(tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> np.ndarray:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(dtype)
        return flat.view(torch.uint8).numpy().copy()

    return {
        "weights, bf16": (2, together(parameters, torch.bfloat16)),
        "weights, fp32": (4, together(parameters)),
        "Adam, first moment": (4, together([optim.state[p]["exp_avg"] for p in parameters])),
        "Adam, second moment": (4, together([optim.state[p]["exp_avg_sq"] for p in parameters])),
    }


def formats_of(state: dict[str, tuple[int, np.ndarray]]) -> Iterator[str]:
    """Yield a table row for each kind of state and each way to store it."""
    for name, (width, content) in state.items():
        target = np.empty_like(content)
        memcpy = content.nbytes / best(partial(np.copyto, target, content)) / 1e9
        for how, planed in (("plain", 0), ("zstd 1", 1), ("planes + zstd 1", width)):
            file, write_s = packed(content, planed)
            read_s = best(partial(unpack, file, target.data))
            assert np.array_equal(content, target)
            write, read = content.nbytes / write_s / 1e9, content.nbytes / read_s / 1e9
            yield (
                f"| {name} | {how} | {content.nbytes / len(file):.2f} | {write:.2f} | {write / memcpy:.2f} "
                f"| {read:.2f} | {read / memcpy:.2f} |"
            )


def packed(content: np.ndarray, width: int) -> tuple[bytes, float]:
    """A shard's file, and the seconds to make it.

    `width`: the element width of the byte planes; 1: compress without planes; 0: store uncompressed.
    """
    made: list[bytes] = []

    def pack() -> None:
        encoder = Encoder(Header("bench", UNNAMED.id, 1, 1, "dp0", content.nbytes, UNIT))
        made[:] = [encoder.begin()]
        for start in range(0, content.nbytes, UNIT):
            unit = content[start : start + UNIT].data
            made.append(encoder.unit(unit, digest(unit), max(1, width)) if width else plain(encoder, unit))
        made.append(encoder.end())

    seconds = best(pack)
    return b"".join(made), seconds


def plain(encoder: Encoder, unit: memoryview) -> bytes:
    """A unit in the uncompressed format, without trying to compress it."""
    sealed = digest(unit)
    encoder._digests.update(shardfile._DIGEST.pack(sealed))
    encoder._next += 1
    return shardfile._UNIT.pack(encoder._next - 1, unit.nbytes, shardfile.PLAIN, 1, 0, sealed) + bytes(unit)


def unpack(file: bytes, out: memoryview) -> None:
    read = io.BytesIO(file).read
    header = shardfile.read_header(read)
    for unit in shardfile.read_units(read, header):
        start = unit.number * UNIT
        shardfile.decode_unit(unit, out[start : start + unit.length])


def best(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of `ROUNDS` rounds, since the machine may be busy."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


# ---------------------------------------------------------------------- steps


def steps_of(layers: int, seconds: float, every: str) -> list[str]:
    """Train and persist; report step times with and without concurrent persisting."""
    base = arena_base()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = Path(tempfile.mkdtemp(prefix="bench-persist-", dir=Path.cwd()))
    os.environ |= {
        "HOLDFAST_PERSIST": str(place),
        "HOLDFAST_PERSIST_EVERY": every,
        "HOLDFAST_JOB": f"bench{os.getpid()}",
    }
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    quiet: list[float] = []
    busy: list[float] = []
    try:
        with InMemorySnapshot(model, optim, every=1) as snap:
            client, limit, written, writing = snap._session.rank.client, time.monotonic() + seconds, 0, False
            x = torch.randn(128, 1024)
            while time.monotonic() < limit:
                due = client.persist_due
                began = time.perf_counter()
                model(x).square().mean().backward()
                optim.step()
                optim.zero_grad()
                took = time.perf_counter() - began
                count = client.counters()["snapshots_persisted"]
                was, writing = writing, writing and count == written
                written = count
                if due and not client.persist_due:
                    writing = True
                if snap.step > 20:
                    (busy if was and writing else quiet).append(took)
            counters, statistics = client.counters(), snap.statistics
        shard = sum(p.numel() for p in model.parameters()) * 12
    finally:
        shutil.rmtree(place, ignore_errors=True)
    ratio = median(busy) / median(quiet) if busy and quiet else float("nan")
    stored = counters["bytes_persisted"] / max(1, counters["snapshots_persisted"])
    return [
        f"A model of {layers} layers, {shard / 1e6:.0f} MB of fp32 weights and Adam moments, one trainer with one "
        "thread, and its SMP; a directory on disk; persisted whenever the one before was done and "
        f"{every} had passed.",
        "",
        "| steps | median, ms | 90th percentile, ms | × quiet |",
        "|---|---|---|---|",
        f"| quiet: {len(quiet)} | {median(quiet) * 1e3:.1f} | {high(quiet) * 1e3:.1f} | 1.00 |",
        f"| while one was persisted: {len(busy)} | {median(busy) * 1e3:.1f} | {high(busy) * 1e3:.1f} | {ratio:.2f} |",
        "",
        f"{counters['snapshots_persisted']} snapshots persisted, {stored / 1e6:.0f} MB each; {statistics.taken} "
        f"snapshots in memory, {statistics.skipped} steps without a free slot, {statistics.failed} failed.",
    ]


def high(times: list[float]) -> float:
    return float(np.percentile(times, 90))


if __name__ == "__main__":
    main()
