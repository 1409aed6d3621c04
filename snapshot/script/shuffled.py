"""Finds what a source of batches shuffles in place as a pass begins.

Each pass then begins with the order that the one before has left, and a restart with the order that the script made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.snapshot.state.walk import LONGEST, walk

MOST = 1_000_000
"""Longer ones are taken for data: they are copied for the first look."""

SHUFFLED = (
    "data %r: a pass shuffles %s in place, from the order that the pass before has left. A restart begins with the "
    "order that the script makes, and is refused from the second pass on: shuffle a copy in each pass, as by `order = "
    "list(...)`"
)

log = get_log(__name__)


class Shuffled:
    """Looks at the lists and arrays of a source before its first pass, and once more after a batch was read."""

    def __init__(self, source: Any, name: str) -> None:
        self._name = name
        self._before = [(path, value, _copied(value)) for path, value in _ordered_in(source)]

    def look(self) -> None:
        """Warn of those that are in another order now."""
        if found := [path.strip(".") for path, value, before in self._before if _is_shuffled(before, value)]:
            log.warning(SHUFFLED, self._name, some(found))


def _ordered_in(source: Any) -> Iterator[tuple[str, Any]]:
    for path, value, _ in walk([("", source)], lambda each: not callable(each), longest=LONGEST):
        is_row = isinstance(value, np.ndarray) and value.ndim == 1 and not value.dtype.hasobject
        if (is_row or isinstance(value, list)) and len(value) <= MOST:
            yield path, value


def _copied(value: Any) -> Any:
    """By no method of a class of the user's own."""
    return list.copy(value) if isinstance(value, list) else np.ndarray.copy(value)


def _is_shuffled(before: Any, now: Any) -> bool:
    """Whether these hold the same, in another order."""
    if isinstance(before, np.ndarray):
        is_other = before.shape == now.shape and not np.array_equal(before, now)
        return is_other and np.array_equal(np.sort(before), np.sort(now))
    is_other = len(before) == len(now) and any(one is not other for one, other in zip(before, now, strict=True))
    return is_other and sorted(map(id, before)) == sorted(map(id, now))
