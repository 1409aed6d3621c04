"""Whether a snapshot holds everything that its record lists. Pure functions of the record's trees, as they are before
they are encoded, or once they are decoded.

The fixed values list the entries of each optimizer's state. Each entry is either a leaf of the slot or among the late
values; which of the two is not said, and may change from one walk of the state to the next.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast.smp_daemon.shared.errors import IncompleteSnapshot
from holdfast.smp_daemon.shared.logs import some
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.wrappers import INNER

HELD_BY = {"master_param": "main"}
"""Entries that another leaf of the same parameter holds: an optimizer that offloads lists the copies that it steps."""

BESIDE = tuple(f".{name}" for name in ("main", "scale"))
"""Ends of the names of leaves that belong to a parameter, and are no entries of its state."""


def plain_entries(fixed: Tree, leaves: Collection[str]) -> list[dict[str, list[Any]]]:
    """For each optimizer, and by parameter, the entries that are in no leaf, so that the late values must hold them.

    Takes about half a microsecond an entry, so it is called once a walk.
    """
    found = []
    for kept in fixed.get("optim", ()):
        absent = {
            name: [each for each in entries if not _is_leaf(f"{kept['prefix']}.{name}", each, leaves)]
            for name, entries in kept["order"].items()
        }
        found.append({name: entries for name, entries in absent.items() if entries})
    return found


def _is_leaf(stem: str, entry: Any, leaves: Collection[str]) -> bool:
    return f"{stem}.{entry}" in leaves or (entry in HELD_BY and f"{stem}.{HELD_BY[entry]}" in leaves)


def unlisted(fixed: Tree, leaves: Collection[str]) -> list[str]:
    """The leaves of optimizers' state that no entry names: a restore would leave them out."""
    prefixes = tuple(f"{kept['prefix']}." for kept in fixed.get("optim", ()))
    listed = {
        f"{kept['prefix']}.{name}.{entry}"
        for kept in fixed.get("optim", ())
        for name, entries in kept["order"].items()
        for entry in entries
    }
    return [
        leaf
        for leaf in leaves
        if leaf.startswith(prefixes) and leaf.partition(INNER)[0] not in listed and not leaf.endswith(BESIDE)
    ]


def differing(plain: list[dict[str, list[Any]]], fixed: Tree, late: Tree) -> list[str]:
    """What the late values lack, or hold although it is not listed; in words.

    Args:
        plain: from `plain_entries`, for the same fixed values.
    """
    optimizers, held = fixed.get("optim", ()), late.get("optim", ())
    problems = [] if len(optimizers) == len(held) else [f"values of {len(held)} of {len(optimizers)} optimizers"]
    for kept, wanted, values in zip(optimizers, plain, held, strict=False):
        state = values["state"]
        if {name: list(entries) for name, entries in state.items()} == wanted:
            continue  # as always, and five times as fast as what follows
        for name in dict.fromkeys((*wanted, *state)):
            want, have = wanted.get(name, []), list(state.get(name, ()))
            problems += [f"{kept['prefix']}.{name}.{entry} has no value" for entry in want if entry not in have]
            problems += [f"{kept['prefix']}.{name}.{entry} is not listed" for entry in have if entry not in want]
    schedulers = fixed.get("schedulers", ()), late.get("scheduler", ())
    if len(schedulers[0]) != len(schedulers[1]):
        problems.append(f"values of {len(schedulers[1])} of {len(schedulers[0])} schedulers")
    names, flags = fixed.get("flags", {}), late.get("flags", {})
    for which, of in (("requires_grad", "parameters"), ("training", "modules")):
        count = len(names.get(of, ()))
        if flags and len(flags[which]) != (count + 7) // 8:
            problems.append(f"{which} of {count} {of} is {len(flags[which])} bytes long")
    return problems


def check_complete(fixed: Tree, late: Tree, leaves: Collection[str]) -> None:
    """Check a record. `leaves`: names of all leaves, shared ones whole.

    Raises:
        IncompleteSnapshot: the record lists something that is not held, or the other way round; names it.
    """
    problems = differing(plain_entries(fixed, leaves), fixed, late)
    problems += [f"{leaf} is not listed" for leaf in unlisted(fixed, leaves)]
    if problems:
        raise IncompleteSnapshot(f"what is listed and what is held differ: {some(problems)}")
