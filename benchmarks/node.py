"""``python -m benchmarks.node``: `holdfast bench node` with other sizes, and in turn with the code of another checkout.

It needs 17 times ``--shard`` of memory, 29 times with ``--against``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from benchmarks.arguments import counts
from holdfast.bench.node import LEGEND, NodeBenchmark, NodeReport, head, quick, run, show, tables
from holdfast.bench.parts import PARTS
from holdfast.cli.arguments import output_file, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="everything once, in seconds: no figure is to be trusted")
    parser.add_argument("--nodes", type=counts, default=(2, 4), help="SMPs that protect each other (default 2,4)")
    parser.add_argument(
        "--connections",
        type=counts,
        default=(1, 2, 4),
        help="connections from each SMP to each other one, as HOLDFAST_LINKS sets them (default 1,2,4)",
    )
    parser.add_argument("--shard", type=size, default="256MiB", metavar="SIZE", help="of each node (default 256MiB)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (default 7)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="a checkout whose SMPs are measured in turn")
    parser.add_argument("--smps-only", action="store_true", help="leave out the parts; --measured refuses the result")
    parser.add_argument("--no-tls", action="store_true", help="leave out connections by TLS")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the data (default 1234)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, metavar="FILE")
    parsed = parser.parse_args()
    console = Console(highlight=False, markup=False)
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
    if parsed.json:
        parsed.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))


def markdown(report: NodeReport) -> str:
    """The report as a Markdown file."""
    parts = ["# What this machine does with a node's snapshots", head(report), LEGEND]
    parts += [table.markdown() for table in tables(report)]
    parts += [f"{name}: bytes {what}." for name, what in PARTS.items() if report.parts]
    return "\n\n".join(parts + report.notes) + "\n"


if __name__ == "__main__":
    main()
