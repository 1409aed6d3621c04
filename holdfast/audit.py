"""``holdfast audit``: does *your* job continue exactly after a kill and a resume, and if not, what was forgotten?

The command runs five times for a few steps: undisturbed, undisturbed again, killed in the middle of a step, resumed
from memory and killed one step later, and resumed again. What differs between the two undisturbed runs is not
deterministic, and no resume could be exact there. Two consecutive steps are resumed because some state alternates from
step to step. When a resumed run begins its first step, everything that the training loop can reach is compared with the
undisturbed run at the same step. After that, the model's outputs and all gradients of every step are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast import sessions
from holdfast.leftovers import find_leftovers, remove
from holdfast.scratch import Scratch
from holdfast.sessions import tail
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.settings import MAX_REPEATS
from holdfast.snapshot.resume.comparison import ENV as DRIFT_ENV
from holdfast.snapshot.state.audit import GENERATOR, AuditOrders

RUNS = ("undisturbed", "undisturbed again", "killed", "resumed, and killed", "resumed")
KILLED = RUNS[2:4]
QUIET_S = 10.0
"""Interval in seconds between messages that a run has not begun a step yet."""

GLOBAL_GENERATORS = {
    "random.python": "Python's generator",
    "random.numpy": "NumPy's global generator",
    "random.torch": "torch's CPU generator",
    "random.cuda": "a generator of a CUDA device",
}
"""Prefixes of the noted values of generators that are not global."""

NOTHING = "nothing"
"""The noted value of something that a run does not have."""

VARIABLE = re.compile(r"[^.\[{]+\.[^.\[{]+")
"""Matches the start of a name: function and variable."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to audit.

    Attributes:
        command: the training command, as started by hand; it enters `InMemorySnapshot`.
        steps: number of steps in each run. The first kill is in the middle.
        ignore: regular expressions; a name that contains a match is not compared.
        deadline_s: timeout for each run.
    """

    command: tuple[str, ...]
    steps: int = 8
    ignore: tuple[str, ...] = ()
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("what shall be audited? holdfast audit -- python train.py ...")
        if self.steps < 3:
            raise ConfigError(f"--steps {self.steps}: give 3 or more, for it is killed in the middle")

    @property
    def kill(self) -> int:
        """Number of steps before the first kill."""
        return self.steps // 2


Values = Mapping[str, str]


@dataclass(slots=True)
class Notes:
    """The notes of one process of a rank.

    Attributes:
        values: by step, everything that the training loop could reach when the next step began.
        computed: by step, outputs and gradients of that step.
        epoch, start, pid: epoch of this start of the job, the step it began with, and the process id.
        protected: the newest step that the process was told is protected.
    """

    values: dict[int, Values] = field(default_factory=dict)
    computed: dict[int, Values] = field(default_factory=dict)
    epoch: int = 0
    start: int = 0
    pid: int = 0
    protected: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs from the undisturbed run.

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
        compared: number of values compared.
        passing: names of values that differed when a resumed run began, without any effect; see `compare_rank`.
    """

    resumed: tuple[int, ...]
    compared: int
    differences: tuple[Difference, ...]
    passing: frozenset[str] = frozenset()

    @property
    def exact(self) -> bool:
        return not self.differences


def run(plan: AuditPlan, progress: Callable[[str], None]) -> AuditReport:
    """Run the command five times and compare the runs. Blocks; leaves nothing behind.

    Raises:
        HoldfastError: a run did not do what it should; the message ends with the run's output.
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
        return once  # the second resume only inherits these differences
    return together([once, twice])


def compare(
    first: Sequence[Notes],
    second: Sequence[Notes],
    resumed: Sequence[Notes],
    ignore: Iterable[str] = (),
    harmless: Callable[[str], bool] = lambda name: False,
) -> AuditReport:
    """Compare the runs rank by rank. Pure. `harmless` is passed on to `compare_rank`.

    Raises:
        HoldfastError: a rank of the resumed run was not restored, or the runs have different numbers of ranks.
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
    """Merge several reports into one."""
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
    """Compare a resumed process of a rank with two undisturbed ones. Pure.

    Two things are compared: what the process could reach when its first step began, and the outputs and gradients of
    every step. What differs between the two undisturbed processes is not deterministic.

    A new process differs in some values that no training depends on: libraries set flags on first use and fill caches.
    Such values are recognised by their effect, not by a list of names. A difference is *passing*, and no fault, if

    * the undisturbed process began with the same value,
    * the difference is gone at the last step compared, and
    * nothing else of this process differs: no output, no gradient, and at the start of later steps no value that was
      equal at first. Any effect of the difference would have left a trace there.

    Args:
        one, two: notes of the undisturbed processes.
        later: notes of the resumed process.
        harmless: names of differences that passed in other processes. They pass here too if this process ended before
            its own were gone.
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
    """Return how many values were compared, and how `held` differs from `expected`.

    A value on which the undisturbed runs, `expected` and `again`, disagree is reported only if it was computed.
    """
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
        elif _variable(name) != name and _variable(name) in roots:  # the variable exists, so it is not merely unset
            found.append(Difference("absent", rank, step, name, value, NOTHING))
    return compared, found


def show(console: Console, report: AuditReport, most: int = 12) -> None:
    """Print the verdict: what differs, and what was probably forgotten."""
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
    """Explain why a random generator differs, and what helps. None if the difference is not a generator's."""
    if difference.kind != "not restored":
        return None
    if difference.name in GLOBAL_GENERATORS:
        return (
            f"{GLOBAL_GENERATORS[difference.name]} is not as it was when the step after {difference.step} began: "
            "something drew from it between entering and the first step, such as iter(DataLoader); use "
            "snap.data(loader), or call snap.begin() at the top of the loop. Outside of an audit such a job is refused "
            "when it is started again"
        )
    if difference.expected.startswith(GENERATOR):
        return (
            f"{difference.name} is a generator of the job's own, and nobody puts it back: if only a loader draws from "
            "it, use snap.data(loader); else give its state to snap.track(...)"
        )
    return None


def distinct(differences: Iterable[Difference]) -> list[Difference]:
    """The first difference of each name, ordered by step. A tensor with several names counts once, by its shortest."""
    by_name: dict[str, Difference] = {}
    for difference in sorted(differences, key=lambda difference: difference.step):
        by_name.setdefault(difference.name, difference)
    by_value: dict[tuple[str, str], Difference] = {}
    for difference in sorted(by_name.values(), key=lambda difference: len(difference.name)):
        tensor = difference.expected.startswith(("torch.", GENERATOR))
        key = (difference.expected, difference.found) if tensor else (difference.name, "")
        by_value.setdefault(key, difference)
    return sorted(by_value.values(), key=lambda difference: (difference.step, difference.rank, difference.name))


def _variable(name: str) -> str:
    match = VARIABLE.match(name)
    return match[0] if match else name


class _RunProgress:
    """Reports how far a run is: each new step, and every `QUIET_S` that there is none yet."""

    def __init__(self, notes: Path, name: str, steps: int, progress: Callable[[str], None]) -> None:
        self._notes, self._name, self._steps, self._progress = notes, name, steps, progress
        self._step, self._said_s = -1, 0.0

    def look(self, ran_s: float) -> None:
        """Report progress after `ran_s` seconds, if there is any news."""
        step = max((max(rank[-1].values, default=-1) for rank in read(self._notes) if rank), default=-1)
        if step > self._step:
            self._progress(f"{self._name}: step {step} of {self._steps} after {ran_s:.0f} s")
        elif step < 0 and ran_s - self._said_s > QUIET_S:
            self._progress(f"{self._name}: no step yet after {ran_s:.0f} s")
        else:
            return
        self._step, self._said_s = step, ran_s


def _run(plan: AuditPlan, folder: Path, name: str, progress: Callable[[str], None]) -> list[Notes]:
    """Run the command once; return the notes of its ranks. Raises `HoldfastError` if it did not end as it should."""
    number = RUNS.index(name)
    notes = folder / f"notes{number}"
    notes.mkdir()
    arena = folder / f"arena{min(number, 2)}"  # the last three runs are one job
    orders = AuditOrders(str(notes), plan.steps, plan.kill + KILLED.index(name) if name in KILLED else 0)
    environment = sessions.trial_environment() | orders.to_environment()
    environment |= {ARENA_ENV: str(arena), "HOLDFAST_JOB": "audit", "HOLDFAST_EVERY": "1"}
    # Drift is reported, so the run must not be refused; nor for the kills.
    environment |= {DRIFT_ENV: "accept", MAX_REPEATS.variable: "0"}
    # The runs that are compared iterate over sets of strings in the same order. The second undisturbed run uses another
    # order, to show whether results depend on it.
    environment = {"PYTHONHASHSEED": str(int(name == RUNS[1]))} | environment
    log = notes / "log"
    look = _RunProgress(notes, name, plan.steps, progress).look
    status = sessions.run(plan.command, environment, log, plan.deadline_s, f"{name} run", look)
    if (status != 0) is not (name in KILLED):
        raise HoldfastError(f"the {name} run ended with status {status}\n{tail(log)}")
    return read_last(notes, log, name)


def read_last(folder: Path, log: Path, name: str) -> list[Notes]:
    """The notes of the last process of each rank in `folder`. Raises `HoldfastError` if run `name` has none."""
    ranks = read(folder)
    if not ranks:
        raise HoldfastError(f"the {name} run never entered InMemorySnapshot\n{tail(log)}")
    return [processes[-1] for processes in ranks]


def read(folder: Path) -> list[list[Notes]]:
    """All notes in `folder`: for each rank, those of its processes in order."""
    files = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [_read(file) for file in files]


def _read(file: Path) -> list[Notes]:
    found: list[Notes] = []
    for line in file.read_text().splitlines():
        try:
            note: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # the process was killed while writing this line
        if "epoch" in note:
            found.append(Notes(epoch=note["epoch"], start=note["start"], pid=note["pid"]))
        elif "values" in note:
            found[-1].values[note["step"]] = note["values"]
            found[-1].protected = max(found[-1].protected, note["protected"] or 0)
        else:
            found[-1].computed[note["step"]] = note["computed"]
    return found
