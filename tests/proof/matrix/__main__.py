"""``python -m tests.proof.matrix``: every kind of job, killed, restored and compared."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.arguments import Parser, output_file
from holdfast.cli.main import main
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.extras import require


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="python -m tests.proof.matrix",
        description="Runs each cell, one way to train, twice on virtual nodes: undisturbed, and with a trainer and "
        "then a node killed in the middle of steps. Status 0 only if all losses and all final state are the "
        "same to the last bit. 1 to 10 seconds a cell on two cores.",
    )
    parser.add_argument(
        "--cells",
        default="all",
        help="'all', 'quick', 'torch' for those without Megatron, or names such as 'TP2;PP2' (default all)",
    )
    parser.add_argument("--list", action="store_true", help="only list the cells")
    parser.add_argument("--seed", type=int, default=1234, help="seed of weights, data and dropout (default 1234)")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the table as Markdown")
    add_json(parser)
    parser.set_defaults(run=_run)
    return parser


def _run(parsed: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from holdfast.bench.machine import describe, machine
    from tests.proof.matrix.cells import GPT, CellVerdict, choose, markdown, outcome, report, run, show

    console = console_of(parsed)
    cells = choose(parsed.cells)
    if parsed.list:
        for cell in cells:
            console.print(f"{cell.name}: {cell.ranks} ranks{', quick' if cell.quick else ''}")
        return 0
    if megatron := [cell.name for cell in cells if cell.job == GPT]:
        require("megatron", f"cell {megatron[0]!r}", "choose others, as --cells torch does")
    console.print(f"importing torch{', megatron-core' if megatron else ''}")

    def tell(verdict: CellVerdict) -> None:
        console.print(f"{verdict.cell.name}: {outcome(verdict)} ({verdict.seconds:.0f} s)")

    verdicts = run(cells, parsed.seed, tell)
    show(console, verdicts)
    of = datetime.now(UTC).isoformat(timespec="seconds"), describe(machine()), parsed.seed
    if parsed.markdown:
        parsed.markdown.write_text(markdown(verdicts, *of))
    write_json(parsed.json, report(verdicts, *of))
    return 1 if any(verdict.difference for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(parser=make_parser()))
