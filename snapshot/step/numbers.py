"""Numbers that a source of batches keeps in objects of the user's own classes: a sampler's count of its passes, the
stage of a curriculum. They are part of the source's place, as its random generators are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.walk import LONGEST, is_users_own, walk


class OwnNumbers:
    """The numbers of one source, of which only those count that are not what the script first made them."""

    def __init__(self, source: Any) -> None:
        """`source`: as it is before the first pass; later ones may take its place."""
        self.look(source)
        self._made = dict(self._numbers())

    def look(self, source: Any) -> None:
        """Find the objects of `source` again. Too slow for `changed`, which is called in every step."""
        self._owners = dict(_owners(source))

    def changed(self) -> Tree:
        """Those that have changed, by path."""
        return {path: number for path, number in self._numbers() if self._made.get(path) != number}

    def put_back(self, source: Any, held: Mapping[str, Any]) -> None:
        """Make them what `changed` returned in an earlier process. Some may only be attributes of classes yet."""
        owners = dict(_owners(source)) if held else {}
        for path, number in held.items():
            owner, _, name = path.rpartition(".")
            if owner in owners:
                setattr(owners[owner], name, number)

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        for path, owner in self._owners.items():
            for name, value in vars(owner).items():
                if type(value) in (bool, int, float):
                    yield f"{path}.{name}", value


def _owners(source: Any) -> Iterator[tuple[str, Any]]:
    """Objects of the user's own classes in a source, by path. A loader leads to its data and its samplers."""
    for path, value, _ in walk([("", source)], _is_opened, longest=LONGEST):
        if hasattr(value, "__dict__") and _is_opened(value) and is_users_own(value):
            yield path, value


def _is_opened(value: Any) -> bool:
    return not callable(value)
