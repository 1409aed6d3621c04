"""The parser of the ``holdfast`` command. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys

from holdfast import HoldfastError, __version__
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
    matrix,
    plan,
    profile,
    simulate,
    smp,
    status,
    tune,
)

COMMANDS = (
    *(demo, matrix, audit, status, smp, drain, export, gc, deploy, doctor, bench, chaos, plan, profile, tune, simulate),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status: 0 if all is well, 1 if not, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    parsed = parser.parse_args(words[:cut])
    if cut < len(words):
        if "command" not in parsed:
            parser.error(f"no command is taken here after --: {' '.join(words[cut + 1 :])}")
        parsed.command = words[cut + 1 :]
    try:
        status: int = parsed.run(parsed)
        return status
    except HoldfastError as error:
        print(f"holdfast: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Keeps a training run on its step: in-memory snapshots, restored bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
