"""Every test asserts something: itself, in a helper that it calls, or in a fixture that it requests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PATHS = sorted(TESTS.rglob("test_*.py"))
Function = ast.FunctionDef


class Module:
    """The functions and methods that a module of tests defines, and the modules of tests that it imports from."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        self.functions: dict[str, list[Function]] = {}
        self.imported: list[Path] = []
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
                self.functions.setdefault(node.name, []).extend(made)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
                inside = TESTS.parent / str(node.module).replace(".", "/")
                self.imported.append(inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py"))
        self.tests = [each for each in tree.body if isinstance(each, Function) and each.name.startswith("test_")]


@cache
def module(path: Path) -> Module:
    return Module(path)


def named(path: Path, name: str) -> Iterator[tuple[Path, Function]]:
    """The functions that a name may refer to in a module of tests. Only its last part counts: of two methods, both."""
    fixtures = [folder / "conftest.py" for folder in path.parents if folder == TESTS or TESTS in folder.parents]
    for where in (path, *module(path).imported, *(each for each in fixtures if each.exists())):
        yield from ((where, function) for function in module(where).functions.get(name, ()))


def called(function: Function) -> Iterator[str]:
    """The last part of the name of everything that it calls, and of each fixture that it requests."""
    yield from (argument.arg for argument in function.args.args)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def fails_itself(function: Function) -> bool:
    """Whether it has an ``assert`` or an equivalent, such as `pytest.raises` or a command that must succeed."""
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="pytest"), attr="raises" | "warns" | "fail")):
                return True
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute.startswith("assert_"):
                return True
            case ast.keyword(arg="check", value=ast.Constant(value=True)):
                return True
    return False


def can_fail(path: Path, function: Function, seen: set[int] | None = None) -> bool:
    """Whether it, or anything that it calls, asserts something."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return False
    seen.add(id(function))
    inner = (pair for name in called(function) for pair in named(path, name))
    return fails_itself(function) or any(can_fail(where, each, seen) for where, each in inner)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_test_can_fail(path: Path) -> None:
    assert [test.name for test in module(path).tests if not can_fail(path, test)] == []


@pytest.mark.parametrize(
    ("body", "asserts"),
    [
        ("    work()", False),
        ("    assert work()", True),
        ("    with pytest.raises(ValueError): work()", True),
        ("    check()\ndef check(): assert work()", True),
        ("    Rig().check()\nclass Rig:\n    def check(self): assert work()", True),
        ("    try: work()\n    except ValueError: pass", False),
    ],
)
def test_the_check_sees_what_it_is_for(tmp_path: Path, body: str, asserts: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"def test_work():\n{body}\n")
    assert can_fail(path, module(path).tests[0]) is asserts
