"""What the results and errors of all commands have in common."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.arguments import output_file
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, NotFound, SmpUnavailable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OK, FAILED, WRONG, NOT_FOUND, NO_ANSWER = range(5)
"""Exit statuses: all is well; it is not, or something failed; wrong usage or set-up; there is no such job, node or SMP;
an SMP does not answer. A command that a signal has ended has 128 more than its number."""

STATUSES: tuple[tuple[type[HoldfastError], int], ...] = (
    (ConfigError, WRONG),
    (NotFound, NOT_FOUND),
    (SmpUnavailable, NO_ANSWER),
    (HoldfastError, FAILED),
)


class EndedBySignal(KeyboardInterrupt):
    """A signal ends the command."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"ended by {signal.Signals(number).name}")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, gap: int = 2) -> list[str]:
    """The lines of a table, the first `left` columns to the left and the others to the right. Pure.

    Nothing is cut, whatever the terminal, and nothing stands at the end of a line: what is too wide is broken.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def console_of(parsed: argparse.Namespace, *, soft_wrap: bool = False) -> Console:
    """Where a command that has ``--json`` prints what is for people.

    Brackets are printed as they are: paths and the errors of others have them. What has a style is a `Text`.
    """
    from rich.console import Console

    return Console(stderr=parsed.json == "-", highlight=False, markup=False, soft_wrap=soft_wrap)


def say(console: Console, text: RenderableType) -> None:
    """Print text: on a terminal broken between words, in a pipe as it is."""
    console.print(text, soft_wrap=not console.is_terminal)


def add_json(command: argparse._ActionsContainer) -> None:
    """Give a command ``--json``."""
    command.add_argument(
        "--json", metavar="FILE", type=_target, help="also write the result as JSON; - is standard output"
    )


def write_json(target: str | None, data: Any) -> None:
    """Write a command's result where ``--json`` says, if it says so."""
    if target is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_text(text)


def report(error: BaseException, words: Sequence[str]) -> int:
    """Say what ended a command, for people and, if its `words` ask for that, as JSON; its exit status.

    Anything but an error of ours, of the system or a signal is a bug, and raised again.
    """
    kind, message, status = describe(error)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read what is said there has gone
        return status
    print(f"holdfast: {message}", file=sys.stderr)
    target = json_target(words)
    if target is not None:
        try:
            write_json(target, {"error": {"kind": kind, "message": message, "status": status}})
        except OSError:
            pass  # it may be what the error is about
    return status


def describe(error: BaseException) -> tuple[str, str, int]:
    """Kind, message and exit status of what ended a command. Pure; raises what is none of ours again."""
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, EndedBySignal) else signal.SIGINT
        return "EndedBySignal", str(error) or "ended by SIGINT", 128 + number
    if isinstance(error, HoldfastError):
        status = next(status for kind, status in STATUSES if isinstance(error, kind))
        return type(error).__name__, str(error), status
    if isinstance(error, BrokenPipeError):
        return "EndedBySignal", "ended by SIGPIPE", 128 + signal.SIGPIPE
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: " if error.filename is not None else ""
        return type(error).__name__, f"{what}{error.strerror}", WRONG if error.filename is not None else FAILED
    raise error


def json_target(words: Sequence[str]) -> str | None:
    """What ``--json`` says in a command line that may be wrong otherwise."""
    words = words[: words.index("--")] if "--" in words else words
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == "--json":
            return following
        if word.startswith("--json="):
            return word.removeprefix("--json=")
    return None


def _target(text: str) -> str:
    return text if text == "-" else str(output_file(text))
