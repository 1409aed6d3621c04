"""``holdfast audit``: does a killed and resumed run of *your* job go on exactly, and if not, what was forgotten?

The command runs five times for a few steps: undisturbed, undisturbed again (what differs between these two is not
deterministic, and no resume could make it so), killed in the middle of a step, resumed from memory and killed a step
later, and resumed again: two steps in a row, as some state takes turns. At the start of a resumed step everything that
the training loop can reach is compared with the undisturbed run at the same place; after that the model's outputs and
all gradients of every step are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast import sessions
from holdfast.sessions import tail
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.scratch import Scratch
from holdfast.smp_daemon.shared.spawn import find_leftovers, remove
from holdfast.snapshot.resume.comparison import ENV as DRIFT_ENV
from holdfast.snapshot.state.audit import AuditOrders

RUNS = ("undisturbed", "undisturbed again", "killed", "resumed, and killed", "resumed")
KILLED = RUNS[2:4]
QUIET_S = 10.0
"""After so long without a step it is said that there is none yet."""

GLOBAL_GENERATORS = {
    "random.python": "Python's generator",
    "random.numpy": "NumPy's global generator",
    "random.torch": "torch's CPU generator",
    "random.cuda": "a generator of a CUDA device",
}
OWN_GENERATORS = ("torch.Generator ", "numpy.random.", "random.Random ")
"""How values of generators begin that are no global ones."""

NOTHING = "nothing"
"""What is found where a value is not there."""

VARIABLE = re.compile(r"[^.\[{]+\.[^.\[{]+")
"""The start of a name: function and variable."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to audit.

    Attributes:
        command: as it would be started by hand; it enters `InMemorySnapshot`.
        steps, kill: how many steps to run, and after how many of them to kill first.
        ignore: regular expressions; names in which one is found are not compared.
        deadline_s: for each of the runs.
    """

    command: tuple[str, ...]
    steps: int = 8
    kill: int = 4
    ignore: tuple[str, ...] = ()
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("what shall be audited? holdfast audit -- python train.py ...")
        if not 1 <= self.kill < self.steps - 1:
            raise ConfigError(f"--kill {self.kill} --steps {self.steps}: kill after 1 step or more, 2 before the last")


Values = Mapping[str, str]


@dataclass(slots=True)
class Notes:
    """What one process of a rank noted, by step.

    Attributes:
        values: all that could be reached when the step after it began.
        computed: outputs and gradients of the step that led to it.
        epoch, start, pid: of this start of the job, the step that it began with, and the process.
        protected: the newest step that it was told to be protected.
    """

    values: dict[int, Values] = field(default_factory=dict)
    computed: dict[int, Values] = field(default_factory=dict)
    epoch: int = 0
    start: int = 0
    pid: int = 0
    protected: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not as in the undisturbed run.

    Attributes:
        kind: ``not deterministic``, ``not restored``, ``absent`` or ``computed``.
    """

    kind: str
    rank: int
    step: int
    name: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        resumed: the steps that resumed runs began with.
        compared: how many values were.
        passing: names of what differed as a resumed run began, and could do nothing: see `compare_rank`.
    """

    resumed: tuple[int, ...]
    compared: int
    differences: tuple[Difference, ...]
    passing: frozenset[str] = frozenset()

    @property
    def exact(self) -> bool:
        return not self.differences


def run(plan: AuditPlan, progress: Callable[[str], None]) -> AuditReport:
    """Run the command five times, and compare. Blocks; leaves nothing behind.

    Raises:
        HoldfastError: a run did not do what it should; the message ends with what it printed.
    """
    with Scratch("audit") as scratch:
        folder = scratch.path
        try:
            notes = {}
            for name in RUNS:
                progress(name)
                notes[name] = _run(plan, folder, name, progress)
        finally:
            for leftover in find_leftovers(folder):
                remove(leftover)
    first, second, short, long = (notes[name] for name in (RUNS[0], RUNS[1], *RUNS[3:]))
    twice = compare(first, second, long, plan.ignore)
    once = compare(first, second, short, plan.ignore, twice.passing.__contains__)
    if not once.exact:
        return once  # what comes after it differs for that reason alone
    return together([once, twice])


def compare(
    first: Sequence[Notes],
    second: Sequence[Notes],
    resumed: Sequence[Notes],
    ignore: Iterable[str] = (),
    harmless: Callable[[str], bool] = lambda name: False,
) -> AuditReport:
    """What differs, rank by rank. Pure; `harmless` as of `compare_rank`.

    Raises:
        HoldfastError: the resumed run began from nothing, or with another number of ranks.
    """
    if not len(first) == len(second) == len(resumed):
        raise HoldfastError(f"{len(first)} ranks undisturbed, {len(second)} again, {len(resumed)} resumed")
    reports = []
    for rank, (one, two, three) in enumerate(zip(first, second, resumed, strict=True)):
        step = min(three.values, default=0)
        if step == 0 or step not in one.values:
            raise HoldfastError(f"rank {rank} was not restored: the resumed run began with step {step}")
        reports.append(compare_rank(rank, one, two, three, ignore, harmless))
    return together(reports)


def together(reports: Sequence[AuditReport]) -> AuditReport:
    """Several reports as one."""
    return AuditReport(
        tuple(sorted({step for report in reports for step in report.resumed})),
        sum(report.compared for report in reports),
        tuple(difference for report in reports for difference in report.differences),
        frozenset().union(*(report.passing for report in reports)),
    )


def compare_rank(
    rank: int,
    one: Notes,
    two: Notes,
    later: Notes,
    ignore: Iterable[str] = (),
    harmless: Callable[[str], bool] = lambda name: False,
) -> AuditReport:
    """What a process of a rank has found and computed otherwise than two undisturbed ones, which tell what is not
    deterministic: what it could reach when its first step began, and outputs and gradients of every step. Pure.

    A new process has some things otherwise that no training depends on: libraries set flags on first use and make
    caches. No list of their names is kept; what counts is what they do. A difference is *passing*, and no fault, if the
    value is the one with which the undisturbed process began, too; if the difference is gone some steps later, for
    good; and if nothing of this process differs that did not as it began: no output, no gradient, and nothing that can
    be reached as any later step begins. Whatever had an effect while it differed would have left a trace there.

    Args:
        harmless: of a process that did not live until they are gone: names whose differences passed in others.
    """
    ignored = [re.compile(pattern) for pattern in ignore]

    def compared(step: int, kind: str) -> tuple[int, list[Difference]]:
        expected, again, held = (each.computed if kind == "computed" else each.values for each in (one, two, later))
        return _differences(rank, step, kind, expected[step], again.get(step, {}), held[step], ignored)

    first = min(later.values)
    count, found = compared(first, "not restored") if first in one.values else (0, [])
    results = [compared(step, "computed") for step in sorted(one.computed.keys() & later.computed.keys())]
    afterwards = [step for step in sorted(one.values.keys() & later.values.keys()) if step > first]
    passing: frozenset[str] = frozenset()
    if found and not any(differences for _, differences in results):
        fresh, names = one.values[min(one.values)], {each.name for each in found}
        left = [{each.name for each in compared(step, "not restored")[1]} for step in afterwards]
        if all(each <= names for each in left):
            last = afterwards[-1] if afterwards else first
            gone = {name for name in names if later.values[last].get(name) == one.values[last].get(name)}
            passing = frozenset(
                each.name
                for each in found
                if each.found == fresh.get(each.name, NOTHING) and (each.name in gone or harmless(each.name))
            )
        found = [each for each in found if each.name not in passing]
    found += [difference for _, differences in results for difference in differences]
    return AuditReport((first,), count + sum(number for number, _ in results), tuple(found), passing)


def _differences(
    rank: int,
    step: int,
    kind: str,
    expected: Values,
    again: Values,
    held: Values,
    ignored: Sequence[re.Pattern[str]],
) -> tuple[int, list[Difference]]:
    """How many values were compared, and what is not as expected, twice alike."""
    found: list[Difference] = []
    compared = 0
    roots = set(map(_variable, held))
    for name, value in expected.items():
        if any(pattern.search(name) for pattern in ignored):
            continue
        compared += 1
        if again.get(name) != value:
            if kind == "computed":
                found.append(Difference("not deterministic", rank, step, name, value, again.get(name, NOTHING)))
        elif name in held:
            if held[name] != value:
                found.append(Difference(kind, rank, step, name, value, held[name]))
        elif kind == "computed":
            found.append(Difference(kind, rank, step, name, value, NOTHING))
        elif _variable(name) != name and _variable(name) in roots:  # not just a variable that is not set yet
            found.append(Difference("absent", rank, step, name, value, NOTHING))
    return compared, found


def show(console: Console, report: AuditReport, most: int = 12) -> None:
    """Print the verdict: what is not exact, and what was probably forgotten."""
    if report.exact:
        steps = " and ".join(map(str, report.resumed))
        console.print(f"exact: resumed at steps {steps}; {report.compared:,} values are those of the undisturbed run")
        if report.passing:
            console.print(_passing(sorted(report.passing)))
        return
    said = {
        "not deterministic": "differs between two undisturbed runs, so no resume can be exact:",
        "not restored": "not restored, as it was when the next step began; probably forgotten:",
        "absent": "not there after the resume, when the next step began; probably forgotten:",
        "computed": "computed differently after the resume:",
    }
    for kind, title in said.items():
        chosen = distinct(difference for difference in report.differences if difference.kind == kind)
        if not chosen:
            continue
        console.print(title)
        for each in chosen[:most]:
            where = f"step {each.step}, rank {each.rank}"
            console.print(f"  {each.name}: {each.found}, undisturbed {each.expected} ({where})")
            if (why := drift(each)) is not None:
                console.print(f"    {why}")
        if len(chosen) > most:
            console.print(f"  and {len(chosen) - most} more")
    forgotten = [each for each in report.differences if each.kind in ("not restored", "absent")]
    if any(drift(each) is None for each in forgotten):
        console.print("Give such state to snap.track(...) or extra=, or say --ignore PATTERN if it does not matter.")


def _passing(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (
        f"as a resumed run began, {', '.join(names[:most])}{more} differed, as in any new process; that was gone "
        "soon, and nothing that was computed differs: such as flags that a library sets on first use"
    )


def drift(difference: Difference) -> str | None:
    """Why a random generator is not as it was, and what helps; None: the difference is no generator's."""
    if difference.kind != "not restored":
        return None
    if difference.name in GLOBAL_GENERATORS:
        return (
            f"{GLOBAL_GENERATORS[difference.name]} is not as it was when the step after {difference.step} began: "
            "something drew from it between entering and the first step, such as iter(DataLoader); use "
            "snap.data(loader), or call snap.begin() at the top of the loop. Outside of an audit such a job is refused "
            "when it is started again"
        )
    if difference.expected.startswith(OWN_GENERATORS):
        return (
            f"{difference.name} is a generator of the job's own, and nobody puts it back: if only a loader draws from "
            "it, use snap.data(loader); else give its state to snap.track(...)"
        )
    return None


def distinct(differences: Iterable[Difference]) -> list[Difference]:
    """The first of each name, in order of steps; of a tensor that has several names, only the one with the shortest."""
    by_name: dict[str, Difference] = {}
    for difference in sorted(differences, key=lambda difference: difference.step):
        by_name.setdefault(difference.name, difference)
    by_value: dict[tuple[str, str], Difference] = {}
    for difference in sorted(by_name.values(), key=lambda difference: len(difference.name)):
        tensor = difference.expected.startswith(("torch.", *OWN_GENERATORS))
        key = (difference.expected, difference.found) if tensor else (difference.name, "")
        by_value.setdefault(key, difference)
    return sorted(by_value.values(), key=lambda difference: (difference.step, difference.rank, difference.name))


def _variable(name: str) -> str:
    match = VARIABLE.match(name)
    return match[0] if match else name


class _RunProgress:
    """Says how far a run is: each new step, and now and then that there is none yet."""

    def __init__(self, notes: Path, name: str, steps: int, progress: Callable[[str], None]) -> None:
        self._notes, self._name, self._steps, self._progress = notes, name, steps, progress
        self._step, self._said_s = -1, 0.0

    def look(self, ran_s: float) -> None:
        """After so many seconds."""
        step = max((max(rank[-1].values, default=-1) for rank in read(self._notes) if rank), default=-1)
        if step > self._step:
            self._progress(f"{self._name}: step {step} of {self._steps} after {ran_s:.0f} s")
        elif step < 0 and ran_s - self._said_s > QUIET_S:
            self._progress(f"{self._name}: no step yet after {ran_s:.0f} s")
        else:
            return
        self._step, self._said_s = step, ran_s


def _run(plan: AuditPlan, folder: Path, name: str, progress: Callable[[str], None]) -> list[Notes]:
    """One run, and what its ranks noted. Raises `HoldfastError` if it did not end as it should."""
    number = RUNS.index(name)
    notes = folder / f"notes{number}"
    notes.mkdir()
    arena = folder / f"arena{min(number, 2)}"  # the last three are one job
    orders = AuditOrders(str(notes), plan.steps, plan.kill + KILLED.index(name) if name in KILLED else 0)
    environment = os.environ | orders.to_environment()
    environment |= {ARENA_ENV: str(arena), "HOLDFAST_JOB": "audit", "HOLDFAST_OVERHEAD_BUDGET": "0"}
    environment |= {DRIFT_ENV: "accept"}  # what drifted is to be seen, not refused
    # Sets of texts have the same order in the runs that are compared, and another in the run that tells whether what is
    # computed depends on it.
    environment = {"PYTHONHASHSEED": str(int(name == RUNS[1]))} | environment
    log = notes / "log"
    look = _RunProgress(notes, name, plan.steps, progress).look
    status = sessions.run(plan.command, environment, log, plan.deadline_s, f"{name} run", look)
    if (status != 0) is not (name in KILLED):
        raise HoldfastError(f"the {name} run ended with status {status}\n{tail(log)}")
    return read_last(notes, log, name)


def read_last(folder: Path, log: Path, name: str) -> list[Notes]:
    """What the last process of each rank noted there. Raises `HoldfastError` if none did in the run of that name."""
    ranks = read(folder)
    if not ranks:
        raise HoldfastError(f"the {name} run never entered InMemorySnapshot\n{tail(log)}")
    return [processes[-1] for processes in ranks]


def read(folder: Path) -> list[list[Notes]]:
    """What was noted there: for each rank, its processes in order."""
    files = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [_read(file) for file in files]


def _read(file: Path) -> list[Notes]:
    found: list[Notes] = []
    for line in file.read_text().splitlines():
        try:
            note: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # it was killed while it wrote this one
        if "epoch" in note:
            found.append(Notes(epoch=note["epoch"], start=note["start"], pid=note["pid"]))
        elif "values" in note:
            found[-1].values[note["step"]] = note["values"]
            found[-1].protected = max(found[-1].protected, note["protected"] or 0)
        else:
            found[-1].computed[note["step"]] = note["computed"]
    return found
