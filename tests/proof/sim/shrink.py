"""Shortens a run that breaks the promise: leaves out everything that the failure does not need.

First the plan is made smaller, with turns drawn as before: fewer lives, faults, nodes and steps, and no bad network.
Then the turns are simplified. The plain order (`tests.proof.sim.turns`) may fail as well, perhaps with up to three
tasks delayed. Otherwise the turns of the run are recorded as deviations from the plain order, and deviations are
dropped as long as the same check fails. The result is a `Case`: a file that replays the run, and a history in words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from tests.proof.sim.checks import CHECKS
from tests.proof.sim.plan import Gap, SeedPlan
from tests.proof.sim.run import SeedReport, order_of, play
from tests.proof.sim.scheduler import Moment
from tests.proof.sim.turns import Deviations, Recorder, Replayed, Turns

RUNS = 3000
"""Limit on the number of runs made to shorten one; each takes some hundredths of a second."""

DELAYED_RUNS = 400
"""Number of runs that look for a failure with up to three tasks delayed."""

ORDERS = 4
"""Number of orders of turns in which a smaller plan is tried: it may fail in one order and not in another."""

Deviation = tuple[str, int, int]
"""One of `Deviations`: its kind, the number of its await or pick, and the index of the task that is picked."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run that breaks the promise.

    Attributes:
        check: which of `tests.proof.sim.checks` fails.
        deviations: how its turns deviate from the plain order.
    """

    check: str
    plan: SeedPlan
    deviations: Deviations

    def play(self, trace: Callable[[str], None] | None = None) -> SeedReport:
        """Run it, and record its history."""
        return play(self.plan, Replayed(self.deviations), trace=trace, telling=True)

    def write(self, path: Path) -> None:
        """Write it to a file for `read_case`."""
        path.write_bytes(encode_json(self) + b"\n")


def read_case(path: Path) -> Case:
    """Read what `Case.write` wrote. Raises `ProtocolError`, `OSError`."""
    return decode_json(Case, path.read_bytes(), f"a case, in {path}")


def shrink(plan: SeedPlan, runs: int = RUNS) -> Case:
    """Return the smallest case that is found. Call it within `tests.proof.sim.seams.installed`.

    Raises:
        ValueError: the plan breaks no promise.
    """
    return _Shrinking(plan, runs).run()


class _Shrinking:
    """Leaves things out until nothing more can be left out, or `runs` runs were made."""

    def __init__(self, plan: SeedPlan, runs: int) -> None:
        self._left = runs
        self._plan = plan
        found = play(plan).violations
        if not found:
            raise ValueError(f"seed {plan.seed} breaks no promise")
        self._check = found[0].check

    def run(self) -> Case:
        while self._simplify(self._with_other_turns):
            pass
        self._deviations = self._with_delays() or self._recorded()
        self._drop_deviations()
        while self._simplify(self._with_these_turns):
            self._drop_deviations()
        return Case(self._check, self._plan, self._deviations)

    def _simplify(self, fails: Callable[[SeedPlan], SeedPlan | None]) -> bool:
        """Take the first simpler plan that fails. Returns whether there was one."""
        for simpler in simpler_plans(self._plan):
            found = fails(simpler)
            if found is not None:
                self._plan = found
                return True
        return False

    def _with_other_turns(self, plan: SeedPlan) -> SeedPlan | None:
        each = (replace(plan, turns=self._plan.turns + number) for number in range(ORDERS))
        return next((plan for plan in each if self._fails(plan, order_of(plan))), None)

    def _with_delays(self) -> Deviations | None:
        """Look for a failure in the plain order, with none to three drawn tasks delayed. None if none is found."""
        pick = random.Random(f"delays {self._plan.seed}")
        awaits = play(self._plan, Replayed(Deviations())).awaits
        for number in range(DELAYED_RUNS):
            delays = sorted(pick.randrange(1, awaits + 1) for _ in range(min(number, 1 + number % 3)))
            found = Deviations(delays=tuple(delays))
            if self._fails(self._plan, Replayed(found)):
                return found
        return None

    def _recorded(self) -> Deviations:
        recorder = Recorder(order_of(self._plan))
        play(self._plan, recorder)
        return recorder.deviations

    def _with_these_turns(self, plan: SeedPlan) -> SeedPlan | None:
        return plan if self._fails(plan, Replayed(self._deviations)) else None

    def _drop_deviations(self) -> None:
        """Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002): leave out
        ever smaller parts."""
        items = _as_list(self._deviations)
        size = len(items)
        while size:
            at = 0
            while at < len(items):
                fewer = items[:at] + items[at + size :]
                if self._fails(self._plan, Replayed(_as_deviations(fewer))):
                    items = fewer
                else:
                    at += size
            size //= 2
        self._deviations = _as_deviations(items)

    def _fails(self, plan: SeedPlan, order: Turns) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        return any(violation.check == self._check for violation in play(plan, order).violations)


def _as_list(deviations: Deviations) -> list[Deviation]:
    return [
        *(("delay", at, 0) for at in deviations.delays),
        *(("switch", at, 0) for at in deviations.switches),
        *(("pick", number, index) for number, index in deviations.picks),
    ]


def _as_deviations(items: Sequence[Deviation]) -> Deviations:
    return Deviations(
        tuple(at for kind, at, _ in items if kind == "delay"),
        tuple(at for kind, at, _ in items if kind == "switch"),
        tuple((number, index) for kind, number, index in items if kind == "pick"),
    )


def simpler_plans(plan: SeedPlan) -> Iterator[SeedPlan]:
    """Yield plans in which less happens, roughly starting with those that leave out most."""
    lives, gaps = plan.lives, plan.gaps
    for number in reversed(range(len(lives))):
        yield replace(plan, lives=lives[:number] + lives[number + 1 :], gaps=gaps[:number] + gaps[number + 1 :])
    for number, life in enumerate(lives):
        for at in range(len(life)):
            fewer = life[:at] + life[at + 1 :]
            yield replace(plan, lives=(*lives[:number], fewer, *lives[number + 1 :]))
    for number, gap in enumerate(gaps):
        for at in range(len(gap.moves)):
            less = replace(gap, moves=gap.moves[:at] + gap.moves[at + 1 :])
            yield replace(plan, gaps=(*gaps[:number], less, *gaps[number + 1 :]))
    simple: dict[str, Any] = {
        "final": "stop",
        "quiet": min(plan.quiet, 1),
        "flip_chance": 0.0,
        "break_chance": 0.0,
        "latency_s": 0.0,
        "step_s": 0.0,
        "capacity": 64,
        "every": 1,
        "generations": 1,
        "protect_every": 1,
        "beside": False,
        "slots": 3,
        "regroup_after_s": 0.0,
        "rebuild": "decode",
        "unit_bytes": 512,
        "gaps": tuple(Gap(0.0, True, gap.moves) for gap in gaps),
        "lengths": tuple(40 for _ in plan.lengths),
    }
    for name, value in simple.items():
        if getattr(plan, name) != value:
            yield replace(plan, **{name: value})
    if plan.quiet:
        yield replace(plan, quiet=0)
    for steps in {1, plan.steps - 1} - {0, plan.steps}:
        yield replace(plan, steps=steps)
    for rank in reversed(range(len(plan.ranks))):
        ranks = plan.ranks[:rank] + plan.ranks[rank + 1 :]
        if len(set(ranks)) > 1:
            yield _of_ranks(plan, ranks, plan.lengths[:rank] + plan.lengths[rank + 1 :])
    if plan.protect != "1+1":
        yield replace(plan, protect="1+1")
    if plan.order == "uniform" and plan.chance > 0.001:
        yield replace(plan, chance=plan.chance / 4)


def _of_ranks(plan: SeedPlan, ranks: Sequence[int], lengths: tuple[int, ...]) -> SeedPlan:
    """The plan with only these ranks, on as many nodes as they need, numbered from 0."""
    numbers = {node: number for number, node in enumerate(sorted(set(ranks)))}
    return replace(plan, nodes=len(numbers), ranks=tuple(numbers[node] for node in ranks), lengths=lengths)


# ---------------------------------------------------------------------- in words


def tell(case: Case) -> list[str]:
    """Run a case, and return its history with one line for each event that matters."""
    report = case.play()
    return [_setting(case.plan), *merged(report.history), f"what must hold: {CHECKS[case.check]}"]


def _setting(plan: SeedPlan) -> str:
    ranks = "1 rank each" if len(plan.ranks) == plan.nodes else f"{len(plan.ranks)} ranks"
    every = "every step" if plan.every == 1 else f"every {plan.every} steps"
    which = {1: "each", "auto": "one at a time"}.get(plan.protect_every, f"one of {plan.protect_every}")
    return f"{plan.nodes} nodes, {ranks}, {plan.slots} slots, a snapshot {every}, {which} protected by {plan.protect}"


def merged(history: Sequence[Moment]) -> Iterator[str]:
    """Yield one line for each series of events that say the same of different subjects, with the time of the first."""
    for what, events in groupby(history, key=lambda event: event.what):
        found = list(events)
        yield f"{found[0].at_s:8.3f} s  {', '.join(dict.fromkeys(event.who for event in found))} {what}"
