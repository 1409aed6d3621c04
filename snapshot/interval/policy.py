"""After which steps a rank takes snapshots: picks the policy, reports times of steps and snapshots to it, keeps notes.

With a number of steps the policy is `Governor`, with ``"auto"`` `Online`, and while a profile is recorded
`Alternation`. The last two need to know how long protecting takes, so a `Watch` runs beside them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.quantities import parse_time
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.interval.failures import from_profile
from holdfast.snapshot.interval.governor import Governor
from holdfast.snapshot.interval.online import Online
from holdfast.snapshot.interval.profile import Recording
from holdfast.snapshot.interval.profiles import PUBLISHED, profile
from holdfast.snapshot.interval.rates import FailureRate
from holdfast.snapshot.interval.watch import Watch
from holdfast.snapshot.step.copier import CopyJob
from holdfast.snapshot.step.ledger import ProtectEvery

MTBF_ENV = "HOLDFAST_MTBF"
DEFAULT_BUDGET = 0.01
log = get_log(__name__)


class IntervalPolicy(Protocol):
    """One rank's wish for an interval, from what it observes. All ranks use the longest one that any of them wants.

    Whether a snapshot is taken depends only on the step's number and what the ranks agreed on, so all ranks take the
    same snapshots. Not thread-safe; nothing blocks.
    """

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, as the ranks agreed."""
        ...

    @property
    def overhead(self) -> float | None:
        """Fraction of training time that snapshots take at this interval; None as long as it is unknown."""
        ...

    def takes(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        ...

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step: seconds from boundary to boundary, how long of that the loop was held up, and
        whether a snapshot was worked on at some time during it."""
        ...

    def wanted(self) -> int:
        """The interval this rank asks for."""
        ...

    def agree(self, interval: int) -> None:
        """All ranks use `interval` from now on."""
        ...


class IntervalController:
    """Runs one rank's interval policy. Called by the hook, in the training thread, except `sealed`."""

    def __init__(
        self,
        every: int | Literal["auto"],
        budget: float | None,
        slots: int,
        protect_every: ProtectEvery,
        recording: Recording | None,
        connect: Callable[[], SmpClient],
        agreement: Agreement,
        notes: Mapping[str, Any],
        system: System = MACHINE,
    ) -> None:
        """A collective call with ``"auto"``.

        Args:
            budget: largest fraction of training time that snapshots may take; None: any.
            protect_every: which snapshots are protected.
            recording: the recording of a profile, if there is one; then `every` and `budget` do not matter.
            connect: opens another connection to this node's SMP.
            notes: the notes of the restored snapshot; may be empty.

        Raises:
            ConfigError: ``HOLDFAST_MTBF`` or the notes are malformed.
        """
        self._recording = recording
        self._budget = budget
        self._protect_every = protect_every
        self._told = every if isinstance(every, int) else 1
        self._leads = agreement.rank == 0
        self._said = ""
        self._mtbf_s = mtbf_from_environment() if every == "auto" else None
        self._online: Online | None = None
        self.policy: IntervalPolicy
        # With protect_every="auto" some snapshot is being encoded at almost any time, so all cost alike.
        together = protect_every if isinstance(protect_every, int) else 1
        if recording is not None:
            self.policy = recording.policy
        elif every == "auto":
            rates = self._rates_of(1)
            lost = 1 - rates["process"] / sum(rates.values())
            self.policy = self._online = Online(
                budget, FailureRate(sum(rates.values())), slots, protect_every=together, lost=lost
            )
            if notes:
                self._online.resume(notes)
            self._online.agree(-agreement.minimum([-self._online.interval])()[0])
        else:
            self.policy = Governor(budget, every, protect_every=together)
        self._watch = Watch(connect, system) if self._online is not None or recording is not None else None
        self._boundary_s: float | None = None
        self._stalled_s = 0.0
        self._say()

    @property
    def why(self) -> str:
        """With ``"auto"``, the reason for the interval, in words."""
        return self._online.why if self._online else ""

    def placed(self, layout: Layout) -> None:
        """The job has this layout now. With ``"auto"``, its number of nodes sets the failure rate."""
        if self._online is not None:
            self._online.rate.prior = sum(self._rates_of(len(layout.nodes)).values())

    def observe(self, now_s: float, stalled_s: float, overlapped: bool) -> None:
        """A step is done.

        Args:
            now_s: the time of the boundary after it.
            stalled_s: how long the loop was held up in total since the hook was entered.
            overlapped: a snapshot was worked on at some time during the step.
        """
        for timing in self._watch.take() if self._watch else ():
            if self._recording is not None:
                self._recording.timings.append(timing)
            elif self._online is not None:
                self._online.timed(timing)
        if self._boundary_s is not None:
            self.policy.observe(now_s - self._boundary_s, stalled_s - self._stalled_s, overlapped)
        self._boundary_s = now_s
        self._stalled_s = stalled_s

    def agree(self, interval: int) -> str | None:
        """All ranks use `interval` from now on. Returns, on rank 0, what to tell operators of a change; else None."""
        before = self.policy.interval
        self.policy.agree(interval)
        if interval == before or not self._leads:
            return None
        if self._online is not None:
            self._say()
        # Warn only if the interval is at least twice, or at most half, the one last warned of (at first `every`).
        level = logging.WARNING if not 1 / 2 < interval / self._told < 2 else logging.INFO
        if level == logging.WARNING:
            self._told = interval
        log.log(level, "a snapshot every %d steps from now on, not %d: %s", interval, before, self.reason)
        return f"a snapshot every {interval} steps: {self.reason}"

    def plan_in_words(self) -> str:
        """How often snapshots are taken, as shown and logged when a job begins."""
        every = "every step" if self.policy.interval == 1 else f"every {self.policy.interval} steps"
        if self._protect_every != 1:
            some = "one at a time" if self._protect_every == "auto" else f"one of {self._protect_every}"
            every += f", of which {some} is protected"
        limit = f"; less often where they take more than {self._budget:.1%} of the time" if self._budget else ""
        text = f"a snapshot {every}{limit}"
        if text != self._said:
            log.warning("%s", text)
            self._said = text
        return text

    @property
    def reason(self) -> str:
        """The reason for the interval, in words."""
        if self._online is not None:
            return self._online.why
        if self._budget is None:
            return "as asked for"
        if self.policy.overhead is None:
            return "to measure steps without a snapshot"
        return (
            f"that takes {self.policy.overhead:.1%} of the training time, and overhead_budget allows {self._budget:.1%}"
        )

    def sealed(self, job: CopyJob) -> None:
        """A snapshot is sealed, or was given up. May be called from any thread; returns at once."""
        if self._watch is not None:
            self._watch.sealed(job)

    def notes(self) -> dict[str, Any] | None:
        """What the next start of the job must know; stored in every snapshot."""
        return self._online.notes() if self._online else None

    def close(self, deadline_s: float) -> None:
        """End. For a profile, sealed snapshots are timed first. Raises `DeadlineExceeded` if that takes too long."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(deadline_s, wait=self._recording is not None)
            if self._recording is not None:
                self._recording.timings += watch.take()

    def _say(self) -> None:
        """Show operators the interval and the reason for it."""
        if self._online is not None and self._watch is not None and self._leads:
            self._watch.say(f"a snapshot every {self._online.interval} steps: {self._online.why}")

    def _rates_of(self, nodes: int) -> dict[str, float]:
        """Failures per second, by kind, of `nodes` nodes; only failures that are restored from memory."""
        rates = from_profile(profile(PUBLISHED), self._mtbf_s).job(nodes)
        return {kind: rate for kind, rate in rates.items() if kind != "beyond"}


def mtbf_from_environment() -> float | None:
    """``HOLDFAST_MTBF``, the MTBF of one node, in seconds; None if it is not set. Raises `ConfigError`."""
    text = os.environ.get(MTBF_ENV)
    if not text:
        return None
    seconds = parse_time(text, MTBF_ENV)
    if seconds <= 0:
        raise ConfigError(f"{MTBF_ENV}={text!r}: give more than 0")
    return seconds


def budget_from_environment() -> float:
    """``HOLDFAST_OVERHEAD_BUDGET``, by default 1 %; 0 means no budget. Raises `ConfigError`."""
    text = os.environ.get("HOLDFAST_OVERHEAD_BUDGET", str(DEFAULT_BUDGET))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"HOLDFAST_OVERHEAD_BUDGET={text!r}: a fraction of training time, such as 0.01") from None
