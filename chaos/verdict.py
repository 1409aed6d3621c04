"""What a scenario came to: pure functions from what was seen to a verdict."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.chaos.cluster import History
from holdfast.chaos.drill import compare, steps_done_again
from holdfast.chaos.scenario import Scenario
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """One scenario.

    Attributes:
        problems: empty if everything is as it must be.
        asked, injected: faults, counting each target.
        restarts: how often the job was started again.
        steps_again: finished steps that had to be done again, at each restart.
        lost_protected_steps: steps that were protected, and older ones were restored instead.
        wrong: a loss or a final state differs from the undisturbed run's.
        hang: it did not end in time.
        leaks: what was left behind.
        history: what happened.
    """

    scenario: Scenario
    problems: tuple[str, ...]
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

    @property
    def held(self) -> bool:
        """Whether all is well."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For reports; without the history."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("scenario", "history")}
        return {"scenario": self.scenario.name, **data, "faults": [asdict(fault) for fault in self.scenario.faults]}


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
    problems, wrong = [], False
    if hang:
        problems.append(f"it did not end: {str(failure).splitlines()[0]}")
    elif scenario.beyond_parity:
        if failure is None:
            problems.append("it ended as if nothing had happened, although more was lost than parity makes up for")
        elif "Unrecoverable" not in str(failure):
            problems.append(f"it failed, but not with Unrecoverable: {_last_line(failure)}")
    elif failure is not None:
        problems.append(f"it failed: {_last_line(failure)}")
    else:
        difference = compare(undisturbed, disturbed)
        wrong = bool(difference)
        problems += [difference] * wrong
    if started := torn(disturbed):
        problems.append(started)
        wrong = True
    again = tuple(steps_done_again(disturbed, n) for n in range(1, len(disturbed.restarts) + 1))
    tiers = [event.get("tier") for event in disturbed.of("started")]
    if scenario.from_storage and failure is None and len(disturbed.restarts) == 1 and "persisted" not in tiers:
        problems.append("it did not come back from what was persisted")
    if max(again, default=0) > scenario.again and not scenario.from_storage:
        problems.append(f"{max(again)} finished steps had to be done again; {scenario.again} at most may")
    flipped = any(fault.kind.startswith("flip-") for fault in scenario.faults)
    if not flipped and any(event["how"] == "repaired" for event in disturbed.of("started")):
        problems.append("a shard was damaged although nothing had flipped a bit")
    if lost and not scenario.from_storage:
        problems.append(f"{lost} protected steps were lost")
    if injected != scenario.asked:
        problems.append(f"{scenario.asked} faults were asked for, {injected} were done")
    if failure is None:
        idle = [event["fault"] for event in disturbed.of("impaired") if not event["packets"]]
        problems += [f"{kind} met no packet" for kind in idle]
        problems += [f"no trainer saw its clock {ahead_s} s ahead" for ahead_s in unseen_jumps(scenario, disturbed)]
    problems += [f"an SMP outlived {by} and had to be killed" for by in outlived(disturbed)]
    problems += [f"left behind: {leak}" for leak in leaks]
    problems += [f"an error that an SMP did not expect: {text}" for text in disturbed.tracebacks]
    return ScenarioVerdict(
        scenario,
        tuple(problems),
        scenario.asked,
        injected,
        len(disturbed.restarts),
        again,
        lost,
        wrong,
        hang,
        leaks,
        seconds,
        disturbed,
        replay if problems else "",
    )


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
    wanted = [fault.amount for fault in scenario.faults if fault.kind == "jump-clock"]
    return [amount for amount in wanted if not any(abs(each - seen[0] - amount) < abs(amount) / 2 for each in seen)]


def torn(history: History) -> str:
    """Ranks of one start that restored different steps, or an empty text."""
    for generation in {event["generation"] for event in history.of("started")}:
        steps = {event["step"] for event in history.of("started", generation=generation)}
        if len(steps) > 1:
            return f"ranks started at different steps: {sorted(steps)}"
    return ""


def _last_line(failure: HoldfastError) -> str:
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1])[:300]
