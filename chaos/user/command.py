"""``holdfast chaos run --seed N -- COMMAND``: a user's own training command, broken in the middle of steps, copies and
recoveries, and what comes of it.

The command runs undisturbed twice (what differs between these two no resume could make the same), and then with
faults drawn from the seed, started again whenever it ends badly, as a scheduler would. Whatever it restarts by itself,
as torchrun does, it may. Every process of it notes what it computes (`state.audit`). Here is what is to be done, and
the verdict; `holdfast.chaos.user.run` does it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.audit import AuditReport, Notes, compare_rank, together
from holdfast.chaos.faults import CATALOGUE
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
class CommandVerdict:
    """What came of it.

    Attributes:
        injected: what was done, in order.
        starts: how often the command was started; `epochs`: how often the job was.
        steps_again: finished steps that had to be done again, at each new epoch.
        report: what was compared, and what differed.
        problems: empty if everything is as it must be.
    """

    asked: tuple[CommandFault, ...]
    injected: tuple[CommandFault, ...]
    starts: int
    epochs: int
    steps_again: tuple[int, ...]
    lost_protected_steps: int
    hang: bool
    leaks: tuple[str, ...]
    seconds: float
    report: AuditReport
    problems: tuple[str, ...]

    def to_json(self, replay: str) -> dict[str, Any]:
        """For ``--json``, with the keys of a campaign; `replay`: how to run it again."""
        return {
            "faults_asked": len(self.asked),
            "faults_injected": len(self.injected),
            "scenarios": 1,
            "wrong_states": int(not self.report.exact),
            "lost_protected_steps": self.lost_protected_steps,
            "hangs": int(self.hang),
            "leaks": len(self.leaks),
            "failed": int(bool(self.problems)),
            "seconds": round(self.seconds, 1),
            "replay": [replay] if self.problems else [],
            "starts": self.starts,
            "epochs": self.epochs,
            "steps_again": self.steps_again,
            "values_compared": self.report.compared,
            "injected": [asdict(fault) for fault in self.injected],
            "problems": self.problems,
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


def judge(
    first: Sequence[Notes],
    second: Sequence[Notes],
    disturbed: Sequence[Sequence[Notes]],
    ignore: Sequence[str],
    last: int,
) -> tuple[AuditReport, tuple[int, ...], int, list[str]]:
    """Compare all processes of all ranks: differences, steps done again, protected steps lost, problems. Pure.

    Args:
        first, second: of each rank, undisturbed.
        disturbed: of each rank, its processes.
        last: the step that every rank must have computed.
    """
    problems = []
    if len(first) != len(disturbed):
        return (
            AuditReport((), 0, ()),
            (),
            0,
            [f"{len(first)} ranks trained undisturbed, and {len(disturbed)} with faults"],
        )
    reports = [
        compare_rank(rank, first[rank], second[rank], process, ignore)
        for rank, processes in enumerate(disturbed)
        for process in processes
        if process.values
    ]
    report = together(reports)
    if not report.exact:
        one = report.differences[0]
        problems.append(
            f"{len(report.differences)} values differ, as {one.name} of rank {one.rank} in step {one.step} ({one.kind})"
        )
    everything = [process for processes in disturbed for process in processes]
    again, lost = [], 0
    for epoch in sorted({process.epoch for process in everything}):
        starts = {process.start for process in everything if process.epoch == epoch}
        before = [process for process in everything if process.epoch < epoch]
        if len(starts) > 1:
            problems.append(f"ranks started at different steps: {sorted(starts)}")
        if before:
            again.append(max(0, max(max(p.values, default=0) for p in before) - min(starts)))
            lost = max(lost, max(p.protected for p in before) - min(starts))
    if lost:
        problems.append(f"{lost} protected steps were lost")
    short = [rank for rank, processes in enumerate(disturbed) if max(processes[-1].computed, default=0) < last]
    if short:
        problems.append(f"ranks {short} did not come to step {last}")
    return report, tuple(again), lost, problems
