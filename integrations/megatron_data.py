"""What Megatron-LM's loop keeps beside its model: how its data loaders resume, and its rerun state machine.

Megatron-LM's own samplers resume by the counters in its arguments. This module handles the rest: loaders that are read
over and over, whose first pass a new process would begin again; and loaders that the script provides
(``--dataloader-type external``), which report their own place, as Energon's do.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.values import packed, unpacked
from holdfast.snapshot.state.worker_states import copy_worker_states

BUILD = "build_train_valid_test_data_loaders"
"""The function that returns all loaders. Arguments say of which kind these are."""

HOOKS = (
    ("save_state_rank", "restore_state_rank"),
    ("save_state", "restore_state"),
    ("state_dict", "load_state_dict"),
)
"""Methods that return a loader's place and restore it: Energon's, Megatron-LM's own names for these, torchdata's."""

SAVE = "save_state"
"""The method that Megatron-LM's checkpoints call on a loader."""

log = get_log(__name__)


class Loaders:
    """The loaders of one rank, in the order in which they are built. For the training thread only."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._places: dict[str, Passes | Hooked] = {}
        self._held: dict[str, Any] | None = None
        self._builds = 0

    def get(self) -> dict[str, Any]:
        """The places as a step begins; until the first step has begun, what was restored."""
        if self._held is not None:
            return self._held
        return {"ranks": self._ranks(), "places": {name: place.get() for name, place in self._places.items()}}

    def set(self, held: dict[str, Any]) -> None:
        """Keep what was restored, until the loaders are built."""
        self._held = held

    def begun(self) -> None:
        """The first step of this process has begun: batches are read from now on, so what was restored is outdated."""
        self._held = None

    def building(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `BUILD`, so that its loaders resume."""

        @functools.wraps(build)
        def building(*args: Any, **kwargs: Any) -> Any:
            train, valid, test = build(*args, **kwargs)
            return (*self.go_on(train, valid), test)

        return building

    def go_on(self, train: Any, valid: Any) -> tuple[Any, Any]:
        """The loaders of one model chunk, or wrappers of them, such that they resume; None where this rank has none.

        Raises:
            ConfigError: a loader reports its place but cannot restore it, or another number of ranks read it.
            StateMismatch: the snapshot has no such loader.
        """
        chunk, self._builds = self._builds, self._builds + 1
        if train is not None:
            train = self._one(f"train{chunk}", train, trains=True)
        if isinstance(valid, list):
            valid = [
                self._one(f"valid{chunk}/{i}", each, trains=False) if each is not None else None
                for i, each in enumerate(valid)
            ]
        return train, valid

    def _one(self, name: str, loader: Any, *, trains: bool) -> Any:
        kind = self._args.dataloader_type
        if kind == "external":
            place = _hooked(name, loader, trains=trains)
            if place is not None:
                self._add(name, place)
        elif not trains and getattr(self._args, "full_validation", False):
            loader = Passes(loader)
            self._add(name, loader)
        elif kind == "cyclic" and self._held is not None and is_under_way(loader):
            make_first_iterator_quiet(loader)
        return loader

    def _add(self, name: str, place: Passes | Hooked) -> None:
        self._places[name] = place
        if self._held is None:
            return
        if name not in self._held["places"]:
            raise StateMismatch(
                f"the snapshot has no place for data loader {name!r}, because the run that took it had no such loader: "
                "start with the loaders of that run"
            )
        if self._held["ranks"] != self._ranks():
            raise ConfigError(
                f"data loader {name!r} was read by {self._held['ranks']} data-parallel ranks, there are "
                f"{self._ranks()} now, and each knows its own place only: start with as many as before"
            )
        place.set(self._held["places"][name])

    def _ranks(self) -> int | None:
        return getattr(self._args, "data_parallel_size", None)


class Passes:
    """A loader that Megatron-LM reads from its beginning in every process, and then over and over: its full validation.

    If it has fewer batches than on other ranks, it is in the middle of a pass between evaluations.
    """

    def __init__(self, loader: Any) -> None:
        self._loader: Any = loader
        self._read = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._note, iter(self._loader))

    def _note(self, batch: Any) -> Any:
        self._read += 1
        return batch

    def get(self) -> int:
        """Number of batches read since the job began."""
        return self._read

    def set(self, held: int) -> None:
        """Continue after `held` batches."""
        self._read = held
        sampler = self._loader.batch_sampler
        if hasattr(sampler, "last_batch_size"):  # it shuffles each pass by this counter
            sampler.consumed_samples += held * sampler.micro_batch_times_data_parallel_size
            into, begun = 0, is_under_way(self._loader)
        else:
            into = held % len(self._loader)
            begun = bool(into) or (self._loader.persistent_workers and held > 0)
        if begun:
            make_first_iterator_quiet(self._loader, into)


def is_under_way(loader: Any) -> bool:
    """Whether the loader's next iterator already existed in the run before, according to its sampler's counter.

    It existed in the middle of a pass; persistent workers keep it for all passes.
    """
    sampler = getattr(loader, "batch_sampler", None)
    consumed, total = getattr(sampler, "consumed_samples", 0), getattr(sampler, "total_samples", 0)
    whole = total - getattr(sampler, "last_batch_size", 0)
    if not isinstance(loader, DataLoader) or whole <= 0:
        return False
    return bool(consumed % whole) or (loader.persistent_workers and consumed > 0)


class Hooked:
    """A loader of the script that reports its own place."""

    def __init__(self, owner: Any, save: str, restore: str) -> None:
        copy_worker_states(owner)
        self._owner = owner
        self._save = save
        self._restore = restore

    def get(self) -> Any:
        """The loader's state."""
        return getattr(self._owner, self._save)()

    def set(self, held: Any) -> None:
        """Make the loader resume from there."""
        getattr(self._owner, self._restore)(copy.deepcopy(held))
        if isinstance(self._owner, DataLoader):
            make_first_iterator_quiet(self._owner)


def make_first_iterator_quiet(loader: Any, skip: int = 0) -> None:
    """Have the loader's first iterator made without advancing the random generators.

    The run before made it, and drew its workers' seed, before the snapshot. Here it is made when the first batch is
    read, when the generators are already those of the snapshot.

    Args:
        skip: number of batches that the iterator had returned: they are read again.
    """
    make = loader._get_iterator

    def quietly() -> Any:
        del loader._get_iterator
        with rng.undrawn():
            iterator = make()
            for _ in islice(iterator, skip):
                pass
        return iterator

    loader._get_iterator = quietly


def _hooked(name: str, loader: Any, *, trains: bool) -> Hooked | None:
    """The loader and its methods among `HOOKS`. What Megatron-LM gets often only wraps the loader in an attribute."""
    for owner in (loader, *getattr(loader, "__dict__", {}).values()):
        if not hasattr(owner, "__iter__") and not hasattr(owner, "__next__"):
            continue  # not a loader: a model has a state_dict, too
        for save, restore in HOOKS:
            if callable(getattr(owner, save, None)) and callable(getattr(owner, restore, None)):
                return Hooked(owner, save, restore)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    known = ", or ".join(f"{save} and {restore}" for save, restore in HOOKS)
    if trains and hasattr(loader, SAVE):
        raise ConfigError(
            f"data loader {name!r}, a {kind}, has {SAVE}, but no method that restores what this returns: after a "
            "restart it would begin anew, and the job would train on other data; give it, or an attribute of it, "
            f"{known}"
        )
    log.warning(
        "data loader %r, a %s, does not say where it is, so its place is in no snapshot: after a restart it begins "
        "where the script's provider begins it; if that is the wrong place, give it, or an attribute of it, %s",
        name,
        kind,
        known,
    )
    return None


GET = "get_rerun_state_machine"
"""The function from which the loop gets the machine."""

CHECKPOINTED = (
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "suspicious_node",
    "suspicious_device",
    "large_value_counts",
    "max_values",
)
"""Attributes with plain values that Megatron-LM's own checkpoint of a pending rerun contains, too."""

NEEDED = (
    *CHECKPOINTED,
    "state",
    "current_iteration",
    "first_iteration_complete",
    "failed_validation_call",
    "initial_result",
    "error_injector",
    "stats",
)
"""Attributes that a machine must have. The command line sets `mode`, and each step sets all others anew."""

NEEDED_OF_MODULE = ("RerunState", "RerunDiagnostic", "Caller", "Call", "QuickStats")

SAMPLED = ("pos", "zero_cnt", "max", "max_size")
"""Attributes of statistics, besides the samples."""


class Reruns:
    """The state of this process's rerun state machine, which runs an iteration again when one of its results looks
    wrong. For the training thread only.

    Megatron-LM's own checkpoints contain it only while a rerun is pending. Between two steps no rerun is pending,
    except in a process that was started from such a checkpoint. A rerun that was interrupted is repeated from the
    iteration's first run, with the same random numbers.

    Args:
        machine: Megatron's ``get_rerun_state_machine()``; None: the loop has none.

    Raises:
        ConfigError: the machine's version is not known.
    """

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        if machine is None:
            return
        self._module: Any = sys.modules[type(machine).__module__]
        missing = [f"{type(machine).__name__}.{name}" for name in NEEDED if not hasattr(machine, name)]
        missing += [name for name in NEEDED_OF_MODULE if not hasattr(self._module, name)]
        if missing:
            raise ConfigError(f"{self._module.__name__} has no {', '.join(missing)}: this version of it is not known")

    def get(self) -> dict[str, Any] | None:
        """The state as a step begins; None if the loop has no machine."""
        machine = self._machine
        if machine is None:
            return None
        call, injected = machine.failed_validation_call, machine.error_injector.injected_error_type
        return {name: getattr(machine, name) for name in (*CHECKPOINTED, "current_iteration")} | {
            "state": machine.state.name,
            "first_iteration_complete": machine.first_iteration_complete,
            "failed_validation_call": None if call is None else [list(call.caller), call.sequence],
            "initial_result": packed(machine.initial_result),  # as a tensor, the first one would change the layout
            "injected_error_type": None if injected is None else injected.value,
            "stats": [[list(caller), _sampled(stats)] for caller, stats in machine.stats.items()],
        }

    def set(self, held: dict[str, Any] | None, *, same_iteration: bool) -> None:
        """Take over what was restored.

        The machine keeps what the command line sets: its mode, and which errors are injected.

        Args:
            same_iteration: whether a checkpoint was loaded before, of exactly the iteration at which the loop resumes.
                If a rerun is pending in it, that stays: Megatron wrote it after the snapshot, and exited for the rerun.
        """
        machine = self._machine
        if machine is None or held is None:
            return
        module = self._module
        machine.first_iteration_complete = held["first_iteration_complete"]
        for caller, sampled in held["stats"]:
            stats = machine.stats[module.Caller(*caller)] = module.QuickStats()
            stats.samples = sampled["samples"].tolist()
            for name in SAMPLED:
                setattr(stats, name, sampled[name])
        if same_iteration and machine.state is not module.RerunState.NOT_RUNNING_YET:
            return
        for name in (*CHECKPOINTED, "current_iteration"):
            setattr(machine, name, held[name])
        machine.state = module.RerunState[held["state"]]
        machine.data_iterator_checkpoints = None  # earlier batches, which the next step would drop anyway
        machine.initial_result = unpacked(held["initial_result"], torch.device("cuda"))
        call, injected = held["failed_validation_call"], held["injected_error_type"]
        machine.failed_validation_call = None if call is None else module.Call(module.Caller(*call[0]), call[1])
        if machine.error_injector.should_inject_errors:
            machine.error_injector.injected_error_type = None if injected is None else module.RerunDiagnostic(injected)


def _sampled(stats: Any) -> dict[str, Any]:
    return {"samples": np.array(stats.samples, dtype=np.float64)} | {name: getattr(stats, name) for name in SAMPLED}
