"""Tensors of other classes that are made of plain ones, such as an optimizer's state in 8 bits.

torch's own protocol takes them apart and puts them together: ``__tensor_flatten__`` and ``__tensor_unflatten__``. The
plain tensors within are captured and restored in place like any others; the class and what else it needs is plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import empty_like_leaf
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.values import class_of, name_of

INNER = "//"
"""Between the name of such a tensor, in a leaf's name, and the name of a tensor within."""

_CLASS = "holdfast.wrapper"
_PROTOCOL = ("__tensor_flatten__", "__tensor_unflatten__")


def is_wrapper(value: Any) -> bool:
    """Whether a tensor is made of others. A `DTensor` is not: a rank has a part of it, which is a tensor."""
    return is_wrapper_class(type(value)) and not hasattr(type(value), "to_local")


def wrapped_in(value: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors within, with their paths; a plain tensor itself, under an empty path."""
    if not is_wrapper(value):
        yield path, value
        return
    for name in _taken_apart(value)[0]:
        yield from wrapped_in(getattr(value, name), f"{path}{INNER}{name}")


def described(value: Any) -> Any:
    """What `wrapper_of` needs besides the tensors within, as plain values; any other value as it is."""
    if not is_wrapper(value):
        return value
    names, context = _taken_apart(value)
    return {
        _CLASS: name_of(type(value)),
        "parts": {name: described(inner) if is_wrapper(inner := getattr(value, name)) else None for name in names},
        "context": context,
        "size": list(value.size()),
        "stride": list(value.stride()),
    }


def is_description(value: Any) -> bool:
    """Whether `described` has returned it for a wrapper."""
    return isinstance(value, dict) and _CLASS in value


def wrapper_of(description: Tree, path: str, leaves: Mapping[str, Leaf], device: torch.device) -> torch.Tensor:
    """A tensor like the one described, with uninitialised tensors like `leaves` within.

    Raises:
        StateMismatch: its class is in no module that is loaded.
    """
    kind: Any = class_of(description[_CLASS])
    if kind is None or not is_wrapper_class(kind):
        raise StateMismatch(
            f"{path} is a {description[_CLASS].replace(':', '.')} in the snapshot, and no module that is loaded has "
            "that class: import it before the hook is entered"
        )
    parts = {
        name: empty_like_leaf(leaves[f"{path}{INNER}{name}"], device)
        if part is None
        else wrapper_of(part, f"{path}{INNER}{name}", leaves, device)
        for name, part in description["parts"].items()
    }
    size, stride = torch.Size(description["size"]), tuple(description["stride"])
    made: torch.Tensor = kind.__tensor_unflatten__(parts, description["context"], size, stride)
    return made


def is_wrapper_class(kind: type) -> bool:
    """Whether tensors of a class are made of others."""
    return issubclass(kind, torch.Tensor) and all(map(hasattr, (kind, kind), _PROTOCOL))


def _taken_apart(value: Any) -> tuple[list[str], Any]:
    names, context = value.__tensor_flatten__()
    return list(names), context
