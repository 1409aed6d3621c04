"""The hook's interface to a framework, and what all frameworks have in common."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import Episodes, get_log, some
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import block_of, empty_like_leaf, leaf_of, local, memory_of
from holdfast.snapshot.state import rng, tracked
from holdfast.snapshot.state.hidden import Changing, generators, owners, samples_of_attributes, switches
from holdfast.snapshot.state.live import At, Change, Container, LiveTensor, Look, Stateful, Tree, Updated
from holdfast.snapshot.state.optimizers import OptimizerState, check_names
from holdfast.snapshot.state.steppers import Steppers
from holdfast.snapshot.state.tracked import Tracked, containers
from holdfast.snapshot.state.worker_states import copy_worker_states

log = get_log(__name__)

entered: dict[Adapter, tuple[int, Path]] = {}
"""The adapters of the hooks that this process has entered, with the thread that entered each, and its rank's place in
the arena of its job: what one of them captures, no other one misses. Ranks may be threads, each of which adds and
removes its own at any time: iterate over a copy."""

OWNER = "the model and the optimizers"
"""Who keeps the generators of `Adapter.generators`, as errors name it."""


class Adapter:
    """A job's state on this rank: modules, the states of optimizers, schedules, extras, and what the user tracks. Each
    framework has a subclass, which says what raises `NotImplementedError` here. Called from the training thread only.

    Attributes:
        schedules: the schedules that were given.
        rebuilds: what the user has said for `rebuild`.
        carried: random streams of absent ranks, by coordinate.
        captured: `memory_of` the tensors that are captured, and of the optimizers, when `verify` was called last.
        told: names of attributes that `watch` need not tell of, with the ids of who holds them.
    """

    def __init__(
        self,
        model: Any,
        states: Sequence[OptimizerState],
        scheduler: Stateful | Sequence[Stateful] | None,
        extra: Mapping[str, Stateful | None] | None,
    ) -> None:
        self._modules = check_modules(model)
        self._states = states
        several = isinstance(scheduler, list | tuple)
        schedulers: Sequence[Any] = scheduler if several else [] if scheduler is None else [scheduler]  # type: ignore[assignment]
        self.schedules: list[Stateful] = [
            _check_stateful(f"scheduler[{i}]" if several else "scheduler", each) for i, each in enumerate(schedulers)
        ]
        self._extra: dict[str, Stateful] = {
            name: _check_stateful(f"extra[{name!r}]", part)
            for name, part in ({} if extra is None else extra).items()
            if part is not None
        }
        self._loaders: list[Any] = []  # whose places are captured, as they report them
        for part in self._extra.values():
            self._loaders += copy_worker_states(part)
        self._tracked: dict[str, Tracked] = {}
        with_extra_state(self._roots())  # raises now rather than with the first snapshot
        _warn_of_own_tensors(self._roots())
        self._extra_states: WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
        self._episodes = Episodes(log)
        self._generators: dict[str, Any] | None = None
        self._watches: list[Changing[str]] = []
        self._switches = switches(self._watched(), [])
        self._turned: list[str] = []  # those that the first step has turned
        self.told: set[tuple[int, str]] = set()
        self._warned: set[str] = set()  # by any watch: `verify` makes new ones with every layout
        self.rebuilds: list[Callable[[At], object]] = []
        self._parameters: frozenset[str] | None = None  # names, when the layout was last made
        self._undo = ExitStack()  # what `materialise` has made of tensors that are no optimizer's
        self.carried: dict[str, Tree] = {}
        self.captured: set[int] = set()

    def coordinate(self) -> str:
        """The rank's logical place, which does not change when ranks are renumbered."""
        raise NotImplementedError

    def replica_set(self) -> str:
        """Name of the set of ranks that hold `replicated` tensors alike: the same on each of them."""
        raise NotImplementedError

    def track(self, piece: Tracked) -> None:
        """Add a piece of state. Raises `ConfigError` if its name is taken."""
        if piece.name in self._tracked:
            raise ConfigError(f"track({piece.name!r}): there is one of that name already")
        self._loaders += copy_worker_states(getattr(piece.get, "__self__", None))
        self._tracked[piece.name] = piece

    def keeps_place(self, loader: Any) -> bool:
        """Whether the place of a loader, which it reports itself, is captured."""
        return any(loader is each for each in self._loaders)

    def rebuild(self, at: At) -> None:
        """A snapshot of a job that was `at` that place is about to be checked: make what it has beside what it began
        with."""
        for each in self.rebuilds:
            each(at)

    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules whose forward, in training and with gradients, begins a step."""
        return self._modules

    def optimizers(self) -> Sequence[Any]:
        """The objects whose ``step()`` changes the state; the last one's ends a step."""
        raise NotImplementedError

    def tensors(self) -> Iterator[LiveTensor]:
        """Every tensor of the state, under a name that is the same in every run of the job. Walks all of it."""
        raise NotImplementedError

    def scalers(self) -> Sequence[GradScaler]:
        """Gradient scalers whose ``step(optimizer)`` may skip the optimizer's step: extras, and those in extras, as in
        timm's ``NativeScaler``."""
        return [scaler for part in self._extra.values() for scaler in _scalers_of(part)]

    def extras(self) -> Collection[str]:
        """Names of the objects with a ``state_dict`` that this rank has besides modules, optimizers and schedules."""
        return self._extra.keys()

    def steppers(self) -> Steppers:
        """Start to watch for other optimizers that step this job's parameters."""
        parameters = [p for module in self._modules for p in module.parameters()]
        updated = [p for state in self._states for _, p in state.parameters()]
        known, given = [*parameters, *updated], self.optimizers()
        return Steppers(given, self._captured(), known, lambda each: any(one.has(each) for one in [*entered]))

    def _captured(self) -> list[torch.optim.Optimizer]:
        return [*(state.optimizer for state in self._states), *self._inside()]

    def has(self, optimizer: Any) -> bool:
        """Whether an optimizer is captured, be it as an extra."""
        return any(optimizer is each for each in (*self.optimizers(), *self._captured(), *self._extra.values()))

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        """Optimizers that are captured as part of the optimizer that contains them."""
        return ()

    def updated(self) -> dict[str, Updated]:
        """The parameters of all optimizers, by the stem that the names of their state begin with."""
        return {stem: parameter for state in self._states for stem, parameter in state.updated().items()}

    def watched(self) -> Iterator[Container]:
        """The containers in which `tensors` found the tensors."""
        for module in self._modules:
            yield from containers(module)
        for state in self._states:
            yield from state.watched()
        for piece in self._tracked.values():
            yield from piece.watched()

    def look(self) -> Look:
        """A new look at the state beside its tensors."""
        self._generators = self._find_generators()
        flags, states = Flags(self._modules), [state.look() for state in self._states]
        fixed = {
            "flags": flags.names(),
            "optim": [state.fixed for state in states],
            "schedulers": [type(each).__qualname__ for each in self.schedules],
        }
        return Look(fixed, partial(self._late, flags, states, with_extra_state(self._roots())))

    def early(self) -> Tree:
        """State that reading data for the next step changes: random generators, data iterators."""
        return {
            "rng": rng.capture(),
            "extra": self._extras(late=False),
            "tracked": tracked.values(self._tracked, late=False),
            "generators": rng.states(self.generators()),
            **({"streams": self.carried} if self.carried else {}),
        }

    def _late(self, flags: Flags, states: Sequence[Look], extra: Sequence[tuple[str, Any]]) -> Tree:
        """Values of what one look has found. `extra`: the modules that have an extra state."""
        return {
            "optim": [state.late() for state in states],
            "scheduler": [each.state_dict() for each in self.schedules],
            "extra": self._extras(late=True),
            "get_extra_state": {name: extra_state(module, self._extra_states) for name, module in extra},
            **scalings(extra),
            "flags": flags.state(),
            GRADIENTS: flags.gradients(),
            "tracked": tracked.values(self._tracked, late=True),
        }

    def verify(self) -> None:
        """Check that state that is not captured can be derived bit for bit. Raises `StateMismatch` if it cannot. Warns
        once if a schedule changes an optimizer's options but was not given, and so is not captured. From now on `watch`
        compares attributes."""
        self._warn_of_growth()
        self.captured = self.memory()
        self._watches = [
            Changing(partial(samples_of_attributes, roots, self._keepers(), self.captured, self.told), patience)
            for roots, patience in ((self._watched(), 3), (self._unknown_optimizers(), 1))
        ]
        now = switches(self._watched(), self._keepers())
        self._turned = [path for path, value in self._switches.items() if now.get(path, value) is not value]
        schedules = [each for each in self._extra.values() if hasattr(each, "optimizer")]
        if not (self._tracked or self.schedules or schedules):
            for state in self._states:
                if hasattr(getattr(state.optimizer, "step", None), "_wrapped_by_lr_sched"):
                    kind = type(state.optimizer).__qualname__
                    text = "a schedule changes options of %s, and is not captured: give it as scheduler="
                    self._episodes.begin("schedule", text, kind)

    def memory(self) -> set[int]:
        """What `captured` would be now."""
        optimizers = [state.optimizer for state in self._states]
        of_parameters = chain.from_iterable(each.state.values() for each in optimizers if isinstance(each.state, dict))
        return set(map(memory_of, (*(item.tensor for item in self.tensors()), *optimizers, *of_parameters)))

    def _warn_of_growth(self) -> None:
        """Warn as soon as parameters are added in training, which no restart makes by itself."""
        before, now = self._parameters, frozenset(parameter_names(self._modules).values())
        self._parameters = now
        if before is not None and (new := sorted(now - before)) and not self.rebuilds:
            self._episodes.begin(
                "growth",
                "%s: added in training. A restart makes the model as the script first makes it, without them, and is "
                "then refused: say how they are made, by snap.rebuild(function), before the hook is entered",
                some(new),
            )

    def watch(self) -> None:
        """Called as a snapshot is taken: warn of attributes that change from step to step and are not captured."""
        found = {place for watch in self._watches for place in watch.look()}.union(self._turned) - self._warned
        if found:
            self._warned |= found
            log.warning(
                "%s: changed by steps, and not captured. If a step reads what an earlier one left there, a restart "
                "gives other results: then name it by snap.track. `holdfast audit` tells whether it does",
                some(sorted(found)),
            )

    def generators(self) -> Mapping[str, Any]:
        """The random generators in attributes of modules and optimizers that are captured, by name."""
        if self._generators is None:
            self._generators = self._find_generators()
        return self._generators

    def _find_generators(self) -> dict[str, Any]:
        return generators([*self._watched(), *self._unknown_optimizers()], self._keepers())

    def named(self) -> Sequence[Any]:
        """What the user has named beside modules, optimizers and schedules: what to call for their values, or the
        objects themselves."""
        return [*(part.get for part in self._tracked.values() if part.get is not None), *self._extra.values()]

    def _unknown_optimizers(self) -> list[tuple[str, Any]]:
        """The optimizers, by name, that may keep in attributes what the adapter does not know."""
        return []

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the tensors of `leaves` that a new job would only make later, such as Adam's moments."""
        for state in self._states:
            state.materialise(leaves)
        for name, module in self._of_modules():
            shape_buffers(module, name, leaves, self._undo)
        device = next((p.device for module in self._modules for p in module.parameters()), torch.device("cpu"))
        for piece in self._tracked.values():
            piece.materialise(leaves, device, self._undo)

    def withdraw(self) -> None:
        """Remove what `check` and `materialise` have made, because the snapshot does not fit after all."""
        for undo in (self._undo, *(state.undo for state in self._states)):
            undo.close()

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` unless `load` will find everything it needs. Called before anything is written."""
        check_names("extra", {**early["extra"], **late["extra"]}, self._extra)
        held, have = fixed["schedulers"], [type(each).__qualname__ for each in self.schedules]
        if held != have:
            raise StateMismatch(f"scheduler is {held or 'none'} in the snapshot, {have or 'none'} in this job")
        names = [name for name, _ in with_extra_state(self._roots())]
        check_names("what has get_extra_state", late["get_extra_state"], names)
        tracked.check(self._tracked, {**early["tracked"], **late["tracked"]})
        self._generators = self._find_generators()
        rng.check(self._generators, early["generators"], OWNER)
        if len(late["optim"]) != len(self._states):
            raise StateMismatch(f"{len(late['optim'])} optimizers in the snapshot, {len(self._states)} in this job")
        for state, plain, kept in zip(self._states, late["optim"], fixed["optim"], strict=True):
            state.check(plain, kept)

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Load what `early` and `look` returned, after the tensors are restored; random generators last."""
        self._undo.pop_all()  # it would keep replaced tensors alive
        for scheduler, saved in zip(self.schedules, late["scheduler"], strict=True):
            scheduler.load_state_dict(saved)
        for state, plain, kept in zip(self._states, late["optim"], fixed["optim"], strict=True):
            state.load(plain, kept)
        held = {**early["extra"], **late["extra"]}
        for name, part in self._extra.items():
            part.load_state_dict(_state_for(part, held[name]))
        Flags(self._modules).load(fixed["flags"], late["flags"], late[GRADIENTS])
        for name, module in with_extra_state(self._roots()):
            module.set_extra_state(late["get_extra_state"][name])
            put_back_scaling(name, module, late.get(SCALING, {}).get(name, {}))
        tracked.load(self._tracked, {**early["tracked"], **late["tracked"]})
        self.carried = early.get("streams", {})
        self.rewinding(early)()

    def rewinding(self, early: Tree) -> Callable[[], None]:
        """A function that sets the random generators to their state in `early`, and nothing else, at every call."""

        def rewind() -> None:
            rng.restore(early["rng"])
            rng.put_back(self.generators(), early["generators"], OWNER)

        return rewind

    def _extras(self, *, late: bool) -> Tree:
        """The states of the extras that settle late (see `settles_late`), or of the others."""
        return {n: _state_of(part) for n, part in self._extra.items() if settles_late(part) is late}

    def _of_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from ((f"model{i}", module) for i, module in enumerate(self._modules))

    def _roots(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules that were given, by name, including tracked ones."""
        yield from self._of_modules()
        for name, piece in self._tracked.items():
            if isinstance(piece.tensors, torch.nn.Module):
                yield f"tracked.{name}", piece.tensors

    def _watched(self) -> list[tuple[str, Any]]:
        """All whose attributes nobody else keeps, by name."""
        return [*self._roots(), *((f"extra.{name}", each) for name, each in self._extra.items() if _is_module(each))]

    def _keepers(self) -> list[Any]:
        """As `named`, without what is watched."""
        return [each for each in self.named() if not _is_module(each)]

    def _tracked_tensors(self) -> Iterator[LiveTensor]:
        for piece in self._tracked.values():
            yield from piece.live()


def _is_module(value: Any) -> bool:
    """Whether ``load_state_dict`` is torch's own, which loads tensors, and no other attributes."""
    return getattr(type(value), "load_state_dict", None) is torch.nn.Module.load_state_dict


def buffers(module: torch.nn.Module, prefix: str) -> Iterator[LiveTensor]:
    """A module's buffers, persistent or not. Forward may change them."""
    for name, buffer in module.named_buffers():
        yield LiveTensor(f"{prefix}.{name}", local(buffer), Change.ANY, block=block_of(buffer))


def shape_buffers(module: torch.nn.Module, prefix: str, leaves: Mapping[str, Leaf], undo: ExitStack) -> None:
    """Give buffers the shapes that they had in the snapshot, uninitialised, and make those that are made in the first
    forward: caches that grow, masks, running scales."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    for path, owner in module.named_modules():
        for name, buffer in list(owner._buffers.items()):
            leaf = leaves.get(".".join(filter(None, (prefix, path, name))))
            if leaf is None or (buffer is not None and (local(buffer) is not buffer or buffer.shape == leaf.shape)):
                continue
            if buffer is None:
                owner._buffers[name] = empty_like_leaf(leaf, device)
                undo.callback(owner._buffers.__setitem__, name, None)
            elif leaf_of(leaf.name, buffer).dtype == leaf.dtype:
                undo.callback(setattr, buffer, "data", buffer.data)
                buffer.data = empty_like_leaf(leaf, buffer.device)  # the same object: others may refer to it


def check_modules(model: Any) -> list[torch.nn.Module]:
    """`model` as a list of modules. Raises `ConfigError` if it is anything else."""
    modules = list(model) if isinstance(model, list | tuple) else [model]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"model is a {type(module).__qualname__}: give a torch.nn.Module or a list of them")
        lazy = [name for name, each in chain(module.named_parameters(), module.named_buffers()) if is_lazy(each)]
        if lazy:
            raise ConfigError(
                f"{some(lazy)}: no shape is known yet, as in a lazy module before its first forward: run it once on a "
                "batch, under torch.no_grad(), before the hook is made"
            )
    return modules


def parameter_names(modules: Sequence[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """The names of the parameters in the job. A parameter with several names gets the first."""
    names: dict[torch.Tensor, str] = {}
    for i, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, f"model{i}.{name}")
    return names


def warn_of_unnamed(states: Sequence[OptimizerState]) -> None:
    """Warn if parameters in no module have the same shape: only their place in the optimizer tells them apart."""
    for state in states:
        shapes = Counter(tuple(parameter.shape) for _, parameter in state.unnamed())
        if alike := sum(count for count in shapes.values() if count > 1):
            text = (
                "%d parameters that %s updates are in none of the given modules, and have the same shape: a restart "
                "tells them apart only by their order in the optimizer. Give their module, too, or keep that order"
            )
            log.warning(text, alike, type(state.optimizer).__qualname__)


def settles_late(part: Stateful) -> bool:
    """Whether an extra changes between two steps, as schedules, gradient scalers and averages do. Objects that can be
    iterated over, such as data loaders, change when data is read."""
    if isinstance(part, torch.nn.Module):
        return True  # an average of weights; a module may be iterable, too
    return not any(hasattr(type(part), name) for name in ("__iter__", "__next__", "__getitem__"))


def _scalers_of(part: Stateful) -> list[GradScaler]:
    """A gradient scaler; of another extra, those in its attributes whose state is all of its own, or an entry there."""
    if isinstance(part, GradScaler):
        return [part]
    held = [each for each in getattr(part, "__dict__", {}).values() if isinstance(each, GradScaler)]
    if not held:
        return []
    state = part.state_dict()
    entries = state.values() if isinstance(state, dict) else ()
    kept = [each.keys() for each in (state, *entries) if isinstance(each, dict)]
    return [each for each in held if each.state_dict().keys() in kept]


def _state_of(part: Any) -> Tree:
    """The state of an extra. That of a gradient scaler has tensors where ``state_dict`` has numbers: to read these
    would wait for the device at every boundary."""
    known = isinstance(part, GradScaler) and type(part).state_dict is GradScaler.state_dict
    if not known or not part.is_enabled():
        found: Tree = part.state_dict()
        return found
    scale, tracker = part._scale, part._growth_tracker
    if scale is None or tracker is None:  # they are made as the first loss is scaled
        scale = torch.tensor(part._init_scale, dtype=torch.float32, device="cpu")
        tracker = torch.tensor(part._init_growth_tracker, dtype=torch.int32, device="cpu")
    return {
        "scale": scale,
        "growth_factor": part.get_growth_factor(),
        "backoff_factor": part.get_backoff_factor(),
        "growth_interval": part.get_growth_interval(),
        "_growth_tracker": tracker,
    }


def _state_for(part: Stateful, held: Tree) -> Tree:
    """What `_state_of` gave, for ``load_state_dict``."""
    if not isinstance(part, GradScaler):
        return held
    return {key: each.item() if isinstance(each, torch.Tensor) else each for key, each in held.items()}


def _check_stateful(what: str, part: Any) -> Stateful:
    """Return `part`. Warns if it is a module with an empty state; raises `ConfigError` if it is not `Stateful`."""
    if not isinstance(part, Stateful):
        raise ConfigError(
            f"{what} is a {type(part).__qualname__} without state_dict and load_state_dict: leave it out. A warning of "
            "the second turn names what it carries from step to step, and the lines that capture that"
        )
    if isinstance(part, torch.nn.Module) and not part.state_dict():
        log.warning("%s, a %s, has nothing in its state_dict: nothing of it is captured", what, type(part).__qualname__)
    found: Stateful = part
    return found


def _warn_of_own_tensors(roots: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Warn if a module with a ``state_dict`` of its own, such as a metric of torchmetrics, keeps tensors beside its
    parameters and buffers."""
    for path, module in owners(roots):
        if type(module).state_dict is torch.nn.Module.state_dict:
            continue
        names = [name for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        if names:
            log.warning(
                "%s, a %s, keeps %s beside its parameters and buffers: that is not captured. Name it, by "
                "snap.track(name, get, set), or make it a buffer",
                path,
                type(module).__qualname__,
                some(names),
            )


PACKAGE = "transformer_engine"

NOT_UNPICKLED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"

SCALING = "fp8"
"""Key of the late state under which the results of `scaling` are kept."""


def with_extra_state(roots: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, Any]]:
    """The modules in `roots`, by name, whose classes define ``get_extra_state``.

    Raises:
        ConfigError: a class has no ``set_extra_state`` to take the state back.
    """
    found = []
    for name, module in owners(roots):
        kind = type(module)
        if kind.get_extra_state is torch.nn.Module.get_extra_state:
            continue
        if kind.set_extra_state is torch.nn.Module.set_extra_state:
            raise ConfigError(f"{name}: {kind.__qualname__} has get_extra_state without set_extra_state: add it")
        found.append((name, module))
    return found


def scaling(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's live tensors for delayed scaling: scales, and the largest values of the last steps."""
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return {}
    found = {
        f"{way}.{key}": getattr(meta.get(way), key, None)
        for way in ("scaling_fwd", "scaling_bwd")
        for key in ("scale", "amax_history")
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}


def extra_state(module: Any, known: WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]]) -> Any:
    """What ``get_extra_state`` of a module returns. The scales and largest values of Transformer Engine's delayed
    scaling are captured beside that, because newer releases do not unpickle the extra state that they return.

    Transformer Engine's waits for the device and pickles, for each layer. With delayed scaling all that changes from
    step to step in it is what `scaling` gives, which is captured and put back by itself: then it is called again only
    when something else has changed. `known` keeps what it returned, and with what else.
    """
    if not (type(module).get_extra_state.__module__.startswith(PACKAGE) and scaling(module)):
        return module.get_extra_state()
    aside = _aside(module)
    if module not in known or known[module][0] != aside:
        known[module] = aside, module.get_extra_state()
    return known[module][1]


def _aside(module: Any) -> Any:
    """What a layer's extra state holds beside its scaling: the recipe, and plain values."""
    meta: dict[str, Any] = module.fp8_meta
    modes = [getattr(module, name, None) for name in ("fp8", "fp8_calibration")]
    plain = {key: value for key, value in meta.items() if isinstance(value, bool | int | float | str | tuple | list)}
    shapes = {key: each.shape for key, each in scaling(module).items()}
    recipe = meta.get("recipe")
    return [*modes, copy.deepcopy(plain), shapes, type(recipe), dict(getattr(recipe, "__dict__", {}))]


def put_back_scaling(name: str, module: torch.nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Copy back what `scaling` returned, after ``set_extra_state``.

    Raises:
        StateMismatch: the layer has other such tensors, or of other sizes.
    """
    live = scaling(module)
    if {key: each.shape for key, each in live.items()} != {key: each.shape for key, each in held.items()}:
        raise StateMismatch(
            f"{name}: delayed scaling has {sorted(held) or 'no state'} in the snapshot, {sorted(live) or 'none'} in "
            f"this job, or of other sizes; if Transformer Engine says that it loads no pickles, set {NOT_UNPICKLED}"
        )
    for key, each in live.items():
        each.copy_(held[key])


def scalings(extra: Iterable[tuple[str, torch.nn.Module]]) -> Tree:
    """The scaling state of modules that compute in 8 bits with delayed scaling, if there are any."""
    found = {name: scaling(module) for name, module in extra}
    held = {name: {key: each.clone() for key, each in of.items()} for name, of in found.items() if of}
    return {SCALING: held} if held else {}


DENSE, SPARSE = 1, 2

GRADIENTS = "gradients"
"""Key of `Flags.gradients` in an adapter's late values. Zeroing gradients does not count as a change of the state."""


class Flags:
    """Flags that loops toggle mid-run: which parameters require or have gradients, which modules are in training mode.
    Reading them takes 0.05 microseconds per parameter or module.

    For a zero gradient an optimizer still applies momentum and weight decay; a parameter without a gradient it skips.
    So a restore puts a gradient of zeros wherever there was a gradient, dense or sparse as it was.

    Args:
        modules: walked once, here. Make new `Flags` whenever the state is walked anew.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = {
            f"model{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()
        }
        self._modules = {
            f"model{i}.{name}": part for i, module in enumerate(modules) for name, part in module.named_modules()
        }

    def names(self) -> Tree:
        """The names of the parameters and modules that `state` describes, in its order."""
        return {"parameters": list(self._parameters), "modules": list(self._modules)}

    def state(self) -> Tree:
        """The current flags, as packed bits."""
        return {
            "requires_grad": _packed([p.requires_grad for p in self._parameters.values()]),
            "training": _packed([m.training for m in self._modules.values()]),
        }

    def gradients(self) -> bytes:
        """Which parameters have a dense gradient, as packed bits; if any has a sparse one, bits for those follow."""
        parameters = self._parameters.values()  # a function for each would take twice as long
        kinds = np.array([0 if (g := p.grad) is None else 1 + g.is_sparse for p in parameters], np.uint8)
        sparse = kinds == SPARSE
        return np.packbits(kinds == DENSE).tobytes() + (np.packbits(sparse).tobytes() if sparse.any() else b"")

    def load(self, names: Tree, state: Tree, gradients: bytes) -> None:
        """Restore the flags. Parameters and modules that are not named stay as they are: they did not exist then."""
        for name, flag in _unpacked(names["parameters"], state["requires_grad"]).items():
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        half = (len(names["parameters"]) + 7) // 8
        dense, sparse = (_unpacked(names["parameters"], part) for part in (gradients[:half], gradients[half:]))
        for name in names["parameters"]:
            parameter = self._parameters.get(name)
            if parameter is not None:
                if dense[name] and _zeroed(parameter):
                    continue
                layout = torch.strided if dense[name] else torch.sparse_coo
                has_one = dense[name] or sparse[name]
                parameter.grad = torch.zeros_like(parameter, layout=layout) if has_one else None
        for name, flag in _unpacked(names["modules"], state["training"]).items():
            if name in self._modules:
                self._modules[name].training = flag


def _zeroed(parameter: torch.Tensor) -> bool:
    """Zero the gradient in place if it is like a new one; returns whether it is. New memory would take longer than
    filling the parameter, and DDP's gradients are views of its buckets."""
    grad = parameter.grad
    alike = (
        type(grad) is torch.Tensor
        and not grad.requires_grad
        and (grad.layout, grad.dtype, grad.device) == (parameter.layout, parameter.dtype, parameter.device)
        and (grad.shape, grad.stride()) == (parameter.shape, parameter.stride())
    )
    if alike and grad is not None:
        grad.zero_()
    return alike


def _packed(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.array(flags, bool)).tobytes()


def _unpacked(names: Sequence[str], bits: bytes) -> dict[str, bool]:
    """The flag of each name; without bits none is set."""
    if not bits:
        return dict.fromkeys(names, False)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(names))
    return {name: bool(flag) for name, flag in zip(names, flags, strict=True)}
