"""Plain Python values as JSON and back, exactly, without pickle.

JSON's own types stand for themselves; everything else becomes ``{"$": tag, ...}``. Tensors are taken out and
replaced by their name, so that they are stored as leaves of the slot.

Nothing is imported and no constructor is called for what a record names: a class is found among the modules that are
loaded, an instance of it is made empty, and gets its attributes back, also those in slots, and its items if it is a
dict. A class may say otherwise, see `keep`.
"""

from __future__ import annotations

import base64
import io
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StateMismatch
from holdfast.snapshot.copy.tensors import empty_restrided, is_dense, octets, strides_of
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.live import refill

LONGEST_JSON_INT = 4096
"""In bits. Longer integers are stored in hexadecimal: Python refuses decimal numbers of more than 4300 digits."""

_PACKED, SMALL = "holdfast.tensor", "holdfast.small"
"""Marks of tensors that `packed` made bytes of: of all, and of small ones."""

_NUMBER_TYPE = re.compile(r"[<>|=][biufc][1-9][0-9]?")
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
    "none": None,
}
DEEPEST = 100
"""How deep objects may lie within each other."""

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; tensors in it are added to `tensors` under their path.

    Raises:
        StateMismatch: something cannot be represented; the message names its path.
    """
    match value:  # what is most frequent comes first, as this runs at every boundary
        case None | bool():
            return value
        case str() if type(value) is str:
            return value if _is_unicode(value) else {"$": "str", "data": _text(value.encode("utf-8", "surrogatepass"))}
        case dict() if type(value) in _MAPPINGS.values():
            return _encode_mapping(value, path, tensors)
        case int() if type(value) is int:
            return value if value.bit_length() <= LONGEST_JSON_INT else {"$": "int", "data": hex(value)}
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$": "float", "data": value.hex()}
        case list() if type(value) is list:
            return _encode_items(value, path, tensors)
        case tuple() | set() | frozenset() if type(value) in (tuple, set, frozenset):
            return {"$": type(value).__name__, "items": _encode_items(value, path, tensors)}
        case bytes() | bytearray() if type(value) in (bytes, bytearray):
            return {"$": type(value).__name__, "data": _text(bytes(value))}
        case torch.Tensor():
            name = path
            while name in tensors:  # paths collide: {"a.b": ...} and {"a": {"b": ...}}, or the keys 1 and "1"
                name += "+"
            tensors[name] = value
            strides = strides_of(value)
            return {"$": "tensor", "name": name} | ({} if strides is None else {"strides": strides})
        case np.ndarray() if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return {"$": "ndarray", "dtype": value.dtype.str, "shape": value.shape, "data": _text(value.tobytes())}
        case np.generic() if value.dtype.kind in "biufc":
            return {"$": "scalar", "dtype": value.dtype.str, "data": _text(value.tobytes())}
        case io.BytesIO() if type(value) is io.BytesIO:
            return {"$": "BytesIO", "data": _text(value.getvalue()), "at": value.tell()}
        case deque() if type(value) is deque:
            return {"$": "deque", "items": _encode_items(value, path, tensors), "maxlen": value.maxlen}
        case torch.dtype() | torch.device():
            return {"$": type(value).__name__, "data": str(value).removeprefix("torch.")}
    if (found := _encode_object(value, path, tensors)) is not None:
        return found
    raise StateMismatch(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept exactly: "
        "keep numbers, texts, bytes, arrays, tensors, or lists, tuples, sets, deques and dicts of them"
    )


def _encode_object(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Enumerations, named tuples, and objects of classes that can be found again; None for anything else."""
    kind = type(value)
    named = {"class": name_of(kind)}
    if isinstance(value, Enum):
        return {"$": "enum", "name": value.name} | named if class_of(named["class"]) is kind else None
    if isinstance(value, torch.Size):
        return {"$": "Size", "items": list(value)}
    if isinstance(value, tuple) and hasattr(kind, "_make") and class_of(named["class"]) is kind:
        return {"$": "named", "items": _encode_items(value, path, tensors)} | named
    if kind is defaultdict and value.default_factory in _FACTORIES.values():
        factory = next((name for name, each in _FACTORIES.items() if each is value.default_factory))
        return {"$": "defaultdict", "of": factory, "items": encode(dict(value), path, tensors)}
    way = way_of(value)
    if way is None or way.get is None:
        return None
    if path.count(".") > DEEPEST:
        raise StateMismatch(f"{path}: objects that refer to each other in a circle cannot be kept")
    return {"$": "object", "attributes": encode(way.get(value), path, tensors)} | named


def is_kept(value: Any, path: str) -> bool:
    """Whether `encode` takes a value as it is now."""
    try:
        encode(value, path, {})
    except StateMismatch:
        return False
    return True


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that `encode` encoded as `value`; `tensor` returns a tensor by its name.

    Raises:
        ProtocolError: `value` cannot have come from `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        return _decode_tagged(value, tensor)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, SyntaxError) as error:
        raise ProtocolError(f"the record holds a malformed {value.get('$')!r}: {error!r}") from error


def decode_plain(value: Any) -> Any:
    """As `decode`, for values that hold no tensor. Raises `ProtocolError` if they do."""

    def none(name: str) -> torch.Tensor:
        raise ProtocolError(f"{name}: a tensor among values that are to be plain")

    return decode(value, none)


def _encode_items(values: Collection[Any], path: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    if values and set(map(type, values)) == {int} and max(map(int.bit_length, values)) <= LONGEST_JSON_INT:
        return list(values)  # fast path for states of random generators: hundreds of numbers at every boundary
    return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) is dict and set(map(type, value)) <= {str} and "$" not in value and _is_unicode("".join(value)):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = [
        [encode(key, f"{path}.<key>", tensors), encode(item, f"{path}.{key}", tensors)] for key, item in value.items()
    ]
    return {"$": "mapping", "type": type(value).__name__, "items": pairs}


def _decode_tagged(value: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    match value["$"]:
        case "tensor":
            found = tensor(value["name"])
            empty = empty_restrided(found, value.get("strides"))
            return found if empty is None else empty.copy_(found)
        case "ndarray":
            flat = np.frombuffer(_bytes(value["data"]), dtype=_number_type(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        case "scalar":
            return np.frombuffer(_bytes(value["data"]), dtype=_number_type(value["dtype"]))[0]
        case "int":
            return int(value["data"], 16)
        case "float":
            return float.fromhex(value["data"])
        case "str":
            return _bytes(value["data"]).decode("utf-8", "surrogatepass")
        case "bytes":
            return _bytes(value["data"])
        case "bytearray":
            return bytearray(_bytes(value["data"]))
        case "BytesIO":
            file = io.BytesIO(_bytes(value["data"]))
            file.seek(value["at"])
            return file
        case "tuple" | "set" | "frozenset" as kind:
            make = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(decode(item, tensor) for item in value["items"])
        case "deque":
            return deque((decode(item, tensor) for item in value["items"]), value["maxlen"])
        case "mapping":
            return _MAPPINGS[value["type"]]({decode(key, tensor): decode(item, tensor) for key, item in value["items"]})
        case "dtype":
            return _dtype(value["data"])
        case "device":
            return torch.device(value["data"])
        case "Size":
            return torch.Size(value["items"])
        case "defaultdict":
            return defaultdict(_FACTORIES[value["of"]], decode(value["items"], tensor))
        case "enum" | "named" | "object" as form:
            return _decode_object(form, value, tensor)
    raise ProtocolError(f"the record holds an unknown tag {value['$']!r}")


def _decode_object(form: str, value: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    """Raises `StateMismatch` if the class is not there."""
    kind: Any = class_of(value["class"])
    if kind is None:
        raise StateMismatch(
            f"the snapshot holds a {value['class'].replace(':', '.')}, and no module that is loaded has that class: "
            "import it before the hook is entered"
        )
    if form == "enum" and issubclass(kind, Enum):
        return kind[value["name"]]
    if form == "named" and issubclass(kind, tuple) and hasattr(kind, "_make"):
        return kind._make(decode(item, tensor) for item in value["items"])
    instance = made(kind)
    way = way_of(instance)
    if way is None or way.set is None:
        raise StateMismatch(f"the snapshot holds a {kind.__qualname__}, and how it is kept is not said any more")
    attributes = decode(value["attributes"], tensor)
    try:
        way.set(instance, attributes)
    except Exception as error:
        if way in (ATTRIBUTES, ITEMS):
            raise
        raise StateMismatch(f"the set= for {kind.__qualname__} cannot load what the snapshot has: {error!r}") from error
    return instance


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)  # not getattr, which may import a module of that name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _number_type(text: str) -> np.dtype[Any]:
    if _NUMBER_TYPE.fullmatch(text) is None:  # NumPy accepts many other texts as types
        raise ValueError(f"{text[:80]!r} is not a type of numbers")
    return np.dtype(text)


def _is_unicode(text: str) -> bool:
    """Whether `text` survives JSON unchanged. Lone surrogates, as in undecodable file names, may get paired up."""
    if text.isascii():
        return True
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def packed(value: Any, largest: int | None = None) -> Any:
    """`value` with bytes for the tensors in it. As leaves of the slot, tensors that come and go, or change their size,
    would each time need a new layout.

    Args:
        largest: only dense tensors on the host of up to this many bytes are packed, and only what dicts, lists, tuples
            and deques hold; all else stays as it is. None: all tensors are, and classes of dicts become dicts.
    """
    if isinstance(value, torch.Tensor):
        if largest is not None and not _is_small(value, largest):
            return value
        found = {"shape": list(value.shape), "bytes": elements_of(value), "host": value.device.type == "cpu"}
        return {_PACKED if largest is None else SMALL: value.dtype} | found
    held = dict(value) if largest is None and isinstance(value, dict) else value
    return _rebuilt(held, lambda part: packed(part, largest))


def _rebuilt(value: Any, made: Callable[[Any], Any]) -> Any:
    """A dict, list, tuple or deque with what is `made` of its parts; anything else as it is."""
    kind = type(value)
    if kind is dict:
        return {key: made(part) for key, part in value.items()}
    if kind is deque:
        return deque(map(made, value), value.maxlen)
    return kind(map(made, value)) if kind in (list, tuple) else value


def _is_small(value: torch.Tensor, largest: int) -> bool:
    plain = is_dense(value) and value.is_contiguous() and not value.is_conj() and not value.requires_grad
    return plain and value.device.type == "cpu" and value.nbytes <= largest


def unpacked(held: Any, device: torch.device | None = None, there: Any = None, mark: str = _PACKED) -> Any:
    """What `packed` was given, in containers of its own.

    Args:
        device: where tensors go that were not on the host; None: they stay there.
        there: filled anew and returned if it is a dict or a deque, like `held`: it knows more than its items.
        mark: `SMALL` for what was packed up to some size.
    """
    if type(held) is dict and mark in held:
        made = torch.empty(held["shape"], dtype=held[mark], device="cpu")
        if held["bytes"]:
            octets(made).copy_(torch.frombuffer(bytearray(held["bytes"]), dtype=torch.uint8))
        return made if held["host"] or device is None else made.to(device)
    if type(held) is dict and isinstance(there, dict):
        refill(there, {key: unpacked(part, device, there.get(key), mark) for key, part in held.items()})
        return there
    found = _rebuilt(held, lambda part: unpacked(part, device, mark=mark))
    if type(held) is deque and isinstance(there, deque):
        there.clear()
        there.extend(found)
        return there
    return found


_HEAP_TYPE = 1 << 9
"""Flag of classes that a class statement has made."""


_DEFAULTS = ("__new__", "__reduce_ex__", "__reduce__", "__getstate__")
"""What a class does not define if its objects are no more than their attributes."""


class Keeping(NamedTuple):
    """How instances of a class are kept: ``get(instance)`` returns plain values, ``set(instance, values)`` loads them.
    Without them nothing is kept, and the job makes such an object anew."""

    get: Callable[[Any], Any] | None
    set: Callable[[Any, Any], Any] | None


_ways: dict[type, Keeping] = {}


def keep(kind: type, way: Keeping) -> None:
    """Say how instances of a class, or of subclasses, are kept. Raises `ConfigError` if that was said already."""
    if kind in _ways:
        raise ConfigError(f"{kind.__qualname__} is registered already")
    _ways[kind] = way


def way_of(value: Any) -> Keeping | None:
    """How an object is kept; None: it is no object of a class that can be found again, or more than its attributes."""
    kind = type(value)
    for each in kind.__mro__:
        if each in _ways:
            return _ways[each]
    base = _base_of(kind)
    own = all(getattr(kind, name) is getattr(base, name) for name in _DEFAULTS)
    silent = not hasattr(kind, "__setstate__")
    if not (kind.__flags__ & _HEAP_TYPE and own and silent) or isinstance(value, torch.nn.Module | Enum):
        return None
    if class_of(name_of(kind)) is not kind or (base is object and not (hasattr(value, "__dict__") or _slots(kind))):
        return None
    return ATTRIBUTES if base is object else ITEMS


def name_of(kind: type) -> str:
    """The name under which `class_of` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_of(name: str) -> type | None:
    """The class of that name, if its module is loaded and has it."""
    module, _, path = name.partition(":")
    held: Any = vars(sys.modules[module]) if module in sys.modules else {}
    found: Any = None
    for part in path.split("."):
        found = held.get(part)
        held = vars(found) if isinstance(found, type) else {}
    return found if isinstance(found, type) else None


def made(kind: type) -> Any:
    """An instance of a class without attributes; no code of the class runs."""
    return _base_of(kind).__new__(kind)


def take_over(live: Any, value: Any) -> bool:
    """Give an object the attributes of another one of its class, if it is kept by these. Returns whether it is."""
    if type(live) is not type(value) or way_of(value) is not ATTRIBUTES:
        return False
    _put(live, _attributes(value))
    return True


def _base_of(kind: type) -> Any:
    return next(base for base in (OrderedDict, dict, object) if issubclass(kind, base))


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    parts = [part for each in kind.__mro__ for part in vars(each).values()]
    return {part.__name__: part for part in parts if isinstance(part, MemberDescriptorType)}


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)).items():
        with suppress(AttributeError):  # nothing was assigned yet
            found[name] = slot.__get__(value)
    return found


def _put(value: Any, attributes: dict[str, Any]) -> None:
    slots = _slots(type(value))
    for name in slots.keys() & attributes.keys():
        slots[name].__set__(value, attributes[name])
    if rest := {name: part for name, part in attributes.items() if name not in slots}:
        vars(value).update(rest)


def _items(value: Any) -> dict[str, Any]:
    return {"items": list(dict.items(value)), "attributes": _attributes(value)}


def _put_items(value: Any, held: dict[str, Any]) -> None:
    for key, part in held["items"]:
        _base_of(type(value)).__setitem__(value, key, part)
    _put(value, held["attributes"])


ATTRIBUTES = Keeping(_attributes, _put)
ITEMS = Keeping(_items, _put_items)
