"""Many seeds, in batches, on as many processes as are wanted; and what they did together.

What a seed does is the same whichever process it runs in, and whatever ran there before.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from holdfast.chaos.sim.run import SeedReport, simulate
from holdfast.chaos.sim.seams import installed
from holdfast.chaos.sim.tasks import Violated

BATCH = 256
"""Seeds of a process that is then over, and its memory with it: to look for what of it is garbage takes longer."""

BATCH_DEADLINE_S = 600.0
"""A batch takes seconds; what takes this long hangs."""

PRELOAD = (__name__, "torch._dynamo")
"""What a batch finds imported; torch imports the second when an optimizer is first made, and takes seconds."""


COUNTED = ("faults", "hits", "crashes", "checks", "states")
"""What of a `SeedReport` is added up."""


@dataclass(slots=True)
class SeedTotals:
    """What many seeds did together. `cpu_s` is time of a processor, not simulated."""

    seeds: int = 0
    awaits: int = 0
    turns: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    failures: dict[int, Violated] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)

    def add(self, report: SeedReport) -> None:
        """Count one seed."""
        self.seeds += 1
        self.awaits += report.awaits
        self.turns += report.turns
        self.simulated_s += report.simulated_s
        for name in COUNTED:
            getattr(self, name).update(getattr(report, name))
        if report.violations:
            self.failures[report.seed] = report.violations[0]

    def join(self, other: SeedTotals) -> None:
        """Count what other seeds did."""
        for name in ("seeds", "awaits", "turns", "simulated_s", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTED:
            getattr(self, name).update(getattr(other, name))
        self.failures.update(other.failures)


def run_batch(seeds: Iterable[int]) -> SeedTotals:
    """Run these seeds, one after another, in this process."""
    total, cpu = SeedTotals(), time.process_time()
    with installed():
        for seed in seeds:
            total.add(simulate(seed))
    total.cpu_s = time.process_time() - cpu
    return total


def again(seeds: range) -> list[int]:
    """Those of `seeds` that do something else in another interpreter, with another hash order. Blocks.

    Raises:
        subprocess.SubprocessError: it fails.
    """
    script = (
        "import json, sys\n"
        "from holdfast.chaos.sim.campaign import fingerprints\n"
        "print(json.dumps(fingerprints(range(*map(int, sys.argv[1:])))))"
    )
    command = [sys.executable, "-c", script, str(seeds.start), str(seeds.stop)]
    environment = os.environ | {"PYTHONHASHSEED": str(1 + seeds.start % 1000)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BATCH_DEADLINE_S, check=True
    )
    there = json.loads(done.stdout)
    return [seed for seed, here, other in zip(seeds, fingerprints(seeds), there, strict=True) if here != other]


def fingerprints(seeds: range) -> list[int]:
    """Of each seed, what tells two runs apart."""
    with installed():
        return [simulate(seed).fingerprint for seed in seeds]


def run(seeds: range, jobs: int) -> Iterator[SeedTotals]:
    """What each batch of `seeds` did, in order, in so many processes of their own; 1: in this one. Blocks for a batch.

    To close it before its end also ends the processes, after the batches that they are at.

    Raises:
        TimeoutError: a batch hangs.
    """
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    if jobs <= 1:
        yield from map(run_batch, batches)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    pool = ProcessPoolExecutor(jobs, context, initializer=gc.disable, max_tasks_per_child=1)
    try:
        waiting = []
        for batch in batches:
            waiting.append(pool.submit(run_batch, batch))
            if len(waiting) > 2 * jobs:
                yield waiting.pop(0).result(BATCH_DEADLINE_S)
        for future in waiting:
            yield future.result(BATCH_DEADLINE_S)
    finally:
        pool.shutdown(cancel_futures=True)
