"""``holdfast bench``: how fast this machine is at what holdfast does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import input_file, output_file, size
from holdfast.cli.output import add_json, console_of, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    bench = commands.add_parser("bench", help="measure how fast this machine is at what holdfast does")
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    codes = kinds.add_parser(
        "ec",
        help="erasure codes, compared with memcpy",
        description="Measures every operation of every erasure code backend, in turn with memcpy of the same bytes.",
    )
    codes.add_argument("--quick", action="store_true", help="a few cells, in seconds instead of minutes")
    codes.add_argument("--seed", type=int, default=1234, help="seed of the data (default 1234)")
    codes.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    add_json(codes)
    codes.set_defaults(run=_ec)
    stall = kinds.add_parser(
        "stall",
        help="what a snapshot costs the training loop, beside the checkpoints of others",
        description="Runs one training loop with each system, a snapshot every step and every 10 steps, each in "
        "processes of its own, and compares what they cost with one copy of the same bytes. From a checkout; the "
        "peers' virtual environments are made once (about 1 GB each). About an hour; the machine should be idle.",
    )
    stall.add_argument("--quick", action="store_true", help="a small trial without the peers, in half a minute")
    stall.add_argument("--systems", default="all", help="such as holdfast,dcp-thread (default all)")
    stall.add_argument("--ranks", type=_counts, default=(1, 2, 4), help="trainers on this machine (default 1,2,4)")
    stall.add_argument("--every", type=_counts, default=(1, 10), help="steps between snapshots (default 1,10)")
    stall.add_argument("--rounds", type=int, default=2, help="blocks of steps with snapshots (default 2)")
    stall.add_argument("--layers", type=int, default=16, help="32.8 MB of state each (default 16)")
    stall.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the state is; with cuda a GPU a rank (default cpu)",
    )
    stall.add_argument("--batch", type=int, help="rows of a step (default 32, on a GPU 4096)")
    stall.add_argument("--venvs", type=Path, help="where the peers' environments are (default .venv-peers)")
    stall.add_argument(
        "--from",
        dest="source",
        type=input_file,
        metavar="FILE",
        help="measure nothing: show the result that --json wrote there",
    )
    stall.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    stall.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw the lost time, as SVG (extra: plots)"
    )
    add_json(stall)
    stall.set_defaults(run=_stall)
    node = kinds.add_parser(
        "node",
        help="what protecting costs and how fast it is here, for plan, tune and simulate",
        description="Measures the parts of protecting a snapshot, for each thread and core, and real SMPs that do it, "
        "in turn with plain sockets that carry the same bytes. holdfast plan, tune and simulate read the result with "
        "--measured. Six minutes on an idle machine; it needs 17 times --shard of memory, 29 times with --against.",
    )
    node.add_argument("--quick", action="store_true", help="everything once, in seconds: no figure is to be trusted")
    node.add_argument("--nodes", type=_counts, default=(2, 4), help="SMPs that protect each other (default 2,4)")
    node.add_argument(
        "--connections",
        type=_counts,
        default=(1, 2, 4),
        help="connections from each SMP to each other one, as HOLDFAST_LINKS sets them (default 1,2,4)",
    )
    node.add_argument(
        "--shard", type=size, default="256MiB", metavar="SIZE", help="size of each node's shard (default 256MiB)"
    )
    node.add_argument("--rounds", type=int, default=7, help="how often each is measured (default 7)")
    node.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of holdfast: measure its SMPs in turn with these, to compare",
    )
    node.add_argument("--smps-only", action="store_true", help="leave out the parts; --measured refuses the result")
    node.add_argument("--no-tls", action="store_true", help="leave out connections by TLS")
    node.add_argument("--seed", type=int, default=1234, help="seed of the data (default 1234)")
    node.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    add_json(node)
    node.set_defaults(run=_node)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 1,2,4")
    return counts


def _ec(parsed: argparse.Namespace) -> int:
    from holdfast.bench.ec import EcBenchmark, markdown, quick, run, show

    console = console_of(parsed)
    report = run(quick(parsed.seed) if parsed.quick else EcBenchmark(seed=parsed.seed), console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    write_json(parsed.json, report.to_json())
    return 0


def _node(parsed: argparse.Namespace) -> int:
    from holdfast.bench.node import NodeBenchmark, markdown, quick, run, show

    console = console_of(parsed)
    plan = NodeBenchmark(
        parsed.nodes,
        parsed.connections,
        parsed.shard,
        parsed.rounds,
        seed=parsed.seed,
        against=parsed.against,
        parts=not parsed.smps_only,
        tls=not parsed.no_tls,
    )
    report = run(quick(parsed.seed, parsed.against) if parsed.quick else plan, console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    write_json(parsed.json, report.to_json())
    return 0


def _stall(parsed: argparse.Namespace) -> int:
    from holdfast.cli import plots

    plots.check_plots(parsed.plot)
    console = console_of(parsed)
    console.print("importing torch")
    from holdfast.bench.stall import StallBenchmark, StallReport, choose, markdown, quick, run, show

    plan = StallBenchmark(
        choose(parsed.systems),
        parsed.ranks,
        parsed.every,
        parsed.layers,
        parsed.rounds,
        device=parsed.device,
        batch=parsed.batch,
        **({"venvs": parsed.venvs} if parsed.venvs else {}),
    )
    if parsed.source:
        report = StallReport.read(parsed.source)
    else:
        report = run(quick(parsed.device) if parsed.quick else plan, console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    if parsed.plot:
        plots.write(plots.draw_stall(report), parsed.plot)
    write_json(parsed.json, report.to_json())
    return 1 if report.failed and not parsed.source else 0
