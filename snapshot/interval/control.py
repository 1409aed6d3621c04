"""After which steps a rank takes snapshots: gives `IntervalRule` the times of steps, and tells of its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from holdfast.smp_daemon.shared.failures import NODE_LOST, NODE_MTBF_S
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.settings import MTBF
from holdfast.snapshot.interval.recording import Recording
from holdfast.snapshot.interval.rule import SHORTEST, IntervalRule
from holdfast.snapshot.step.ledger import ProtectEvery

if TYPE_CHECKING:
    from holdfast.snapshot.step.orders import SnapshotCopy

Every = int | Literal["auto"]
log = get_log(__name__)


class IntervalController:
    """Decides for one rank. Called by the hook, in the training thread, except `sealed`.

    Attributes:
        rule: what all ranks agreed on, and what this one wants.
    """

    def __init__(
        self,
        every: Every,
        budget: float | None,
        protect_every: ProtectEvery,
        recording: Recording | None,
        *,
        step: int | None,
        notes: Mapping[str, Any],
    ) -> None:
        """
        Args:
            budget: largest fraction of training time that snapshots may take; None: any.
            protect_every: which snapshots are protected.
            recording: the recording of a profile, if there is one; then `every` and `budget` do not matter.
            step, notes: of the restored snapshot; None and empty if there is none.

        Raises:
            ConfigError: ``HOLDFAST_MTBF`` or the notes are malformed.
        """
        fixed = every if every != "auto" and recording is None else None
        # A failure loses half an interval on average; one that needs a protected snapshot, `protect_every` times that.
        back = 1 + NODE_LOST * (protect_every - 1) if isinstance(protect_every, int) else 1.0
        self._node_rate = back / (MTBF.value() or NODE_MTBF_S)
        self.rule = IntervalRule(fixed, budget, self._node_rate)
        if step is not None:
            self.rule.resume(step, notes)
        self._budget = budget
        self._protect_every = protect_every
        self._recording = recording
        self._told: int | None = None  # the interval that this rank told operators last
        self._begins = True  # whether it was that of a young job
        self._boundary_s: float | None = None
        self._stalled_s = 0.0

    def placed(self, nodes: int) -> None:
        """The job has so many nodes now, each of which may fail."""
        self.rule.assumed = nodes * self._node_rate

    @property
    def protected_every_s(self) -> float:
        """Seconds from one protected snapshot to the next, as things are; 0: it is unknown how long a step takes."""
        together = self._protect_every if isinstance(self._protect_every, int) else 1
        return together * self.rule.interval * (self.rule.cost.step_s or 0.0)

    def observe(self, step: int, now_s: float, stalled_s: float, overlapped: bool) -> None:
        """A step is done.

        Args:
            now_s: the time of the boundary after it.
            stalled_s: how long the loop was held up in total since the hook was entered.
            overlapped: a snapshot was worked on at some time during the step.
        """
        step_s = now_s - self._boundary_s if self._boundary_s is not None else None
        stall_s = stalled_s - self._stalled_s
        self._boundary_s, self._stalled_s = now_s, stalled_s
        if step_s is not None:
            self.rule.observe(step, step_s, stall_s, overlapped)
            if self._recording is not None:
                self._recording.observe(step_s, stall_s, overlapped)

    def begun(self, step: int, encodes: bool) -> None:
        """A snapshot is taken after this step."""
        self.rule.begun(step, encodes)
        if self._recording is not None:
            self._recording.begun(step)

    def wanted(self) -> int:
        """The interval that this rank asks for."""
        return self.rule.wanted().steps if self._recording is None else SHORTEST

    def agree(self, interval: int) -> str | None:
        """All ranks use `interval` from now on: the longest that any of them `wanted`. Returns what to tell operators,
        if there is news, on the rank that has told of the plan."""
        self.rule.interval = interval
        if self._told is None:
            return None
        begins = self.rule.wanted().limit in ("unknown", "young")
        changed = not 1 / 2 < interval / self._told < 2  # half or twice what was told
        return self.say_plan("from now on ") if changed or begins < self._begins else None

    def say_plan(self, since: str = "") -> str:
        """How often snapshots are taken now, and why. Logs it once, and with every `since`."""
        is_news, limit = self._told is None or since, self.rule.wanted().limit
        self._told, self._begins = self.rule.interval, limit in ("unknown", "young")
        every = "every step" if self.rule.interval == 1 else f"every {self.rule.interval} steps"
        if self._protect_every != 1:
            some = "one at a time" if self._protect_every == "auto" else f"one of {self._protect_every}"
            every += f", of which {some} is protected"
        text = f"a snapshot {every}: {self.rule.why()}"
        if limit == "unknown":
            within = f", within {self._budget:.1%} of the time" if self._budget else ""
            text += f"; later the interval that loses least{within}"
        if is_news:
            log.info("%s%s", since, text)
        return text

    def sealed(self, copy: SnapshotCopy) -> None:
        """A snapshot is sealed, or was given up. May be called from any thread; returns at once."""
        if self._recording is not None:
            self._recording.sealed(copy)
