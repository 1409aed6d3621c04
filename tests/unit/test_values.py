"""Plain values, exactly: what goes in comes out, with its type and its last bit, or is refused by name."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.snapshot.state.values import decode, encode
from tests.strategies import json_values, spoilt


def no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "early", tensors))
    return decode(json.loads(text), tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are of one type and equal to the last bit, at every depth."""
    if type(a) is not type(b):
        return False
    match a:
        case np.ndarray() | np.generic():
            return bool((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()))
        case float():
            return bool(a.hex() == b.hex())
        case deque():
            return same((list(a), a.maxlen), (list(b), b.maxlen))
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case dict():
            return same(list(a.items()), list(b.items()))
        case set() | frozenset():
            return bool(a == b) and sorted(map(repr, a)) == sorted(map(repr, b))
        case torch.Tensor():
            return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.parametrize("at", [0, 2, 3, 9])
def test_a_file_in_memory_keeps_its_place(at: int) -> None:
    file = io.BytesIO(b"\0\xff!")
    file.seek(at)
    (back,) = there_and_back([file])
    assert (type(back), back.getvalue(), back.tell()) == (io.BytesIO, b"\0\xff!", at)


huge_ints = st.integers() | st.integers(-(2**5000), 2**5000) | st.sampled_from([10**4299, -(3**8000), 2**4096, 2**63])
keys = st.text(max_size=4) | huge_ints | st.binary(max_size=4) | st.booleans() | st.floats(allow_nan=False)
number_types = (
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes()
) | hnp.complex_number_dtypes()
arrays = hnp.arrays(number_types, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    huge_ints,
    st.floats(),
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=8),
    st.binary(max_size=8).map(bytearray),
    arrays,
    hnp.arrays(number_types, ()).map(lambda array: array[()]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    st.sets(keys, max_size=3),
    st.frozensets(st.tuples(keys, keys), max_size=3),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.one_of(
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "name", "items"]), inner, max_size=3),
        st.dictionaries(keys | st.tuples(keys, keys), inner, max_size=4),
    )
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 5)),
        mappings,
        mappings.map(OrderedDict),
        st.dictionaries(keys, huge_ints, max_size=3).map(Counter),
    )


trees = st.recursive(leaves, containers, max_leaves=10)


@given(trees)
def test_any_nest_of_values_comes_back_exactly(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


@given(arrays)
def test_an_array_that_comes_back_may_be_written_to(array: np.ndarray[Any, Any]) -> None:
    back = there_and_back(array)
    assert back.flags.writeable and back.flags.owndata


def test_a_transposed_array_comes_back_in_its_order() -> None:
    array = np.arange(6).reshape(2, 3).T
    assert same(there_and_back(array), array)


def test_tensors_are_taken_out_under_their_path() -> None:
    tree = {"a": [torch.ones(2), (torch.zeros(()),)], 7: {"$": torch.arange(3)}}
    tensors: dict[str, torch.Tensor] = {}
    encode(tree, "late", tensors)
    assert tensors.keys() == {"late.a.0", "late.a.1.0", "late.7.$"}
    assert same(there_and_back(tree), tree)


def test_tensors_whose_paths_are_alike_are_told_apart() -> None:
    tree = {
        "a": {"b": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)},
        "a.b": torch.ones(4),
        "a.b+": torch.ones(5),
    }
    assert same(there_and_back(tree), tree)


def test_a_tensor_never_takes_the_name_of_one_that_is_there_already() -> None:
    tensors = {"early.x": torch.zeros(1)}
    encoded = encode({"x": torch.ones(2)}, "early", tensors)
    assert len(tensors) == 2
    assert torch.equal(decode(encoded, tensors.__getitem__)["x"], torch.ones(2))
    assert torch.equal(tensors["early.x"], torch.zeros(1))


def test_an_early_tensor_is_named_the_same_in_every_snapshot() -> None:
    tree = {1: torch.ones(1), "1": torch.ones(1)}
    names: list[set[str]] = []
    for _ in range(2):
        tensors: dict[str, torch.Tensor] = {}
        encode(tree, "early", tensors)
        names.append(set(tensors))
    assert names[0] == names[1]


class Colour(IntEnum):
    RED = 1


class Mode(StrEnum):
    MIN = "min"


@dataclass
class Point:
    x: int


class Counter_(Counter[str]):
    pass


class Text(str):
    pass


FakeCounter = type("Counter", (dict,), {})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        1j,
        range(3),
        lambda: None,
        Text("a"),
        np.str_("a"),
        np.bytes_(b"a"),
        np.datetime64("2020-01-01"),
        np.array(["a"]),
        np.array([object()]),
        np.array([(1, 2)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        defaultdict(lambda: 1),
        Counter_("ab"),
        FakeCounter(),
        memoryview(b"a"),
    ],
    ids=lambda value: type(value).__qualname__,
)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda value: value, "early"),
        (lambda value: {"a": [1, (2, value)]}, "early.a.1.1"),
        (lambda value: OrderedDict({5: {"$": value}}), r"early.5.\$"),
    ],
    ids=["alone", "nested", "mapped"],
)
def test_what_cannot_be_kept_exactly_is_refused_by_its_path(value: Any, wrap: Any, path: str) -> None:
    with pytest.raises(StateMismatch, match=f"^{path} is a .*kept exactly"):
        encode(wrap(value), "early", {})


def test_a_key_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"early.a.<key> is a .*Text"):
        encode({"a": {Text("b"): 1}}, "early", {})


class Nested(NamedTuple):
    inner: Point


@pytest.mark.parametrize(
    "value",
    [
        *(Point(1), Nested(Point(2)), Colour.RED, Mode.MIN),
        *(defaultdict(int, a=1), torch.Size([2, 3]), {Colour.RED: [Point(3)]}),
    ],
    ids=lambda value: type(value).__qualname__,
)
def test_an_object_of_a_class_that_can_be_found_is_made_again_from_its_attributes(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value, "early", {}))), no_tensor)
    assert again == value and type(again) is type(value)


def test_a_class_that_is_not_there_any_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(Point(1), "early", {})
    monkeypatch.delattr(sys.modules[__name__], "Point")
    with pytest.raises(StateMismatch, match="Point"):
        decode(encoded, no_tensor)


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:eval", "os:path.join", "nowhere:Class", f"{__name__}:np.array"]
)
def test_only_a_class_that_a_loaded_module_defines_is_found_by_its_name(name: str) -> None:
    with pytest.raises(StateMismatch):
        decode({"$": "object", "class": name, "attributes": {}}, no_tensor)


def test_objects_that_refer_to_each_other_in_a_circle_are_refused() -> None:
    one, other = Point(1), Point(2)
    vars(one)["x"], vars(other)["x"] = other, one
    with pytest.raises(StateMismatch, match="circle"):
        encode(one, "early", {})


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "nothing"},
        {"$": None},
        {"$": []},
        {"$": "tensor"},
        {"$": "tensor", "name": "not there"},
        {"$": "int", "data": "z"},
        {"$": "int", "data": 5},
        {"$": "float", "data": "0x1p99999"},
        {"$": "float", "data": None},
        {"$": "bytes", "data": "!"},
        {"$": "bytes", "data": "é"},
        {"$": "tuple", "items": 5},
        {"$": "set", "items": [[1]]},
        {"$": "mapping", "type": "list", "items": []},
        {"$": "mapping", "type": [], "items": []},
        {"$": "mapping", "type": "dict", "items": [[1]]},
        {"$": "mapping", "type": "dict", "items": [[[], 1]]},
        {"$": "ndarray", "dtype": "<f4", "shape": [2], "data": ""},
        {"$": "ndarray", "dtype": "(2,f4", "shape": [0], "data": ""},
        {"$": "ndarray", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "<f4", "shape": [-1, 0], "data": ""},
        {"$": "scalar", "dtype": "<f4", "data": ""},
        {"$": "scalar", "dtype": "<f4", "data": "AAA="},
        {"$": "dtype", "data": "load"},
        {"$": "dtype", "data": "float31"},
        {"$": "device", "data": "nowhere"},
        {"$": "device", "data": "cpu:-1"},
    ],
    ids=json.dumps,
)
def test_a_malformed_value_is_refused(encoded: Any) -> None:
    with pytest.raises(ProtocolError, match="the record holds"):
        decode([{"a": encoded}], no_tensor)


def encoded(tree: Any) -> Any:
    return encode(tree, "early", {})


@given(json_values | spoilt(trees.map(lambda tree: [encoded(tree)])))
def test_a_spoilt_value_is_refused_or_is_another_one(data: Any) -> None:
    try:
        value = decode(data, no_tensor)
    except ProtocolError:
        return
    assert same(decode(encoded(value), no_tensor), value)
