"""The one way through objects: what is followed, by which path, and that no user's code runs."""

from __future__ import annotations

import functools
import importlib
import io
import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.snapshot.state.digests import digest_of, digest_of_batch
from holdfast.snapshot.state.rng import find
from holdfast.snapshot.state.walk import is_users_own, walk


class Slotted:
    """Has no ``__dict__``, and a slot that nothing was assigned to."""

    __slots__ = ("empty", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Unreadable(OrderedDict[str, Any]):
    """Like a configuration some of whose values are still missing."""

    def items(self) -> Any:
        raise LookupError("a value is missing")


class Watched:
    """Notes whatever code of its own is run."""

    def __init__(self) -> None:
        self.__dict__["ran"] = []
        self.__dict__["plain"] = 1

    @property
    def moves(self) -> int:
        self.__dict__["ran"].append("property")
        return 1

    def __getattr__(self, name: str) -> Any:
        self.__dict__["ran"].append(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        self.__dict__["ran"].append("len")
        return 3

    def __repr__(self) -> str:
        self.__dict__["ran"].append("repr")
        return "watched"


@dataclass(slots=True)
class Pair:
    """A data class without ``__dict__``."""

    left: Any
    right: Any = field(default=None)


def everything(value: Any) -> bool:
    return True


def paths(value: Any, **options: Any) -> dict[str, Any]:
    return {path: part for path, part, _ in walk([("", value)], everything, **options)}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": 5}, "['a']"),
        (OrderedDict({3: 5}), "[3]"),
        ({(1, "b"): 5}, "[(1, 'b')]"),
        ({Slotted(0): 5}, "[0]"),
        ([0, 5], "[1]"),
        ((0, 5), "[1]"),
        (deque([5]), "[0]"),
        ({5}, "{5}"),
        (frozenset({5}), "{5}"),
        (Slotted(5), ".kept"),
        (Pair(0, 5), ".right"),
        (Pair({"x": [Slotted(5)]}), ".left['x'][0].kept"),
    ],
)
def test_each_kind_is_followed_by_its_path(value: Any, path: str) -> None:
    assert paths(value)[path] == 5


def test_an_iterator_of_a_container_is_its_position() -> None:
    places = iter([7, 8, 9])
    next(places)
    assert paths(places)[".position"] == 1
    assert list(places) == [8, 9]


def test_a_set_without_an_order_is_not_opened() -> None:
    assert list(paths({Slotted(1), Slotted(2)})) == [""]


def test_no_code_of_an_object_runs() -> None:
    watched = Watched()
    assert paths([watched], code=True, longest=1)["[0].plain"] == 1
    digest_of_batch([watched])
    assert watched.ran == []


class Lazy(Mapping[str, int]):
    """Makes each value when it is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getitem__(self, key: str) -> int:
        self.made.append(key)
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_values_that_are_made_or_read_when_they_are_asked_for_are_not_asked_for(tmp_path: Path) -> None:
    lazy = Lazy()
    assert list(paths(lazy)) == ["", ".made"]
    assert lazy.made == []
    np.savez(tmp_path / "saved.npz", a=np.zeros(2))
    with np.load(tmp_path / "saved.npz") as saved:
        assert list(paths(saved)) == [""]
    assert paths(UserDict(a=1))["['a']"] == 1


def test_what_refers_to_itself_ends_and_shared_objects_are_opened_once() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert list(paths(loop)) == ["", "[0]", "[1]"]
    shared = Slotted(5)
    assert [path for path in paths([shared, shared]) if path.endswith("kept")] == ["[0].kept"]
    assert [path for path in paths([shared, shared], once=False) if path.endswith("kept")] == ["[0].kept", "[1].kept"]


def test_limits_cut_off_what_is_far() -> None:
    nested: Any = 5
    for _ in range(20):
        nested = [nested]
    assert len(paths(nested, deepest=3)) == 4
    assert len(paths([[1], [2], [3]], most=2)) == 5
    assert list(paths([[0] * 5, [0] * 2], longest=4)) == ["", "[0]", "[1]", "[1][0]", "[1][1]"]
    assert list(paths(list(range(8)), thinned=4)) == ["", "[0]", "[2]", "[4]", "[6]"]


def test_a_long_container_of_objects_comes_last() -> None:
    objects, values = [Slotted(number) for number in range(4)], [0] * 4
    found = list(paths([objects, values, [[5]]], longest=3, objects=4))
    assert found[:6] == ["", "[0]", "[1]", "[2]", "[2][0]", "[2][0][0]"]
    assert found[6:8] == ["[0][0]", "[0][0].kept"] and len(found) == 14
    assert list(paths([objects], longest=3)) == ["", "[0]"]
    assert list(paths([objects], longest=3, objects=1)) == ["", "[0]", "[0][0]", "[0][0].kept"]


def test_functions_are_followed_where_code_counts() -> None:
    generator = random.Random(1)

    def draw(scale: float) -> float:
        return generator.random() * scale

    half = functools.partial(draw, 0.5)
    assert list(find(half)) == ["func.generator"]
    assert paths(half).keys() == {""}


def test_only_the_users_own_objects_are_opened() -> None:
    assert is_users_own(Slotted(1))
    assert not is_users_own(torch.utils.data.SequentialSampler([1]))
    assert not is_users_own(torch.nn.Linear(1, 1))
    assert not is_users_own(random.Random(1))


@pytest.mark.parametrize("folder", ["dist-packages", "src"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py", "{}/part.py"])  # the last one has no __init__.py
def test_what_is_installed_in_any_environment_is_not_the_users_own(
    folder: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"of_{folder.replace('-', '_')}_{len(file)}"
    source = tmp_path / folder / file.format(package)
    source.parent.mkdir(parents=True)
    source.write_text("class Made: ...")
    monkeypatch.syspath_prepend(tmp_path / folder)
    made = importlib.import_module(package + ".part" * file.endswith("part.py")).Made()
    assert is_users_own(made) == (folder == "src")


# ---------------------------------------------------------------------- digests

DIFFERENT: list[Any] = [
    *(1, True, 1.0, "1", b"1", None, [], {}, (), [1], (1,), {"a": 1}, {"b": 1}, [[1]], [[], 1], {1}, {2}),
    *(torch.ones(2), torch.zeros(2), torch.ones(2, 1), torch.ones(2, dtype=torch.int32), np.ones(2), np.float32(1)),
    *(torch.tensor(float("nan")), torch.ones(2).to_sparse(), torch.empty(0), np.zeros((0, 2)), -0.0, 0.0, 1 << 70000),
    *(random.Random(1), random.Random(2), np.random.RandomState(1), torch.Generator().manual_seed(1), Slotted(1)),
    *(
        torch.device("cpu"),
        torch.device("cuda", 0),
        io.BytesIO(b"a"),
        io.BytesIO(b"b"),
        {frozenset({1})},
        {frozenset({2})},
    ),
    *(Slotted(2), Pair(1), np.random.default_rng(1), np.random.default_rng(2), "\ud800", 1j, torch.float32),
]


@pytest.mark.parametrize("digest", [digest_of, digest_of_batch])
def test_different_values_have_different_digests(digest: Any) -> None:
    assert len(set(map(digest, DIFFERENT))) == len(DIFFERENT)


@pytest.mark.parametrize("digest", [digest_of, digest_of_batch])
def test_equal_values_have_equal_digests_whatever_they_share(digest: Any) -> None:
    row = [1, torch.ones(3)]
    assert digest([row, row]) == digest([[1, torch.ones(3)], [1, torch.ones(3)]])
    both = torch.ones(2, 3)
    assert digest(both.t().contiguous()) == digest(torch.ones(3, 2)) == digest(both.t())


def test_texts_in_a_row_are_not_taken_for_others() -> None:
    assert digest_of(["a", "b"]) != digest_of(["a[1] str 1 b", ""])
    assert digest_of([{"a", (1, 2)}]) == digest_of([{(1, 2), "a"}])


def test_all_of_a_value_counts_but_of_a_batch_a_sample() -> None:
    one, other = torch.zeros(10_000), torch.zeros(10_000)
    other[1] = 1
    assert digest_of(one) != digest_of(other)
    assert digest_of_batch(one) == digest_of_batch(other)
    deep: Any = 5
    other_deep: Any = 6
    for _ in range(100):
        deep, other_deep = [deep], [other_deep]
    assert digest_of(deep) != digest_of(other_deep)


def test_a_batch_that_refers_to_itself_has_a_digest() -> None:
    graph = Pair(torch.ones(2))
    graph.right = [graph]
    assert digest_of_batch(graph) == digest_of_batch(graph)


def test_a_mapping_that_cannot_be_read_has_no_parts() -> None:
    config = MappingProxyType(Unreadable(rate=1))
    assert [path for path, _, _ in walk([("", [config, 2])], lambda value: True)] == ["", "[0]", "[1]"]


def test_what_another_thread_changes_meanwhile_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the changes come whenever an entry is looked at."""
    table: dict[str, int] = {"a": 1, "b": 2}
    members = {"c", "d"}

    def looked_at(value: object) -> bool:
        table[f"more {len(table)}"] = 0
        members.add(f"more {len(members)}")
        return isinstance(value, str)

    monkeypatch.setattr("holdfast.snapshot.state.walk.is_plain", looked_at)
    found = [path for path, _, _ in walk([("", [table, members])], lambda value: False)]
    assert {"[0]['a']", "[0]['b']", "[1]{'c'}", "[1]{'d'}"} <= set(found)
