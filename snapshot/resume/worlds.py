"""From one number of data-parallel ranks to another: who goes on for whom. Pure; the same on every rank.

A coordinate without its data-parallel place is a *family*: ranks that train the same part of the model. A world may
change in how many ranks each family has, and in nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.snapshot.resume.arrange import coordinate_key

_PLACE = re.compile(r"(?:^|-)dp(0|[1-9]\d*)$")
_UNCHANGING = re.compile(r"(?:^|-)(?:cp|ep)[1-9]")


def family(coord: str) -> str:
    """The family of a coordinate; empty if it has only a data-parallel place."""
    return _PLACE.sub("", coord)


def check_change(old: Collection[str], new: Collection[str]) -> None:
    """Raises `StateMismatch` unless the worlds differ in the number of data-parallel ranks only."""
    for coord in (*old, *new):
        if _PLACE.search(coord) is None:
            raise StateMismatch(f"{coord!r} has no data-parallel place: its world cannot change")
        if _UNCHANGING.search(coord):
            raise StateMismatch(
                f"{coord!r}: with context or expert parallelism the number of data-parallel ranks cannot change: "
                "start with as many as before"
            )
    held, wanted = {family(coord) for coord in old}, {family(coord) for coord in new}
    if held != wanted:
        raise StateMismatch(
            f"only the number of data-parallel ranks may change; not in the snapshot: {sorted(wanted - held)[:8]}; "
            f"not in this job: {sorted(held - wanted)[:8]}. Start with the same tensor and pipeline parallel sizes"
        )


def members(coords: Collection[str], of: str) -> list[str]:
    """Those of the family of `of`, in order."""
    return sorted((coord for coord in coords if family(coord) == family(of)), key=coordinate_key)


def heir_of(coord: str, old: Collection[str]) -> str:
    """Whose place a new rank takes: its own if there was such a rank, else that of the first of its family."""
    return coord if coord in old else members(old, coord)[0]


def preference(coord: str, old: Collection[str]) -> list[str]:
    """From whom `coord` takes what several hold: from whose place it takes, then from the others of its family."""
    heir = heir_of(coord, old)
    return [heir, *(other for other in members(old, coord) if other != heir)]


def readers(old: Sequence[str], ranks: int, index: int) -> list[str]:
    """Whose manifests rank `index` of `ranks` reads for all."""
    return sorted(old, key=coordinate_key)[index::ranks]


def carriers(old: Collection[str], new: Collection[str], carried: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Which random streams each new rank carries for ranks that are not there: by coordinate, in whose record they are.

    Args:
        carried: by coordinate, in whose record of the snapshot a stream stands that was carried then.
    """
    found = {coord: holder for coord, holder in carried.items() if coord not in old}
    homeless = {**found, **{coord: coord for coord in old}}
    waiting = sorted((coord for coord in homeless if coord not in new), key=coordinate_key)
    result: dict[str, dict[str, str]] = {coord: {} for coord in new}
    for number, coord in enumerate(waiting):
        takers = members(new, coord)
        result[takers[number % len(takers)]][coord] = homeless[coord]
    return result
