"""What a scenario came to: pure functions from what was seen to a verdict."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.chaos.cluster import History
from holdfast.chaos.differences import compare, longest_interval, most_held_up, steps_done_again
from holdfast.chaos.scenario import Scenario
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError

PROMISES = {
    "ends": "the job ends in time",
    "refuses": "if more is lost than parity makes up for, the job says so and does not start anew",
    "returns": "else it comes back from every fault, and ends well",
    "result": "every loss, every gradient and the final state are those of the undisturbed job, bit for bit",
    "together": "all ranks of a start go on from the same step",
    "kept": "no step that was protected is lost",
    "again": "no more finished steps are done again than may be",
    "persisted": "if memory is lost, what was persisted comes back",
    "whole": "no shard is damaged unless a bit was flipped",
    "smps": "an SMP ends by the signal that it is sent",
    "leaks": "nothing is left behind",
    "expected": "no SMP meets an error that it does not expect",
}
"""What is checked of the product, by name. A build that is broken on purpose names what must notice it."""

TRIALS = {
    "struck": "every fault that was asked for was done",
    "met": "what impairs a network met packets",
    "seen": "a clock that was set was read",
}
"""What is checked of the trial itself: a fault that does nothing shows nothing."""

CHECKS = PROMISES | TRIALS


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """One scenario.

    Attributes:
        breaches: which of `CHECKS` found what; empty if everything is as it must be.
        asked, injected: faults, counting each target.
        restarts: how often the job was started again.
        steps_again: finished steps that had to be done again, at each restart.
        lost_protected_steps: steps that were protected, and older ones were restored instead.
        wrong: a loss or a final state differs from the undisturbed run's.
        hang: it did not end in time.
        leaks: what was left behind.
        history: what happened.
        interval: the longest that there was from one snapshot to the next, in steps.
        held_up: the part of the last start's time for which the hook held up the loop, on the rank where it was most;
            None: it did not end.
        checks: how often each of `CHECKS` looked at something.
        failure: what a job that failed said, and its logs, if any check found something; else empty.
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
        """What was found, in words."""
        return tuple(text for _, text in self.breaches)

    @property
    def held(self) -> bool:
        """Whether all is well."""
        return not self.breaches

    def to_json(self) -> dict[str, Any]:
        """For reports; without the history."""
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
        text = f"{max(again)} finished steps had to be done again; {scenario.again} at most may"
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
    found.look_at_each("smps", [f"an SMP outlived {by} and had to be killed" for by in outliving])
    found.look_at_each("leaks", [f"left behind: {leak}" for leak in leaks])
    bugs = [f"an error that an SMP did not expect: {text}" for text in disturbed.tracebacks]
    found.look_at_each("expected", bugs)
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


class Findings:
    """What checks have looked at, and found."""

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.breaches: list[tuple[str, str]] = []

    def look(self, check: str, breach: str) -> None:
        """One of `CHECKS` has looked at something; `breach`: what it found; empty: all is well."""
        self.checks[check] += 1
        if breach:
            self.breaches.append((check, breach))

    def look_at_each(self, check: str, breaches: Sequence[str]) -> None:
        """It has looked at whatever there is."""
        self.checks[check] += 1
        self.breaches += [(check, breach) for breach in breaches]


def _not_refused(failure: HoldfastError | None) -> str:
    if failure is None:
        return "it ended as if nothing had happened, although more was lost than parity makes up for"
    return "" if "Unrecoverable" in str(failure) else f"it failed, but not with Unrecoverable: {_first_line(failure)}"


def lost_protected(history: History) -> int:
    """How many protected steps were not restored: the promise is that there are none.

    What counts as protected is what any trainer was told before a restart.
    """
    lost = 0
    for started in history.of("started"):
        if started["generation"] == 0:
            continue
        known = [e["protected"] or 0 for e in history.of("step") if e["generation"] < started["generation"]]
        lost = max(lost, max(known, default=0) - started["step"])
    return lost


def outlived(history: History) -> list[str]:
    """Signals that SMPs were sent and did not end by, so that SIGKILL had to follow."""
    return [e["by"] for e in history.of("smp-ended", status=-signal.SIGKILL) if e["by"] != signal.SIGKILL.name]


def unseen_jumps(scenario: Scenario, history: History) -> list[int]:
    """By how much clocks were to jump without any trainer reporting such a time.

    Trainers report by both clocks; before the first fault, the wall clock is this machine's.
    """
    seen = [event["wall"] - event["at"] for event in history.events if "wall" in event]
    return [
        amount for amount in jumps(scenario) if not any(abs(each - seen[0] - amount) < abs(amount) / 2 for each in seen)
    ]


def jumps(scenario: Scenario) -> list[int]:
    """By how much its faults set clocks ahead, in seconds."""
    return [fault.amount for fault in scenario.faults if fault.kind == "jump-clock"]


def torn(history: History) -> str:
    """Ranks of one start that restored different steps, or an empty text."""
    for generation in {event["generation"] for event in history.of("started")}:
        steps = {event["step"] for event in history.of("started", generation=generation)}
        if len(steps) > 1:
            return f"ranks started at different steps: {sorted(steps)}"
    return ""


def _first_line(failure: HoldfastError) -> str:
    return next(iter(str(failure).splitlines()), type(failure).__name__)
