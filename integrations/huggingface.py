"""Hugging Face's ``transformers.Trainer``: ``protect(trainer); trainer.train()`` resumes a run that died.

A callback alone is not enough: it can neither set the epoch in which the loop begins, nor learn of exceptions. So some
of the trainer's methods are wrapped as well. The trainer's own code skips batches that were seen before.

A snapshot is complete in ``on_step_begin`` of the next step, after logs, evaluation and callbacks have run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast.hook import InMemorySnapshot, SettledSnapshot
from holdfast.integrations.accelerate import with_generator
from holdfast.integrations.adapters.releases import need_release
from holdfast.integrations.callbacks import CallbackState, SubclassState
from holdfast.integrations.replacing import guarded
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.resume.comparison import refuse
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import digest_of, digest_of_batch
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.source import is_loader, workers_anew

NAME = "huggingface"
"""The name under which the trainer's state is tracked."""

STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Captured fields of `TrainerState`, besides ``log_history``. The others follow from the arguments."""

TRAINER = ("_total_loss_scalar", "_initial_global_step", "_globalstep_last_logged", "current_flos")
"""Sums and counters of the trainer itself, besides ``_tr_loss``. Releases before 5.19 lack the second."""


def protect(
    trainer: Trainer, *, track: Callable[[InMemorySnapshot, Trainer], None] | None = None, **options: Any
) -> ProtectCallback:
    """Keep the state of `trainer` in memory. Call it once, before ``trainer.train()``, after other callbacks are added.

    A run that was killed and started again ends as if nothing had happened. Restored are: parameters, buffers,
    optimizer, schedule and gradient scaler; the random generators; `TrainerState` with its ``log_history``; the losses
    and operations added up since the last log; the attributes that stateful callbacks export; modules and dicts of
    tensors in attributes of callbacks, such as averages; the epoch, and how many of its steps are done.

    Restored as well are numbers, texts, tensors and containers of these in attributes of the user's own callbacks,
    unless they set others to anything else meanwhile.

    Not restored: memory and speed metrics, which count from the last start, as when Trainer itself resumes; any other
    state of callbacks: if they change tensors, one warning names these. The epoch's data loader is made
    again from the same state of the random generators, and the trainer skips what was seen, by index where the data set
    has indices. If random numbers were drawn while batches were made, as by a collator that masks at random, or if
    there are workers, the epoch is read again instead. The first batches are compared with those of the earlier run.
    What a subclass of Trainer keeps in attributes is restored if it consists of numbers, texts, tensors and containers
    of these. Use `track` for any other state, such as that of a data set.

    Training that stops before ``max_steps``, because a callback asked for it, keeps the snapshots for the next start,
    unless it was `EarlyStoppingCallback`. An evaluation that was interrupted is repeated, together with the step before
    it. For finished epochs callbacks get ``on_epoch_begin`` again, but no other event. A snapshot takes precedence over
    ``train(resume_from_checkpoint=...)``.

    Supports one process, and DDP. Training blocks as `holdfast.InMemorySnapshot` says.

    Args:
        track: called with the snapshot and the trainer before the state is restored, for `InMemorySnapshot.track`.
        options: for `holdfast.InMemorySnapshot`.

    Returns:
        The callback that was added. Its ``snapshot`` is the `InMemorySnapshot`, while the trainer trains.

    Raises:
        ConfigError: transformers is too old; the trainer uses ``auto_find_batch_size``, ``ignore_data_skip``, FSDP or
            DeepSpeed, or is protected already; or, from ``train``, after the first steps: its class keeps batches that
            are not captured.
        HoldfastError: from ``train``: whatever `InMemorySnapshot` raises on entering, and at the first step.
    """
    need_release("transformers", transformers.__version__, "5.9")
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size is not supported, because batches may have another size after a restart: set "
            "per_device_train_batch_size instead"
        )
    if trainer.args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip is not supported, because a restart has to find the place in the data: leave it out"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError("FSDP and DeepSpeed under transformers.Trainer are not supported: use one process, or DDP")
    if any(isinstance(callback, ProtectCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigError("this trainer is protected already")
    callback = ProtectCallback(trainer, track, options)
    trainer.add_callback(callback)
    trainer._inner_training_loop = guarded(callback.leave)(trainer._inner_training_loop)
    trainer._run_epoch = callback.place(trainer._run_epoch)
    trainer.get_batch_samples = callback.read(trainer.get_batch_samples)
    trainer._load_rng_state = callback.unless_resumed(trainer._load_rng_state)
    trainer._evaluate = callback.unless_resumed(trainer._evaluate)
    return callback


class ProtectCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Made by `protect`. Restores in ``on_train_begin``, and completes a snapshot in ``on_step_begin``."""

    def __init__(
        self, trainer: Trainer, track: Callable[[InMemorySnapshot, Trainer], None] | None, options: dict[str, Any]
    ) -> None:
        self.snapshot: SettledSnapshot | None = None
        self._trainer = trainer
        self._track = track
        self._options = options
        self._callbacks: CallbackState | None = None
        self._history = _LogHistory()
        self._kept: SubclassState | None = None
        self._reading: Reading | None = None
        self._held: dict[str, Any] | None = None
        self._begin_epoch(0, 0, 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        extra = {"scaler": getattr(trainer.accelerator, "scaler", None), **self._options.get("extra", {})}
        snap = SettledSnapshot(
            trainer.model_wrapped,
            _innermost(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            **{**self._options, "extra": extra},
        )
        snap.track(NAME, get=self._get, set=self._set)
        if self._track is not None:
            self._track(snap, trainer)
        self._kept = SubclassState(trainer, Trainer, trainer.args.device)
        others = [callback for callback in trainer.callback_handler.callbacks if callback is not self]
        self._callbacks = CallbackState(snap, others, TrainerCallback, _state_of)
        snap.__enter__()
        self.snapshot = snap
        if self._held is not None:
            self._load(self._held, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._held = None
        if self.snapshot is not None and self._callbacks is not None:
            self.snapshot.settle()  # the first time, this restores the generators
            self._callbacks.look()
            if self._kept is not None:
                self._kept.check(self.snapshot.tracked)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._has_stopped_early():
            return  # the epoch's end has run too soon: the last step is repeated
        if state.global_step - self._first >= self._steps:
            self._begin_epoch(self._epoch + 1, state.global_step, self._steps)
        if self._reading is not None:
            self._reading.between()
        if self.snapshot is not None:
            self.snapshot.settle()

    # Replacements of the trainer's methods.

    def place(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``_run_epoch``, to resume where the dead run was."""

        @functools.wraps(run)
        def run_epoch(**kwargs: Any) -> Any:
            epoch, steps, held = kwargs["epoch"], kwargs["num_update_steps_per_epoch"], self._held
            each = self._trainer.args.gradient_accumulation_steps
            if held is None or epoch == held["epoch"]:
                loader = kwargs["train_dataloader"]
                with_generator(loader)
                if hasattr(loader, "set_epoch"):
                    loader.set_epoch(epoch)  # the trainer tells only the loader that skips
                self._reading = Reading(loader, epoch, self._beat)
            if held is None:
                skipped = kwargs["steps_trained_in_current_epoch"] if epoch == kwargs["epochs_trained"] else 0
                self._begin_epoch(epoch, self._trainer.state.global_step - skipped // each, steps)
                return run(**kwargs)
            if epoch < held["epoch"]:
                return None
            if epoch > held["epoch"]:
                raise ConfigError(
                    f"resume_from_checkpoint begins in epoch {epoch}, but the snapshot in memory is from epoch "
                    f"{held['epoch']}: remove one of them"
                )
            rng.restore(held["rng"])
            self._begin_epoch(epoch, self._trainer.state.global_step - held["done"], steps)
            done = held["done"] * each
            here = {
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": done,
                "resume_from_checkpoint": "memory" if done else None,
            }
            return run(**{**kwargs, **here})

        return run_epoch

    def read(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``get_batch_samples``, to note where the batches of a step come from, and to find them again."""

        @functools.wraps(take)
        def get_batch_samples(epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            def reads(iterator: Any) -> Any:
                return take(iterator, num_batches, device)

            reading, held = self._reading, self._held
            if reading is None:
                return reads(epoch_iterator)
            if held is None:
                return reading.group(epoch_iterator, reads)
            done = held["done"] * self._trainer.args.gradient_accumulation_steps
            return reading.resume(held["reading"], done, epoch_iterator, reads)

        return get_batch_samples

    def unless_resumed(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what is skipped until the first step of a run that resumes from memory: ``_load_rng_state``, since there
        is no file, and ``_evaluate``, since what ``eval_on_start`` asks for was done by the run that began."""
        return lambda *args, **kwargs: do(*args, **kwargs) if self._held is None else None

    # Internals.

    def _begin_epoch(self, epoch: int, first: int, steps: int) -> None:
        self._epoch, self._first, self._steps, self._at_epoch = epoch, first, steps, rng.capture()

    def _get(self) -> dict[str, Any]:
        """The state. Called in ``on_step_begin`` of the next step, and at the end of training."""
        trainer, state = self._trainer, self._trainer.state
        return {
            "state": {name: getattr(state, name) for name in STATE},
            "history": self._history.text(state.log_history),
            "trainer": {name: getattr(trainer, name) for name in TRAINER if hasattr(trainer, name)},
            "loss": trainer._tr_loss,
            "callbacks": [callback.state()["attributes"] for callback in self._stateful()],
            "epoch": self._epoch,
            "done": state.global_step - self._first,
            "rng": self._at_epoch,
            "reading": self._reading.state() if self._reading is not None else {},
            "kept": self._kept.get() if self._kept is not None else {},
        }

    def _beat(self) -> None:
        if self.snapshot is not None:
            self.snapshot.heartbeat()

    def _set(self, held: dict[str, Any]) -> None:
        self._held = held

    def _load(self, held: dict[str, Any], state: Any) -> None:
        for name, value in held["state"].items():
            setattr(state, name, value)
        state.log_history = [json.loads(line) for line in held["history"].splitlines()]
        for name, value in held["trainer"].items():
            setattr(self._trainer, name, value)
        with torch.no_grad():
            self._trainer._tr_loss.copy_(held["loss"])
        if self._kept is not None:
            self._kept.put(held["kept"])
        for callback, attributes in zip(self._stateful(), held["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _stateful(self) -> list[Any]:
        return [part for part in self._trainer.callback_handler.callbacks if isinstance(part, ExportableState)]

    def leave(self, error: BaseException | None) -> None:
        """Training has ended by `error`, or, if it is None, well or early."""
        try:
            if self.snapshot is not None:
                self.snapshot.leave(error, early=error is None and self._has_stopped_early())
        finally:
            self.snapshot = None
            self._held = self._kept = self._reading = None
            self._begin_epoch(0, 0, 1)

    def _has_stopped_early(self) -> bool:
        """Whether a callback stopped training before its end, and not because there is nothing to gain any more."""
        trainer = self._trainer
        if trainer.state.global_step >= trainer.state.max_steps:
            return False
        stopping = [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        return all(each.early_stopping_patience_counter < each.early_stopping_patience for each in stopping)


def _state_of(callback: Any) -> Any:
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else None


class _LogHistory:
    """``log_history`` as lines of JSON. Only encodes new entries, because the list grows throughout a run."""

    def __init__(self) -> None:
        self._text = ""
        self._count = 0

    def text(self, history: list[dict[str, Any]]) -> str:
        if len(history) < self._count:
            self._text, self._count = "", 0
        self._text += "".join(json.dumps(entry, default=float) + "\n" for entry in history[self._count :])
        self._count = len(history)
        return self._text


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which is an optimizer by type only."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    result: torch.optim.Optimizer = optimizer
    return result


log = get_log(__name__)


class Reading:
    """One pass of a trainer over its loader, read step by step: `group` reads the batches of one step.

    The trainer reads all batches of a step before the hook learns of the step, and its loader (Accelerate's) reads one
    batch ahead of what it gives. So a batch is drawn from the random generators as they were before the reading of the
    batch before it.

    Args:
        loader: gives a new iterator for each pass.
        epoch: how many passes are finished.
        heartbeat: called while batches are read again, which may take long, to show that this process is alive.
    """

    def __init__(self, loader: Any, epoch: int, heartbeat: Callable[[], None]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._heartbeat = heartbeat
        self._own = rng.find(loader)
        self._iterator: Iterator[Any] | None = None
        self._opened = False  # whether a batch of the iterator was read; with the first one its seeds are drawn
        self._skips = getattr(loader, "num_workers", 0) == 0  # workers draw by themselves
        self._start = self._last = self._generators()
        self._noted = self._note()

    def state(self) -> Tree:
        """The pass as plain values: where it was before the newest group was read, and digests of that group."""
        return {"start": self._start, **self._noted}

    def between(self) -> None:
        """The next group has not been read yet."""
        self._noted = self._note()

    def group(self, iterator: Iterator[Any], read: Callable[[Iterator[Any]], Any]) -> Any:
        """Call `read` with an iterator, from which it reads the batches of one step; returns what it returns.

        Args:
            iterator: the trainer's; it is read unless `resume` has begun the pass anew.
        """
        if self._iterator is None:
            self._iterator = iterator
        noted, taken = self._note(), list[Any]()
        result = read(map(self._next, repeat(taken)))
        self._noted = {**noted, "batches": digest_of_batch(taken), "drawn": _digest(self._generators())}
        return result

    def resume(self, held: Tree, done: int, iterator: Iterator[Any], read: Callable[[Iterator[Any]], Any]) -> Any:
        """`group` for the first step after a restart, which comes after `done` batches of the pass.

        If nothing was drawn for those batches, the trainer's iterator is read, which has skipped them. Otherwise, or if
        that leads elsewhere, the pass is read again.

        Args:
            held: `state` of the earlier run.

        Raises:
            StateMismatch: the batches are not those that followed in the earlier run.
        """
        self._start = held["start"]
        self._put(self._start)
        if held["skips"]:
            result = self._continue(held, iterator, False, read)
            if held["batches"] in ("", self._noted["batches"]):
                return result
            log.info("to skip batches of the trainer's pass leads elsewhere")
        iterator = self._again(done, held["last"])
        self._put(held["now"])
        result = self._continue(held, iterator, done > 0, read)
        if held["batches"] and any(self._noted[name] != held[name] for name in ("batches", "drawn")):
            refuse(
                f"the trainer's data is not where it was: after {done} batches of this pass it gives others than in "
                "the earlier run. The data or the number of ranks has changed, or it depends on what is not restored: "
                "`track` that, or derive what is random in a batch from its samples"
            )
        return result

    def _continue(self, held: Tree, iterator: Iterator[Any], opened: bool, read: Callable[[Iterator[Any]], Any]) -> Any:
        self._iterator, self._opened = iterator, opened
        self._skips, self._last = held["skips"], held["last"]
        return self.group(iterator, read)

    def _again(self, done: int, last: Tree) -> Iterator[Any]:
        log.info("batches of the trainer's pass that are read again: %d", done)
        self._put(self._start)
        iterator: Iterator[Any] = iter(self._loader)
        for number in range(done):
            if 0 < number == done - 1:
                rng.restore(last["global"])
            with self._making() if number == 0 else nullcontext():
                next(iterator, None)
            self._heartbeat()
        return iterator

    def _next(self, taken: list[Any]) -> Any:
        assert self._iterator is not None
        before = self._generators()
        with self._making() if not self._opened else nullcontext():
            batch = next(self._iterator)
        if self._opened and self._skips:
            self._skips = _digest(before) == _digest(self._generators())
        self._opened, self._last = True, before
        taken.append(batch)
        return batch

    def _making(self) -> AbstractContextManager[None]:
        """The trainer's loader makes the iterator of the loader inside when its first batch is read."""
        inner = getattr(self._loader, "base_dataloader", self._loader)
        return workers_anew([inner] if is_loader(inner) else [], self._epoch)

    def _note(self) -> Tree:
        return {"now": self._generators(), "last": self._last, "skips": self._skips, "batches": "", "drawn": ""}

    def _generators(self) -> Tree:
        return rng.capture_with(self._own)

    def _put(self, generators: Tree) -> None:
        rng.restore_with(self._own, generators, "the trainer's data")


def _digest(generators: Tree) -> str:
    """A digest of all but devices' generators, which may not be there yet."""
    return digest_of([rng.on_host(generators["global"]), generators["own"]])
