"""What one rank does by itself in a step: it tells ranks apart whose steps all take as long as the slowest rank's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch

from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own
from holdfast.snapshot.step.gradients import first_trained
from holdfast.snapshot.step.hooks import on_gradient

STEPS_KEPT = 16
"""Over so many steps medians are taken: what happens now and then, such as an evaluation, makes nobody a straggler."""


class OwnTime:
    """Times one rank's own work in each step. Used by the training thread.

    Gradients of the first parameter are computed last, and before any rank waits for the others' gradients. On a GPU
    that moment says nothing: there the thread only queues work, and waits at places that differ from rank to rank.

    Args:
        now: a clock that stands still while the hook holds the thread up.
        data_s: how long data has been read so far, in seconds.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], now: Callable[[], float], data_s: Callable[[], float]
    ) -> None:
        self._now = now
        self._data_s = data_s
        self._began_s: float | None = None  # None: the first step, which is like no other
        self._computed_s = self._read_s = 0.0
        self._kept: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)  # as the numbers of an `Own`
        self._undo = [
            on_gradient(parameter, self._computed)
            for _, parameter in first_trained(modules)
            if parameter.device.type == "cpu"
        ]

    def step_ended(self) -> None:
        """A step has ended, and the next begins."""
        now, read_s = self._now(), self._data_s()
        if self._began_s is not None:
            work_s = max(0.0, self._computed_s - self._began_s)
            self._kept.append((now - self._began_s, read_s - self._read_s, work_s))
        self._began_s, self._read_s = now, read_s

    def own(self) -> Own:
        """What is known until now."""
        return Own(*map(median, zip(*self._kept, strict=True))) if self._kept else UNKNOWN

    def remove(self) -> None:
        """Stop watching gradients."""
        while self._undo:
            self._undo.pop()()

    def _computed(self, _gradient: torch.Tensor) -> None:
        self._computed_s = self._now()
