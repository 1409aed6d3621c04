"""``holdfast bench``: how fast this machine is at what holdfast does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import counts, output_file, size
from holdfast.cli.output import add_json, console_of, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    bench = commands.add_parser("bench", help="measure how fast this machine is at what holdfast does")
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    node = kinds.add_parser(
        "node",
        help="what protecting costs and how fast it is here, for holdfast plan",
        description="Measures the parts of protecting a snapshot, for each thread and core, and real SMPs that do it, "
        "in turn with plain sockets that carry the same bytes. holdfast plan reads the result with "
        "--measured. Six minutes on an idle machine; it needs 17 times --shard of memory, 29 times with --against.",
    )
    node.add_argument("--quick", action="store_true", help="everything once, in seconds: no figure is to be trusted")
    node.add_argument("--nodes", type=counts, default=(2, 4), help="SMPs that protect each other (default 2,4)")
    node.add_argument(
        "--connections",
        type=counts,
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
