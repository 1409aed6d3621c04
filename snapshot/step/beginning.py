"""Where a step begins, if the loop does not say: with the first forward in training mode and with gradients after
``optim.step()``, unless that turns out to have been an evaluation, for which no gradients are computed."""

from __future__ import annotations

from holdfast.snapshot.copy.errors import GivenUp
from holdfast.snapshot.step.boundary import BEGIN
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import CopyJob

EVALUATED = (
    "after step %d the model ran forward in training mode and with gradients, but no step began. If that forward draws "
    f"random numbers and reading data does, too, a restart is refused: {BEGIN}; or evaluate under model.eval() and "
    "torch.no_grad()"
)


class Doubtful(GivenUp):
    """It is unknown where a step began."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"after step {step} the model ran forward in training mode, no gradients were computed, and random "
            "generators, buffers or weights changed afterwards; it cannot be told whether that was an evaluation or "
            f"the beginning of a step: {BEGIN}; or evaluate under model.eval() and torch.no_grad()"
        )


class Beginning:
    """What is known about the beginning of the current step. Used by the training thread.

    Attributes:
        forward: number of the newest forward that may begin a step; 0: none was seen.
        seen: whether the step has begun, as far as can be told.
        blind: whether the model runs forward unseen, as noticed in an earlier step.
        has_backward: whether gradients were computed since the last step ended.
        doubtful: whether the forward that the step began with may have been an evaluation: none of its gradients were
            computed so far, and forward ran again after it or other code had drawn random numbers or changed buffers,
            or anything else has changed since.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.seen = False
        self.blind = False
        self.has_backward = False
        self.doubtful = False
        self._began_with = 0  # number of the forward that the step is taken to begin with
        self._own = False  # gradients of that forward were computed

    def over(self) -> None:
        """The step has ended."""
        self.seen = self.has_backward = self.doubtful = self._own = False

    def with_this_forward(self) -> None:
        """Take the newest forward as the beginning of the step."""
        self._began_with = self.forward

    def certain(self) -> None:
        """The step begins here, whatever is computed from now on."""
        self.seen = self._own = True
        self.doubtful = False

    def backward(self, number: int) -> bool:
        """Gradients of that forward are computed; 0: of one that was not seen. Returns whether it is certain now that
        the step began where it is taken to begin."""
        self.has_backward = True
        if number == self._began_with:
            self._own, self.doubtful = True, False
        return self.seen and not self.doubtful

    def was_another(self, capture: Capture, copy: CopyJob) -> bool:
        """Forward runs once more before any gradients are computed. Returns whether the step begins only now, because
        more has changed than a forward changes."""
        if self._own:
            return False
        state, traces = capture.changed(copy)
        if state:
            self.doubtful = False
        else:
            self.doubtful = self.doubtful or traces
        return state

    def is_doubtful(self, capture: Capture, copy: CopyJob) -> bool:
        """Whether `copy` may be of an evaluation: no gradients of its forward were computed, and other code has changed
        the state meanwhile."""
        if not self._own and not self.doubtful:
            self.doubtful, _ = capture.changed(copy)
        return self.doubtful
