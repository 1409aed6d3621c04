"""Structured logs: one line per event, with job, node, epoch and step, and in trainers also rank and coordinate.

The subject of an event is given in fields (`about`), never in its text alone. A failure that repeats is an episode
(`Episodes`): it is logged when it begins and when it ends, and counted in between.

A line is logfmt, ``time=... level=... job=... node=... epoch=... step=... at=... msg="..."``, or JSON with the same
fields if ``HOLDFAST_LOG=json``. In a process that is not ours, such as a trainer, logging is not set up: the fields are
attributes of the `logging.LogRecord`, for the job's own formatter, and ``HOLDFAST_LOG`` sends the lines to standard
error.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import logging.handlers
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.settings import LOG

if TYPE_CHECKING:
    from holdfast.smp_daemon.shared.layout import SnapshotId  # this imports NumPy, which starts threads

IDENTITY = ("job", "node", "epoch", "step", "rank", "coord")
MAX_BYTES = 256 << 10
MAX_EPISODES = 1024
"""Episodes that are remembered; the one that began first is forgotten first."""

EVENTS_KEPT = 12
MAX_EVENT_CHARACTERS = 160

_identity: dict[str, Any] = {}


def identify(**fields: Any) -> None:
    """Set fields of `IDENTITY` for all lines of this process. Callables are called for each line. None: unknown now."""
    unknown = fields.keys() - set(IDENTITY)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not fields of every line: use one of {IDENTITY}")
    _identity.update(fields)


def about(snapshot: SnapshotId | None = None, **fields: Any) -> dict[str, Any]:
    """The fields of an event, to be passed as ``extra`` to a logging call."""
    place = {"epoch": epoch_text(snapshot.epoch), "step": snapshot.step} if snapshot is not None else {}
    return {**place, "fields": fields}


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records carry the identity of this process. Thread-safe."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        given = kwargs.get("extra") or {}
        known = {name: value() if callable(value) else value for name, value in _identity.items()}
        kwargs["extra"] = dict.fromkeys(IDENTITY) | {"fields": {}} | known | dict(given)
        return msg, kwargs


def get_log(name: str) -> Log:
    """The logger of a module."""
    return Log(logging.getLogger(name))


@dataclass(slots=True)
class _Episode:
    began_s: float
    level: int
    count: int = 1


class Episodes:
    """Failures that repeat, each identified by a key. Thread-safe.

    ``begin`` logs the first failure and counts the others, until ``end`` logs how many there were.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic, every_s: float = math.inf) -> None:
        """`every_s`: how often a failure that nothing ends is logged again, in seconds."""
        self._log = log
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()  # guards `_going_on`; innermost: lines are logged without it
        self._going_on: dict[Hashable, _Episode] = {}

    def begin(
        self, key: Hashable, text: str, *args: Any, level: int = logging.WARNING, extra: dict[str, Any] | None = None
    ) -> bool:
        """Note a failure of `key`. Returns whether it was logged: the first is, the first of a higher level, and then
        one every `every_s`."""
        now_s = self._clock()
        with self._lock:
            known = self._going_on.get(key)
            if known is not None and now_s - known.began_s < self._every_s and level <= known.level:
                known.count += 1
                return False
            if known is not None:
                text, args = f"{text} (%d times in the last %.0f s)", (*args, known.count, now_s - known.began_s)
                del self._going_on[key]
            elif len(self._going_on) >= MAX_EPISODES:
                del self._going_on[next(iter(self._going_on))]
            self._going_on[key] = _Episode(now_s, level)
        self._log.log(level, text, *args, extra=extra)
        return True

    def end(self, key: Hashable, text: str, *args: Any, extra: dict[str, Any] | None = None) -> None:
        """Note that `key` works. Logs this if it had failed; otherwise costs next to nothing."""
        if key not in self._going_on:
            return
        with self._lock:
            known = self._going_on.pop(key, None)
        if known is not None:
            fields = {"times": known.count, "for_s": round(self._clock() - known.began_s, 3)}
            merged = {**(extra or {}), "fields": {**(extra or {}).get("fields", {}), **fields}}
            self._log.info(text, *args, extra=merged)


class Formatter(logging.Formatter):
    """Formats a record, ours or anyone else's, as one line."""

    def __init__(self, kind: str) -> None:
        """`kind`: one of `FORMATS`."""
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, even if its message has several."""
        fields = self._fields(record)
        if self._kind == "json":
            return json.dumps(fields, default=str, separators=(",", ":"))
        return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        for name in IDENTITY:
            value = getattr(record, name, None)
            if value is None:
                value = _identity.get(name)
                value = value() if callable(value) else value
            if value is not None or name in ("job", "node", "epoch", "step"):
                fields[name] = value
        fields |= {"at": record.name, "msg": record.getMessage()}
        for name, value in (getattr(record, "fields", None) or {}).items():
            fields.setdefault(name, value)
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return fields


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line of the log, for operators: time in seconds since 1970, level, and the beginning of the text."""

    at: float
    level: str
    text: str


def some(texts: Sequence[str], most: int = 8, between: str = "; ") -> str:
    """The first `most` texts, and how many more there are."""
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


class _LastEvents(logging.Handler):
    """Keeps the last lines that this process has logged. The handler's own lock guards `events`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: deque[LogEvent] = deque(maxlen=EVENTS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:MAX_EVENT_CHARACTERS]
        self.events.appendleft(LogEvent(record.created, record.levelname.lower(), text))


_last = _LastEvents()


_early = logging.handlers.BufferingHandler(sys.maxsize)
"""Keeps the lines of a process that has no log yet."""


def log_later() -> None:
    """Keep the lines of this process until `log_to` says where they go."""
    logging.basicConfig(level=logging.INFO, handlers=[_early])


def last_events() -> tuple[LogEvent, ...]:
    """The last `EVENTS_KEPT` lines that this process has logged since `log_to`, the newest first. Thread-safe."""
    with _last.lock or nullcontext():
        return tuple(_last.events)


def _quoted(value: Any) -> str:
    if value is None:
        return "-"
    text = str(value)
    plain = text and all(c.isprintable() and c not in ' "=' for c in text) and text != "-"
    return text if plain else json.dumps(text)


def chosen_format() -> str:
    """The format that ``HOLDFAST_LOG`` names, or logfmt. Raises `ConfigError`."""
    return LOG.value() or "logfmt"


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file of at most `MAX_BYTES`, with an older one beside it. If the process crashes in native code, the stacks
    of all threads are written to it as plain text. Lines that cannot be written to it go to standard error.

    Attributes:
        problem: why the last line is not in the file; empty if it is.
    """

    problem = ""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, delay=True)
        self._elsewhere = logging.StreamHandler(sys.stderr)
        for each in (self, self._elsewhere):
            each.setFormatter(Formatter(chosen_format()))

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        faulthandler.enable(stream)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        before, self.problem = self.problem, ""
        super().emit(record)
        if self.problem and not before:
            _last.handle(logging.makeLogRecord({"msg": self.problem, "levelname": "ERROR"}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Note why a line could not be written, usually because the disk is full."""
        error = sys.exc_info()[1]
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        self.problem = f"the log {self.baseFilename} cannot be written: {why}; lines are missing from it"
        self._elsewhere.handle(record)


_file: _LogFile | None = None


def log_to(path: Path, **identity: Any) -> None:
    """Have this process log to a file, see `_LogFile`. Lines kept since `log_later` come first."""
    global _file
    identify(**identity)
    _file = _LogFile(path)
    logging.getLogger().removeHandler(_early)
    logging.basicConfig(level=logging.INFO, handlers=[_file, _last])
    for record in _early.buffer:
        _file.handle(record)
        _last.handle(record)
    _early.buffer.clear()


def log_file_problem() -> str:
    """Why lines are missing from the file given to `log_to`; empty if none are. Thread-safe."""
    return _file.problem if _file is not None else ""


class _Unhandled(logging.Handler):
    """Shows warnings of a process that has set up no logging, as `logging.lastResort` does, but says whose they are,
    and breaks no progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        others = [*logging.getLogger().handlers, *logging.getLogger("holdfast").handlers]
        if others != [self]:
            return
        try:
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
            (print if bars is None else bars.write)(f"holdfast: {record.getMessage()}", file=sys.stderr)
        except Exception:  # as any handler: a log must not end the job
            self.handleError(record)


_unhandled = _Unhandled()


def log_here(**identity: Any) -> None:
    """Set up logging in a trainer: to standard error if ``HOLDFAST_LOG`` is set, else the job's own handlers apply."""
    identify(**identity)
    logger = logging.getLogger("holdfast")
    if not LOG.text():
        logger.addHandler(_unhandled)
        return
    kind = chosen_format()
    logger.removeHandler(_unhandled)
    if not any(isinstance(handler.formatter, Formatter) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Formatter(kind))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
