"""Notices a job whose parameters change although the optimizer that was given never steps."""

from __future__ import annotations

from itertools import islice

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.hidden import SAMPLED

UNSTEPPED_TURNS = 2
"""So many turns at the beginning may change parameters without an optimizer's step. Gradients that are accumulated
change none; an evaluation with other weights may, now and then."""

COMPARED = 16
"""So many parameters are compared for that, since reading one may wait for a GPU."""


class Unstepped:
    """Notices a job whose parameters change although the optimizer that was given never steps, as with LOMO, which
    updates them in backward: no step would ever end, and no snapshot come. Used by the training thread."""

    def __init__(self, adapter: Adapter) -> None:
        trained = (each for module in adapter.modules() for each in module.parameters() if each.requires_grad)
        self._parameters = list(islice(trained, COMPARED))
        self._given = type(adapter.optimizers()[0]).__qualname__
        self._before = self._samples()
        self._turns = 0
        self._has_begun = False

    def step_begins(self) -> bool:
        """A step begins. Returns whether it is the first, and parameters have changed since the loop was entered."""
        is_first, self._has_begun = not self._has_begun, True
        return is_first and self._changed()

    def look(self) -> bool:
        """A turn has ended, and no optimizer has stepped so far. Returns whether to look again.

        Raises:
            ConfigError: parameters have changed in each of the first `UNSTEPPED_TURNS` turns.
        """
        self._turns += 1
        if not self._changed():
            return False
        if self._turns == UNSTEPPED_TURNS:
            raise ConfigError(
                f"parameters changed in each of the first {self._turns} turns, and no step() of {self._given} was "
                "seen, so no snapshot would ever be taken. If it updates them in backward, or the loop does so itself, "
                "leave it out and keep its state beside: InMemorySnapshot(model, extra={'optim': optim}); then each "
                "turn is a step"
            )
        return True

    def _changed(self) -> bool:
        """Whether parameters have changed since this was made or last asked."""
        before, self._before = self._before, self._samples()
        return before != self._before

    def _samples(self) -> list[bytes]:
        return [elements_of(each, SAMPLED) for each in self._parameters]
