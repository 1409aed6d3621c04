"""``python benchmarks/persist.py --markdown FILE``: the cost of persisting for a job, and what compression would gain.

*Compression*: slot files are persisted as they are. Here the state of a small, briefly trained model is stored as it
is, with zstandard, and with zstandard on byte planes (the first bytes of all numbers, then all second bytes, and so on,
as only the byte with the exponent compresses). Speeds are those of one thread, compared with memcpy of the same bytes
in the same run.

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

import numpy as np
import torch
import zstandard

from holdfast import InMemorySnapshot
from holdfast.bench.machine import describe, machine
from holdfast.smp_daemon.shared.paths import arena_base
from holdfast.smp_daemon.shared.records import digest

UNIT = 2 << 20
LEVEL = 1
"""Of zstandard. Level 3 takes twice as long for fp32 and bf16 state, and makes it no shorter."""
PLANES = 4
"""Also for bf16: its two bytes take turns in two planes each."""
ROUNDS = 5


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="of the model of the first part (default 256)")
    parser.add_argument("--layers", type=int, default=6, help="of the job of the second part (default 6)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long that job trains (default 60)")
    parser.add_argument("--every", default="3s", help="how often it persists (default 3s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    began = os.getloadavg()[0]
    formats = list(formats_of(state_of(arguments.width)))
    lines = steps_of(arguments.layers, arguments.seconds, arguments.every)
    text = "\n".join(
        [
            "# What persisting costs, and what compression would gain",
            "",
            f"{datetime.now(UTC).isoformat(timespec='seconds')}, {describe(machine())}; load average {began:.1f} "
            f"before and {os.getloadavg()[0]:.1f} after. `python benchmarks/persist.py {' '.join(sys.argv[1:])}`",
            "",
            "## Compression",
            "",
            "Ratio: bytes in memory to bytes stored. Write and read: one thread's processor time, beside memcpy of the "
            "same bytes (1.00 is as fast as memcpy), digests included. The last rows are bf16 weights with fp32 "
            "weights and both moments, as mixed-precision training keeps them.",
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


def state_of(width: int) -> dict[str, np.ndarray]:
    """The bytes of each kind of training state, after 60 steps of a small transformer."""
    layers = [torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(2048, width), *layers, torch.nn.Linear(width, 2048))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(60):
        x = (torch.rand(8, 32) ** 3 * 2047).long()
        y = (x * 7 + 13) % 2048
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        optim.step()
        optim.zero_grad()
    parameters = list(model.parameters())

    def together(tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> np.ndarray:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(dtype)
        return flat.view(torch.uint8).numpy().copy()

    state = {
        "weights, bf16": together(parameters, torch.bfloat16),
        "weights, fp32": together(parameters),
        "Adam, first moment": together([optim.state[p]["exp_avg"] for p in parameters]),
        "Adam, second moment": together([optim.state[p]["exp_avg_sq"] for p in parameters]),
    }
    return {**state, "all": np.concatenate(list(state.values()))}


def formats_of(state: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield a table row for each kind of state and each way to store it."""
    for name, content in state.items():
        target = np.empty_like(content)
        memcpy = content.nbytes / best(partial(np.copyto, target, content)) / 1e9
        for how in ("as it is", "zstd 1", "planes + zstd 1"):
            stored: list[bytes] = []
            write_s = best(partial(pack, content, how, stored))
            read_s = best(partial(unpack, stored, how, target))
            assert np.array_equal(content, target)
            write, read = content.nbytes / write_s / 1e9, content.nbytes / read_s / 1e9
            yield (
                f"| {name} | {how} | {content.nbytes / sum(map(len, stored)):.2f} | {write:.2f} | {write / memcpy:.2f} "
                f"| {read:.2f} | {read / memcpy:.2f} |"
            )


def pack(content: np.ndarray, how: str, stored: list[bytes]) -> None:
    """Make the bytes that would be stored of each unit, with its digest."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    stored.clear()
    for start in range(0, content.nbytes, UNIT):
        unit = content[start : start + UNIT]
        digest(unit.data)
        if how == "as it is":
            stored.append(unit.tobytes())
        else:
            stored.append(compressor.compress(planes_of(unit) if how.startswith("planes") else unit.data))


def unpack(stored: list[bytes], how: str, out: np.ndarray) -> None:
    """Undo `pack`, and take the digests."""
    for number, unit in enumerate(stored):
        into = out[number * UNIT : (number + 1) * UNIT]
        content = unit if how == "as it is" else zstandard.ZstdDecompressor().decompress(unit)
        found = np.frombuffer(content, np.uint8)
        if how.startswith("planes"):
            whole = found.nbytes // PLANES * PLANES
            into[:whole].reshape(-1, PLANES).T[:] = found[:whole].reshape(PLANES, -1)
            into[whole:] = found[whole:]
        else:
            into[:] = found
        digest(into.data)


def planes_of(unit: np.ndarray) -> bytes:
    whole = unit.nbytes // PLANES * PLANES
    return unit[:whole].reshape(-1, PLANES).T.tobytes() + unit[whole:].tobytes()


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
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(128, 1024)
    quiet: list[float] = []
    busy: list[float] = []
    try:
        with InMemorySnapshot(model, optim, every=1) as snap:
            client, limit, written, writing = snap._session.rank.client, time.monotonic() + seconds, 0, False
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
    stored = counters["bytes_persisted"] / max(1, counters["snapshots_persisted"])
    return [
        f"A model of {layers} layers, {shard / 1e6:.0f} MB of fp32 weights and Adam moments, one trainer with one "
        "thread, and its SMP; a directory on disk; persisted whenever the one before was done and "
        f"{every} had passed.",
        "",
        "| steps | median, ms | 90th percentile, ms | × quiet |",
        "|---|---|---|---|",
        steps_row("quiet", quiet, quiet),
        steps_row("while one was persisted", busy, quiet),
        "",
        f"{counters['snapshots_persisted']} snapshots persisted, {stored / 1e6:.0f} MB each; {statistics.taken} "
        f"snapshots in memory, {statistics.skipped} steps without a free slot, {statistics.failed} failed.",
    ]


def steps_row(what: str, times: list[float], quiet: list[float]) -> str:
    """A row of the table. A short run on a busy machine may have none of these steps."""
    if not times:
        return f"| {what}: 0 | – | – | – |"
    ratio = f"{median(times) / median(quiet):.2f}" if quiet else "–"
    return f"| {what}: {len(times)} | {median(times) * 1e3:.1f} | {np.percentile(times, 90) * 1e3:.1f} | {ratio} |"


if __name__ == "__main__":
    main()
