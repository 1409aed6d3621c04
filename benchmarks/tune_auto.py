"""``python benchmarks/tune_auto.py --months 30 --seed 1 --markdown FILE``: ``every="auto"`` against fixed intervals.

In the simulated months (`benchmarks.rehearsal`), step times, costs and failure rates change every few days. All ways to
choose the interval meet the same failures. They are compared by wasted time: the cost of snapshots, lost steps, and
restarts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rehearsal import Climate, Wasted, by_daly, draw, play_fixed, play_rule

INTERVALS = (4, 6, 8, 10, 12, 14, 16, 19, 23, 28, 34, 40, 50)
AUTO, VISIBLE, WHOLE = "auto", "Daly, visible cost", "Daly, whole time"


@dataclass(frozen=True, slots=True)
class Month:
    """Results of one month.

    Attributes:
        wasted: by way to choose the interval.
        best: the best fixed interval.
        daly: Daly's intervals, for the visible cost and for the whole time.
        changes: how often the rule changed the interval.
    """

    seed: int
    failures: int
    wasted: dict[str, Wasted]
    best: int
    daly: tuple[int, int]
    changes: int

    def ratio(self, name: str) -> float:
        """Wasted time relative to that of the month's best fixed interval."""
        return self.wasted[name].total / self.wasted[str(self.best)].total


def play(seed: int) -> Month:
    """Simulate one month with every way to choose the interval."""
    weather = draw(Climate(), seed)
    wasted = {str(interval): play_fixed(weather, interval) for interval in INTERVALS}
    best = min(INTERVALS, key=lambda interval: wasted[str(interval)].total)
    daly = by_daly(weather, whole=False), by_daly(weather, whole=True)
    wasted[VISIBLE], wasted[WHOLE] = (play_fixed(weather, interval) for interval in daly)
    changes: list[int] = []
    wasted[AUTO] = play_rule(weather, seed, None, lambda now_s, steps: changes.append(steps))
    return Month(seed, len(weather.failures), wasted, best, daly, len(changes))


def report(months: Sequence[Month], command: str) -> str:
    """The report in Markdown."""
    climate = Climate()
    totals = {name: [month.wasted[name] for month in months] for name in months[0].wasted}
    seconds = len(months) * climate.month_s

    def row(name: str, text: str) -> str:
        parts = (sum(getattr(w, part) for w in totals[name]) for part in ("total", "snapshots", "lost", "restarts"))
        shares = " | ".join(f"{part / seconds:.3%}" for part in parts)
        beside = [month.ratio(name) for month in months]
        error = stdev(beside) / len(beside) ** 0.5 if len(beside) > 1 else 0.0
        return f"| {text} | {shares} | {fmean(beside):.3f} ± {error:.3f} | {max(beside):.3f} |"

    once = min(INTERVALS, key=lambda interval: sum(w.total for w in totals[str(interval)]))
    each = sum(month.wasted[str(month.best)].total for month in months)
    auto = sum(w.total for w in totals[AUTO])
    lines = [
        "# An interval that plans itself, beside fixed ones",
        "",
        f"{date.today()}, `{command}`: {len(months)} simulated months, seeds {months[0].seed} to {months[-1].seed}, "
        f"{sum(month.failures for month in months):,} failures.",
        "",
        ", ".join(f"{name} {value}" for name, value in asdict(climate).items()) + ".",
        "",
        f"`auto` wastes **{auto / each:.3f}** of what the best fixed interval of *each month*, chosen with hindsight, "
        f"wastes, and **{auto / sum(w.total for w in totals[str(once)]):.3f}** of the best one for all months (every "
        f"{once} steps). It changed the interval {fmean(month.changes for month in months):.0f} times a month. The "
        "last columns: wasted time beside that of each month's best fixed interval, mean with its error, and worst.",
        "",
        "| every | wasted | snapshots | lost steps | restarts | beside the month's best | worst month |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        row(AUTO, "**auto**"),
        row(VISIBLE, "Daly's, from the first day; cost: what training loses"),
        row(WHOLE, "Daly's, from the first day; cost: until it is protected"),
        *(row(str(interval), f"{interval} steps") for interval in INTERVALS),
        "",
        "| seed | failures | best fixed | auto beside | Daly's, visible | beside | Daly's, whole | beside | changes |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {m.seed} | {m.failures} | {m.best} | {m.ratio(AUTO):.3f} | {m.daly[0]} | {m.ratio(VISIBLE):.3f} | "
            f"{m.daly[1]} | {m.ratio(WHOLE):.3f} | {m.changes} |"
            for m in months
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--months", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the first month")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    months = []
    for seed in range(args.seed, args.seed + args.months):
        months.append(play(seed))
        print(f"seed {seed}: auto {months[-1].ratio(AUTO):.3f} of every {months[-1].best}", flush=True)
    text = report(months, f"python benchmarks/tune_auto.py --months {args.months} --seed {args.seed}")
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
