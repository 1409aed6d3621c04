"""How all commands print results and report errors."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.arguments import output_file
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, NotFound, SmpUnavailable

if TYPE_CHECKING:
    from rich.console import Console

OK, FAILED, WRONG, NOT_FOUND, NO_ANSWER = range(5)
"""Exit statuses: success; a bad result, or a failure; wrong usage or set-up; no such job, node or SMP; an SMP does not
answer. A command ended by a signal exits with 128 plus the signal's number."""

STATUSES: tuple[tuple[type[HoldfastError], int], ...] = (
    (ConfigError, WRONG),
    (NotFound, NOT_FOUND),
    (SmpUnavailable, NO_ANSWER),
    (HoldfastError, FAILED),
)


class EndedBySignal(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"ended by {signal.Signals(number).name}")


def console_of(parsed: argparse.Namespace, *, soft_wrap: bool = False) -> Console:
    """The console for the human-readable output of a command that has ``--json``: standard error if JSON takes standard
    output.

    Brackets are printed literally, because paths and foreign error messages contain them. Styled text is a `Text`.
    """
    return make_console(stderr=parsed.json == "-", soft_wrap=soft_wrap)


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that leaves a reader that has gone to `report`; Rich would end the process with status 1."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise  # called while the BrokenPipeError is handled

    return Quiet(stderr=stderr, highlight=False, markup=False, soft_wrap=soft_wrap)


def add_json(command: argparse._ActionsContainer) -> None:
    """Add ``--json`` to a command."""
    command.add_argument(
        "--json", metavar="FILE", type=_target, help="also write the result as JSON; - is standard output"
    )


def write_json(target: str | None, data: Any) -> None:
    """Write a command's result to `target`, the value of ``--json``; None: it was not given."""
    if target is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_text(text)


def report(error: BaseException, target: str | None) -> int:
    """Report what ended a command, for people and, to `target`, as JSON: see `write_json`. Returns the exit status.

    Any error other than a `HoldfastError`, an error of the system or a signal is a bug, and is raised again.
    """
    kind, message, status = describe(error)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone: discard the rest of the output
        return status
    print(f"holdfast: {message}", file=sys.stderr)
    with suppress(OSError):  # the error may be about this very file
        write_json(target, {"error": {"kind": kind, "message": message, "status": status}})
    return status


def describe(error: BaseException) -> tuple[str, str, int]:
    """Kind, message and exit status for the exception that ended a command. Pure; raises an unexpected one again."""
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
    """The value of ``--json`` in a command line that may be wrong elsewhere."""
    words = words[: words.index("--")] if "--" in words else words
    for word, following in zip_longest(words, words[1:]):
        if word == "--json":
            return following
        if word.startswith("--json="):
            return word.removeprefix("--json=")
    return None


def _target(text: str) -> str:
    return text if text == "-" else str(output_file(text))
