"""What the user has named as state: whole objects, and single attributes of others.

``snap.track("count", get=lambda: model.count, set=...)`` names one attribute. What else the model keeps is captured,
and told of, as if nothing of it were named.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch

from holdfast.snapshot.state.walk import is_users_own, referred

Chain = tuple[str, ...]
"""A variable, and the attributes that are read one after the other: ``("model", "head", "count")``."""


@dataclass(frozen=True, slots=True)
class NamedState:
    """What was named.

    Attributes:
        objects: what is named as a whole, attributes' values included.
        attributes: the attributes that are named of objects, with the ids of these.
    """

    objects: list[Any] = field(default_factory=list)
    attributes: set[tuple[int, str]] = field(default_factory=set)

    def has(self, holder: Any, path: str) -> bool:
        """Whether the attribute of `holder` at the end of a path is named."""
        return (id(holder), path.rpartition(".")[2]) in self.attributes

    def add(self, value: Any, attributes: Chain) -> None:
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
        if not isinstance(each, FunctionType):
            found.objects.append(each)
            continue
        read = chains_in(each.__code__)
        for path, value in referred(each):
            own = [chain[1:] for chain in read if chain[0] == path.removeprefix(".")]
            is_attribute = not own and path.removeprefix(".") in each.__globals__  # of something else that is read
            if isinstance(value, FunctionType) and is_users_own(value) and own:
                todo.append(value)
            elif not is_attribute:
                for chain in own or [()]:  # the default of an argument is taken whole
                    found.add(value, chain)
    return found


@lru_cache(maxsize=256)
def chains_in(code: CodeType) -> frozenset[Chain]:
    """The variables of others that a function reads, functions within it included, with the attributes that it takes of
    each. It takes a value whole if it passes it on, looks into it, or calls a method of it."""
    found, chain = set[Chain](), Chain()
    for each in dis.get_instructions(code):
        if chain and each.opname == "LOAD_ATTR" and "NULL|self" not in each.argrepr:  # as methods are
            chain = (*chain, each.argval)
            continue
        found |= {chain} - {()}
        chain = (each.argval,) if each.opname in ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME") else ()
    return frozenset(found.union(*(chains_in(each) for each in code.co_consts if isinstance(each, CodeType))))


def _held_by(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        held |= {**value._modules, **value._buffers, **value._parameters}
    return held
