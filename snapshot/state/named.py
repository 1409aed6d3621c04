"""What the user has named as state: whole objects, and single attributes of others.

``snap.track("count", get=lambda: model.count, set=...)`` names one attribute. What else the model keeps is captured,
and told of, as if nothing of it were named. So it is with ``extra={"trainer": trainer}``, if the trainer's
``load_state_dict`` sets single attributes: no other can be what it was.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from holdfast.snapshot.state.walk import is_code, is_users_own, parts_of_code, referred

LOADS = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST")
"""What instructions are called that read a variable."""

Chain = tuple[str, ...]
"""A variable, and the attributes that are read one after the other: ``("model", "head", "count")``."""


@dataclass(frozen=True, slots=True)
class NamedState:
    """What was named.

    Attributes:
        objects: what is named as a whole, attributes' values included.
        attributes: the attributes that are named of objects, with the ids of these.
        variables: those that functions take whole. A number that one holds is known by its name only.
    """

    objects: list[Any] = field(default_factory=list)
    attributes: set[tuple[int, str]] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)

    def has(self, holder: Any, path: str) -> bool:
        """Whether the attribute of `holder` at the end of a path is named."""
        return (id(holder), path.rpartition(".")[2]) in self.attributes

    def add(self, value: Any, attributes: Chain = ()) -> None:
        """These attributes of a value are read, one after the other. What is no plain attribute, such as a property,
        may give anything of the object."""
        holder = None
        for name in attributes:
            held = _held_by(value)
            if name not in held:
                holder = None
                break
            holder, value = value, held[name]
        if holder is not None:
            self.attributes.add((id(holder), attributes[-1]))
        self.objects.append(value)


def state_named_by(given: Iterable[Any]) -> NamedState:
    """What is named by objects, each of them as a whole, and by functions that return values: what these read."""
    found, seen, todo = NamedState(), set[int](), [*given]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, MethodType) and each.__name__ != "state_dict":
            found.add(each.__self__)
            todo.append(each.__func__)
            continue
        if is_code(each) and not isinstance(each, FunctionType):
            todo.extend(part for _, part in parts_of_code(each))
            continue
        if not isinstance(each, FunctionType):
            for chain in _restored_by(type(each)):
                found.add(each, chain)
            continue
        read = chains_in(each.__code__)
        for path, value in referred(each):
            name = path.removeprefix(".")
            own = [chain[1:] for chain in read if chain[0] == name]
            if () in own:
                found.variables.add(name)
            is_attribute = not own and name in each.__globals__  # of something else that is read
            if isinstance(value, FunctionType) and is_users_own(value) and own:
                todo.append(value)
            elif not is_attribute:
                for chain in own or [()]:  # the default of an argument is taken whole
                    found.add(value, chain)
    return found


def _restored_by(kind: type) -> Collection[Chain]:
    """The attributes that a class of the user touches as it is loaded. Other classes load all they have, as does one of
    whose method it cannot be told."""
    method = inspect.getattr_static(kind, "load_state_dict", None)
    if not (isinstance(method, FunctionType) and is_users_own(method) and method.__code__.co_argcount):
        return [()]
    touched = chains_in(method.__code__)
    itself = method.__code__.co_varnames[0]
    return [()] if ("super",) in touched else {chain[1:] for chain in touched if chain[0] == itself}


@lru_cache(maxsize=256)
def chains_in(code: CodeType) -> frozenset[Chain]:
    """The variables that a function reads, functions within it included, with the attributes that it takes, or sets, of
    each. It takes a value whole if it passes it on, looks into it, or calls a method of it."""
    found, chain = set[Chain](), Chain()
    for each in dis.get_instructions(code):
        is_attribute = each.opname == "STORE_ATTR" or (each.opname == "LOAD_ATTR" and "NULL|self" not in each.argrepr)
        if chain and is_attribute:  # a method is called otherwise
            chain = (*chain, each.argval)
            continue
        found |= {chain} - {()}
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # some read two variables
        *whole, chain = [(name,) for name in names] if any(load in each.opname for load in LOADS) else [()]
        found.update(whole)
    return frozenset(found.union(*(chains_in(each) for each in code.co_consts if isinstance(each, CodeType))))


def _held_by(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        held |= {**value._modules, **value._buffers, **value._parameters}
    return held
