"""The state of a `torch.optim.Optimizer`, in place. Megatron's optimizers wrap one, so both adapters use this.

A parameter has the same name as in the model, whatever its place in the optimizer. A parameter that is in no module is
called ``<group>.<index>``, after its group and its place in the group. A dict that an optimizer keeps under a text key
of its state, as LoRA-FA does, is called ``named.<text>``; any other value there is plain, as SPAM's count of steps.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.tensors import Block, block_of, empty_like_leaf, local
from holdfast.snapshot.state.live import Change, Container, LiveTensor, Look, Stateful, Tree, Updated, refill
from holdfast.snapshot.state.values import is_kept, packed, take_over, unpacked, way_of
from holdfast.snapshot.state.walk import walk
from holdfast.snapshot.state.wrappers import INNER, described, is_description, is_wrapper, wrapped_in, wrapper_of

log = get_log(__name__)

SHAREABLE = ("torch.optim.",)
"""Modules whose optimizers keep only functions of the reduced gradients, alike on all replicas. Other optimizers may
keep state of each rank's own, such as a compressor's error feedback, which may be zero for the first thousand steps."""

WITH_TABLES = ("torch.", "apex.", "bitsandbytes.", "transformer_engine.")
"""Modules whose optimizers keep only buffers and tables in attributes, no state."""

NAMED = "named."

PLACES = frozenset({"params", "param_names"})
"""Keys of a group that list its parameters in order. The job sets these; they are not options."""

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial)
_CONTAINERS = (dict, list, tuple, set, frozenset)

OWN = frozenset({"state", "param_groups", "defaults"})
"""Attributes of an optimizer that hold its own state, and no inner optimizers."""


def unwrapped(*optimizers: Any) -> list[torch.optim.Optimizer]:
    """Optimizers and those in their attributes, such as SAM's base optimizer and torchtitan's list; inner ones first.

    A wrapper that only passes on the state and the groups of another optimizer, as Accelerate's does, is left out.

    Raises:
        ConfigError: an optimizer has no state or no groups, and contains no other optimizer.
    """
    found: dict[tuple[int, int], torch.optim.Optimizer] = {}
    for given in optimizers:
        inside = list(nested("optim", given))
        for _, each in inside:
            if not isinstance(each, torch.optim.Optimizer):
                continue
            state, groups = getattr(each, "state", None), getattr(each, "param_groups", None)
            if state is not None and groups is not None:
                found.setdefault((id(state), id(groups)), each)
            elif len(inside) == 1:
                raise ConfigError(
                    f"optim is a {type(each).__qualname__} without state and param_groups: call "
                    "torch.optim.Optimizer.__init__ in its own, or give the optimizers that it steps"
                )
    return list(found.values())


def has_step_hooks(optimizer: Any) -> bool:
    """Whether torch calls hooks for its steps. That takes the constructor of `torch.optim.Optimizer`, which some
    wrappers that inherit from it do not call: it makes the lists of hooks and the `step` that calls them. timm's
    ``Lookahead`` makes the lists itself, and torch gives its class that `step` only in the first ``zero_grad()``."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))


def says_more(optimizer: Any) -> bool:
    """Whether it overrides ``state_dict``, and so may keep more than its state and its groups."""
    kind = type(optimizer)
    own = getattr(kind, "state_dict", None) is not torch.optim.Optimizer.state_dict
    return own and not kind.__module__.startswith(WITH_TABLES)


def nested(name: str, optimizer: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The optimizers inside an optimizer, then itself, each once and with its path, which begins with `name`."""
    seen = set() if seen is None else seen
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    for path, inner, _ in walk([(name, optimizer)], lambda value: value is optimizer, skipped=OWN):
        if inner is not optimizer and is_optimizer(inner):
            yield from nested(path, inner, seen)
    yield name, optimizer


def is_optimizer(value: Any) -> bool:
    """Whether it is an optimizer, or looks like one, as those of Apex and Megatron do."""
    kind = type(value)
    looks = hasattr(kind, "step") and hasattr(kind, "zero_grad") and not isinstance(value, torch.nn.Module)
    return looks or isinstance(value, torch.optim.Optimizer)


class OptimizerState:
    """One optimizer as the adapters see it. Not thread-safe.

    Args:
        replicated: whether data-parallel replicas update the same parameters with the same gradients. They may divide
            the parameters among their optimizers, as `ZeroRedundancyOptimizer` does.
        names: the names of parameters in the model; read whenever the state is walked.
        blocks: returns which part of the whole a parameter is. State of the same shape is the same part.

    Attributes:
        undo: closing it removes what `check` and `materialise` have made; `load` keeps that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        prefix: str,
        *,
        replicated: bool,
        names: Mapping[torch.Tensor, str] | None = None,
        blocks: Callable[[torch.Tensor], Block | None] = block_of,
    ) -> None:
        self.optimizer = optimizer
        self._names = {} if names is None else names
        self._blocks = blocks
        self._prefix = prefix
        self._replicated = replicated and type(optimizer).__module__.startswith(SHAREABLE)
        self.undo = ExitStack()
        self._made_with = _attributes(optimizer)
        self._counts: set[str] = set()
        self._began = len(optimizer.param_groups)
        self._kept: dict[str, tuple[type, bool]] = {}
        self._told: set[str] = set()
        self._wrappers: Tree = {}  # of the snapshot that is being restored

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that the optimizer updates, once."""
        parameters = {p: name for group in self._places() for name, p in group}
        return ((name, parameter) for parameter, name in parameters.items())

    def unnamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that have no name in the model."""
        return ((name, parameter) for name, parameter in self.parameters() if parameter not in self._names)

    def _places(self) -> list[list[tuple[str, torch.Tensor]]]:
        groups = self.optimizer.param_groups
        return [
            [(self._names.get(parameter) or f"{g}.{i}", parameter) for i, parameter in enumerate(group["params"])]
            for g, group in enumerate(groups)
        ]

    def _entries(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Name, key and state of every parameter, and of dicts under text keys. What is under other keys is left out,
        and such dicts with tensors for keys: they have no name that would be the same in every run."""
        for name, parameter in self.parameters():
            yield name, parameter, self.optimizer.state.get(parameter, {})
        for key, state in self.optimizer.state.items():
            if isinstance(key, str) and isinstance(state, dict):
                if any(isinstance(inner, torch.Tensor) for inner in state):
                    self._tell_nameless(torch.Tensor)
                else:
                    yield f"{NAMED}{key}", key, state
            elif not isinstance(key, torch.Tensor | str):
                self._tell_nameless(type(key))

    def _tell_nameless(self, kind: type) -> None:
        if kind.__qualname__ not in self._told:
            self._told.add(kind.__qualname__)
            log.warning(
                "%s keeps state under a %s, which has no name that would be the same in every run, so it is not "
                "captured: name it by snap.track(name, get=..., set=...) if a step reads what an earlier one left",
                self._prefix,
                kind.__qualname__,
            )

    def tensors(self) -> Iterator[LiveTensor]:
        """The current state tensors, such as Adam's moments. Many appear only with the first step."""
        updated = self.updated()
        unnamed = {name for name, _ in self.unnamed()}
        for name, _, state in self._entries():
            of = updated.get(f"{self._prefix}.{name}", Updated((), None))
            replicated = self._replicated and name not in unnamed  # replicas may have others at that place
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    part = local(value)
                    block = of.block if tuple(part.shape) == of.shape else None
                    place = f"{self._prefix}.{name}.{key}"
                    for inner, each in wrapped_in(part):
                        yield LiveTensor(f"{place}{inner}", each, Change.STEP, replicated, None if inner else block)

    def watched(self) -> Iterator[Container]:
        """The groups and each parameter's state, and their containers, since ``load_state_dict`` replaces them."""
        yield vars(self.optimizer)
        yield self.optimizer.param_groups
        yield self.optimizer.state
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        yield from (state for state in self.optimizer.state.values() if isinstance(state, dict))

    def updated(self) -> dict[str, Updated]:
        """See `snapshot.state.adapter.Adapter.updated`."""
        return {
            f"{self._prefix}.{name}": Updated(tuple(local(parameter).shape), self._blocks(parameter))
            for name, parameter in self.parameters()
        }

    def look(self) -> Look:
        """The optimizer's class, the parameters of each of its groups, and the order of keys in each one's state; and
        what reads the values in it that are not tensors, see `_values`."""
        order: dict[str, list[Any]] = {}
        plain: list[tuple[str, Any, list[Any]]] = []
        for name, key, state in self._entries():
            left = [entry for entry, value in state.items() if not self._is_kept(f"{name}.{entry}", value)]
            order[name] = [entry for entry in state if entry not in left]
            if entries := [e for e in order[name] if not isinstance(state[e], torch.Tensor) or is_wrapper(state[e])]:
                plain.append((name, key, entries))
        fixed: Tree = {"class": self._class(), "prefix": self._prefix, "order": order, "groups": self._groups()}
        fixed["began"] = self._began
        return Look(fixed, partial(self._values, plain))

    def _class(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _groups(self) -> list[list[str]]:
        return [[name for name, _ in group] for group in self._places()]

    def _values(self, plain: Sequence[tuple[str, Any, list[Any]]]) -> Tree:
        """Group options such as lr, and per-parameter state that is not tensors.

        Options that are classes, such as the class of inner optimizers, are the job's code, not state. Numbers in
        attributes are state if they change, such as the count of steps since weights were last merged; so are objects
        there with a ``state_dict``, such as SPAM's schedule of its own.

        Args:
            plain: name and key of each parameter that has such state, and its entries.

        Raises:
            LayoutChanged: one of these entries is not there any more.
        """
        held = self.optimizer.state
        try:
            state = {name: {entry: described(held[key][entry]) for entry in entries} for name, key, entries in plain}
        except KeyError as error:
            raise LayoutChanged(f"an entry of {self._prefix} is not there any more: {error}") from error
        numbers = _attributes(self.optimizer)
        self._counts |= {name for name, value in numbers.items() if self._made_with.get(name) != value}
        return {
            "numbers": {name: numbers[name] for name in sorted(self._counts & numbers.keys())},
            "objects": {
                name: packed(said)
                for name, said in ((name, part.state_dict()) for name, part in _stateful(self.optimizer))
                if self._is_kept(name, said)
            },
            "groups": [
                {k: v for k, v in group.items() if k not in PLACES and self._is_kept(f"group {g}: {k}", v)}
                for g, group in enumerate(self.optimizer.param_groups)
            ],
            "state": state,
            "values": {
                key: value
                for key, value in self.optimizer.state.items()
                if isinstance(key, str) and not isinstance(value, dict) and self._is_kept(key, value)
            },
        }

    def _is_kept(self, place: str, value: Any) -> bool:
        """Whether a value is captured. Code is the job's, and is there again after a restart; anything else that cannot
        be kept exactly is named once: nobody may be able to change what an optimizer keeps."""
        if isinstance(value, torch.Tensor) or is_captured_number(value):
            return True
        if isinstance(value, _CODE):
            return False
        known = self._kept.get(place)
        if known is not None and known[0] is type(value) and type(value) not in _CONTAINERS:
            return known[1]
        kept = is_kept(value, f"{self._prefix}.{place}")
        self._kept[place] = type(value), kept
        way = way_of(value)
        if not kept and not (way is not None and way.get is None) and place not in self._told:
            self._told.add(place)
            log.warning(
                "%s: %s is a %s.%s, which is not captured, as it holds more than plain values: after a restart it is "
                "what the optimizer makes anew. Say how it is kept, by holdfast.register(that class, get=..., "
                "set=...), or that it need not be, by kept=False",
                self._prefix,
                place,
                type(value).__module__,
                type(value).__qualname__,
            )
        return kept

    def check(self, plain: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` unless the optimizer has the class and the groups that `fixed` was taken from.

        Groups, and the parameters in a group, may have another order if each parameter's state is independent: with
        `torch.optim`'s optimizers except LBFGS, and with any optimizer that has no state.
        """
        self._wrappers = plain["state"]
        kind = self._class()
        if kind != fixed["class"]:
            raise StateMismatch(f"{self._prefix} is a {fixed['class']} in the snapshot, a {kind} in this job")
        self._add_groups(plain, fixed)
        held, have = fixed["groups"], self._groups()
        before = {name: g for g, group in enumerate(held) for name in group}
        now = {name: g for g, group in enumerate(have) for name in group}
        problems = [f"{name} only in the snapshot" for name in before if name not in now]
        problems += [f"{name} only in this job" for name in now if name not in before]
        if problems:
            raise StateMismatch(
                f"{self._prefix} updates other parameters than in the snapshot: {some(problems)}. Give the same "
                "optimizers and modules as when the snapshot was taken, in the same order"
            )
        met: dict[tuple[int, int], str] = {}  # each two groups once: a group may be very large
        for name, g in now.items():
            met.setdefault((g, before[name]), name)
        if parted := [name for (g, then), name in met.items() if set(have[g]) != set(held[then])]:
            raise StateMismatch(
                f"{self._prefix}: {parted[0]} is in another parameter group than in the snapshot: make the same groups "
                "as when the snapshot was taken"
            )
        if len(have) != len(held):
            raise StateMismatch(f"{self._prefix} has {len(held)} parameter groups in the snapshot, {len(have)} here")
        ordered = not kind.startswith(SHAREABLE) or isinstance(self.optimizer, torch.optim.LBFGS)
        moved = [b for a, b in zip(before, now, strict=True) if a != b]
        if moved and ordered and any(fixed["order"].values()):
            raise StateMismatch(
                f"{self._prefix}, a {kind}, has its parameters in another order than in the snapshot, from {moved[0]} "
                "on, and may keep state that depends on it: give them in the order of the snapshot"
            )

    def _add_groups(self, plain: Tree, fixed: Tree) -> None:
        """Make the groups that the earlier run added in training, of parameters that the model has, too: as when layers
        are unfrozen. The job that starts again makes only those that it began with."""
        held, groups = fixed["groups"], self.optimizer.param_groups
        had = len(groups)
        if not fixed.get("began") == had < len(held):
            return
        if [set(names) for names in held[:had]] != [set(names) for names in self._groups()]:
            return
        known = {name: parameter for parameter, name in self._names.items()}
        added = list(zip(held[had:], plain["groups"][had:], strict=True))
        if all(name in known for names, _ in added for name in names):
            self.undo.callback(groups.__delitem__, slice(had, None))
            for names, options in added:
                self.optimizer.add_param_group({**options, "params": [known[name] for name in names]})
            log.info("%s: parameter groups that were added in training are made again: %d", self._prefix, len(added))

    def load(self, plain: Tree, fixed: Tree) -> None:
        """Load what `look` returned, and the values that it read. Options that are tensors are filled in place."""
        self.undo.pop_all()  # it would keep replaced tensors alive
        for name, number in plain["numbers"].items():
            held = getattr(self.optimizer, name, None)
            if type(held) is list and type(number) is list:
                held[:] = number  # others may refer to the same list
            elif isinstance(held, torch.Tensor) and number is not None:
                held.fill_(number)
            else:
                setattr(self.optimizer, name, number)
            self._counts.add(name)
        parts = dict(_stateful(self.optimizer))
        for name, state in plain["objects"].items():
            if name in parts:
                parts[name].load_state_dict(unpacked(state))
            else:
                log.warning("%s has no %s here, whose state the snapshot holds: it is not restored", self._prefix, name)
        order = fixed["order"]
        for group, saved in zip(self.optimizer.param_groups, self._matching(plain, fixed), strict=True):
            for key, value in saved.items():
                live = group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
                    live.copy_(value)
                elif not take_over(live, value):  # other groups may refer to the same object
                    group[key] = value
        keys: dict[str, Any] = dict(self.parameters())
        keys |= {name: name.removeprefix(NAMED) for name in order if name.startswith(NAMED)}
        for name, key in keys.items():
            held = {entry: value for entry, value in plain["state"].get(name, {}).items() if not is_description(value)}
            state = {**self.optimizer.state.get(key, {}), **held}
            if state:
                self.optimizer.state[key] = {
                    entry: state[entry] if entry in state else state[str(entry)] for entry in order[name]
                }
        values, texts = plain["values"], [key for key in self.optimizer.state if isinstance(key, str)]
        for gone in (text for text in texts if text not in values and f"{NAMED}{text}" not in order):
            self.optimizer.state.pop(gone)
        self.optimizer.state.update(values)
        before = dict(self.optimizer.state)  # restore the order in which steps create the entries
        refill(self.optimizer.state, {key: before.pop(key) for key in keys.values() if key in before} | before)

    def _matching(self, plain: Tree, fixed: Tree) -> Iterator[dict[str, Any]]:
        """The saved options of each group, found by its set of parameters; empty groups are matched in order."""
        held: dict[frozenset[str], list[dict[str, Any]]] = {}
        for names, options in zip(fixed["groups"], plain["groups"], strict=True):
            held.setdefault(frozenset(names), []).append(options)
        for names in self._groups():
            yield held[frozenset(names)].pop(0)

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the state tensors of `leaves` that do not exist yet, uninitialised."""
        held = self.optimizer.state
        before = {key: dict(state) if isinstance(state, dict) else state for key, state in held.items()}
        self.undo.callback(refill, held, before)
        parameters = dict(self.parameters())
        first = next(iter(parameters.values()), torch.empty(0))
        self._make_wrappers(leaves, parameters)
        for leaf in leaves.values():
            if not leaf.name.startswith(f"{self._prefix}.") or INNER in leaf.name:
                continue
            place = leaf.name.removeprefix(f"{self._prefix}.")
            name, _, entry = place.rpartition(".")
            while name and not name.startswith(NAMED) and name not in parameters:
                name = name.rpartition(".")[0]  # names of entries may have dots, too
            entry = entry if name.startswith(NAMED) else place.removeprefix(f"{name}.")
            key: Any = name.removeprefix(NAMED) if name.startswith(NAMED) else parameters.get(name)
            if key is not None and entry not in map(str, self.optimizer.state.get(key, {})):
                like = parameters.get(name, first)
                self.optimizer.state.setdefault(key, {})[entry] = _empty_for(like, leaf)

    def _make_wrappers(self, leaves: Mapping[str, Leaf], parameters: Mapping[str, torch.Tensor]) -> None:
        """The tensors of other classes that the job does not have yet. Raises as `wrapper_of`."""
        for name, entries in self._wrappers.items():
            key: Any = name.removeprefix(NAMED) if name.startswith(NAMED) else parameters.get(name)
            for entry, description in entries.items():
                if key is not None and is_description(description) and entry not in self.optimizer.state.get(key, {}):
                    device = parameters[name].device if name in parameters else torch.device("cpu")
                    made = wrapper_of(description, f"{self._prefix}.{name}.{entry}", leaves, device)
                    self.optimizer.state.setdefault(key, {})[entry] = made


def _stateful(optimizer: Any) -> list[tuple[str, Any]]:
    """Objects with a ``state_dict`` in the attributes of an optimizer that may keep more than its state and its groups.
    Modules are the job's, and other optimizers are captured as such."""
    if not says_more(optimizer):
        return []
    return [
        (name, value)
        for name, value in vars(optimizer).items()
        if isinstance(value, Stateful) and not isinstance(value, torch.nn.Module) and not is_optimizer(value)
    ]


def _attributes(optimizer: Any) -> dict[str, Any]:
    """Numbers, texts, None, and copies of lists of these, in an optimizer's attributes; tensors that hold one number,
    which compiled steps take instead of numbers, as such. torch's own optimizers keep nothing there that lasts."""
    if type(optimizer).__module__.startswith("torch."):
        return {}
    return {
        name: list(value) if type(value) is list else value.item() if isinstance(value, torch.Tensor) else value
        for name, value in vars(optimizer).items()
        if is_captured_number(value)
    }


def is_captured_number(value: Any) -> bool:
    """Whether an attribute of an optimizer is captured with it, once it changes."""
    if type(value) is torch.Tensor:  # on a device, reading it would wait
        real = not (value.is_complex() or value.is_quantized or value.requires_grad)
        return value.dim() == 0 and value.device.type == "cpu" and value.layout is torch.strided and real
    return _is_plain(value) or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or (isinstance(value, np.generic) and value.dtype.kind in "biufc")
    )


def _empty_for(parameter: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """The tensor an optimizer would create for `parameter`, distributed like it; `leaf` is this rank's part of it."""
    empty = empty_like_leaf(leaf, parameter.device)
    part = local(parameter)
    if part is parameter or part.shape != empty.shape:
        return empty
    return torch.empty_like(parameter, dtype=empty.dtype, requires_grad=False)


def check_names(what: str, held: Iterable[str], have: Iterable[str]) -> None:
    """Raises `StateMismatch` unless the snapshot and the job name the same parts."""
    before, now = sorted(held), sorted(have)
    if before != now:
        raise StateMismatch(f"{what} is {before or 'none'} in the snapshot, {now or 'none'} in this job")
