"""The rooms: what may import what, which modules start without frameworks, and what must not appear anywhere."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.scripts import python

ROOT = Path(__file__).parents[2]
PARTS = ("ec", "smp_daemon", "snapshot", "integrations", "chaos", "deploy", "examples")
"""Top-level folders that are parts of ``holdfast``."""

ROOMS = (
    "ec",
    *(f"smp_daemon.{room}" for room in ("shared", "storage", "watchdog", "net", "recovery", "persist", "coding")),
    *("smp_daemon.node", "smp_daemon.ops", "smp_daemon"),
    *(f"snapshot.{room}" for room in ("collective", "copy", "state", "script", "step", "resume", "interval")),
    *("snapshot", "integrations.adapters", "holdfast", "integrations", "integrations.ray", "megatron_lm"),
    *("planner", "export"),
    *(
        "chaos",
        "chaos.user",
        "bench",
        "deploy",
        "cli",
        "examples",
    ),
)
"""Lowest first: a room imports only itself and the rooms before it."""


def product() -> dict[str, Path]:
    """Every shipped module, by its name without ``holdfast.``."""
    found = {}
    for folder in (*PARTS, "holdfast"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            inside = path.relative_to(ROOT)
            name = ".".join((inside.parent if path.name == "__init__.py" else inside.with_suffix("")).parts)
            found[name if name == "holdfast" else name.removeprefix("holdfast.")] = path
    return found


MODULES = product()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_no_class_is_called_as_another_is() -> None:
    """Leading underscores are ignored, so that a search for a name finds one class."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(name)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("holdfast.") in MODULES else node.module


@cache
def edges(path: Path) -> set[str]:
    """The modules of the product that it imports, including imports for types and within functions."""
    return {name.removeprefix("holdfast.") for name in imports(path)} & MODULES.keys()


def room_of(name: str) -> str:
    """``snapshot.state`` for ``snapshot.state.values``, ``holdfast`` for ``hook``; a package is in its own room."""
    parts = name.split(".")
    while parts and ".".join(parts) not in ROOMS:
        parts.pop()
    return ".".join(parts) or "holdfast"


def test_everything_is_imported_by_one_name() -> None:
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).glob("**/*.py")]
    for path in (*MODULES.values(), *others):
        taken = {name.split(".")[0] for name in imports(path)} & set(PARTS)
        assert not taken, f"{path} imports {sorted(taken)}, which may be anybody's: import them from holdfast"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_itself_and_rooms_below(room: str) -> None:
    inside = [name for name in MODULES if room_of(name) == room]
    assert inside
    for name in inside:
        for other in edges(MODULES[name]):
            assert ROOMS.index(room_of(other)) <= ROOMS.index(room), f"{name} imports {other}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    sorter = graphlib.TopologicalSorter({name: edges(path) - {name} for name, path in MODULES.items()})
    assert set(sorter.static_order()) == MODULES.keys()  # a cycle raises an error that names it


WITH_DOORS = [room for room in ROOMS if room.partition(".")[0] in ("smp_daemon", "snapshot")]
WITH_DOORS.remove("smp_daemon.shared")  # all of it is for others


@pytest.mark.parametrize("room", WITH_DOORS)
def test_a_room_is_entered_by_the_modules_that_its_door_names(room: str) -> None:
    door = ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text())
    named = next((ast.literal_eval(node.value) for node in door.body if isinstance(node, ast.Assign)), None)
    used = {
        other.rpartition(".")[2]
        for name, path in MODULES.items()
        for other in edges(path)
        if room_of(other) == room != room_of(name) and other != room
    }
    assert sorted(named or ()) == sorted(used)


def test_the_trainer_side_imports_of_the_smp_only_what_is_shared() -> None:
    for name, path in MODULES.items():
        if name.startswith("snapshot."):
            for other in edges(path):
                assert room_of(other) in ("ec", "smp_daemon.shared") or other.startswith("snapshot"), f"{name}: {other}"


@pytest.mark.parametrize("room", ["ec", "smp_daemon"])
def test_below_the_trainer_nothing_imports_torch(room: str) -> None:
    for path in (path for name, path in MODULES.items() if name.startswith(room)):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_nothing_unpickles_or_evaluates() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in MODULES.values():
        calls = {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
        assert not forbidden & {name.split(".")[0] for name in imports(path)}, path
        assert not {"eval", "exec", "torch.load"} & calls, path


def test_the_front_door_opens_without_frameworks() -> None:
    code = "import sys, holdfast; print([m for m in ('torch', 'ray', 'megatron', 'grpc', 'numpy') if m in sys.modules])"
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_the_version_is_printed_without_frameworks() -> None:
    code = (
        "import sys, holdfast.cli.main as cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'ray', 'megatron') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.split("\n")[1] == "0 []"
