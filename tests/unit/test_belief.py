"""Every function that reads the bytes of a snapshot, or decides what is held, asks whether they may be believed.

The functions are found in the code, so that a new one cannot be forgotten: it asks `shared.belief`, or stands in a
table here with what asks for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.system.test_architecture import MODULES

READS = {"read_format", "read_stamp", "stored_record"}
"""Functions that read what a slot, or a persisted shard, says it is."""

GIVES = {"view"}
"""Methods of an SMP's pools that give the bytes of a slot."""

ASKS = {"believe", "believe_slot", "_believe", "check_slot"}

ASKED_BEFORE = {
    "snapshot.step.reading._holds": "only asks whether another snapshot has the slot meanwhile",
    "smp_daemon.storage.receiving.Receiving.slot_for": "bytes are received into it, and believed as they are committed",
}
"""Readers that need not ask, and why."""

FORMATS = (
    "smp_daemon.shared.slotfile",
    "smp_daemon.shared.belief",
    "smp_daemon.persist.manifest",
    "smp_daemon.storage.pool",
)
"""Modules that define these functions."""


def readers() -> Iterator[tuple[str, ast.AST]]:
    """Every function of the product that calls one of `READS`, by its full name."""
    for name, path in MODULES.items():
        if name.startswith(FORMATS) or name.startswith("chaos"):
            continue
        for function, node in functions(name, ast.parse(path.read_text())):
            functions_, methods = called(node)
            if functions_ & READS or (name.startswith("smp_daemon.storage") and methods & GIVES):
                yield function, node


def functions(prefix: str, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(f"{prefix}.{node.name}", node)
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}.{node.name}", node


def called(node: ast.AST) -> tuple[set[str], set[str]]:
    """Names of the functions, and of the methods, that are called in a function."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {each.id for each in calls if isinstance(each, ast.Name)}, {
        each.attr for each in calls if isinstance(each, ast.Attribute)
    }


FOUND = dict(readers())


@pytest.mark.parametrize("name", sorted(FOUND))
def test_whoever_reads_bytes_asks_whether_they_may_be_believed(name: str) -> None:
    asked = set.union(*called(FOUND[name])) & ASKS
    assert asked or name in ASKED_BEFORE, name


def test_the_table_names_readers_only() -> None:
    assert ASKED_BEFORE.keys() <= FOUND.keys()


def test_readers_are_found() -> None:
    stored = "smp_daemon.persist.reading.StoredShards._record"
    assert {"smp_daemon.storage.holdings.Holdings.open", stored} <= FOUND.keys()
    seal = "smp_daemon.storage.store.Store.seal"
    assert seal in FOUND
    [removed] = ast.parse("def seal(self, slot):\n    return self.pool.view(slot)").body
    assert not set.union(*called(removed)) & ASKS, "a reader that does not ask would fail here"
