"""How often a running job fails, from a published rate and its own recent failures. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.snapshot.interval.checks import not_negative, positive
from holdfast.snapshot.interval.failures import PRIOR_EVENTS

REMEMBERED = 16
"""Number of failures that are remembered, the newest. Few enough to follow a changing rate, and enough to know it to
within a quarter, which costs 1 % of the wasted time."""


class FailureRate:
    """Gamma-Poisson estimate, from a prior of shape `PRIOR_EVENTS` and mean `prior`, and the remembered failures.

    Not thread-safe.

    Attributes:
        prior: expected failures per second of the whole job, before any were seen.
    """

    def __init__(self, prior: float) -> None:
        """Raises `ConfigError` if the prior is not positive."""
        self.prior = positive("the failure rate", prior, " per second")
        self._trained_s = 0.0
        self._failures: deque[float] = deque(maxlen=REMEMBERED)
        self._since_s = 0.0

    def trained(self, seconds: float) -> None:
        """The job has run for `seconds` more."""
        self._trained_s += seconds

    def failed(self) -> None:
        """The job has failed now."""
        if len(self._failures) == REMEMBERED:
            self._since_s = self._failures[0]
        self._failures.append(self._trained_s)

    @property
    def per_second(self) -> float:
        """Mean of the posterior, ``(a + n) / (a / prior + t)``, for n failures in the time t since the newest failure
        that is forgotten."""
        exposure_s = self._trained_s - self._since_s
        return (PRIOR_EVENTS + len(self._failures)) / (PRIOR_EVENTS / self.prior + exposure_s)

    def notes(self) -> list[float]:
        """What the next start of the job must know: how long the job ran, since when its failures are known, and when
        it failed."""
        return [self._trained_s, self._since_s, *self._failures]

    def resume(self, notes: Sequence[float]) -> None:
        """Continue from the `notes` of an earlier start. Raises `ConfigError` or `ValueError` if they are malformed."""
        self._trained_s, self._since_s, *failures = (not_negative("a time of the failure rate", at) for at in notes)
        self._failures = deque(failures, maxlen=REMEMBERED)
