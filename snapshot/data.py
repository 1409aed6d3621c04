"""Sources of batches that go on where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Data:
    def __init__(self, source: Any, name: str, held: Any, mark: Callable[[], None], begin: Callable[[], None]) -> None:
        self.source = source
        self._mark, self._begin = mark, begin
        self._n = (held or {}).get("taken", 0)
        self._e = (held or {}).get("epoch", 0)

    def epoch(self) -> int:
        return self._e

    def state(self) -> Any:
        return {"epoch": self._e, "taken": self._n}

    def __iter__(self) -> Iterator[Any]:
        it = iter(self.source)
        for _ in range(self._n):
            next(it)
        while True:
            self._mark()
            try:
                b = next(it)
            except StopIteration:
                break
            self._begin()
            self._n += 1
            yield b
        self._n = 0
        self._e += 1
