"""``python -m benchmarks.fleet``: what a large job loses to failures over months, with holdfast and others."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from benchmarks.played_slots import parse_protect_every
from holdfast.cli.arguments import Parser, output_file, rate, some_time, time
from holdfast.cli.main import main
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.cli.rates import add_interference, add_measured, add_rates, cores_here, smp_of
from holdfast.planner.costs import INTERFERENCE
from holdfast.planner.model import parse_shape, state_bytes
from holdfast.planner.profiles import PROFILES, profile
from holdfast.planner.rates import basis
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import amount, duration
from holdfast.smp_daemon.shared.settings import PERSIST_EVERY
from holdfast.snapshot.resume.arrange import parse_protect

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.fleet.strategies import Strategy
    from benchmarks.fleet.sweep import SeedMean, Sweep, SweepRow
    from holdfast.planner.rates import SmpRates

NAMES = ("holdfast", "gemini", "disk-sync", "disk-async", "nothing")


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="python -m benchmarks.fleet",
        description="Simulates a job of thousands of GPUs over months, failure by failure, with rates that studies "
        "have published, and compares ways to protect it. Nothing is run; numbers are means over seeds with standard "
        "errors. What is assumed stands in docs/simulation.md.",
    )
    parser.add_argument("--gpus", default="1024,16384,131072", help="sizes (default 1024,16384,131072)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    parser.add_argument("--days", type=float, default=90.0, help="simulated (default 90)")
    parser.add_argument("--profile", default="llama3", help=f"failures: {', '.join(PROFILES)} (default llama3)")
    parser.add_argument("--bursts", type=float, default=1.0, help="Weibull shape of times between failures (default 1)")
    parser.add_argument("--strategies", default="all", help=f"of {', '.join(NAMES)} (default all)")
    parser.add_argument("--protect", default="auto,6+2", help="codes, k+m, of holdfast (default auto,6+2)")
    parser.add_argument(
        "--every", default="auto", help="steps between its snapshots, such as auto,1,10 (default auto: as trainers do)"
    )
    parser.add_argument(
        "--protect-every",
        default="1",
        metavar="N",
        help="protect one of every N of its snapshots, such as 1,8,auto; any but 1 takes 4 slots (default 1)",
    )
    parser.add_argument("--spares", default="auto", help="machines that stand by (default auto: 4 in 1,024 nodes)")
    parser.add_argument(
        "--persist",
        default=PERSIST_EVERY.default,
        type=time,
        metavar="TIME",
        help=f"between copies of memory to storage; 0: none (default {PERSIST_EVERY.default}, as of trainers)",
    )
    parser.add_argument("--model", default="405b", help="as of holdfast plan (default 405b)")
    parser.add_argument(
        "--step", default="6s", type=some_time, metavar="TIME", help="how long a step takes (default 6s)"
    )
    parser.add_argument(
        "--restart",
        default="auto",
        type=or_auto(time),
        metavar="TIME",
        help="how long new processes on all nodes take to be ready, such as 5min (default auto: by size)",
    )
    parser.add_argument("--rack", type=int, default=2, help="nodes that one shock takes (default 2)")
    add_measured(parser)
    add_rates(parser)
    add_interference(parser)
    for option, what in (("--network-rate", "encoding sends out of a node"), ("--digest-rate", "an SMP digests")):
        parser.add_argument(
            option, type=rate, metavar="RATE", help=f"how fast {what} (default: computed from cores and --line-rate)"
        )
    parser.add_argument(
        "--storage-rate",
        default="auto",
        type=or_auto(rate),
        metavar="RATE",
        help="of the storage (default auto: 3MB/s for each GPU)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--seed", type=int, default=1234, help="of the first (default 1234)")
    parser.add_argument("--published", action="store_true", help="also repeat what studies have published")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw where the time goes, as SVG (extra: plots)"
    )
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


def or_auto(read: Callable[[str], float]) -> Callable[[str], float | None]:
    """An option type that also accepts ``auto``, which means None."""
    return lambda text: None if text == "auto" else read(text)


def run(parsed: argparse.Namespace) -> int:
    """Run the command. Status 1 if a published number is not reproduced."""
    from benchmarks import plots
    from benchmarks.fleet.published import POINTS
    from benchmarks.fleet.sweep import run as run_sweep

    plots.check_plots(parsed.plot)
    console = console_of(parsed)
    smp = smp_of(parsed, parsed.measured)
    sweep = _sweep(parsed, smp)
    console.print("simulating")
    rows = run_sweep(sweep, lambda row: console.print(f"  {row.gpus:,} GPUs, {row.strategy}"))
    points = [(point, point.simulated(parsed.seed)) for point in POINTS] if parsed.published else []
    checks = [
        {key: getattr(point, key) for key in ("name", "source", "published", "within", "at_least")}
        | {"simulated": value, "holds": point.holds(value)}
        for point, value in points
    ]
    show(console, rows, checks, _describe(sweep, parsed))
    say(console, " ".join(basis(smp, cores_here())))
    if parsed.markdown:
        what = " ".join([_describe(sweep, parsed), *basis(smp, cores_here())])
        parsed.markdown.write_text(markdown(rows, checks, what))
    if parsed.plot:
        plots.write(plots.draw_simulation([asdict(row) for row in rows], _describe(sweep, parsed)), parsed.plot)
    options = {key: str(value) for key, value in vars(parsed).items() if key not in ("run", "json", "plot", "markdown")}
    found = {"options": options, "rates": smp.to_json(), "rows": [asdict(row) for row in rows], "published": checks}
    write_json(parsed.json, found)
    return 0 if all(check["holds"] for check in checks) else 1


def _sweep(parsed: argparse.Namespace, smp: SmpRates) -> Sweep:
    from benchmarks.fleet.failures import FailureProcess
    from benchmarks.fleet.job import FleetJob, Site
    from benchmarks.fleet.sweep import Sweep

    state = state_bytes(parse_shape(parsed.model), "adam")
    site = Site(
        network_rate=smp.network if parsed.network_rate is None else parsed.network_rate,
        rack=parsed.rack,
        interference=parsed.interference,
        digest_rate=smp.digest if parsed.digest_rate is None else parsed.digest_rate,
    )
    return Sweep(
        gpus=_numbers("--gpus", parsed.gpus),
        strategies=_strategies(parsed),
        failures=FailureProcess.of(profile(parsed.profile), shape=parsed.bursts),
        days=parsed.days,
        spares=tuple(None if word == "auto" else _numbers("--spares", word)[0] for word in parsed.spares.split(",")),
        job=FleetJob(1, parsed.gpus_per_node, parsed.step, state),
        site=site,
        restart_s=parsed.restart,
        storage_rate=parsed.storage_rate,
        seeds=parsed.seeds,
        seed=parsed.seed,
    )


def _strategies(parsed: argparse.Namespace) -> tuple[Strategy, ...]:
    from benchmarks.fleet.strategies import DiskAsync, DiskSync, InMemoryCode, Nothing, PairReplication

    names = list(NAMES) if parsed.strategies == "all" else parsed.strategies.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--strategies: there is no {unknown[0]!r}: choose one of {', '.join(NAMES)}")
    persist_s = parsed.persist or math.inf
    codes = [(text, parse_protect(text)) for text in parsed.protect.split(",")]
    if unfit := [text for text, code in codes if not code.parity]:
        raise ConfigError(
            f"--protect {unfit[0]}: name codes here, such as auto, 7+1 or copies:1; for none, --strategies nothing"
        )
    ours = [
        InMemoryCode(code.data, code.parity, every, 3 if some == 1 else 4, persist_s, protect_every=some)
        for _, code in codes
        for every in (None if word == "auto" else _numbers("--every", word)[0] for word in parsed.every.split(","))
        for some in map(parse_protect_every, parsed.protect_every.split(","))
    ]
    known: dict[str, list[Strategy]] = {
        "holdfast": [*ours],
        "gemini": [PairReplication(persist_s=persist_s)],
        "disk-sync": [DiskSync()],
        "disk-async": [DiskAsync()],
        "nothing": [Nothing()],
    }
    return tuple(strategy for name in names for strategy in known[name])


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers such as 1,10") from None


def _describe(sweep: Sweep, parsed: argparse.Namespace) -> str:
    shares = ", ".join(f"{share:.1%} {kind}" for kind, share in sweep.failures.shares.items())
    shape = f", in bursts (Weibull, shape {parsed.bursts:g})" if parsed.bursts != 1 else ""
    sending = f"sending slows training down by {parsed.interference:.1%}"
    sending += ", assumed" if parsed.interference == INTERFERENCE else ""
    return (
        f"{parsed.model}, {amount(sweep.job.state_bytes)} of state, steps of {duration(sweep.job.step_s)}, "
        f"{parsed.days:g} days; failures of {parsed.profile}: {sweep.failures.rate:g} per 1,000 node-days ({shares})"
        f"{shape}, racks of {parsed.rack} nodes; {sending}; seeds {parsed.seed}/0 to {parsed.seed}/{parsed.seeds - 1}."
    )


HEAD = (
    *("strategy", "every", "spares", "ETTR, %", "lost steps", "restarts", "stored", "saving, %", "lost, %"),
    *("recovery, %", "waiting, %", "memory", "a save sends", "sent"),
)
LEGEND = (
    "ETTR: effective training time ratio, time in steps that were kept over all time; the rest went into saving, lost "
    "steps, recovery (detecting, new processes, loading) and waiting for machines. 'Stored': restarts from storage or "
    "from step 0, which memory could not serve. Memory is a node's, reserved for copies; 'sends', 'sent': from a node "
    "to others, for each save and on average. ± is the standard error over seeds."
)


def tables(rows: Sequence[SweepRow], checks: Sequence[dict[str, Any]]) -> list[Report]:
    """The table for each number of GPUs, then that of the published figures, if there are `checks`."""
    sizes = dict.fromkeys(row.gpus for row in rows)
    found = [Report(HEAD, [_cells(row) for row in rows if row.gpus == gpus], _title(rows, gpus)) for gpus in sizes]
    return found + ([_published(checks)] if checks else [])


def _cells(row: SweepRow) -> list[str]:
    return [
        row.strategy,
        f"{row.every:,}" if row.every else "–",
        f"{row.spares:,}",
        _percent(row.ettr),
        _count(row.lost_steps),
        f"{row.restarts.mean:,.0f}",
        f"{row.stored.mean:,.1f}" if 0 < row.stored.mean < 100 else f"{row.stored.mean:,.0f}",
        *(f"{part.mean * 100:.2f}" for part in (row.save, row.lost, row.recovery, row.waiting)),
        amount(row.memory_bytes) if row.memory_bytes else "–",
        amount(row.network_bytes) if row.network_bytes else "–",
        f"{amount(row.network_rate)}/s" if row.network_rate else "–",
    ]


def _percent(value: SeedMean) -> str:
    return f"{value.mean * 100:.2f}" + ("" if value.error is None else f" ± {value.error * 100:.2f}")


def _count(value: SeedMean) -> str:
    digits = ",.0f" if value.mean >= 100 else ",.1f"
    return f"{value.mean:{digits}}" + ("" if value.error is None else f" ± {value.error:{digits}}")


def _published(checks: Sequence[dict[str, Any]]) -> Report:
    return Report(
        ["what", "who", "published", "simulated", ""],
        [
            [
                check["name"],
                check["source"],
                f"{'≥ ' if check['at_least'] else ''}{check['published']:g}",
                f"{check['simulated']:.4g}",
                "✓" if check["holds"] else "✗",
            ]
            for check in checks
        ],
        "What studies have published",
    )


def show(console: Console, rows: Sequence[SweepRow], checks: Sequence[dict[str, Any]], what: str) -> None:
    """Print all tables."""
    say(console, *tables(rows, checks), f"{what} {LEGEND}")


def markdown(rows: Sequence[SweepRow], checks: Sequence[dict[str, Any]], what: str) -> str:
    """All tables as a Markdown page."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    head = ["# What a large job loses to failures, simulated", f"{when}. {what}", LEGEND]
    return "\n\n".join([*head, *(table.markdown() for table in tables(rows, checks))]) + "\n"


def _title(rows: Sequence[SweepRow], gpus: int) -> str:
    return f"{gpus:,} GPUs, {next(row.nodes for row in rows if row.gpus == gpus):,} nodes"


if __name__ == "__main__":
    sys.exit(main(parser=make_parser()))
