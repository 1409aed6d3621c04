"""``holdfast chaos run --seed N -- COMMAND``: breaks a user's own training command in the middle of steps, copies and
recoveries, and judges the results.

The command runs undisturbed twice; values that differ between these two runs are not deterministic, and are not held
against it. Then it runs with faults drawn from the seed, and is started again whenever it fails, as by a scheduler. It
may also restart its own processes, as torchrun does. Each process notes what it computes (`state.audit`). This module
has the plan and the verdict; `holdfast.chaos.user.run` does the runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.audit import AuditReport, Notes, compare_rank, together
from holdfast.chaos.faults import CATALOGUE, STEP_POINTS
from holdfast.chaos.findings import Findings
from holdfast.smp_daemon.shared.errors import ConfigError

FIRST_STEP = 3
"""The first step that a fault may strike, so that there is something to restore."""

STEPS_AFTER = 3
"""Number of steps after the last one that a fault is drawn for. If no snapshot is taken of that step, a later one has
the same points. What differs in any new process is gone again before the last step is compared."""

MOST_NODES = 16
PAUSE_S = 1.5
"""How long a process that is stopped stands still, in seconds."""

MOST_WORK_S = 300.0
"""How long a command may seem to work after a fault without training: some wait for a lost peer at full load."""

LOOK_AT_WORK_S = 5.0
"""Pause between two looks at processor time, in seconds: each goes through all processes of the machine."""

WORK_SHARE = 0.05
"""Share of one core above which a command works. Those that wait for a lost peer, and look at times, take less."""

IN_A_RECOVERY = ("restore.before", "restore.middle")
STEP = STEP_POINTS[0]


KINDS = (
    *("kill-trainer", "term-trainer", "segv-trainer", "kill-trainers", "kill-launcher", "pause-trainer"),
    *("kill-smp", "pause-smp", "kill-other", "lose-node"),
)
"""The kinds that a seed draws from; the last two only where there are such targets. The order is part of the meaning of
each seed."""


@dataclass(frozen=True, slots=True)
class CommandFault:
    """A fault that is injected when `rank` reaches `point` of `step` or of a later step.

    A point in a recovery is never reached if there is nothing to restore. So a fault there is injected in the middle of
    the next step at the latest.
    """

    kind: str
    rank: int
    point: str
    step: int

    def matches(self, rank: int | None, point: str, step: int) -> bool:
        """Whether the fault is due. `rank`: None if it is unknown."""
        if rank not in (None, self.rank):
            return False
        return point in (self.point, STEP) if self.point in IN_A_RECOVERY else point == self.point and step >= self.step


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """Which faults strike which command.

    Attributes:
        command: the training command, as started by hand; it enters `InMemorySnapshot`.
        faults: number of faults.
        double: each fault that ends training is followed by another one during the recovery from it.
        nodes: number of nodes on which the command is started, all on this machine, each with its own SMP; with 2 or
            more, nodes are lost, too.
        other: a word in the command lines of other processes that may be killed, too; empty: none.
        ignore: regular expressions; a name that contains a match is not compared.
        deadline_s: timeout for each undisturbed run, and for each start of the run with faults.
    """

    command: tuple[str, ...]
    seed: int
    faults: int = 4
    double: bool = False
    other: str = ""
    steps: int = 16
    nodes: int = 1
    ignore: tuple[str, ...] = ()
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ConfigError(f"--nodes {self.nodes}: choose 1 to {MOST_NODES}, all of which run on this machine")
        most = self.steps - FIRST_STEP - STEPS_AFTER
        if most < 1:
            raise ConfigError(f"--steps {self.steps}: choose {FIRST_STEP + STEPS_AFTER + 1} or more")
        if not 1 <= self.faults <= most:
            raise ConfigError(
                f"{self.faults} faults in {self.steps} steps: choose 1 to {most}, or more steps with --steps"
            )


class Standstill:
    """Judges whether a command neither ends nor goes on: one that writes, or takes processor time, goes on, for
    `MOST_WORK_S` without training. Pure: the caller looks, and says when.
    """

    def __init__(self, patience_s: float, work_s: Callable[[], float]) -> None:
        """
        Args:
            patience_s: how long it may do nothing.
            work_s: looks how much processor time its processes have taken, in seconds.
        """
        self._patience_s = patience_s
        self._work_s = work_s
        self._trained, self._trained_s = -1, 0.0
        self._written, self._moved_s = -1, 0.0
        self._worked_s, self._looked_s = 0.0, 0.0

    def lasts(self, trained: int, written: int, now_s: float) -> bool:
        """Whether it has stood still for too long at `now_s` (seconds), given the lengths of its notes and its log."""
        if trained != self._trained:
            self._trained, self._trained_s = trained, now_s
        if trained + written != self._written:
            self._written, self._moved_s = trained + written, now_s
        if now_s - self._looked_s >= LOOK_AT_WORK_S:
            worked_s = self._work_s()
            if abs(worked_s - self._worked_s) > WORK_SHARE * (now_s - self._looked_s):  # less if a process has ended
                self._moved_s = now_s
            self._worked_s, self._looked_s = worked_s, now_s
        return now_s - self._moved_s > self._patience_s or now_s - self._trained_s > MOST_WORK_S


@dataclass(frozen=True, slots=True)
class CommandRun:
    """What was observed of the run with faults.

    Attributes:
        notes: for each rank, the notes of its processes.
        injected: the faults that were injected, in order.
        starts: how often the command was started.
        hang: whether it did not end in time.
        failure: how it failed in the end, in words; empty if it did not.
        leaks: processes that it left behind.
    """

    notes: Sequence[Sequence[Notes]]
    asked: tuple[CommandFault, ...] = ()
    injected: tuple[CommandFault, ...] = ()
    starts: int = 1
    hang: bool = False
    failure: str = ""
    leaks: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CommandVerdict:
    """The verdict on a command.

    Attributes:
        run: what was observed.
        epochs: how often the job was started.
        steps_again: number of finished steps that had to be done again, at each new epoch.
        report: what was compared, and what differed.
        breaches: pairs of a check and what it found; empty if all is well.
        checks: how often each check looked at something.
    """

    run: CommandRun
    epochs: int
    steps_again: tuple[int, ...]
    lost_protected_steps: int
    report: AuditReport
    breaches: tuple[tuple[str, str], ...]
    checks: Counter[str]

    @property
    def problems(self) -> tuple[str, ...]:
        """What the checks found, in words."""
        return tuple(text for _, text in self.breaches)

    def to_json(self, replay: str) -> dict[str, Any]:
        """A JSON object for ``--json``, with the keys of a campaign; `replay`: the command that runs it again."""
        run = self.run
        return {
            "faults_asked": len(run.asked),
            "faults_injected": len(run.injected),
            "scenarios": 1,
            "wrong_states": int(not self.report.exact),
            "lost_protected_steps": self.lost_protected_steps,
            "hangs": int(run.hang),
            "leaks": len(run.leaks),
            "failed": int(bool(self.breaches)),
            "seconds": round(run.seconds, 1),
            "checks": dict(self.checks),
            "replay": [replay] if self.breaches else [],
            "starts": run.starts,
            "epochs": self.epochs,
            "steps_again": self.steps_again,
            "values_compared": self.report.compared,
            "injected": [asdict(fault) for fault in run.injected],
            "problems": self.problems,
            "broken": [check for check, _ in self.breaches],
        }


def draw(
    seed: int, faults: int, ranks: int, steps: int, *, double: bool = False, other: bool = False, several: bool = False
) -> tuple[CommandFault, ...]:
    """Draw this number of faults, in ascending steps that are all different; the same for the same arguments. Pure.

    Args:
        double: see `CommandPlan`.
        other: whether there are other processes to kill. `several`: whether there are nodes to lose.
    """
    source = random.Random(f"own {seed} {faults} {ranks} {steps} {double} {other}" + " several" * several)
    there = {"kill-other": other, "lose-node": several}
    kinds = [kind for kind in KINDS if there.get(kind, True)]
    found: list[CommandFault] = []
    for step in sorted(source.sample(range(FIRST_STEP, steps - STEPS_AFTER), faults)):
        kind = source.choice(kinds)
        found.append(CommandFault(kind, source.randrange(ranks), source.choice(STEP_POINTS), step))
        if double and CATALOGUE[kind].ends_job:
            found.append(CommandFault("kill-trainer", source.randrange(ranks), source.choice(IN_A_RECOVERY), step))
    return tuple(found)


def judge(plan: CommandPlan, first: Sequence[Notes], second: Sequence[Notes], run: CommandRun) -> CommandVerdict:
    """The verdict on a run with faults, given the two undisturbed runs of each rank. Pure."""
    found = Findings()
    found.look("ends", f"it did not end within {plan.deadline_s:.0f} s" if run.hang else "")
    short = [rank for rank, processes in enumerate(run.notes) if max(processes[-1].computed, default=0) < plan.steps]
    if not run.hang:
        found.look("returns", f"it ended with {run.failure}" if run.failure else "")
        found.look("returns", f"ranks {short} did not come to step {plan.steps}" if short else "")
    report = _compared(first, second, run.notes, plan.ignore)
    if report is None:
        found.look("result", f"{len(first)} ranks trained undisturbed, and {len(run.notes)} with faults")
    elif report.compared:
        found.look("result", _first_difference(report))
    everything = [process for processes in run.notes for process in processes]
    epochs = sorted({process.epoch for process in everything})
    again, lost = [], 0
    for epoch in epochs:
        starts = {process.start for process in everything if process.epoch == epoch}
        before = [process for process in everything if process.epoch < epoch]
        found.look("together", f"ranks started at different steps: {sorted(starts)}" if len(starts) > 1 else "")
        if before:
            again.append(max(0, max(max(p.values, default=0) for p in before) - min(starts)))
            lost = max(lost, max(p.protected for p in before) - min(starts))
    if again:
        found.look("kept", f"{lost} protected steps were lost" if lost else "")
    asked, done = len(run.asked), len(run.injected)
    if asked:
        found.look("struck", f"{asked} faults were asked for, {done} were done" if done < asked else "")
    if not run.failure:
        found.look("leaks", *[f"left behind: process {leak}" for leak in run.leaks])
    nothing = AuditReport((), 0, ())
    return CommandVerdict(run, len(epochs), tuple(again), lost, report or nothing, tuple(found.breaches), found.checks)


def _compared(
    first: Sequence[Notes], second: Sequence[Notes], disturbed: Sequence[Sequence[Notes]], ignore: Sequence[str]
) -> AuditReport | None:
    """Compare every process of every rank with the undisturbed runs; None if these had another number of ranks."""
    if len(first) != len(disturbed):
        return None
    everyone = [(rank, each) for rank, processes in enumerate(disturbed) for each in processes if each.values]
    reports = [compare_rank(rank, first[rank], second[rank], each, ignore) for rank, each in everyone]
    harmless = together(reports).passing
    return together(
        [compare_rank(rank, first[rank], second[rank], each, ignore, harmless.__contains__) for rank, each in everyone]
    )


def _first_difference(report: AuditReport) -> str:
    if report.exact:
        return ""
    one = report.differences[0]
    return (
        f"{len(report.differences)} values differ, such as {one.name} of rank {one.rank} in step {one.step} "
        f"({one.kind})"
    )
