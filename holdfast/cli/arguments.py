"""Types of options and arguments for all commands: how they are read, and refused."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import checked as checked_name
from holdfast.smp_daemon.shared.quantities import duration, parse_rate, parse_size, parse_time
from holdfast.smp_daemon.shared.settings import ARENA

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigError` for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}: see {self.prog} --help")


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make an option type of a reader that raises `ConfigError`. The parser's error then names the option."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


size = checked(parse_size)
rate = checked(parse_rate)
time = checked(parse_time)


@checked
def some_time(text: str) -> float:
    """Seconds, more than 0."""
    seconds = parse_time(text)
    if seconds <= 0:
        raise ConfigError(f"{text!r}: give more than 0")
    return seconds


@checked
def pattern(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}") from None
    return text


def deadline_up_to(most_s: float) -> Callable[[str], float]:
    """An option type: seconds, more than 0 and at most `most_s`."""

    @checked
    def convert(text: str) -> float:
        seconds = some_time(text)
        if seconds > most_s:
            raise ConfigError(f"{text!r} is longer than {duration(most_s)}: give less")
        return seconds

    return convert


deadline = deadline_up_to(7 * 86400.0)


@checked
def output_file(text: str) -> Path:
    """A file that can be written. Checked now, since the result may take hours."""
    path, folder = Path(text), Path(text).parent
    if path.is_dir():
        raise ConfigError(f"{text} is a directory: name a file")
    if not folder.is_dir():
        raise ConfigError(f"{text}: there is no directory {folder}: make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{text} cannot be written: permission denied: choose another file")
    return path


@checked
def input_file(text: str) -> Path:
    """A file that exists."""
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"{text} is not a file: name one that is there")
    return path


@checked
def arena_folder(text: str) -> Path:
    """A directory that holds arenas, or a path that does not exist yet."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{text or repr(text)} is not a directory: name one that holds arenas")
    return path


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add what commands have in common that run a training command several times, and compare the runs."""
    parser.add_argument(
        "--ignore",
        type=pattern,
        action="append",
        default=[],
        metavar="PATTERN",
        help="do not compare names that contain a match of this regular expression; may be repeated",
    )
    parser.add_argument(
        "--deadline", type=deadline, default="10min", metavar="TIME", help="timeout for each run (default 10min)"
    )


def add_job(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--job``, with this help. An empty id is refused: a variable that is not set is not a way to say "any"."""
    parser.add_argument("--job", type=checked(lambda job: checked_name(job, "a job id")), help=text)


def add_arena(parser: argparse.ArgumentParser) -> None:
    """Add ``--arena`` to a command that looks for the SMPs of this machine."""
    parser.add_argument("--arena", metavar=ARENA.kind.shown, type=arena_folder, help=ARENA.help)
