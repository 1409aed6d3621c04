"""Runs many seeds in batches, if asked in several processes, and adds up what they did.

What a seed does depends neither on the process that it runs in nor on what ran there before.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.processes import own_environment
from tests.proof.sim.run import SeedReport, simulate
from tests.proof.sim.seams import installed
from tests.proof.sim.tasks import Violated

BATCH = 256
"""Seeds per batch. With several processes, each runs one batch and ends, which frees its memory faster than `gc`."""

SIZED_BATCHES = 8
"""How many times as few seeds a batch has on nodes of real size, as each takes much longer."""

BATCH_DEADLINE_S = 1200.0
"""Timeout for a batch. A batch takes seconds to minutes; one that takes this long hangs."""

PRELOAD = (__name__, "torch._dynamo")
"""Modules that are imported before a batch starts. torch imports the second one when the first optimizer is made, which
takes seconds."""


COUNTED = ("faults", "hits", "crashes", "checks", "states")
"""The counters of a `SeedReport`, which `SeedTotals` adds up."""


@dataclass(slots=True)
class SeedTotals:
    """Totals over many seeds. `cpu_s` is real processor time, not simulated time."""

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
        """Add one seed."""
        self.seeds += 1
        self.awaits += report.awaits
        self.turns += report.turns
        self.simulated_s += report.simulated_s
        for name in COUNTED:
            getattr(self, name).update(getattr(report, name))
        if report.violations:
            self.failures[report.seed] = report.violations[0]

    def join(self, other: SeedTotals) -> None:
        """Add the totals of other seeds."""
        for name in ("seeds", "awaits", "turns", "simulated_s", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTED:
            getattr(self, name).update(getattr(other, name))
        self.failures.update(other.failures)


def run_batch(seeds: Iterable[int], sized: bool = False) -> SeedTotals:
    """Run these seeds one after another in this process. `sized`: on nodes of real size."""
    total, cpu = SeedTotals(), time.process_time()
    with installed():
        for seed in seeds:
            total.add(simulate(seed, sized=sized))
    total.cpu_s = time.process_time() - cpu
    return total


def again(seeds: range, sized: bool = False) -> list[int]:
    """Return those of `seeds` that behave differently in another interpreter with another hash order. Blocks.

    Raises:
        subprocess.SubprocessError: the other interpreter fails, or takes longer than `BATCH_DEADLINE_S`.
    """
    script = (
        "import json, sys\n"
        "from tests.proof.sim.campaign import fingerprints\n"
        "print(json.dumps(fingerprints(range(*map(int, sys.argv[1:3])), sys.argv[3] == 'True')))"
    )
    command = [sys.executable, "-P", "-c", script, str(seeds.start), str(seeds.stop), str(sized)]
    environment = own_environment() | {"PYTHONHASHSEED": str(1 + seeds.start % 1000)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BATCH_DEADLINE_S, check=True
    )
    there = json.loads(done.stdout)
    return [seed for seed, here, other in zip(seeds, fingerprints(seeds, sized), there, strict=True) if here != other]


def fingerprints(seeds: range, sized: bool = False) -> list[int]:
    """Run each seed and return its fingerprint, which tells two different runs apart."""
    with installed():
        return [simulate(seed, sized=sized).fingerprint for seed in seeds]


def run(seeds: range, jobs: int, sized: bool = False) -> Iterator[SeedTotals]:
    """Yield the totals of each batch of `seeds`, in order. Blocks until a batch is done.

    With 1 job the batches run in this process; with more, each runs in a process of its own, `jobs` at a time. Closing
    the generator early waits for the running batches, and ends their processes.

    Raises:
        TimeoutError: a batch hangs, with more than 1 job; its process is killed.
    """
    size = BATCH // SIZED_BATCHES if sized else BATCH
    batches = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    if jobs <= 1:
        yield from (run_batch(batch, sized) for batch in batches)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(jobs, context, initializer=gc.disable, max_tasks_per_child=1)
    try:
        waiting = []
        for batch in batches:
            waiting.append(pool.submit(run_batch, batch, sized))
            if len(waiting) > 2 * jobs:
                yield waiting.pop(0).result(BATCH_DEADLINE_S)
        for future in waiting:
            yield future.result(BATCH_DEADLINE_S)
    except TimeoutError:
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()  # else the shutdown would wait for it, too
        raise
    finally:
        pool.shutdown(cancel_futures=True)
