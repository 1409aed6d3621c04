"""``holdfast bench``: how fast this machine is at what holdfast does."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.output import add_json, console_of, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    bench = commands.add_parser("bench", help="measure how fast this machine is at what holdfast does")
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    node = kinds.add_parser(
        "node",
        help="what protecting costs and how fast it is here, for holdfast plan",
        description="Measures the parts of protecting a snapshot, and real SMPs that do it, in turn with plain "
        "sockets that carry the same bytes, for holdfast plan --measured. Six minutes on an idle machine; it needs "
        "4.6 GB of memory.",
    )
    node.add_argument("--quick", action="store_true", help="everything once, in seconds: no figure is to be trusted")
    add_json(node)
    node.set_defaults(run=_node)


def _node(parsed: argparse.Namespace) -> int:
    from holdfast.bench.node import NodeBenchmark, quick, run, show

    console = console_of(parsed)
    report = run(quick() if parsed.quick else NodeBenchmark(), console)
    show(console, report)
    write_json(parsed.json, report.to_json())
    return 0
