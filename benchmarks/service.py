"""``python benchmarks/service.py``: SMPs under load, and whether their memory grows.

* 64 trainers on one SMP, each with its own shard.
* 32 SMPs on this machine, each with one trainer.
* 1,000 requests per second for ``/status.json``, and for ``/metrics``, to an SMP that is busy with snapshots.
* 10,000 snapshots of 20 MB, half on each of two nodes, with trainers killed at moments drawn from a seed; each time,
  the restored state is compared with the protected snapshot to the last byte.

The trainers do not use torch, as only the service is measured. ``--quick`` runs a short version of each part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.service_parts import Answer, Job, request_all, spread
from holdfast.smp_daemon.shared.paths import arena_base

PHASES = ("begin", "write", "seal", "protect")
FLAT = 1.01
"""Upper limit for memory at the end, relative to memory half-way."""

SETTLED = 1.02
"""Upper limit for memory at the end, relative to memory early on; higher than `FLAT`, as allocators grow at first."""


def phases_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Latencies of the phases of snapshots, by name."""
    whole = [answer["seconds"] for answer in answers if "seconds" in answer]
    return {name: spread([seconds[i] for seconds in whole]) for i, name in enumerate(PHASES)}


def growth(samples: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any]:
    """Memory and descriptors of the SMPs early, half-way and late in a run, and whether they stay flat."""
    tenth = max(1, len(samples) // 10)
    parts = {"early": samples[tenth : 2 * tenth] or samples[:1], "half": samples[len(samples) // 2 :][:tenth]}
    parts["late"] = samples[-tenth:]
    found: dict[str, Any] = {}
    for name in samples[0][0]:
        found[name] = {when: round(fmean(e[name] for s in part for e in s), 1) for when, part in parts.items()}
    early, half, late = (found["anonymous_kb"][when] + found["shared_kb"][when] for when in parts)
    flat = late <= FLAT * half and late <= SETTLED * early
    flat = flat and found["descriptors"]["late"] <= found["descriptors"]["early"]
    return {**found, "late_to_half": round(late / half, 4), "late_to_early": round(late / early, 4), "flat": flat}


def many_trainers(base: Path, count: int, length: int, rounds: int) -> dict[str, Any]:
    """Measure one SMP with `count` trainers, and another SMP that protects them."""
    with ExitStack() as stack:
        job = Job(base, stack, [[length] * count, [length]])
        job.start()
        answers, samples = [], []
        for _ in range(rounds):
            answers += job.take()
            samples.append(job.memory()[:1])
        return {
            "trainers": count,
            "shard_bytes": length,
            "snapshots": rounds,
            **phases_of(answers),
            "requests": sum(job.requests.values()),
            "lost": len(job.lost),
            "smp": growth(samples),
        }


def many_smps(base: Path, count: int, length: int, rounds: int) -> dict[str, Any]:
    """Measure `count` SMPs on this machine."""
    with ExitStack() as stack:
        job = Job(base, stack, [[length]] * count)
        job.start()
        answers, samples = [], []
        for _ in range(rounds):
            answers += job.take()
            samples.append(job.memory())
        return {
            "smps": count,
            "shard_bytes": length,
            "snapshots": rounds,
            "all_serve_after_s": round(job.ready_s, 2),
            **phases_of(answers),
            "requests": sum(job.requests.values()),
            "lost": len(job.lost),
            "smp": growth(samples),
        }


def status_requests(base: Path, length: int, rate: float, seconds: float) -> dict[str, Any]:
    """Measure HTTP requests to an SMP that is taking snapshots, and the snapshots with and without these requests."""
    found: dict[str, Any] = {"shard_bytes": length, "asked_a_second": rate, "seconds": seconds}
    with ExitStack() as stack:
        job = Job(base, stack, [[length], [length]])
        job.start()
        for path in ("", "/status.json", "/metrics"):
            result = request_all(job.nodes[0], path, rate, seconds) if path else None
            until, answers = time.perf_counter() + seconds, []
            while time.perf_counter() < until:
                answers += job.take()
            whole = spread([sum(answer["seconds"]) for answer in answers if "seconds" in answer])
            found[path or "none"] = {"requests": result() if result else None, "snapshot": whole}
        found["lost"] = len(job.lost) + sum(found[path]["requests"]["lost"] for path in ("/status.json", "/metrics"))
        found["smp"] = job.memory()[0]
    return found


def endurance(base: Path, length: int, snapshots: int, seed: int, every: int) -> dict[str, Any]:
    """Take snapshots one after another, and kill trainers during about one in `every` of them."""
    source = random.Random(seed)
    with ExitStack() as stack:
        job = Job(base, stack, [[length], [length]])
        job.start()
        answers: list[Answer] = []
        samples, kills, recoveries = [], 0, []
        taken = 0
        next_kill = source.randint(every // 2, every * 3 // 2)
        while taken < snapshots:
            if taken >= next_kill:
                delay_s, who = source.uniform(0, 0.08), source.choice(((0,), (1,), (0, 1)))

                def fault(delay_s: float = delay_s, who: tuple[int, ...] = who) -> None:
                    time.sleep(delay_s)  # at any point of the snapshot
                    for rank in who:
                        job.trainers[rank].kill()

                job.take(fault)
                began = time.perf_counter()
                job.kill()  # as a launcher kills the other trainers
                job.start()
                recoveries.append(time.perf_counter() - began)
                kills += 1
                next_kill = taken + source.randint(every // 2, every * 3 // 2)
            answers += [{"seconds": answer["seconds"]} for answer in job.take() if "seconds" in answer]
            taken += 1
            if taken % 50 == 0:
                samples.append(job.memory())
            if taken % 500 == 0:
                print(f"{taken:,} snapshots, {kills} kills, {len(job.lost)} lost, {samples[-1][0]}", flush=True)
        return {
            "snapshot_bytes": 2 * length,
            "snapshots": taken,
            "seed": seed,
            "kills": kills,
            "recovery": spread(recoveries),
            **phases_of(answers),
            "requests": sum(job.requests.values()),
            "lost": len(job.lost),
            "first_lost": job.lost[:3],
            "smp": growth(samples),
        }


def markdown(result: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# The service under load", "", f"{result['date']}, `{result['command']}`, {result['machine']}.", ""]
    lines += [result["note"], ""]
    for name, part in result["parts"].items():
        lines += [f"## {name}", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {_text(value)} |" for key, value in part.items()]
        lines.append("")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    if "p50_ms" in value:
        rest = "".join(f", {key.replace('_', ' ')} {value[key]:,}" for key in value if not key.endswith("_ms"))
        return f"p50 {value['p50_ms']:,} ms, p99 {value['p99_ms']:,} ms, longest {value['max_ms']:,} ms{rest}"
    if "early" in value:
        return " → ".join(f"{each:,}" for each in value.values())
    return "; ".join(f"{key.replace('_', ' ')}: {_text(each)}" for key, each in value.items())


def main() -> int:
    """Run the benchmark; return 1 if a request was lost, or if memory grew, which a quick run is too short to tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a little of each, half a minute")
    parser.add_argument("--only", choices=("trainers", "smps", "status", "endurance"), action="append")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--snapshots", type=int, help="of the last part")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    quick = args.quick
    count = args.snapshots or (200 if quick else 10_000)
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "trainers": lambda base: many_trainers(base, 64, 1 << 20, 10 if quick else 200),
        "smps": lambda base: many_smps(base, 8 if quick else 32, 1 << 20, 5 if quick else 50),
        "status": lambda base: status_requests(base, 20 << 20, 1000.0, 2.0 if quick else 15.0),
        "endurance": lambda base: endurance(base, 10_000_000, count, args.seed, 20 if quick else 50),
    }
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python benchmarks/service.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "note": "Other work ran on the machine at the same time: ratios within a run mean more than milliseconds.",
        "parts": {},
    }
    print(f"seed {args.seed}", flush=True)
    arena_base().mkdir(parents=True, mode=0o700, exist_ok=True)
    for name, part in parts.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-", dir=arena_base()) as base:
            result["parts"][name] = found = part(Path(base))
        print(name, json.dumps(found, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(result))
    parts_seen = result["parts"].values()
    good = not any(part["lost"] for part in parts_seen) and (
        quick or all(p["smp"].get("flat", True) for p in parts_seen)
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
