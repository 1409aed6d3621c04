"""PyTorch Lightning: ``Trainer(callbacks=[InMemoryCallback()])`` keeps a fit in memory, and resumes one that died.

Lightning runs forward and backward inside ``optimizer.step(closure)``; here the closure runs just before the step, so
that copies overlap with it. A snapshot is complete when the next batch is about to be read: by then validation, the end
of the epoch, schedules and callbacks have run, and no random number for that batch has been drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging, early_stopping
from lightning.pytorch.loops import _Loop
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

from holdfast.hook import InMemorySnapshot, SettledSnapshot
from holdfast.integrations.adapters.releases import need_release
from holdfast.integrations.callbacks import CallbackState
from holdfast.integrations.replacing import Replacements, before
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state import rng
from holdfast.snapshot.step.source import is_loader, workers_anew

NAME = "lightning"
"""The name under which the state of the loops is tracked."""


class InMemoryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Restores in ``on_fit_start``, takes snapshots while the trainer fits, and ends the job in ``on_fit_end``.

    A fit that was killed and started again ends as if nothing had happened. Restored are: parameters, buffers,
    optimizers, schedules and the gradient scaler; the random generators; all counters of the fit loop (epoch, batch,
    global step, those of validation); ``callback_metrics``, ``should_stop`` and the states of the other callbacks and
    of the datamodule; modules and dicts of tensors that callbacks have before ``on_fit_start``, as `WeightAveraging`
    has; numbers, texts, tensors and containers of these in attributes of callbacks of the user's own without a
    ``state_dict``, unless they set others to anything else meanwhile; the place in the training data. The epoch's
    iterator is made again from the same state of the random generators, and the batches that were seen are read again
    and dropped, also if the loader has a ``state_dict``. The first batch is compared with that of the earlier run. A
    data set with state of its own must be tracked.

    Not restored: accumulated metrics (``self.log(..., on_epoch=True)`` in ``training_step``, torchmetrics), which after
    a restart cover only the rest of the epoch, so nothing that steers training should monitor them; what loggers and
    the progress bar show; ``on_save_checkpoint`` of the module; wall-clock timers. Use `track` for any other state.

    A validation that was interrupted is repeated, together with the step before it. Hooks for the start of the epoch
    are not called again when it resumes in the middle; ``on_fit_start`` and ``on_train_start`` are. A snapshot takes
    precedence over ``fit(ckpt_path=...)``. If callbacks change other tensors, one warning names them. All steps of
    optimizers within a batch count as one.

    A fit that stops because ``should_stop`` was set, as `Timer` sets it, keeps the snapshots for the next start, and
    goes on in the middle of its epoch, unless it was `EarlyStopping` that set it.

    Supports one process, and ``strategy="ddp"``. The trainer blocks as `holdfast.InMemorySnapshot` says.

    Args:
        track: called with the snapshot and the module before the state is restored, for `InMemorySnapshot.track`.
        options: for `holdfast.InMemorySnapshot`.

    Raises:
        ConfigError: Lightning is too old; or, from ``fit``: ``training_step`` takes ``dataloader_iter``, so its place
            in the data is not known; or a callback is a `StochasticWeightAveraging`, whose state cannot be put back.
        HoldfastError: from ``fit``: whatever `InMemorySnapshot` raises on entering, and at the first step.
    """

    def __init__(self, *, track: Callable[[InMemorySnapshot, Any], None] | None = None, **options: Any) -> None:
        need_release("lightning", lightning.__version__, "2.6")
        self._track = track
        self._options = options
        self._snap: SettledSnapshot | None = None
        self._fit: _Fit | None = None

    @property
    def snapshot(self) -> InMemorySnapshot | None:
        """The snapshot, while the trainer fits."""
        return self._snap

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging):
                raise ConfigError(
                    f"{type(callback).__qualname__} replaces schedules and changes the trainer as epochs begin, which "
                    "cannot be put back in the middle of one: average by WeightAveraging or EMAWeightAveraging instead"
                )
        extra = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options.get("extra", {})}
        snap = SettledSnapshot(trainer.strategy.model, trainer.optimizers, **{**self._options, "extra": extra})
        fit = _Fit(trainer, snap)
        snap.track(NAME, get=fit.get, set=fit.set)
        if self._track is not None:
            self._track(snap, pl_module)
        others = [callback for callback in trainer.callbacks if callback is not self]
        kept = CallbackState(snap, others, Callback, methodcaller("state_dict"))
        with rng.undrawn():  # so that a train_dataloader() that splits data at random splits it as before
            snap.__enter__()
        self._snap, self._fit = snap, fit
        fit.begin(kept)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._snap is not None and not _has_stopped_early(trainer):
            self._snap.settle()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(None, early=_has_stopped_early(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None, *, early: bool = False) -> None:
        snap, fit, self._snap, self._fit = self._snap, self._fit, None, None
        if fit is not None:
            fit.replaced.undo()
        if snap is not None:
            snap.leave(error, early=early)


class _Fit:
    """The state of a trainer's loops: reads it, and makes the loops resume from it."""

    def __init__(self, trainer: Any, snap: SettledSnapshot) -> None:
        self._trainer = trainer
        self._snap = snap
        self._held: dict[str, Any] | None = None
        self._at_iter: dict[str, Any] = rng.capture()
        self._at_first: dict[str, Any] | None = None
        self._at_last: dict[str, Any] | None = None  # of the last batch that was read: fetchers may read one ahead
        self.replaced = Replacements()

    def get(self) -> dict[str, Any]:
        """The state. Called when the next batch is about to be read."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        # A loader's state does not say where the fetcher is, which reads ahead, nor whether it moves later epochs, too.
        loops["state_dict"]["combined_loader"] = []
        first = self._at_first or rng.capture()
        return {
            "loops": loops,
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "metrics": {n: each.detach() for n, each in trainer._logger_connector._callback_metrics.items()},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "stop": trainer.should_stop,
            "accumulates": trainer.accumulate_grad_batches,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "rng": {"iter": self._at_iter, "first": first, "last": self._at_last or first},
        }

    def set(self, held: dict[str, Any]) -> None:
        """Keep the restored state until everything has been restored."""
        self._held = held

    def begin(self, kept: CallbackState) -> None:
        """Replace methods of the loops, and take over what was restored."""
        self._kept, replace = kept, self.replaced.replace
        for optimizer in self._trainer.optimizers:
            if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
                replace(optimizer, "step", _closure_first)
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        replace(fit_loop, "_load_combined_loader_states", before(self._before_iter))
        replace(epoch_loop, "reset", self._unless_resumed)
        replace(epoch_loop, "on_run_start", self._on_run_start)
        replace(epoch_loop, "_on_before_fetch", before(self._before_fetch))
        if self._held is not None:
            self._load(self._held)

    def _load(self, held: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._checkpoint_connector._loaded_checkpoint = {}
        trainer.fit_loop.load_state_dict(held["loops"])
        for config, state in zip(trainer.lr_scheduler_configs, held["schedules"], strict=True):
            config.scheduler.load_state_dict(state)
        for callback in trainer.callbacks:
            if state := held["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
        trainer._logger_connector._callback_metrics.update(held["metrics"])
        if trainer.datamodule is not None and held["datamodule"]:
            trainer.datamodule.load_state_dict(held["datamodule"])
        trainer.should_stop = held["stop"]
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.ready == epochs.processed:  # kept at the end of an earlier fit: the next epoch begins
            self._clear_restart_marks()
            self._snap.settle()  # restores the generators before its data is read

    def _clear_restart_marks(self) -> None:
        """Clear the loops' marks of being restored, with which they would skip or repeat what is due."""
        self._held = None
        for loop in _loops(self._trainer.fit_loop):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()

    def _before_iter(self) -> None:
        self._at_iter, self._at_first, self._at_last = rng.capture(), None, None

    # Each of the following takes a method of a loop and returns its replacement.

    def _unless_resumed(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Skip the reset if an epoch resumes: its counters are right as they are."""
        return lambda: None if self._held is not None else reset()

    def _on_run_start(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        def on_run_start(fetcher: Any) -> None:
            if isinstance(fetcher, _DataLoaderIterDataFetcher):
                raise ConfigError(
                    "training_step takes dataloader_iter: let it take a batch, so that its place is known"
                )
            if self._held is not None:
                self._resume(fetcher, self._held, start)
                return
            before, iterator = rng.capture(), fetcher.combined_loader._iterator
            with self._making(fetcher):
                start(fetcher)
            if fetcher.combined_loader._iterator is not iterator:
                self._at_iter, self._at_first, self._at_last = before, None, None

        return on_run_start

    def _resume(self, fetcher: Any, held: dict[str, Any], start: Callable[[Any], None]) -> None:
        """Make the next batch the one that the dead trainer was about to read."""
        self._at_iter, self._at_first, self._at_last = (held["rng"][name] for name in ("iter", "first", "last"))
        rng.restore(held["rng"]["iter"])
        with self._making(fetcher):
            iter(fetcher)
        rng.restore(held["rng"]["first"])
        seen = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for number in range(seen):
            if 0 < number == seen - 1:
                rng.restore(held["rng"]["last"])
            next(fetcher)
        fetcher.fetched -= seen  # Lightning adds them itself
        self._trainer.fit_loop._last_train_dl_reload_epoch = held["reloaded"]
        self._trainer.accumulate_grad_batches = held["accumulates"]  # callbacks set it as an epoch begins
        start(fetcher)
        self._clear_restart_marks()

    def _making(self, fetcher: Any) -> AbstractContextManager[None]:
        """Iterators of an epoch are made meanwhile."""
        loaders = [each for each in fetcher.combined_loader.flattened if is_loader(each)]
        return workers_anew(loaders, self._trainer.current_epoch)

    def _before_fetch(self) -> None:
        if self._at_first is None:
            self._at_first = rng.capture()
        self._snap.settle()
        self._at_last = rng.capture()
        self._kept.look()


def _has_stopped_early(trainer: Any) -> bool:
    """Whether ``should_stop`` ended a fit before its end, and not because there is nothing to gain any more.

    By the end of a fit the loops have counted the epoch that was stopped as a whole one.
    """
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress
    is_over = loop.max_epochs not in (None, -1) and epochs >= loop.max_epochs and batches.is_last_batch
    if not trainer.should_stop or is_over or 0 < loop.epoch_loop.max_steps <= trainer.global_step:
        return False
    none = early_stopping.EarlyStoppingReason.NOT_STOPPED
    stopping = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]
    return not any(each.stopped_epoch or each.stopping_reason is not none for each in stopping)


def _closure_first(step: Callable[..., Any]) -> Callable[..., Any]:
    """Run forward and backward, then the step. Torch's optimizers except LBFGS do the same inside their step."""

    @functools.wraps(step)
    def stepping(closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return step()
        with torch.enable_grad():
            loss = closure()
        return step(lambda: loss)

    return stepping


def _loops(loop: Any) -> Iterator[Any]:
    yield loop
    for part in vars(loop).values():
        if isinstance(part, _Loop):
            yield from _loops(part)
