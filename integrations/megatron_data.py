"""Where Megatron-LM's data loaders go on after a restart.

Its own samplers go on by the counters in its arguments. What these leave out is here: loaders that are read over and
over, of which a new process begins the first pass once more; and loaders that the script brings along
(``--dataloader-type external``), which say themselves where they are, as Energon's do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.state import rng

BUILD = "build_train_valid_test_data_loaders"
"""The function that gives all of them, and arguments say what kind they are of."""

HOOKS = (
    ("save_state_rank", "restore_state_rank"),
    ("save_state", "restore_state"),
    ("state_dict", "load_state_dict"),
)
"""Methods that give a loader's place, and take it over: Energon's, Megatron-LM's own name for it, torchdata's."""

SAVE = "save_state"
"""What Megatron-LM's checkpoints ask a loader for."""

log = get_log(__name__)


class Loaders:
    """Those of one rank, in the order in which they are built. The training thread's."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._places: dict[str, Passes | Hooked] = {}
        self._held: dict[str, Any] | None = None
        self._builds = 0

    def get(self) -> dict[str, Any]:
        """As a step begins; until the first has, what was restored."""
        if self._held is not None:
            return self._held
        return {"ranks": self._ranks(), "places": {name: place.get() for name, place in self._places.items()}}

    def set(self, held: dict[str, Any]) -> None:
        """What was restored, before the loaders are built."""
        self._held = held

    def begun(self) -> None:
        """The first step of this process has begun, so batches are read from now on."""
        self._held = None

    def building(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """`BUILD`, whose loaders go on."""

        @functools.wraps(build)
        def building(*args: Any, **kwargs: Any) -> Any:
            train, valid, test = build(*args, **kwargs)
            return (*self.go_on(train, valid), test)

        return building

    def go_on(self, train: Any, valid: Any) -> tuple[Any, Any]:
        """The loaders of one model chunk, or what stands for them; None where this rank has none.

        Raises:
            ConfigError: one says where it is, and cannot be told where to go on.
            StateMismatch: the snapshot knows of no such loader.
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
        elif kind == "cyclic" and self._held is not None:
            loader = PassGoesOn(loader, *_of_sampler(loader))
        return loader

    def _add(self, name: str, place: Passes | Hooked) -> None:
        self._places[name] = place
        if self._held is None:
            return
        if name not in self._held["places"]:
            raise StateMismatch(f"the snapshot does not say where data loader {name!r} is: its run had none such")
        if self._held["ranks"] != self._ranks():
            raise ConfigError(
                f"data loader {name!r} was read by {self._held['ranks']} data-parallel ranks, there are "
                f"{self._ranks()} now, and each knows its own place only: start with as many as before"
            )
        place.set(self._held["places"][name])

    def _ranks(self) -> int | None:
        return getattr(self._args, "data_parallel_size", None)


class PassGoesOn:
    """A loader whose first pass in this process goes on, if one had begun before.

    What making its iterator draws from the generators, and reading what was read before, must not move them.
    """

    def __init__(self, loader: Any, begun: bool, skip: int = 0) -> None:
        """
        Args:
            begun: whether the iterator that is made next was there already when the run before took its snapshot.
            skip: batches that it had given.
        """
        self._loader = loader
        self._begun = begun
        self._skip = skip

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        begun, skip, self._begun = self._begun, self._skip, False
        if not begun:
            iterator: Iterator[Any] = iter(self._loader)
            return iterator
        state = rng.capture()
        try:
            iterator = iter(self._loader)
            for _ in islice(iterator, skip):
                pass
        finally:
            rng.restore(state)
        return iterator


class Passes:
    """A loader that Megatron-LM reads from its beginning in every process, and then over and over: its full validation.

    Where it has fewer batches than on other ranks it is in the middle of a pass between evaluations.
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
        """Batches that were read since the job began."""
        return self._read

    def set(self, held: int) -> None:
        """So many were read."""
        self._read = held
        sampler = self._loader.batch_sampler
        if hasattr(sampler, "last_batch_size"):  # it shuffles each pass anew, by this counter
            sampler.consumed_samples += held * sampler.micro_batch_times_data_parallel_size
            self._loader = PassGoesOn(self._loader, *_of_sampler(self._loader))
        else:
            into = held % len(self._loader)
            self._loader = PassGoesOn(self._loader, bool(into) or (self._loader.persistent_workers and held > 0), into)


def _of_sampler(loader: Any) -> tuple[bool]:
    """Whether the iterator of a loader that is made next was there already, by the counter of its sampler.

    It was there in the middle of a pass; workers that stay are there for all passes.
    """
    sampler = getattr(loader, "batch_sampler", None)
    consumed, total = getattr(sampler, "consumed_samples", 0), getattr(sampler, "total_samples", 0)
    whole = total - getattr(sampler, "last_batch_size", 0)
    if not isinstance(loader, DataLoader) or whole <= 0:
        return (False,)
    return (bool(consumed % whole) or (loader.persistent_workers and consumed > 0),)


class Hooked:
    """A loader of the script's own, that says where it is."""

    def __init__(self, owner: Any, save: str, restore: str) -> None:
        self._owner = owner
        self._save = save
        self._restore = restore

    def get(self) -> Any:
        """Its state, as plain values."""
        return plain(getattr(self._owner, self._save)(), _packages(self._owner))

    def set(self, held: Any) -> None:
        """It goes on there."""
        getattr(self._owner, self._restore)(made(held, _packages(self._owner)))
        if isinstance(self._owner, DataLoader):
            _make_first_iterator_quiet(self._owner)


def _make_first_iterator_quiet(loader: Any) -> None:
    """It was made in the run before, and drew its workers' seed then; it is made again as the first batch is read, when
    the generators are those of the snapshot."""
    make = loader._get_iterator

    def quietly() -> Any:
        del loader._get_iterator
        state = rng.capture()
        try:
            return make()
        finally:
            rng.restore(state)

    loader._get_iterator = quietly


def _hooked(name: str, loader: Any, *, trains: bool) -> Hooked | None:
    """How a loader is asked. What Megatron-LM is given often only wraps it; then it is in an attribute of that."""
    for owner in (loader, *getattr(loader, "__dict__", {}).values()):
        if not hasattr(owner, "__iter__") and not hasattr(owner, "__next__"):
            continue  # a model has a state_dict, too
        for save, restore in HOOKS:
            if callable(getattr(owner, save, None)) and callable(getattr(owner, restore, None)):
                return Hooked(owner, save, restore)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    known = ", or ".join(f"{save} and {restore}" for save, restore in HOOKS)
    if trains and hasattr(loader, SAVE):
        raise ConfigError(
            f"data loader {name!r}, a {kind}, has {SAVE}, but nothing takes over what that gives: after a restart it "
            f"would begin anew, and the job train on other data; give it, or an attribute of it, {known}"
        )
    log.warning(
        "data loader %r, a %s, does not say where it is, so no snapshot does: after a restart it goes on wherever the "
        "script's provider begins it; if that is not where it was, give it, or an attribute of it, %s",
        name,
        kind,
        known,
    )
    return None


def plain(value: Any, packages: frozenset[str]) -> Any:
    """A loader's state without objects: tuples, and dataclasses, named tuples and dicts of `packages`, become tuples
    that say what they were.

    Raises:
        StateMismatch: an object is of another package.
    """
    kind = type(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: plain(getattr(value, field.name), packages) for field in fields(value)}
        return ("fields", *_name(kind, packages), parts)
    if kind is dict:
        return {key: plain(part, packages) for key, part in value.items()}
    if isinstance(value, dict):
        return ("dict", *_name(kind, packages), {key: plain(part, packages) for key, part in value.items()})
    if kind is tuple:
        return ("tuple", [plain(part, packages) for part in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("items", *_name(kind, packages), [plain(part, packages) for part in value])
    if kind is list:
        return [plain(part, packages) for part in value]
    return value


def made(value: Any, packages: frozenset[str]) -> Any:
    """What `plain` was given. Only classes of `packages` that are imported by now are called.

    Raises:
        StateMismatch: there is no such class.
    """
    match value:
        case ("tuple", parts):
            return tuple(made(part, packages) for part in parts)
        case ("fields", module, name, parts):
            return _class(module, name, packages)(**{key: made(part, packages) for key, part in parts.items()})
        case ("dict", module, name, parts):
            return _class(module, name, packages)({key: made(part, packages) for key, part in parts.items()})
        case ("items", module, name, parts):
            return _class(module, name, packages)(*(made(part, packages) for part in parts))
        case dict():
            return {key: made(part, packages) for key, part in value.items()}
        case list():
            return [made(part, packages) for part in value]
    return value


def _packages(owner: Any) -> frozenset[str]:
    """Whose classes a loader's state may be made of: those of its own package."""
    return frozenset(kind.__module__.partition(".")[0] for kind in type(owner).__mro__) - {"builtins"}


def _name(kind: type, packages: frozenset[str]) -> tuple[str, str]:
    if kind.__module__.partition(".")[0] not in packages | {"collections"}:
        raise StateMismatch(
            f"the state of a data loader has a {kind.__module__}.{kind.__qualname__}: keep plain values, or classes of "
            f"the loader's own package ({', '.join(sorted(packages))})"
        )
    return kind.__module__, kind.__qualname__


def _class(module: str, name: str, packages: frozenset[str]) -> Callable[..., Any]:
    found: Any = sys.modules.get(module) if module.partition(".")[0] in packages | {"collections"} else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not (is_dataclass(found) or issubclass(found, dict | tuple)):
        raise StateMismatch(f"the state of a data loader has a {module}.{name}, which is not there any more")
    return found
