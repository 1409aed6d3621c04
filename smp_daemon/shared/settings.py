"""The one table of settings: every ``HOLDFAST_`` variable, what it may be, and one sentence about it.

A setting is read through its entry: ``MEMORY.value()``. From the same entries are made the options of ``holdfast smp
start`` and of the SMP (`add_options`), and docs/reference-environment.md. `tests/system/test_docs.py` fails if the code
names a variable that is not here, or if nothing reads one that is.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from holdfast.smp_daemon.shared.addresses import parse_hosts, parse_http, parse_spares, parse_standby
from holdfast.smp_daemon.shared.deadlines import parse_deadlines
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_GENERATIONS, MAX_LINKS
from holdfast.smp_daemon.shared.quantities import duration, parse_rate, parse_size, parse_time

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T]):
    """What the text of a setting may be.

    Attributes:
        shown: what stands for the value in help.
        read: the value in a text; raises `ConfigError`, which quotes the text and says what is accepted.
    """

    shown: str
    read: Callable[[str], T]


@dataclass(frozen=True, slots=True)
class Section:
    """Settings that apply in one place, as the reference groups them: those below it in the table.

    Attributes:
        text: who reads them, in Markdown.
        options: whether they are also options of an SMP.
    """

    title: str
    text: str
    options: bool = False


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One setting.

    Attributes:
        variable: the environment variable. The option is called like it: ``HOLDFAST_ON_HANG`` is ``--on-hang``.
        default: the text that applies if it is not set.
        meaning: one sentence.
        shown: what to say of the default, where that is decided elsewhere; empty: `default` itself.
        page: where the documentation says more.
        blank: whether to set it to nothing is the same as not to set it.
    """

    variable: str
    kind: ValueKind[T]
    default: str
    meaning: str
    shown: str = ""
    page: str = ""
    blank: bool = True

    @property
    def where(self) -> Section:
        """Its section: the one above it in the table."""
        return _SECTIONS[self.variable]

    @property
    def name(self) -> str:
        """The attribute that holds it among parsed arguments."""
        return self.variable.removeprefix("HOLDFAST_").lower()

    @property
    def option(self) -> str:
        """Its option on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def called(self) -> str:
        """What an error calls it."""
        return f"{self.option} ({self.variable})" if self.where.options else self.variable

    @property
    def help(self) -> str:
        """Its sentence and its default, as commands say them."""
        meaning = self.meaning.removesuffix(".")
        begin = meaning[0].lower() if meaning[1].islower() else meaning[0]
        return f"{begin}{meaning[1:]} (default {self.variable} or {self.shown or self.default or 'none'})"

    def text(self, environment: Mapping[str, str] | None = None) -> str:
        """Its text in an environment, by default this process's."""
        text = (os.environ if environment is None else environment).get(self.variable)
        return self.default if text is None or (self.blank and not text.strip()) else text.strip()

    def value(self, environment: Mapping[str, str] | None = None) -> T:
        """Its value in an environment, by default this process's.

        Raises:
            ConfigError: the text is wrong; the message names the setting, the text and what is accepted.
        """
        try:
            return self.kind.read(self.text(environment))
        except ConfigError as error:
            raise ConfigError(f"{self.called}: {error}") from None


def add_options(parser: argparse.ArgumentParser, settings: Iterable[Setting[Any]]) -> None:
    """Add the option of each setting. Its text is kept as it is; `given` has those that were given."""
    for each in settings:
        if each.kind is SWITCH:
            parser.add_argument(each.option, action="store_const", const="1", help=each.help)
        else:
            parser.add_argument(each.option, metavar=each.kind.shown, help=each.help)


def given(parsed: argparse.Namespace, settings: Iterable[Setting[Any]]) -> dict[str, str]:
    """The variables that say what the options of `add_options` said, for those that were given."""
    return {each.variable: text for each in settings if (text := getattr(parsed, each.name)) is not None}


# ---------------------------------------------------------------------- kinds


def whole(least: int, most: int | None = None) -> ValueKind[int]:
    """A whole number from `least` to `most`."""
    limits = f"{least} or more" if most is None else f"{least} to {most}"

    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise ConfigError(f"{text!r}: give a whole number, {limits}")
        return int(text)

    return ValueKind("N", read)


def time(least_s: float = 0.0, most_s: float = math.inf) -> ValueKind[float]:
    """A time. Beyond these limits, in seconds, it is a slip in the unit."""

    def read(text: str) -> float:
        seconds = parse_time(text)
        if seconds < least_s:
            raise ConfigError(f"{text!r}: give {duration(least_s)} or more")
        if seconds > most_s:
            raise ConfigError(f"{text!r}: give {duration(most_s)} or less")
        return seconds

    return ValueKind("TIME", read)


def choice(*words: str) -> ValueKind[str]:
    """One of some words, of which the empty one is not shown."""
    shown = [word for word in words if word]

    def read(text: str) -> str:
        if text not in words:
            raise ConfigError(f"{text!r}: say {' or '.join(shown)}{', or leave it out' if '' in words else ''}")
        return text

    return ValueKind("{" + ",".join(shown) + "}", read)


def or_none(kind: ValueKind[U]) -> ValueKind[U | None]:
    """The same, or nothing."""
    return ValueKind(kind.shown, lambda text: kind.read(text) if text else None)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{text!r}: say 1 for yes, or 0 for no")
    return text == "1"


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise ConfigError(f"{text!r}: give a fraction from 0 to 1, such as 0.01")
    return fraction


def _signals(text: str) -> tuple[signal.Signals, ...]:
    try:
        found = tuple(
            signal.Signals[f"SIG{name.strip().upper().removeprefix('SIG')}"] for name in text.split(",") if name
        )
    except KeyError as error:
        raise ConfigError(f"{text!r}: there is no signal {error}: say names with commas, such as TERM,USR1") from error
    if {signal.SIGKILL, signal.SIGSTOP}.intersection(found):
        raise ConfigError(f"{text!r}: no process hears KILL or STOP: leave them out")
    return found


def _every(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else whole(1, MAX_COUNT).read(text)


def _require(text: str) -> int:
    try:
        return 1 if text == "snapshot" else whole(1).read(text)
    except ConfigError:
        raise ConfigError(f"{text!r}: say snapshot, or the oldest step that a start may go back to") from None


def _links(text: str) -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 16)) if text == "auto" else whole(1, MAX_LINKS).read(text)


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r}: it is not UTF-8, and SMPs tell their settings in that") from None
    return text


def _absolute(text: str) -> str:
    if text and not text.startswith("/") and "://" not in text and "::" not in text:
        raise ConfigError(f"{text!r}: give an absolute path: scripts change directory, and SMPs run in /")
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


TEXT: ValueKind[str] = ValueKind("TEXT", str)
NAME: ValueKind[str] = ValueKind("NAME", str)
FILE: ValueKind[str] = ValueKind("FILE", _absolute)
SWITCH = ValueKind("0|1", _switch)
SIZE = ValueKind("SIZE", parse_size)
RATE = ValueKind("RATE", parse_rate)


# ---------------------------------------------------------------------- the table

THE_JOB = Section(
    "The job",
    "Read by trainers and SMPs. Set the same values on every rank and on every restart, except for the name and "
    "the failure domains of a node.",
)
JOB = Setting(
    "HOLDFAST_JOB",
    NAME,
    "",
    "Id of the training run, the same on every rank and every restart.",
    shown="torchrun's --rdzv-id, or Slurm's job id",
)
NODE = Setting("HOLDFAST_NODE", NAME, "", "Name of this node, unique in the job.", shown="the host's name")
ARENA = Setting(
    "HOLDFAST_ARENA",
    ValueKind("DIR", Path),
    f"/dev/shm/holdfast-{os.getuid()}",
    "Directory on tmpfs in which the arenas of all jobs lie.",
    shown="/dev/shm/holdfast-<uid>",
)
DOMAINS = Setting(
    "HOLDFAST_DOMAINS",
    ValueKind("KIND=NAME,...", str),
    "",
    "What this node fails together with, such as rack=r7,switch=s3,@dp: no group has more than m nodes of one domain, "
    "if that is possible.",
)

TRAINERS = Section(
    "Taking and restoring snapshots",
    "Read by trainers; an argument of `InMemorySnapshot` takes precedence. The same on every rank.",
)
EVERY = Setting(
    "HOLDFAST_EVERY",
    ValueKind("STEPS", _every),
    "auto",
    "Steps from one snapshot to the next; auto: [the interval that loses least](interval.md).",
)
OVERHEAD_BUDGET = Setting(
    "HOLDFAST_OVERHEAD_BUDGET",
    ValueKind("FRACTION", _fraction),
    "0.01",
    "Fraction of training time that snapshots may take, unless their interval is given; 0: any.",
)
MTBF = Setting(
    "HOLDFAST_MTBF",
    or_none(time(least_s=1.0)),
    "",
    "Mean time between failures of one node, such as 1000d, unless this job has failed more often.",
    shown="435 days",
)
GENERATIONS = Setting(
    "HOLDFAST_GENERATIONS",
    whole(1, MAX_GENERATIONS),
    "1",
    "How many protected snapshots are kept.",
)
RESTORE_STEP = Setting(
    "HOLDFAST_RESTORE_STEP",
    or_none(whole(1)),
    "",
    "Go back to the snapshot of this step.",
    shown="the newest",
    page="restarts.md#going-back-further",
)
REQUIRE = Setting(
    "HOLDFAST_REQUIRE",
    ValueKind("snapshot|STEP", lambda text: _require(text) if text else 0),
    "",
    "Refuse a start that would begin from nothing (snapshot), or go back to before this step.",
    shown="any start",
    page="restarts.md#a-start-that-must-go-on",
)
LEAVE_ON = Setting(
    "HOLDFAST_LEAVE_ON",
    ValueKind("TERM,USR1,...", _signals),
    "",
    "Signals that announce to a trainer that its node is to be taken away: the job ends as with `holdfast drain`.",
    shown="none",
    page="running.md#taking-a-node-away",
)
STANDBY = Setting(
    "HOLDFAST_STANDBY",
    ValueKind("PORT|HOST:PORT", parse_standby),
    "",
    "For `survive`: the port at which rank 0 awaits standbys; on a standby node, HOST:PORT of rank 0.",
    shown="no standby",
    page="restarts.md#a-standby-for-a-lost-node",
)
RUN = Setting(
    "HOLDFAST_RUN",
    ValueKind("ID", str),
    "",
    "Go on with the run of this id.",
    shown="the run that was begun last",
    page="restarts.md#which-run-goes-on",
)
GIVE_UP = Setting(
    "HOLDFAST_GIVE_UP",
    ValueKind("ID,...", _words),
    "",
    "Ids of runs that are over, of which nothing is restored.",
    page="restarts.md#which-run-goes-on",
)
MAX_REPEATS = Setting(
    "HOLDFAST_MAX_REPEATS",
    whole(0),
    "5",
    "After this many starts in a row that ended in the same way at the same step, the next one is refused; 0: never.",
    page="restarts.md",
)
ELASTIC = Setting(
    "HOLDFAST_ELASTIC",
    SWITCH,
    "0",
    "Restore a snapshot of another number of data-parallel ranks, too.",
    page="elastic.md",
)
DRIFT = Setting(
    "HOLDFAST_DRIFT",
    choice("", "accept"),
    "",
    "Go on, with other results, although the first step after a restore does not begin with what was restored.",
    page="loops.md#after-a-restore",
)
LOG = Setting(
    "HOLDFAST_LOG",
    choice("", "logfmt", "json"),
    "",
    "The form of log lines; a trainer writes them to standard error if this is set, else through Python's logging.",
    shown="logfmt in an SMP",
)

THE_SMP = Section(
    "The SMP",
    "Read by whatever starts an SMP: the first trainer of a node, or `holdfast smp start`, whose options of the "
    "same names take precedence. An SMP that runs keeps what it was started with: `holdfast smp stop` ends it first.",
    options=True,
)
HOST = Setting(
    "HOLDFAST_HOST",
    ValueKind("ADDRESS,...", parse_hosts),
    "127.0.0.1",
    "Address of this machine on which the SMP listens for other SMPs, or one for each network card; gRPC is served on "
    "the first, raw bytes on all.",
    page="running.md#several-hosts",
    blank=False,  # what a failed `hostname -I` leaves must not become loopback
)
INSECURE = Setting(
    "HOLDFAST_INSECURE",
    SWITCH,
    "0",
    "Listen off loopback although nothing is encrypted or authenticated, on a network that no one else reaches.",
    page="../SECURITY.md",
)
MEMORY = Setting(
    "HOLDFAST_MEMORY",
    SIZE,
    "0",
    "Memory for snapshots, such as 64GB, reserved from the SMP's start on and never exceeded; 0: what the job needs, "
    "reserved at its first step.",
)
ZERO = Setting(
    "HOLDFAST_ZERO",
    SWITCH,
    "0",
    "Overwrite slots with zeros when they are given up and before they are deleted.",
)
BANDWIDTH = Setting("HOLDFAST_BANDWIDTH", RATE, "0", "Most that encoding sends, such as 2GB/s; 0: no limit.")
LINKS = Setting(
    "HOLDFAST_LINKS",
    ValueKind("N", _links),
    "auto",
    f"Connections to each peer, for each network card of the node, 1 to {MAX_LINKS}; auto: one for every 16 "
    "processors, 1 to 4.",
    page="data-plane.md",
)
PRIORITY = Setting(
    "HOLDFAST_PRIORITY",
    choice("auto", "normal", "idle"),
    "auto",
    "What gives way to the trainers: encoding and the scrub (auto), all that the SMP does, which needs cores to spare "
    "(idle), or nothing (normal).",
)
SCRUB = Setting(
    "HOLDFAST_SCRUB",
    RATE,
    "64MB/s",
    "The rate at which sealed snapshots are read and checked in the background; 0: they are not.",
)
REGROUP_AFTER = Setting(
    "HOLDFAST_REGROUP_AFTER",
    time(),
    "30s",
    "How long a node may be missing, with no trainer connected, before the survivors regroup without it; 0: they never "
    "do.",
)
DEADLINES = Setting(
    "HOLDFAST_DEADLINES",
    ValueKind("PHASE=TIME,...", parse_deadlines),
    "start=15min,restore=15min,step=60s,factor=10,copy=2min",
    "How long a trainer of this node may be quiet in each phase, in a step also factor times the median step, before "
    "it counts as hung; 0: for ever.",
)
ON_HANG = Setting(
    "HOLDFAST_ON_HANG",
    ValueKind("COMMAND", _utf8),
    "",
    "Shell command that is run once per hang of a trainer, for at most a minute.",
    page="running.md#is-it-alive",
)
GRACE = Setting(
    "HOLDFAST_GRACE",
    time(most_s=3600.0),
    "25s",
    "Longest time after SIGTERM for moving what the node holds to other nodes before the SMP ends; 0: it ends at once.",
)
SPARES = Setting(
    "HOLDFAST_SPARES",
    ValueKind("HOST:PORT,...", parse_spares),
    "",
    "SMPs of this job on nodes without trainers, by their gRPC ports, which take over first what is moved after "
    "SIGTERM.",
)
HTTP = Setting(
    "HOLDFAST_HTTP",
    ValueKind("PORT", parse_http),
    "auto",
    "Loopback port of the page, /status.json and /metrics, or ADDRESS:PORT, which serves /metrics to other machines; "
    "auto, or if it is taken: the one before, or any free one; off: none.",
)

STORAGE = Section(
    "Storage",
    "Read by whatever starts an SMP; also its options. The tier is off unless a place is given. [Snapshots on "
    "storage](persist.md).",
    options=True,
)
PERSIST = Setting(
    "HOLDFAST_PERSIST",
    ValueKind("URL", lambda text: _utf8(_absolute(text))),
    "",
    "Where protected snapshots are also written: a directory that all nodes share or an fsspec URL, the same on all "
    "nodes.",
)
PERSIST_EVERY = Setting(
    "HOLDFAST_PERSIST_EVERY",
    time(least_s=0.1),
    "30min",
    "How often snapshots are written there at most, such as 90s, 30min or 2h.",
)
PERSIST_KEEP = Setting("HOLDFAST_PERSIST_KEEP", whole(1), "2", "How many whole snapshots are kept there.")
PERSIST_BANDWIDTH = Setting(
    "HOLDFAST_PERSIST_BANDWIDTH",
    RATE,
    "0",
    "Most that each node reads from memory to write it there, such as 500MB/s; 0: no limit.",
)

SECURITY = Section("Security", "Read by trainers and SMPs. [SECURITY.md](../SECURITY.md) has the threat model.")
TOKEN_FILE = Setting("HOLDFAST_TOKEN_FILE", FILE, "", "File with the job's token, readable by nobody else.")
TOKEN = Setting("HOLDFAST_TOKEN", TEXT, "", "The token itself, where there is no file.")
TLS_CERT = Setting("HOLDFAST_TLS_CERT", FILE, "", "PEM file with this node's certificate, for mutual TLS between SMPs.")
TLS_KEY = Setting("HOLDFAST_TLS_KEY", FILE, "", "PEM file with its private key.")
TLS_CA = Setting("HOLDFAST_TLS_CA", FILE, "", "PEM file with the authority that signed the certificates.")
TLS_NAME = Setting("HOLDFAST_TLS_NAME", NAME, "holdfast-smp", "The DNS name that all certificates carry.")

SET_FOR_YOU = Section("Set for you", "`--on-hang` commands see `HOLDFAST_JOB`, `HOLDFAST_NODE`, and these.")
COORD = Setting("HOLDFAST_COORD", TEXT, "", "Coordinate of the trainer that hangs, such as pp0-tp1-cp0-ep0-dp3.")
PID = Setting("HOLDFAST_PID", TEXT, "", "Its process id.")
PHASE = Setting("HOLDFAST_PHASE", TEXT, "", "The phase it hangs in: start, restore, step or copy.")
STEP = Setting("HOLDFAST_STEP", TEXT, "", "The step it hangs in.")

DEPLOYMENT = Section("Deployment files", "Read by files that `holdfast deploy` writes, not by holdfast.")
KEEP_S = Setting(
    "HOLDFAST_KEEP_S",
    whole(0),
    "0",
    "Slurm's epilog: for how many seconds the SMP of a job that has failed, or is requeued, stays.",
)

INTERNAL = Section("Internal", "Set by holdfast's own commands and tests. Do not set them in a job.")
BACKEND = Setting(
    "HOLDFAST_BACKEND", NAME, "auto", "What computes parity: auto takes the fastest, and all write the same."
)
REBUILD = Setting(
    "HOLDFAST_REBUILD",
    choice("chain", "decode"),
    "chain",
    "How lost shards are computed: along a chain of helpers (the new node receives S bytes), or there (k times S).",
)
COMMAND = Setting(
    "HOLDFAST_COMMAND", TEXT, "", "Marks what a command of holdfast has started, so that it can be ended."
)
AUDIT = Setting("HOLDFAST_AUDIT", TEXT, "", "What holdfast audit and chaos run tell the hook to note.")
PROFILE = Setting("HOLDFAST_PROFILE", TEXT, "", "Where holdfast profile has the hook write what it measured.")
POINTS = Setting("HOLDFAST_POINTS", TEXT, "", "At which failpoints a process stops until a test lets it go on.")
TRAINER = Setting("HOLDFAST_TRAINER", TEXT, "", "What a trainer on a virtual node is to run.")
REJOIN = Setting("HOLDFAST_REJOIN", SWITCH, "1", "Whether a restarted SMP brings back what its node lacks.")

TABLE: tuple[Setting[Any], ...] = tuple(each for each in globals().values() if isinstance(each, Setting))
"""All of them, in the order of the reference."""

_SECTIONS: dict[str, Section] = {}
for _each in [*globals().values()]:
    if isinstance(_each, Section):
        _section = _each
    elif isinstance(_each, Setting):
        _SECTIONS[_each.variable] = _section

SMP_OPTIONS = tuple(each for each in TABLE if each.where.options)
"""Those that are also options of an SMP."""

OF_AN_SMP = tuple(each for each in TABLE if each.where in (THE_SMP, STORAGE) and each is not HOST)
"""Those that an SMP keeps from its start to its end. Its host counts by what it can be reached at."""

VARIABLES = {each.variable: each for each in TABLE}
