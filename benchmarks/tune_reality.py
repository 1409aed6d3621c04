"""``python benchmarks/tune_reality.py --seed 1 --markdown FILE``: predicted and real cost of failures.

Runs real processes on two virtual nodes. Trainers are killed and nodes lost in a Poisson process over progress, and
every lost second is accounted for (`chaos.overhead`), with a snapshot every 1, 8, 32 and 96 steps in turn. The
prediction comes from a profile of the same job and the mean time of a restart. Takes about ten minutes; the machine
should be idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

from holdfast.chaos.launcher import Launcher
from holdfast.planner.measured import Measured
from tests.proof.overhead import Overhead, TimedJob, account, baseline_step, error_of_sum, kills, run

INTERVALS = (1, 8, 32, 96)
BASELINE_FROM = 4
"""Smallest interval at which a run contains baseline steps; for smaller ones they come from a run without snapshots."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Predicted losses of a run, in seconds per useful second: overhead, lost steps, restarts."""

    overhead: float
    lost: float
    restarts: float

    @property
    def wasted(self) -> float:
        return self.overhead + self.lost + self.restarts


def predict(measured: Measured, restarts_s: tuple[float, float], period_s: float, took: Overhead) -> Expected:
    """First-order prediction: ``c/T + rate (T/2 + latency + R)`` for each class of failures, at its observed rate.

    Args:
        restarts_s: mean restart time after the death of a process, and after the loss of a node.
        period_s: time between snapshots.
    """
    commit_s = measured.copy_s + measured.seal_s
    rates = [(took.nodes.count(lost)) / took.useful for lost in (False, True)]
    latencies = (commit_s, commit_s + measured.encode_s)
    return Expected(
        measured.visible_s() / period_s,
        sum(rate * (period_s / 2 + latency) for rate, latency in zip(rates, latencies, strict=True)),
        sum(rate * restart_s for rate, restart_s in zip(rates, restarts_s, strict=True)),
    )


def pooled(runs_of: Sequence[Overhead]) -> tuple[float, float]:
    """Mean seconds of a restart after a process's death, and after the loss of a node, over all runs.

    The tuner does not predict restart times, and they do not depend on the interval.
    """
    pairs = [pair for took in runs_of for pair in zip(took.nodes, took.restarts, strict=True)]
    process_s, node_s = ([seconds for node, seconds in pairs if node is lost] for lost in (False, True))
    return fmean(process_s), fmean(node_s)


def report(
    rows: Sequence[tuple[int, float, Overhead, Expected]],
    measured: Measured,
    restarts_s: tuple[float, float],
    command: str,
) -> str:
    """The report in Markdown."""
    lines = [
        "# What failures take, predicted and measured",
        "",
        f"{date.today()}, `{command}`, 2 noisy cores. Two virtual nodes of one rank, "
        f"{measured.state_bytes / 1e6:.0f} MB of state each, protected by a copy; two of three failures kill a "
        "trainer, one takes a node and its memory.",
        "",
        f"Profile: a step {measured.step_s * 1e3:.0f} ms, a snapshot costs {measured.visible_s() * 1e3:.1f} ± "
        f"{(measured.visible_error_s() or 0) * 1e3:.1f} ms of training, is sealed after "
        f"{(measured.copy_s + measured.seal_s) * 1e3:.0f} ms and protected {measured.encode_s * 1e3:.0f} ms later. "
        f"Restarts, the mean of all: {restarts_s[0]:.2f} s after a process's death, {restarts_s[1]:.2f} s after the "
        "loss of a node.",
        "",
        "Seconds for each useful second; ± is a standard error. Steps that are done in vain count from the kill back "
        "to the snapshot that was restored; restarts until the first step.",
        "",
        "| every | failures | wasted | predicted | overhead | predicted | steps lost | predicted | restarts | mean |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for every, _, took, expected in rows:
        lost, restarts = sum(took.losses) / took.useful, sum(took.restarts) / took.useful
        lost_error, restart_error = (error_of_sum(part) / took.useful for part in (took.losses, took.restarts))
        lines.append(
            f"| {every} | {len(took.losses)} | **{took.wasted:.3f} ± {took.error:.3f}** | **{expected.wasted:.3f}** | "
            f"{took.copying / took.useful:.3f} | {expected.overhead:.3f} | {lost:.4f} ± {lost_error:.4f} | "
            f"{expected.lost:.4f} | {restarts:.3f} ± {restart_error:.3f} | {expected.restarts:.3f} |"
        )
    off = [abs(took.wasted - expected.wasted) / took.error for _, _, took, expected in rows]
    steps = ", ".join(f"{step_s * 1e3:.1f} ms every {every}" for every, step_s, *_ in rows)
    lines += [
        "",
        f"The prediction of all that is wasted is off by {', '.join(f'{each:.1f}' for each in off)} standard errors. "
        f"Baseline steps took {steps}: the period is so many of them, and overhead what steps took beyond them.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="each interval in turn, with other failures (default 2)")
    parser.add_argument("--steps", type=int, default=200, help="of each run (default 200)")
    parser.add_argument("--mean", type=float, default=30.0, help="steps between failures (default 30)")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = TimedJob()
    runs_of: dict[int, list[Overhead]] = {every: [] for every in INTERVALS}
    steps_s: dict[int, list[float]] = {every: [] for every in INTERVALS}
    with Launcher(["tests.proof.overhead"]) as launcher, tempfile.TemporaryDirectory() as folder:
        launcher.wait_ready()
        file = Path(folder, "profile.json")
        run(launcher, load, steps=1 << 40, every=1, profile=file)
        measured = Measured.from_json(json.loads(file.read_text()))
        for number in range(args.rounds):
            strikes = kills(args.seed + number, args.steps, args.mean)
            for every in INTERVALS:
                step_s = baseline_step(run(launcher, load, steps=80, every=0), 0) if every < BASELINE_FROM else None
                history = run(launcher, load, steps=args.steps, every=every, strikes=strikes, lose_every=3)
                step_s = step_s or baseline_step(history, every)
                runs_of[every].append(account(history, step_s))
                steps_s[every].append(step_s)
                print(f"round {number}, every {every}: {runs_of[every][-1].wasted:.3f}", flush=True)
    found = {every: reduce(add, each) for every, each in runs_of.items()}
    restarts_s = pooled(list(found.values()))
    runs = [(every, took, fmean(steps_s[every])) for every, took in found.items()]
    rows = [(e, step_s, took, predict(measured, restarts_s, e * step_s, took)) for e, took, step_s in runs]
    options = f"--seed {args.seed} --rounds {args.rounds} --steps {args.steps} --mean {args.mean:g}"
    text = report(rows, measured, restarts_s, f"python benchmarks/tune_reality.py {options}")
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        data = [{"every": e, "step_s": s, "took": asdict(t), "expected": asdict(x)} for e, s, t, x in rows]
        args.json.write_text(json.dumps({"profile": measured.to_json(), "rows": data}, indent=2) + "\n")


if __name__ == "__main__":
    main()
