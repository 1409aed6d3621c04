"""What a run of Ray Train needs besides `InMemorySnapshot` in its training function: to end where going on is no use.

Train answers any error of a worker with another worker group, `FailureConfig.max_failures` times. It asks callbacks
first, and what one of them raises is the end of the run.
"""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from holdfast.integrations.ray.worker_group import FINAL


class GiveUp(UserCallback):  # type: ignore[misc]
    """``RunConfig(callbacks=[GiveUp()])``: an error that would only happen again ends the run.

    Those are `ConfigError`, `Repeated`, `StateMismatch` and `Unrecoverable`. ``TorchTrainer.fit`` then raises
    ``ray.train.ControllerError``, whose ``controller_failure`` is that error. Runs in Train's controller; never blocks.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the first of `FINAL` that a worker raised. Called by Train."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, FINAL):
                raise error


__all__ = ["GiveUp"]
