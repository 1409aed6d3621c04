"""The verdict on a scenario: pure functions of what was observed."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.chaos.cluster import History
from holdfast.chaos.differences import compare, longest_interval, most_held_up, steps_done_again
from holdfast.chaos.findings import Findings
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from tests.proof.chaos.scenario import Scenario


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """The verdict on one scenario.

    Attributes:
        breaches: pairs of one of `CHECKS` and what it found; empty if all is well.
        asked, injected: numbers of faults, counting each target.
        restarts: how often the job was restarted.
        steps_again: number of finished steps that had to be done again, at each restart.
        lost_protected_steps: see `lost_protected`.
        wrong: whether a loss or final state differs from the undisturbed run, or ranks started at different steps.
        hang: whether the run did not end in time.
        leaks: what was left behind.
        history: everything that happened in the run with faults.
        replay: the command that runs the scenario again, if a check found something.
        skipped: why the scenario cannot run on this machine; empty if it ran.
        interval: see `chaos.differences.longest_interval`.
        held_up: see `chaos.differences.most_held_up`.
        checks: how often each of `CHECKS` looked at something.
        failure: the error of a job that failed, with its logs, if a check found something; else empty.
    """

    scenario: Scenario
    breaches: tuple[tuple[str, str], ...]
    asked: int
    injected: int
    restarts: int
    steps_again: tuple[int, ...]
    lost_protected_steps: int
    wrong: bool
    hang: bool
    leaks: tuple[str, ...]
    seconds: float
    history: History = field(compare=False, repr=False)
    replay: str = ""
    skipped: str = ""
    interval: int = 0
    held_up: float | None = None
    checks: Counter[str] = field(default_factory=Counter)
    failure: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """What the checks found, in words."""
        return tuple(text for _, text in self.breaches)

    @property
    def held(self) -> bool:
        """Whether no check found anything."""
        return not self.breaches

    def to_json(self) -> dict[str, Any]:
        """A JSON object for reports, without the history."""
        left_out = ("scenario", "history", "breaches")
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        told = {"problems": self.problems, "broken": [check for check, _ in self.breaches]}
        return {
            "scenario": self.scenario.name,
            **data,
            **told,
            "faults": [asdict(fault) for fault in self.scenario.faults],
        }


def judge(
    scenario: Scenario,
    undisturbed: History,
    disturbed: History,
    failure: HoldfastError | None,
    leaks: tuple[str, ...],
    seconds: float,
    replay: str,
) -> ScenarioVerdict:
    """The verdict on a run that ended, or failed with `failure`."""
    injected = sum(max(1, len(event["targets"])) for event in disturbed.of("fault"))
    lost = lost_protected(disturbed)
    hang = isinstance(failure, DeadlineExceeded)
    found = Findings()
    found.look("ends", f"it did not end: {str(failure).splitlines()[0]}" if hang else "")
    if scenario.beyond_parity and not hang:
        found.look("refuses", _not_refused(failure))
    elif not hang:
        found.look("returns", "" if failure is None else f"it failed: {_first_line(failure)}")
    difference = compare(undisturbed, disturbed) if failure is None and not scenario.beyond_parity else ""
    if failure is None and not scenario.beyond_parity:
        found.look("result", difference)
    started = torn(disturbed)
    if disturbed.of("started"):
        found.look("together", started)
    again = tuple(steps_done_again(disturbed, n) for n in range(1, len(disturbed.restarts) + 1))
    tiers = [event.get("tier") for event in disturbed.of("started")]
    if scenario.from_storage and failure is None and len(disturbed.restarts) == 1:
        found.look("persisted", "" if "persisted" in tiers else "it did not come back from what was persisted")
    if again and not scenario.from_storage:
        too_many = max(again) > scenario.again
        text = f"{max(again)} finished steps had to be done again; the limit is {scenario.again}"
        if not scenario.defaults:
            found.look("again", text if too_many else "")
        found.look("kept", f"{lost} protected steps were lost" if lost else "")
    if again and not any(fault.kind.startswith("flip-") for fault in scenario.faults):
        damaged = any(event["how"] == "repaired" for event in disturbed.of("started"))
        found.look("whole", "a shard was damaged although nothing had flipped a bit" if damaged else "")
    if scenario.asked or injected:
        text = f"{scenario.asked} faults were asked for, {injected} were done"
        found.look("struck", text if injected != scenario.asked else "")
    if failure is None:
        for event in disturbed.of("impaired"):
            found.look("met", "" if event["packets"] else f"{event['fault']} met no packet")
        unseen = unseen_jumps(scenario, disturbed)
        for jump in jumps(scenario):
            found.look("seen", f"no trainer saw its clock {jump} s ahead" if jump in unseen else "")
    outliving = outlived(disturbed)
    found.look("smps", *[f"an SMP outlived {by} and had to be killed" for by in outliving])
    found.look("leaks", *[f"left behind: {leak}" for leak in leaks])
    bugs = [f"an error that an SMP did not expect: {text}" for text in disturbed.tracebacks]
    found.look("expected", *bugs)
    return ScenarioVerdict(
        scenario,
        tuple(found.breaches),
        scenario.asked,
        injected,
        len(disturbed.restarts),
        again,
        lost,
        bool(difference or started),
        hang,
        leaks,
        seconds,
        disturbed,
        replay if found.breaches else "",
        interval=longest_interval(disturbed),
        held_up=most_held_up(disturbed),
        checks=found.checks,
        failure=str(failure) if failure is not None and found.breaches else "",
    )


def _not_refused(failure: HoldfastError | None) -> str:
    if failure is None:
        return "it ended as if nothing had happened, although more was lost than parity makes up for"
    return "" if "Unrecoverable" in str(failure) else f"it failed, but not with Unrecoverable: {_first_line(failure)}"


def lost_protected(history: History) -> int:
    """The largest number of protected steps that a restart did not restore; the promise is 0.

    A step counts as protected if any trainer was told so before the restart.
    """
    lost = 0
    for started in history.of("started"):
        if started["generation"] == 0:
            continue
        known = [e["protected"] or 0 for e in history.of("step") if e["generation"] < started["generation"]]
        lost = max(lost, max(known, default=0) - started["step"])
    return lost


def outlived(history: History) -> list[str]:
    """The signals that SMPs survived, so that SIGKILL had to follow."""
    return [e["by"] for e in history.of("smp-ended", status=-signal.SIGKILL) if e["by"] != signal.SIGKILL.name]


def unseen_jumps(scenario: Scenario, history: History) -> list[int]:
    """Those of `jumps` that do not show in any time that a trainer reported.

    Trainers report times of both clocks; before the first fault, the wall clock is this machine's.
    """
    seen = [event["wall"] - event["at"] for event in history.events if "wall" in event]
    return [
        amount for amount in jumps(scenario) if not any(abs(each - seen[0] - amount) < abs(amount) / 2 for each in seen)
    ]


def jumps(scenario: Scenario) -> list[int]:
    """How far ahead the scenario's faults set clocks, in seconds."""
    return [fault.amount for fault in scenario.faults if fault.kind == "jump-clock"]


def torn(history: History) -> str:
    """The steps of a start whose ranks restored different steps, in words; empty if there is no such start."""
    for generation in {event["generation"] for event in history.of("started")}:
        steps = {event["step"] for event in history.of("started", generation=generation)}
        if len(steps) > 1:
            return f"ranks started at different steps: {sorted(steps)}"
    return ""


def _first_line(failure: HoldfastError) -> str:
    return next(iter(str(failure).splitlines()), type(failure).__name__)
