"""Samples of times that are noisy, and that may change while a job runs. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

EVIDENCE = 8
"""No fewer samples say anything."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the parts of one snapshot took, one after the other, in seconds.

    Attributes:
        step: of the snapshot.
        copy_s: from the boundary until all of it is in the slot; what the pace held it back is part of it.
        seal_s: until it is sealed.
        encode_s: until this node knows that it is protected.
    """

    step: int
    copy_s: float
    seal_s: float
    encode_s: float


def typical(samples: Collection[float]) -> tuple[float, float]:
    """The mean of the middle half of `samples`, which a quarter of outliers does not move, and its standard error.

    The error of a trimmed mean is that of Tukey and McLaughlin (Sankhya A 25, 1963).
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
    """The newest samples of something that is the same for a while, and then, maybe, something else.

    Where the newest `EVIDENCE` differ from those before by more than noise, these are forgotten.

    Args:
        most: how many are kept.
        errors, least: how many standard errors, and what share of itself, a change must have.
    """

    def __init__(self, most: int, errors: float = 4.0, least: float = 0.1) -> None:
        self._samples: deque[float] = deque(maxlen=most)
        self._errors = errors
        self._least = least
        self._unchecked = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: float) -> bool:
        """Take note of a sample; whether what was known before it is seen to be over."""
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
        """The typical one; 0 if there is none."""
        return typical(self._samples)[0] if self._samples else 0.0
