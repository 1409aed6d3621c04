"""PyTorch Lightning: ``Trainer(callbacks=[InMemoryCallback()])`` keeps a fit in memory, and goes on with one that died.

Lightning runs forward and backward inside ``optimizer.step(closure)``; here the closure runs just before the step, so
that copies overlap with it. A snapshot is complete when the next batch is about to be read: then validation, the end
of the epoch, schedules and the callbacks have had their turn, and no random number for that batch has been drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops import _Loop
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

from holdfast.hook import InMemorySnapshot, SettledSnapshot
from holdfast.integrations.callbacks import Overlooked, keep_averages
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state import rng

NAME = "lightning"
"""What the loops' state is tracked under."""

ARRAY = "lightning.array"
"""Marks a small tensor that is kept among the plain values: as a leaf, each new one would need a new layout."""


class InMemoryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Restores in ``on_fit_start``, takes snapshots while the trainer fits, and ends the job in ``on_fit_end``.

    Carried, so that a fit that was killed and started again ends as if nothing had happened: parameters, buffers,
    optimizers, schedules and the gradient scaler; the random generators; all counters of the fit loop (epoch, batch,
    global step, those of validation); ``callback_metrics``, ``should_stop`` and the states of the other callbacks and
    of the datamodule; modules and dicts of tensors that callbacks have before ``on_fit_start``, as `WeightAveraging`
    has; the place in the training data. A data loader with ``state_dict`` is asked for its place. Of any
    other the epoch's iterator is made again with the random numbers that it was made with, and the batches that were
    seen are read again and dropped; so their content may depend on the sampler, but a data set that keeps state of its
    own must be tracked.

    Not carried: accumulated metrics (``self.log(..., on_epoch=True)`` in ``training_step``, torchmetrics), which after
    a restart cover the rest of the epoch only, so let nothing that steers training monitor them; what loggers and
    the progress bar show; ``on_save_checkpoint`` of the module; wall-clock timers. Give what else there is to `track`.

    A validation that was cut short is done again, with the step before it. Hooks for the start of the epoch are not
    called again when it goes on in the middle; ``on_fit_start`` and ``on_train_start`` are. A snapshot wins over
    ``fit(ckpt_path=...)``. Other tensors that callbacks change are named in a warning, once. All steps of optimizers
    within a batch count as one.

    For one process, and for ``strategy="ddp"``. The trainer blocks as `holdfast.InMemorySnapshot` says.

    Args:
        track: called with the snapshot and the module before the state is restored, for `InMemorySnapshot.track`.
        options: for `holdfast.InMemorySnapshot`.

    Raises:
        ConfigError: from ``fit``: a ``training_step`` that takes ``dataloader_iter`` reads data where nobody sees it.
        HoldfastError: from ``fit``, whatever `InMemorySnapshot` raises on entering, and at the first step.
    """

    def __init__(self, *, track: Callable[[InMemorySnapshot, Any], None] | None = None, **options: Any) -> None:
        self._track = track
        self._options = options
        self._snap: SettledSnapshot | None = None
        self._fit: _Fit | None = None

    @property
    def snapshot(self) -> InMemorySnapshot | None:
        """What keeps the state, while the trainer fits."""
        return self._snap

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        extra = {**({"scaler": scaler} if scaler is not None else {}), **self._options.get("extra", {})}
        snap = SettledSnapshot(trainer.strategy.model, trainer.optimizers, **{**self._options, "extra": extra})
        fit = _Fit(trainer, snap)
        snap.track(NAME, get=fit.get, set=fit.set)
        if self._track is not None:
            self._track(snap, pl_module)
        others = [callback for callback in trainer.callbacks if callback is not self]
        keep_averages(snap, others, _state_of)
        own = rng.capture()
        snap.__enter__()
        rng.restore(own)  # a train_dataloader() that splits data at random does so as when the job began
        self._snap, self._fit = snap, fit
        fit.begin(Overlooked(snap, others, _state_of))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._snap is not None:
            self._snap.settle()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        snap, fit, self._snap, self._fit = self._snap, self._fit, None, None
        if fit is not None:
            fit.end()
        if snap is not None:
            snap.__exit__(type(error) if error is not None else None, error, None)


class _Fit:
    """The state of a trainer's loops: how it is read, and how they go on with it."""

    def __init__(self, trainer: Any, snap: SettledSnapshot) -> None:
        self._trainer = trainer
        self._snap = snap
        self._held: dict[str, Any] | None = None
        self._at_iter: dict[str, Any] = rng.capture()
        self._at_first: dict[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def get(self) -> dict[str, Any]:
        """Called as the next batch is about to be read."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": _plain({callback.state_key: callback.state_dict() for callback in trainer.callbacks}),
            "metrics": _plain(dict(trainer._logger_connector._callback_metrics)),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "stop": trainer.should_stop,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "rng": {"iter": self._at_iter, "first": self._at_first or rng.capture()},
        }

    def set(self, held: dict[str, Any]) -> None:
        """Kept until all has been restored."""
        self._held = held

    def begin(self, overlooked: Overlooked) -> None:
        """Take over what was restored, and listen to the loops."""
        self._overlooked = overlooked
        for optimizer in self._trainer.optimizers:
            if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
                self._replace(optimizer, "step", _closure_first)
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        self._replace(fit_loop, "_load_combined_loader_states", self._before_iter)
        self._replace(epoch_loop, "reset", self._unless_resumed)
        self._replace(epoch_loop, "on_run_start", self._on_run_start)
        self._replace(epoch_loop, "_on_before_fetch", self._before_fetch)
        if self._held is not None:
            self._load(self._held)

    def end(self) -> None:
        """Leave the trainer as it was."""
        while self._undo:
            self._undo.pop()()

    def _load(self, held: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._checkpoint_connector._loaded_checkpoint = {}
        trainer.fit_loop.load_state_dict(held["loops"])
        for config, state in zip(trainer.lr_scheduler_configs, held["schedules"], strict=True):
            config.scheduler.load_state_dict(state)
        states = _tensors(held["callbacks"])
        for callback in trainer.callbacks:
            if state := states.get(callback.state_key):
                callback.load_state_dict(state)
        trainer._logger_connector._callback_metrics.update(_tensors(held["metrics"]))
        if trainer.datamodule is not None and held["datamodule"]:
            trainer.datamodule.load_state_dict(held["datamodule"])
        trainer.should_stop = held["stop"]
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.ready == epochs.processed:  # kept at the end of a fit, and fitted on: the next epoch begins
            self._went_on()
            self._snap.settle()  # puts the generators back before its data is read

    def _went_on(self) -> None:
        """The loops need not know any more that they were restored: they would skip or repeat what is due."""
        self._held = None
        for loop in _loops(self._trainer.fit_loop):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()

    # What stands in for a method is given that method.

    def _before_iter(self, load: Callable[[], None]) -> Callable[[], None]:
        def before_iter() -> None:
            self._at_iter, self._at_first = rng.capture(), None
            load()

        return before_iter

    def _unless_resumed(self, reset: Callable[[], None]) -> Callable[[], None]:
        """The counters of an epoch that goes on are right as they are."""
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
            start(fetcher)
            if fetcher.combined_loader._iterator is not iterator:
                self._at_iter, self._at_first = before, None

        return on_run_start

    def _resume(self, fetcher: Any, held: dict[str, Any], start: Callable[[Any], None]) -> None:
        """Have the next batch be the one that the trainer that died was about to read."""
        self._at_iter, self._at_first = held["rng"]["iter"], held["rng"]["first"]
        if not held["loops"]["state_dict"].get("combined_loader"):
            rng.restore(self._at_iter)
            iter(fetcher)
            rng.restore(held["rng"]["first"])
            seen = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
            for _ in range(seen):
                next(fetcher)
            fetcher.fetched -= seen  # Lightning adds them
        self._trainer.fit_loop._last_train_dl_reload_epoch = held["reloaded"]
        start(fetcher)
        self._went_on()

    def _before_fetch(self, profile: Callable[[], None]) -> Callable[[], None]:
        def before_fetch() -> None:
            if self._at_first is None:
                self._at_first = rng.capture()
            self._snap.settle()
            self._overlooked.look()
            profile()

        return before_fetch

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let what `make` makes of a method of this one object stand in for it."""
        earlier = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))
        self._undo.append(lambda: delattr(owner, name) if earlier is None else setattr(owner, name, earlier))


def _state_of(callback: Any) -> Any:
    return callback.state_dict()


def _closure_first(step: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward, then the step: torch's optimizers but LBFGS do the same, inside of their step."""

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


def _plain(value: Any) -> Any:
    """`value` with the tensors that numpy can hold as arrays. On a device they stay: reading them would wait for it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype is not torch.bfloat16:
        return (ARRAY, value.detach().numpy().copy())
    return value


def _tensors(value: Any) -> Any:
    """What `_plain` made its argument from."""
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and value[0] == ARRAY and isinstance(value[1], np.ndarray):
        return torch.from_numpy(value[1])
    return value
