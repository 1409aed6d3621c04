"""Megatron-LM's training script: the hook, plus the state that the script keeps in its arguments and in its loop."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.megatron_data import BUILD, GET, Loaders, Reruns
from holdfast.integrations.replacing import Replacements, before
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.first_turns import Checks

MODULE = "megatron.training.training"
"""The module that has Megatron-LM's training loop."""

NAME = "megatron_lm"
"""The name under which the script's state is tracked."""

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""The arguments that are counters."""

COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
"""Arguments that ``load_checkpoint`` always compares. The shapes of tensors do not reveal all of them."""

OPERATIONS = "num_floating_point_operations_so_far"
"""An argument that only has the value from when the loop began; the loop counts on in a variable of its own."""

log = get_log(__name__)


def protect(
    model: Any, optimizer: Any, scheduler: Any, args: Any, *, training: ModuleType | None = None, **options: Any
) -> InMemorySnapshot:
    """Enter the hook right after ``setup_model_and_optimizer``, before data iterators are built. A collective call.

    If the job has a snapshot in memory, it is restored, and ``args.iteration`` and the counters are set from it as
    ``load_checkpoint`` would set them. It overwrites a checkpoint loaded from disk before, which is never newer.

    From then on each call of Megatron-LM's ``train_step`` begins a step: `InMemorySnapshot.begin` is called there, so
    the state includes what an evaluation before it has changed. An evaluation that was interrupted is repeated,
    together with the iteration before it. Call `InMemorySnapshot.close` on the result when training has ended well.

    Args:
        model, optimizer, scheduler: as ``setup_model_and_optimizer`` returns them.
        args: Megatron-LM's ``get_args()``.
        training: the module whose ``train_step`` the loop calls; default ``megatron.training.training``. Without such a
            module, a step begins with the first forward in training mode.
        options: `InMemorySnapshot`'s.

    Raises:
        HoldfastError: as entering `InMemorySnapshot`.
    """
    training = training or sys.modules.get(MODULE)
    snap = _ScriptSnapshot(model, optimizer, scheduler=scheduler, **options).enter(args, getattr(training, GET, None))
    if training is not None:
        snap.listen(training)
    return snap


class InMemoryCheckpointManager:
    """For a Megatron-LM whose loop calls it: ``--non-persistent-ckpt-type in_memory``. Replaces no functions.

    Args:
        args: Megatron-LM's ``get_args()``.
        options: `InMemorySnapshot`'s.
    """

    def __init__(self, args: Any, **options: Any) -> None:
        self._args = args
        self._options = options
        self._entered: _ScriptSnapshot | None = None

    @property
    def _snap(self) -> _ScriptSnapshot:
        if self._entered is None:
            raise ConfigError("load was not called: call it right after setup_model_and_optimizer, before all others")
        return self._entered

    def load(self, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        """Restore. Call it right after ``setup_model_and_optimizer``; see `protect`. A collective call.

        Raises:
            HoldfastError: as entering `InMemorySnapshot`.
        """
        snap = _ScriptSnapshot(model, optimizer, scheduler=opt_param_scheduler, **self._options)
        self._entered = snap.enter(self._args, getattr(sys.modules.get(MODULE), GET, None))

    def load_data(self, train_dataloader: Any, valid_dataloaders: Any) -> tuple[Any, Any]:
        """Return one model chunk's data loaders such that they resume. Call after `load`, before making iterators."""
        return self._snap.loaders.go_on(train_dataloader, valid_dataloaders)

    def on_train_step_start(self, num_floating_point_operations_so_far: float) -> None:
        """Begin a step, with the state as it is now. Call it right before ``train_step``. Returns at once."""
        self._snap.begin_iteration(num_floating_point_operations_so_far)

    def close(self) -> None:
        """Give up the job's snapshots. Call it only when training has ended well. A collective call."""
        self._snap.close()


class _ScriptSnapshot(InMemorySnapshot):
    """Captures the state that the script keeps beside its model, and begins a step with each iteration."""

    checks = Checks(reading=False)  # iterators resume by counters, so random numbers drawn to make them do not matter

    def enter(self, args: Any, get_reruns: Callable[[], Any] | None) -> Self:
        """Enter with the script's state, and set the arguments to where the loop resumes. A collective call."""
        if getattr(args, "perform_rl_step", False):
            raise ConfigError("--perform-rl-step: the rollouts that a policy is trained on are not captured")
        self._args = args
        self._counters = _LoopCounters(args, lambda: self.step)
        self.loaders = Loaders(args)
        self._reruns = Reruns(get_reruns() if get_reruns is not None else None)
        self._replaced = Replacements()
        self.track(NAME, self._get, self._set)
        self.__enter__()
        self._counters.go_on()
        if self.restored.snapshot is not None:
            _update_num_microbatches(self._args)
        return self

    def listen(self, training: ModuleType) -> None:
        """Replace functions of the loop's module until this snapshot is left."""
        replace = self._replaced.replace
        replace(training, BUILD, self.loaders.building)
        follows = replace(training, "train_step", before(self.begin_iteration))
        if follows and not replace(training, "checkpoint_and_decide_exit", self._counters.noting_operations):
            log.warning(
                "the training module has no checkpoint_and_decide_exit, so %s is not followed: after a restart it "
                "counts on from its value at this start",
                OPERATIONS,
            )

    def begin_iteration(self, operations: float | None = None) -> None:
        """Begin a step: ``train_step`` is about to run.

        Args:
            operations: the value of `OPERATIONS`, if the loop passes it.
        """
        self._counters.begin(operations)
        self.begin()
        self.loaders.begun()

    def leave(self, error: BaseException | None, *, early: bool = False) -> None:
        self._replaced.undo()
        super().leave(error, early=early)

    def _get(self) -> dict[str, Any]:
        return {"counters": self._counters.get(), "data": self.loaders.get(), "reruns": self._reruns.get()}

    def _set(self, held: dict[str, Any]) -> None:
        counters = held["counters"]
        self._reruns.set(held["reruns"], same_iteration=self._args.iteration == counters["iteration"])
        self._counters.set(counters)
        self.loaders.set(held["data"])


class _LoopCounters:
    """The arguments and variables of the loop that belong to a snapshot."""

    def __init__(self, args: Any, step: Callable[[], int]) -> None:
        self._args = args
        self._step = step
        self._first: int = args.iteration
        self._iteration: int | None = None
        self._operations = getattr(args, OPERATIONS, 0)
        self._held: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """The values as a step begins. The iteration is that of this step, counted from 0."""
        held = {name: getattr(self._args, name) for name in COUNTERS if hasattr(self._args, name)}
        step = self._step()
        iteration = self._first + step if self._iteration is None else self._iteration
        return {"iteration": iteration, "step": step, OPERATIONS: self._operations, "args": self._compared()} | held

    def set(self, values: dict[str, Any]) -> None:
        """Take over what was restored. Raises `StateMismatch` if it is from another kind of model."""
        now = self._compared()
        for name, value in values["args"].items():
            if name in now and now[name] != value:
                raise StateMismatch(f"{name} is {value} in the snapshot, {now[name]} in this job")
        self._held = values
        self._first = values["iteration"] - values["step"]
        self._operations = values[OPERATIONS]
        for name in COUNTERS:
            if name in values:
                setattr(self._args, name, values[name])

    def go_on(self) -> None:
        """Set the loop's arguments, now that everything is restored."""
        if self._held:
            self._args.iteration = self._held["iteration"]
            setattr(self._args, OPERATIONS, self._operations)

    def begin(self, operations: float | None) -> None:
        """``train_step`` is about to run."""
        held, self._held = self._held, {}
        if "consumed_valid_samples" in held:  # if 0, Megatron-LM guesses it when it builds its iterators
            self._args.consumed_valid_samples = held["consumed_valid_samples"]
        self._iteration = getattr(self._args, "curr_iteration", None)
        if operations is not None:
            self._operations = operations

    def noting_operations(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``checkpoint_and_decide_exit``, which gets the value of `OPERATIONS` at the end of each iteration."""
        signature = inspect.signature(decide)

        @functools.wraps(decide)
        def deciding(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            self._operations = given.get(OPERATIONS, self._operations)
            return decide(*args, **kwargs)

        return deciding

    def _compared(self) -> dict[str, Any]:
        return {name: getattr(self._args, name) for name in COMPARED if hasattr(self._args, name)}


def _update_num_microbatches(args: Any) -> None:
    """As ``load_checkpoint`` does. Otherwise a batch size that ramps up seems to grow now and triggers a checkpoint."""
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if calculator is not None and calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
