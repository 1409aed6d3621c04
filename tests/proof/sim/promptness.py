"""Judges on nodes of real size how long things take, and that nothing happens there without a reason.

Each limit is one that docs/guarantee.md or docs/size.md names, or follows from bytes and rates
(`tests.proof.sim.sized`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.spawn import LOOK_EVERY_S
from holdfast.snapshot.rank import ATTACH_DEADLINE_S
from tests.proof.sim.plan import SeedPlan
from tests.proof.sim.scheduler import Scheduler
from tests.proof.sim.sized import back_s, copy_s, is_slow

SERVES_S = 2.0
"""How long after it has begun an SMP serves at the latest, in seconds, whatever its arena holds."""

CONNECTED = 1.5
"""How many times as long as one rank alone needs all ranks of a node may take to have an SMP."""

ANSWER_S = 1.0
"""How much later than its deadline a call may end: what it does besides waiting."""

STEP_S = 1.0
"""What a training thread may wait in a step besides: for messages, and other ranks that do the same."""

TOLD = ("a snapshot ", "snapshots ", "memory for ", "a group of ", "restored ")
"""How the texts begin that are warnings only so that everybody sees them: what was chosen, and what came back."""

ADVICE = (
    "until encoding keeps up again",
    "without HOLDFAST_DOMAINS",
    "keeps what is in memory for 30 days",
    "one that is being started",
)
"""Parts of texts that say rightly that snapshots are taken faster than they can be encoded, what to set, what the job's
protection is worth, or what a start waits for."""

STARVED = "no snapshot is taken: "
"""How a text begins that is right on machines that are slower than holdfast expects of any."""

HUNG_UP = ("connection ended: ", "a connection to ")
"""How texts begin that are right once a job has been started again: what its predecessor was still sending ends, on one
node before the other."""

TROUBLE = ("units_requested_again", "reconnects", "units_damaged", "persist_failures")
"""Counters of an SMP that do not move while nothing is wrong."""


class Promptness(logging.Handler):
    """The checks of one run. It also is the handler of its log.

    Attributes:
        calm: whether bytes cost something, and nothing has struck, been lost or been stopped so far.
        starts: how often the job was started.
        holds_still: whether a node is drained, so that training threads hold still while its bytes move.
    """

    def __init__(self, plan: SeedPlan, scheduler: Scheduler, checks: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self.calm = plan.costs is not None
        self.starts = 0
        self.holds_still = False
        self._plan = plan
        self._scheduler = scheduler
        self._checks = checks

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what holdfast logs, within the block, if bytes cost something."""
        if self._plan.costs is None:
            yield
            return
        log, before = logging.getLogger("holdfast"), logging.root.manager.disable
        logging.disable(min(before, logging.INFO))
        log.addHandler(self)
        propagates, log.propagate = log.propagate, before < logging.CRITICAL
        try:
            yield
        finally:
            log.propagate = propagates
            log.removeHandler(self)
            logging.disable(before)

    def emit(self, record: logging.LogRecord) -> None:
        """holdfast warns of something."""
        text = record.getMessage()
        expected = (
            text.startswith(TOLD)
            or any(advice in text for advice in ADVICE)
            or (self.starts > 1 and text.startswith(HUNG_UP))
            or (is_slow(self._plan) and text.startswith(STARVED))
        )
        if self.calm and not self._scheduler.unwinding and not expected:
            self._violate("calm", f"nothing has struck, and {record.levelname.lower()}: {record.getMessage()}")

    def launched(self, node: str, before: bool) -> None:
        """An SMP is started. `before`: whether the node had one."""
        self._checks["calm"] += self.calm
        if self.calm and before:
            self._violate("calm", f"nothing has struck, and the SMP of {node} is started again")

    def rested(self, node: str, smp: Smp) -> None:
        """A life has ended."""
        if self.calm:
            self._checks["calm"] += 1
            counts = smp.store.counters.read()
            if moved := {name: counts[name] for name in TROUBLE if counts[name]}:
                self._violate("calm", f"nothing has struck, and {node} counts {moved}")

    def served(self, node: str, began_s: float) -> None:
        """An SMP serves that had begun at that time."""
        self._within("serves", began_s, SERVES_S, f"the SMP of {node} serves")

    def connected(self, who: str, began_s: float) -> None:
        """A rank has an SMP, for which it has asked from that time on."""
        if self.calm:
            assert self._plan.costs is not None
            mates = len(self._plan.ranks) // self._plan.nodes
            limit_s = CONNECTED * self._plan.costs.starting_s(1 + mates) + SERVES_S + 2 * LOOK_EVERY_S
            self._within("connected", began_s, limit_s, f"{who} has an SMP")

    def stepped(self, who: str, began_s: float) -> None:
        """A training thread has returned from the code that is called in every step."""
        limit_s = CONNECTED * copy_s(self._plan) + ATTACH_DEADLINE_S + STEP_S
        if self.holds_still:
            limit_s = back_s(self._plan)
        self._within("waits", began_s, limit_s, f"the step of {who} goes on")

    def answered(self, who: str, what: str, began_s: float, deadline_s: float) -> None:
        """A call has ended."""
        self._within("answered", began_s, deadline_s + ANSWER_S, f"a call of {who}, {what}, ends")

    def protected(self, began_s: float) -> None:
        """Everything is protected again after a start."""
        self._within("back", began_s, back_s(self._plan), "protection is back")

    def _within(self, check: str, began_s: float, limit_s: float, what: str) -> None:
        if self._plan.costs is None:
            return
        self._checks[check] += 1
        took_s = self._scheduler.now - began_s
        process = self._scheduler.current.process
        if took_s > limit_s and not process.slow_s and not process.stood:
            self._violate(check, f"{what} after {took_s:.1f} s, and {limit_s:.1f} s are allowed")

    @property
    def _violate(self) -> Callable[[str, str], None]:
        return self._scheduler.violate
