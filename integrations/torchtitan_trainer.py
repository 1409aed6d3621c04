"""What goes with a snapshot of torchtitan's `Trainer`, and when: the same in 0.2 and 0.3.

The loop is ``step += 1``, ``train_step``, ``checkpointer.save``, ``validate``. A step begins with ``train_step``, so
the state is what the validation before it has left.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, Literal

from torch.distributed.fsdp import FSDPModule

from holdfast.hook import InMemorySnapshot
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.session import Checks
from holdfast.snapshot.state import rng

NAME = "torchtitan"
"""What the trainer's state is tracked under."""

TRIED = ("0.2", "0.3")
"""Releases whose debug model was killed, restored and compared."""

NEEDED = ("train", "train_step", "batch_generator", "state_dict", "load_state_dict", "step", "metrics_processor")
"""Of a trainer."""

PACKS = "ParallelAwareDataloader"
"""Its ``state_dict`` is that of its base class, packed by pickle. Nothing here unpickles what was in shared memory."""

VALIDATION = ("_sample_idx", "_token_buffer")
"""Where the data set of 0.2's validator is: it goes on where the validation before has ended; 0.3 makes a new one."""

log = get_log(__name__)


@dataclass(kw_only=True, slots=True)
class SnapshotOptions:
    """Those of `holdfast.InMemorySnapshot` that a configuration can say; None: as the environment says."""

    every: int | Literal["auto"] = 1
    """Take a snapshot every so many steps, or as often as is best."""

    protect_every: int | Literal["auto"] = 1
    """Protect one of so many snapshots, or "auto"; the others are only sealed."""

    protect: str = "auto"
    """"k+m", such as "6+2", "copies:r", "auto" or "none"."""

    slots: int = 3
    """Snapshots that fit in memory at once."""

    job: str | None = None
    """Name of the job, the same on every rank and restart."""

    domains: str | None = None
    """What this node fails together with."""

    keep: bool = False
    """Leave the snapshots in place when training ends well."""

    strict: bool = False
    """Raise if snapshots cannot be taken any more."""

    overhead_budget: float | None = None
    """Part of the training time that snapshots may take."""

    max_repeats: int | None = None
    """Refuse the next start after so many that ended alike."""

    generations: int | None = None
    """How many protected snapshots are kept."""

    restore_step: int | None = None
    """Go back to the snapshot of that step."""


def release(version: str) -> tuple[int, int]:
    """Major and minor number. Raises `ConfigError` for a text that has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"torchtitan {version}: not a version that can be told; 0.2 and 0.3 are known")
    return int(found[1]), int(found[2])


def check(version: str, trainer: Any) -> None:
    """Warn of a release that nobody has tried.

    Raises:
        ConfigError: it is one that is known not to work, or the trainer lacks something.
    """
    if release(version) < (0, 2):
        raise ConfigError(f"torchtitan {version}: its trainer is another one; 0.2 and 0.3 are known")
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"{type(trainer).__qualname__} of torchtitan {version} has no {', '.join(missing)}, by which its loop is "
            "followed: use holdfast.InMemorySnapshot in it, as docs/fsdp2.md says"
        )
    if ".".join(map(str, release(version))) not in TRIED:
        log.warning(
            "torchtitan %s was never tried with holdfast: %s were, see docs/support.md", version, " and ".join(TRIED)
        )


class FromMemory:
    """Goes before torchtitan's checkpoint manager, which is asked for what is on disk.

    Both methods are called whether checkpoints on disk are enabled or not.
    """

    _snapshots: TrainerSnapshots | None = None

    def load(self, step: int = -1) -> bool:
        """As training begins: from memory, or else from the folder. Whether there was anything."""
        if self._snapshots is not None and self._snapshots.enter():
            return True
        return bool(super().load(step))  # type: ignore[misc]

    def close(self) -> None:
        """Of a trainer whose ``train`` was not called, training ends here."""
        if self._snapshots is not None:
            self._snapshots.leave(sys.exc_info()[1])
        super().close()  # type: ignore[misc]


class TrainerSnapshots:
    """The snapshots of one trainer, from ``checkpointer.load`` to the end of ``train``. The training thread's.

    Args:
        parts: the checkpoint manager's ``states``: the trainer is ``train_state``, and there may be others.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        options: SnapshotOptions,
    ) -> None:
        self._trainer = trainer = parts["train_state"]
        self._snap: _TrainerSnapshot | None = None
        self._sharded = [m for part in model_parts for m in part.modules() if isinstance(m, FSDPModule)]
        self._loop = _TrainerState(
            trainer, {name: part for name, part in parts.items() if part is not trainer}, dataloader
        )
        self._make: Callable[[], _TrainerSnapshot] = lambda: _TrainerSnapshot(
            model_parts, optimizers, scheduler=lr_schedulers, **asdict(options)
        )
        self._undo: list[Callable[[], None]] = []
        self._replace("train", self._guard)

    def enter(self) -> bool:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call; blocks. Whether it had.

        Raises:
            HoldfastError: as entering `holdfast.InMemorySnapshot`.
        """
        snap = self._make()
        snap.track(NAME, self._loop.get, self._loop.set)
        self._snap = snap.__enter__()
        self._replace("train_step", self._beginning_with)
        self._replace("batch_generator", self._reading)
        if snap.restored.snapshot is None:
            return False
        log.info("torchtitan goes on after step %d, from memory", self._trainer.step)
        return True

    def leave(self, error: BaseException | None) -> None:
        """Training has ended: well, or by `error`; then the snapshots stay, for the restart."""
        while self._undo:
            self._undo.pop()()
        snap, self._snap = self._snap, None
        if snap is not None:
            snap.__exit__(type(error) if error is not None else None, error, None)

    def _guard(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def training(*args: Any, **kwargs: Any) -> Any:
            try:
                result = train(*args, **kwargs)
            except BaseException as error:
                self.leave(error)
                raise
            self.leave(None)
            return result

        return training

    def _beginning_with(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train_step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._loop.begin()
            for module in self._sharded:
                module.reshard()  # a validation leaves gathered what is not resharded after forward
            if self._snap is not None:
                self._snap.begin()
            return train_step(*args, **kwargs)

        return stepping

    def _reading(self, batches: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(batches)
        def reading(loader: Any, *args: Any, **kwargs: Any) -> Any:
            return batches(self._loop.data if loader is self._loop.data.loader else loader, *args, **kwargs)

        return reading

    def _replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let what `make` makes of a method of this one trainer stand in for it."""
        trainer = self._trainer
        setattr(trainer, name, make(getattr(trainer, name)))
        self._undo.append(lambda: delattr(trainer, name))


class _TrainerSnapshot(InMemorySnapshot):
    checks = Checks(reading=False)  # making an iterator draws, and the generators are put back when a step begins


class _TrainerState:
    """What the trainer keeps outside of the model and the optimizer."""

    def __init__(self, trainer: Any, others: Mapping[str, Any], dataloader: Any) -> None:
        self.data = _Batches(dataloader)
        self._trainer = trainer
        self._others = others
        self._done: int = trainer.step
        self._metrics = _Metrics(trainer.metrics_processor)

    def begin(self) -> None:
        """``train_step`` is called: the trainer counts its step already."""
        self._done = self._trainer.step - 1
        self._metrics.begin()

    def get(self) -> dict[str, Any]:
        """As the next step begins."""
        return {
            "train_state": {**self._trainer.state_dict(), "step": self._done},
            "others": {name: part.state_dict() for name, part in self._others.items()},
            "data": self.data.get(),
            "validation": _validation(self._trainer),
            "metrics": self._metrics.get(),
        }

    def set(self, held: dict[str, Any]) -> None:
        """Take over what was restored."""
        self._done = held["train_state"]["step"]
        self._trainer.load_state_dict(held["train_state"])
        for name, state in held["others"].items():
            self._others[name].load_state_dict(state)
        self.data.set(held["data"])
        if held["validation"]:
            vars(self._trainer.validator.validation_dataloader.dataset).update(held["validation"])
        self._metrics.set(held["metrics"])


class _Batches:
    """The data loader, of which one iterator is made, with the random numbers with which it was made first."""

    def __init__(self, loader: Any) -> None:
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
                f"the data loader was one of {held['ranks']} data-parallel ranks, and is one of {self._ranks()}: "
                "torchtitan's data cannot be cut anew; go on with as many"
            )
        _plain(self.loader).load_state_dict(held["place"])
        self._at_iter = held["rng"]
        rng.restore(self._at_iter)  # workers get the seeds that they had; the generators are put back after all this
        self._made = iter(self.loader)

    def _ranks(self) -> int | None:
        return getattr(self.loader, "dp_world_size", None)


class _Metrics:
    """What the metrics processor has added up since it last logged, and for how long."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._elapsed_s = 0.0
        self._is_restored = False

    def begin(self) -> None:
        if not self._is_restored:  # the first step after a restore is to begin with what was restored
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
    """The loader, or as which of its classes its state is plain values."""
    for kind in type(loader).__mro__:
        if "state_dict" in vars(kind):
            return super(kind, loader) if kind.__name__ == PACKS else loader
    return loader


def _validation(trainer: Any) -> dict[str, Any]:
    loader = getattr(getattr(trainer, "validator", None), "validation_dataloader", None)
    dataset = getattr(loader, "dataset", None)
    return {name: getattr(dataset, name) for name in VALIDATION if hasattr(dataset, name)}
