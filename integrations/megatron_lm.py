"""Megatron-LM's training script: the hook, with what the script keeps in its arguments and in its loop."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.hook import InMemorySnapshot
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.session import Checks

MODULE = "megatron.training.training"
"""Where Megatron-LM has its loop."""

NAME = "megatron_lm"
"""What the counters are tracked under."""

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Of the arguments."""

OPERATIONS = "num_floating_point_operations_so_far"
"""An argument that only says where the loop began; the loop itself counts on in a variable of its own."""

log = get_log(__name__)


def protect(
    model: Any, optimizer: Any, scheduler: Any, args: Any, *, training: ModuleType | None = None, **options: Any
) -> InMemorySnapshot:
    """Enter the hook right after ``setup_model_and_optimizer``, before data iterators are built. A collective call.

    If the job has a snapshot in memory, it is restored, and ``args.iteration`` and the counters are set to it as
    ``load_checkpoint`` would set them. A checkpoint on disk that was loaded before, older by nature, is overwritten.

    From then on each call of Megatron-LM's ``train_step`` begins a step: `InMemorySnapshot.begin` is called there, and
    the state is what an evaluation before it has left. An evaluation that was cut short is done again, with the
    iteration before it. `InMemorySnapshot.close` what is returned when training has ended well.

    Args:
        model, optimizer, scheduler: as ``setup_model_and_optimizer`` returns them.
        args: Megatron-LM's ``get_args()``.
        training: the module whose ``train_step`` the loop calls; default ``megatron.training.training``. Where there
            is none, a step begins with the first forward in training mode.
        options: `InMemorySnapshot`'s.

    Raises:
        HoldfastError: as entering `InMemorySnapshot`.
    """
    snap = _ScriptSnapshot(model, optimizer, scheduler=scheduler, **options)
    snap.follow(args, training or sys.modules.get(MODULE))
    snap.__enter__()
    snap.go_on()
    return snap


class _ScriptSnapshot(InMemorySnapshot):
    """Stands in for two functions of the loop until it is left."""

    checks = Checks(reading=False)  # iterators go on by the counters, whatever making them draws

    def follow(self, args: Any, training: ModuleType | None) -> None:
        """Before entering."""
        self._counters = _LoopCounters(args, lambda: self.step)
        self._args = args
        self._training = training
        self._undo: list[Callable[[], None]] = []
        self.track(NAME, self._counters.get, self._counters.set)

    def go_on(self) -> None:
        """After entering: the arguments say where the loop goes on, and the loop is listened to."""
        self._counters.go_on()
        if self.restored.snapshot is not None:
            _update_num_microbatches(self._args)
            self._replace("build_pretraining_data_loader", _iterating_quietly)
        follows = self._replace("train_step", self._beginning_with)
        if follows and not self._replace("checkpoint_and_decide_exit", self._counters.noting_operations):
            log.warning("no checkpoint_and_decide_exit: after a restart, %s counts from there", OPERATIONS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        super().__exit__(kind, error, trace)

    def _beginning_with(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._counters.begin()
            self.begin()
            return train_step(*args, **kwargs)

        return stepping

    def _replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Let what `make` makes of a function of the loop's module stand in for it. Whether there is one."""
        original = getattr(self._training, name, None)
        if original is None:
            return False
        while isinstance(original, _StandIn):  # of a run that this process has given up
            original = original.original
        stand_in = _StandIn(original, make(original))
        setattr(self._training, name, stand_in)

        def undo() -> None:
            if getattr(self._training, name) is stand_in:
                setattr(self._training, name, original)

        self._undo.append(undo)
        return True


class _StandIn:
    """What is called instead of `original`."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _LoopCounters:
    """What of the arguments and of the loop goes with a snapshot."""

    def __init__(self, args: Any, step: Callable[[], int]) -> None:
        self._args = args
        self._step = step
        self._first: int = args.iteration
        self._iteration: int | None = None
        self._operations = getattr(args, OPERATIONS, 0)
        self._held: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """As a step begins: the iteration is that of this step, counted from 0."""
        held = {name: getattr(self._args, name) for name in COUNTERS if hasattr(self._args, name)}
        step = self._step()
        iteration = self._first + step if self._iteration is None else self._iteration
        return {"iteration": iteration, "step": step, OPERATIONS: self._operations} | held

    def set(self, values: dict[str, Any]) -> None:
        """Take over what was restored."""
        self._held = values
        self._first = values["iteration"] - values["step"]
        self._operations = values[OPERATIONS]
        for name in COUNTERS:
            if name in values:
                setattr(self._args, name, values[name])

    def go_on(self) -> None:
        """All is restored: say so to the loop."""
        if self._held:
            self._args.iteration = self._held["iteration"]
            setattr(self._args, OPERATIONS, self._operations)

    def begin(self) -> None:
        """``train_step`` is called."""
        held, self._held = self._held, {}
        if "consumed_valid_samples" in held:  # where it is 0, Megatron-LM guesses it when it builds its iterators
            self._args.consumed_valid_samples = held["consumed_valid_samples"]
        self._iteration = getattr(self._args, "curr_iteration", None)

    def noting_operations(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        """``checkpoint_and_decide_exit``, which is told of them at the end of each iteration."""
        signature = inspect.signature(decide)

        @functools.wraps(decide)
        def deciding(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            self._operations = given.get(OPERATIONS, self._operations)
            return decide(*args, **kwargs)

        return deciding


def _update_num_microbatches(args: Any) -> None:
    """As ``load_checkpoint`` does: else a batch size that grows is taken to grow just then, and a checkpoint saved."""
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if calculator is not None and calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def _iterating_quietly(build: Callable[..., Any]) -> Callable[..., Any]:
    """``build_pretraining_data_loader``, for a pass that goes on in the middle: its iterator was there already when the
    run before took its snapshot. With ``cyclic`` it is made as the first batch is read, after the generators were put
    back; what making it draws must not move them."""

    @functools.wraps(build)
    def building(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        sampler = getattr(loader, "batch_sampler", None)
        consumed, total = getattr(sampler, "consumed_samples", 0), getattr(sampler, "total_samples", 0)
        whole = total - getattr(sampler, "last_batch_size", 0)
        if isinstance(loader, DataLoader) and whole > 0 and consumed % whole:
            _make_first_iterator_quiet(loader)
        return loader

    return building


def _make_first_iterator_quiet(loader: Any) -> None:
    make = loader._get_iterator

    def quietly() -> Any:
        del loader._get_iterator
        state = torch.get_rng_state()
        try:
            return make()
        finally:
            torch.set_rng_state(state)

    loader._get_iterator = quietly
