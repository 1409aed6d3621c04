"""What a run of Ray Train needs besides `InMemorySnapshot` in its training function: an end when retrying is useless.

Ray Train answers any worker's error with another worker group, up to `FailureConfig.max_failures` times. It calls
callbacks first; an exception from one of them ends the run.
"""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from holdfast.integrations.ray.worker_group import NOT_RETRIED


class GiveUp(UserCallback):  # type: ignore[misc]
    """``RunConfig(callbacks=[GiveUp()])``: an error that would only happen again ends the run.

    These are `ConfigError`, `Repeated`, `StateMismatch` and `Unrecoverable`. ``TorchTrainer.fit`` then raises
    ``ray.train.ControllerError``, whose ``controller_failure`` is that error. Runs in Train's controller; never blocks.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the error of the first worker that raised one of `NOT_RETRIED`. Called by Ray Train."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, NOT_RETRIED):
                raise error


__all__ = ["GiveUp"]
