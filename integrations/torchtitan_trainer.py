"""What a snapshot of torchtitan's `Trainer` contains, and when it is taken: the same in 0.2 and 0.3.

An iteration is ``step += 1``, ``train_step``, ``checkpointer.save``, ``validate``. A step begins with ``train_step``,
so the state includes what the validation before it has changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, make_dataclass
from functools import wraps
from typing import Any, get_type_hints

from torch.distributed.fsdp import FSDPModule

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.adapters.releases import need_release, warn_of_untried
from holdfast.integrations.replacing import Replacements, before, guarded
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.first_turns import Checks
from holdfast.snapshot.options import Options
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.worker_states import copy_worker_states

NAME = "torchtitan"
"""The name under which the trainer's state is tracked."""

TRIED = ("0.2", "0.3")
"""Releases with which training of the debug model was killed, restored and compared."""

NEEDED = ("train", "train_step", "batch_generator", "state_dict", "load_state_dict", "step", "metrics_processor")
"""Attributes that a trainer must have."""

PICKLING_LOADER = "ParallelAwareDataloader"
"""A class whose ``state_dict`` is its base class's, pickled. Nothing here unpickles what was in shared memory."""

VALIDATION = ("_sample_idx", "_token_buffer")
"""The position of 0.2's validation data set, which continues where the last validation ended; 0.3 makes a new one."""

NOT_ASKED = {"run", "give_up", "arena", "block"}
"""Options that are no part of a configuration: the first three are said for one start, or of one node."""

log = get_log(__name__)


def _asked() -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of the fields of `SnapshotOptions`."""
    kinds = get_type_hints(Options)
    for each in fields(Options):
        if each.name not in NOT_ASKED:
            own = each.default is not MISSING  # the others come from the environment, if they are None
            yield (each.name, kinds[each.name] if own else kinds[each.name] | None, each.default if own else None)


SnapshotOptions = make_dataclass("SnapshotOptions", _asked(), kw_only=True, slots=True)
"""Options of `holdfast.InMemorySnapshot` that a configuration can set; None: as the environment says."""


def check(version: str, trainer: Any) -> None:
    """Warn if this release was never tried.

    Raises:
        ConfigError: the release is known not to work, or the trainer lacks an attribute that is needed.
    """
    need_release("torchtitan", version, "0.2")
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"{type(trainer).__qualname__} of torchtitan {version} has no {', '.join(missing)}, which holdfast needs "
            "to follow its loop: use holdfast.InMemorySnapshot in the loop instead, as docs/fsdp2.md says"
        )
    warn_of_untried("torchtitan", version, TRIED)


class FromMemory:
    """A mixin in front of torchtitan's checkpoint manager, which then only handles checkpoints on disk.

    Both methods are called whether checkpoints on disk are enabled or not.
    """

    _snapshots: TrainerSnapshots | None = None

    def load(self, step: int = -1) -> bool:
        """Restore from memory, else from the folder, as training begins. Returns whether anything was restored."""
        if self._snapshots is not None and self._snapshots.enter():
            return True
        return bool(super().load(step))  # type: ignore[misc]

    def close(self) -> None:
        """End training here, if the trainer's ``train`` was not called."""
        if self._snapshots is not None:
            self._snapshots.leave(sys.exc_info()[1])
        super().close()  # type: ignore[misc]


class TrainerSnapshots:
    """The snapshots of one trainer, from ``checkpointer.load`` to the end of ``train``. For the training thread only.

    Args:
        states: the checkpoint manager's: ``train_state`` is the trainer; there may be others.
        parts: what else it is made with: ``model_parts``, ``optimizers``, ``lr_schedulers`` and ``dataloader``.
        options: a `SnapshotOptions`.
    """

    def __init__(self, states: Mapping[str, Any], parts: Mapping[str, Any], options: Any) -> None:
        self._trainer = trainer = states["train_state"]
        self._others = {name: part for name, part in states.items() if part is not trainer}
        self._parts, self._options = parts, options
        self._snap: _TrainerSnapshot | None = None
        self._sharded = [m for part in parts["model_parts"] for m in part.modules() if isinstance(m, FSDPModule)]
        self._data = _Batches(parts["dataloader"])
        self._done: int = trainer.step
        self._metrics = _Metrics(trainer.metrics_processor)
        self._replaced = Replacements()
        self._replaced.replace(trainer, "train", guarded(self.leave))

    def enter(self) -> bool:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call; blocks.

        Returns whether the job had a snapshot.

        Raises:
            HoldfastError: as entering `holdfast.InMemorySnapshot`.
        """
        model, optimizers, schedulers = (self._parts[name] for name in ("model_parts", "optimizers", "lr_schedulers"))
        snap = _TrainerSnapshot(model, optimizers, scheduler=schedulers, **asdict(self._options))
        snap.track(NAME, self._get, self._set)
        self._snap = snap.__enter__()
        self._replaced.replace(self._trainer, "train_step", before(self._begin))
        self._replaced.replace(self._trainer, "batch_generator", self._reading)
        if snap.restored.snapshot is None:
            return False
        log.info("torchtitan continues after step %d, from memory", self._trainer.step)
        return True

    def leave(self, error: BaseException | None) -> None:
        """Leave the snapshot: training has ended well, or by `error`. After an error snapshots stay for the restart."""
        self._replaced.undo()
        snap, self._snap = self._snap, None
        if snap is not None:
            snap.leave(error)

    def _begin(self) -> None:
        self._done = self._trainer.step - 1  # it has already counted the step that begins
        self._metrics.begin()
        for module in self._sharded:
            module.reshard()  # a validation leaves parameters gathered if they are not resharded after forward
        if self._snap is not None:
            self._snap.begin()

    def _reading(self, batches: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(batches)
        def reading(loader: Any, *args: Any, **kwargs: Any) -> Any:
            return batches(self._data if loader is self._data.loader else loader, *args, **kwargs)

        return reading

    def _get(self) -> dict[str, Any]:
        """What the trainer keeps outside of the model and the optimizer, as the next step begins."""
        return {
            "train_state": {**self._trainer.state_dict(), "step": self._done},
            "others": {name: part.state_dict() for name, part in self._others.items()},
            "data": self._data.get(),
            "validation": _validation(self._trainer),
            "metrics": self._metrics.get(),
        }

    def _set(self, held: dict[str, Any]) -> None:
        self._done = held["train_state"]["step"]
        self._trainer.load_state_dict(held["train_state"])
        for name, state in held["others"].items():
            self._others[name].load_state_dict(state)
        self._data.set(held["data"])
        if held["validation"]:
            vars(self._trainer.validator.validation_dataloader.dataset).update(held["validation"])
        self._metrics.set(held["metrics"])


class _TrainerSnapshot(InMemorySnapshot):
    checks = Checks(reading=False)  # making an iterator draws random numbers; generators are restored at a step's begin


class _Batches:
    """The data loader, its only iterator, and the random generators as they were when that iterator was first made."""

    def __init__(self, loader: Any) -> None:
        copy_worker_states(loader)
        self.loader = loader
        self._made: Iterator[Any] | None = None
        self._at_iter: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        if self._made is None:
            self._at_iter = rng.capture()
            self._made = iter(self.loader)
        return self._made

    def get(self) -> dict[str, Any]:
        if self._made is None:
            return {}
        return {"ranks": self._ranks(), "place": _plain(self.loader).state_dict(), "rng": self._at_iter}

    def set(self, held: dict[str, Any]) -> None:
        self._made = None
        if not held:
            return
        if held["ranks"] != self._ranks():
            raise StateMismatch(
                f"the snapshot's data loader was for {held['ranks']} data-parallel ranks, this one is for "
                f"{self._ranks()}: torchtitan's data cannot be divided anew; start with as many ranks as before"
            )
        _plain(self.loader).load_state_dict(held["place"])
        self._at_iter = held["rng"]
        rng.restore(self._at_iter)  # workers get their old seeds; all generators are restored after this
        self._made = iter(self.loader)

    def _ranks(self) -> int | None:
        return getattr(self.loader, "dp_world_size", None)


class _Metrics:
    """The sums of the metrics processor since it last logged, and the time since then."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._elapsed_s = 0.0
        self._is_restored = False

    def begin(self) -> None:
        if not self._is_restored:  # the first step after a restore must begin with what was restored
            self._elapsed_s = time.perf_counter() - self._processor.time_last_log
        self._is_restored = False

    def get(self) -> dict[str, Any]:
        processor = self._processor
        return {
            "tokens": processor.ntokens_since_last_log,
            "loading_s": list(processor.data_loading_times),
            "elapsed_s": self._elapsed_s,
        }

    def set(self, held: dict[str, Any]) -> None:
        self._processor.ntokens_since_last_log = held["tokens"]
        self._processor.data_loading_times = held["loading_s"]
        self._elapsed_s = held["elapsed_s"]
        self._processor.time_last_log = time.perf_counter() - self._elapsed_s
        self._is_restored = True


def _plain(loader: Any) -> Any:
    """The loader, or a view of it as the base class whose ``state_dict`` has plain values."""
    for kind in type(loader).__mro__:
        if "state_dict" in vars(kind):
            return super(kind, loader) if kind.__name__ == PICKLING_LOADER else loader
    return loader


def _validation(trainer: Any) -> dict[str, Any]:
    loader = getattr(getattr(trainer, "validator", None), "validation_dataloader", None)
    dataset = getattr(loader, "dataset", None)
    return {name: getattr(dataset, name) for name in VALIDATION if hasattr(dataset, name)}
