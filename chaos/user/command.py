"""``holdfast chaos run --seed N -- COMMAND``: a user's own training command, broken in the middle of steps, copies and
recoveries, and what comes of it.

The command runs undisturbed twice (what differs between these two no resume could make the same), and then with
faults drawn from the seed, started again whenever it ends badly, as a scheduler would. Whatever it restarts by itself,
as torchrun does, it may. Every process of it notes what it computes (`state.audit`). Here is what is to be done, and
the verdict; `holdfast.chaos.user.run` does it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.audit import AuditReport, Notes, compare_rank, together
from holdfast.chaos.faults import CATALOGUE
from holdfast.chaos.verdict import Findings
from holdfast.smp_daemon.shared.errors import ConfigError

FIRST_STEP = 3
"""No fault comes before it, so that there is something to restore."""

MOST_NODES = 16
PAUSE_S = 1.5
"""How long those that are stopped stand still."""

IN_A_STEP = ("train.step", "copy.before", "copy.middle", "copy.done")
IN_A_RECOVERY = ("restore.before", "restore.middle")
STEP = IN_A_STEP[0]


KINDS = (
    *("kill-trainer", "term-trainer", "segv-trainer", "kill-trainers", "kill-launcher", "pause-trainer"),
    *("kill-smp", "pause-smp", "kill-other", "lose-node"),
)
"""What a seed draws from the catalogue; the last two only where there are such. Their order is part of what each seed
stands for."""


@dataclass(frozen=True, slots=True)
class CommandFault:
    """What is done when `rank` comes to `point` of `step` or a later one.

    One in a recovery, whose `point` is never reached if there is nothing to restore, is done at the latest in the
    middle of the next step.
    """

    kind: str
    rank: int
    point: str
    step: int

    def matches(self, rank: int | None, point: str, step: int) -> bool:
        """Whether it is due. `rank`: None if it cannot be told."""
        if rank not in (None, self.rank):
            return False
        return point in (self.point, STEP) if self.point in IN_A_RECOVERY else point == self.point and step >= self.step


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """What to do to which command.

    Attributes:
        command: as it would be started by hand; it enters `InMemorySnapshot`.
        double: each fault that ends training is followed by one during the recovery from it.
        nodes: on so many the command is started, each with an SMP of its own, all on this machine; from 2 on they
            are lost, too.
        other: a word in the command line of other processes that may be killed, too; none if empty.
        ignore: regular expressions; names in which one is found are not compared.
        deadline_s: for each undisturbed run, and for that with faults as often as it is started.
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
        most = self.steps - FIRST_STEP
        if not 1 <= self.faults <= most:
            raise ConfigError(
                f"{self.faults} faults in {self.steps} steps: choose 1 to {most}, or more steps with --steps"
            )


@dataclass(frozen=True, slots=True)
class CommandRun:
    """What was seen of the run with faults.

    Attributes:
        notes: of each rank, its processes.
        injected: what was done, in order.
        starts: how often the command was started.
        hang: it did not end in time.
        failure: how it ended in the end, in words, if badly.
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
    """What came of it.

    Attributes:
        run: what was seen.
        epochs: how often the job was started.
        steps_again: finished steps that had to be done again, at each new epoch.
        report: what was compared, and what differed.
        breaches: which of `verdict.CHECKS` found what; empty if everything is as it must be.
        checks: how often each of them looked at something.
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
        """What was found, in words."""
        return tuple(text for _, text in self.breaches)

    def to_json(self, replay: str) -> dict[str, Any]:
        """For ``--json``, with the keys of a campaign; `replay`: how to run it again."""
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
    """So many faults, one after another in steps that do not come back; the same for the same arguments. Pure.

    Args:
        double: see `CommandPlan`.
        other: whether there are other processes to kill. `several`: whether there are nodes to lose.
    """
    source = random.Random(f"own {seed} {faults} {ranks} {steps} {double} {other}" + " several" * several)
    there = {"kill-other": other, "lose-node": several}
    kinds = [kind for kind in KINDS if there.get(kind, True)]
    found: list[CommandFault] = []
    for step in sorted(source.sample(range(FIRST_STEP, steps), faults)):
        kind = source.choice(kinds)
        found.append(CommandFault(kind, source.randrange(ranks), source.choice(IN_A_STEP), step))
        if double and CATALOGUE[kind].ends_job:
            found.append(CommandFault("kill-trainer", source.randrange(ranks), source.choice(IN_A_RECOVERY), step))
    return tuple(found)


def judge(plan: CommandPlan, first: Sequence[Notes], second: Sequence[Notes], run: CommandRun) -> CommandVerdict:
    """The verdict on what was seen, beside the two undisturbed runs of each rank. Pure."""
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
        found.look_at_each("leaks", [f"left behind: process {leak}" for leak in run.leaks])
    nothing = AuditReport((), 0, ())
    return CommandVerdict(run, len(epochs), tuple(again), lost, report or nothing, tuple(found.breaches), found.checks)


def _compared(
    first: Sequence[Notes], second: Sequence[Notes], disturbed: Sequence[Sequence[Notes]], ignore: Sequence[str]
) -> AuditReport | None:
    """Every process of every rank, with what the undisturbed ones computed; None if there are not as many ranks."""
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
    return f"{len(report.differences)} values differ, as {one.name} of rank {one.rank} in step {one.step} ({one.kind})"
