"""Megatron-LM's training script: the hook, with the counters that the script keeps in its arguments."""

from __future__ import annotations

from typing import Any

from holdfast.hook import InMemorySnapshot

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def protect(model: Any, optimizer: Any, scheduler: Any, args: Any, **options: Any) -> InMemorySnapshot:
    """Enter the hook right after ``setup_model_and_optimizer``, before data iterators are built. A collective call.

    If the job has a snapshot in memory, it is restored, and ``args.iteration`` and the counters are set to it as
    ``load_checkpoint`` would set them. A checkpoint on disk that was loaded before, older by nature, is overwritten.
    `InMemorySnapshot.close` what is returned when training has ended well.

    Args:
        model, optimizer, scheduler: as ``setup_model_and_optimizer`` returns them.
        args: Megatron-LM's ``get_args()``.
        options: `InMemorySnapshot`'s.

    Raises:
        HoldfastError: as entering `InMemorySnapshot`.
    """
    counters = _Counters(args)
    snap = InMemorySnapshot(model, optimizer, scheduler=scheduler, **options)
    snap.track("megatron_lm", counters.get, counters.set)
    snap.__enter__()
    args.iteration = counters.first_iteration + snap.step
    return snap


class _Counters:
    """What of the arguments goes with a snapshot. The iteration follows from the hook's steps."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self.first_iteration: int = args.iteration

    def get(self) -> dict[str, int]:
        held = {name: getattr(self._args, name) for name in COUNTERS if hasattr(self._args, name)}
        return {"first_iteration": self.first_iteration} | held

    def set(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            if name == "first_iteration":
                self.first_iteration = value
            else:
                setattr(self._args, name, value)
