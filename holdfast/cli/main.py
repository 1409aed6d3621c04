"""The parser of the ``holdfast`` command. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys

from holdfast import __version__
from holdfast.cli import (
    audit,
    bench,
    chaos,
    demo,
    deploy,
    doctor,
    drain,
    export,
    gc,
    give_up,
    plan,
    profile,
    smp,
    status,
)
from holdfast.cli.arguments import Parser
from holdfast.cli.lifetime import run_to_the_end
from holdfast.cli.output import json_target, report

COMMANDS = (demo, audit, status, smp, drain, give_up, export, gc, deploy, doctor, bench, chaos, plan, profile)


def main(arguments: list[str] | None = None, parser: Parser | None = None) -> int:
    """Run the command; return its exit status, see `holdfast.cli.output`.

    Args:
        arguments: the words after the command's name; None: of this process.
        parser: of another program that is to end as this one does; its options set ``run``, as those of commands do.
    """
    words = sys.argv[1:] if arguments is None else arguments
    target = json_target(words)  # until it is parsed: a --json may also be one of the user's own command

    def work() -> int:
        nonlocal target
        parsed = parse(words, parser or make_parser())
        target = getattr(parsed, "json", None)
        status: int = parsed.run(parsed)
        sys.stdout.flush()  # now, while a write error can still be reported
        return status

    return run_to_the_end(work, lambda error: report(error, target))


def parse(words: list[str], parser: Parser) -> argparse.Namespace:
    """The words as the parser reads them, with those after ``--`` as `command`. Raises `ConfigError`."""
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:cut])
    if cut < len(words):
        if "command" not in parsed:
            parser.error(f"no command is taken here after --: {' '.join(words[cut + 1 :])}")
        parsed.command = words[cut + 1 :]
    return parsed


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="holdfast",
        description="Keeps snapshots of a training job in the memory of its nodes, and restores them bit for bit.",
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
