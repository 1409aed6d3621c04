"""Samples of durations that are noisy and may change while a job runs. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

EVIDENCE = 8
"""Minimum number of samples for a conclusion."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the phases of one snapshot took, one after the other, in seconds.

    Attributes:
        step: the snapshot's step.
        copy_s: from the boundary until the whole snapshot is in the slot, including delays by the pace.
        seal_s: from there until it is sealed.
        encode_s: from there until this node knows that it is protected.
    """

    step: int
    copy_s: float
    seal_s: float
    encode_s: float


def typical(samples: Collection[float]) -> tuple[float, float]:
    """The mean of the middle half of `samples`, which a quarter of outliers does not move, and its standard error.

    The standard error of a trimmed mean follows Tukey and McLaughlin (Sankhya A 25, 1963).
    """
    ordered = sorted(samples)
    count = len(ordered)
    cut = count // 4
    middle = ordered[cut : count - cut]
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    center = fmean(winsorized)
    variance = sum((value - center) ** 2 for value in winsorized) / max(1, count - 1)
    return fmean(middle), math.sqrt(variance / count) * count / len(middle)


class Recent:
    """The newest samples of a quantity that stays the same for a while, and may then change.

    If the newest `EVIDENCE` samples differ from the older ones by more than noise, the older ones are forgotten.

    Args:
        most: maximum number of samples kept.
        errors, least: a change must exceed this many standard errors, and this share of the older value.
    """

    def __init__(self, most: int, errors: float = 4.0, least: float = 0.1) -> None:
        self._samples: deque[float] = deque(maxlen=most)
        self._errors = errors
        self._least = least
        self._unchecked = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: float) -> bool:
        """Add a sample. Returns whether the older samples turned out to be outdated, and were forgotten."""
        self._samples.append(sample)
        self._unchecked += 1
        if self._unchecked < EVIDENCE or len(self._samples) < 2 * EVIDENCE:
            return False
        self._unchecked = 0
        samples = list(self._samples)
        (now, now_error), (before, before_error) = typical(samples[-EVIDENCE:]), typical(samples[:-EVIDENCE])
        change = abs(now - before)
        if change <= max(self._errors * math.hypot(now_error, before_error), self._least * abs(before)):
            return False
        self._samples = deque(samples[-EVIDENCE:], maxlen=self._samples.maxlen)
        return True

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self._unchecked = 0

    @property
    def value(self) -> float:
        """The typical sample; 0 if there is none."""
        return typical(self._samples)[0] if self._samples else 0.0
