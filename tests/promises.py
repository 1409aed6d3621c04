"""What README and docs promise, and which tests prove it.

A page marks the sentence or table row that promises something with ``<!--promise:a-name-->`` right before it, and a
test says ``@pytest.mark.proves("a-name")``. `docs/generate.py` quotes the sentences in docs/proof.md, so they may be
reworded freely, and ``python -m tools.proof`` runs those tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARK = "proves"
SLOW = ("pytest.mark.slow", "SLOW")
MARKER = re.compile(r"<!--promise:([a-z-]+)-->")
SENTENCE = re.compile(r".*?[.:][*_]*(?=\s|$)", re.S)


class Promise(NamedTuple):
    """A sentence, or the rest of a table row, of `page`; its markup is left out."""

    page: str
    text: str


class Proof(NamedTuple):
    """A test: its file, from the root on, and its name; `slow`: run by `make test-all` and `make proof`."""

    file: str
    test: str
    slow: bool


def promises_of(page: str, text: str) -> dict[str, Promise]:
    """The promises that a page marks, by name.

    Raises:
        ValueError: a name is used twice, or nothing follows a marker.
    """
    found: dict[str, Promise] = {}
    for marker in MARKER.finditer(text):
        said = _quoted(text, marker.end())
        if not said or marker[1] in found:
            raise ValueError(f"{page}: promise {marker[1]} is empty, or stands there twice")
        found[marker[1]] = Promise(page, said)
    return found


def _quoted(text: str, start: int) -> str:
    in_table = text[text.rfind("\n", 0, start) + 1 :].startswith("|")
    rest = text[start:].partition("\n" if in_table else "\n\n")[0]
    if in_table:
        rest = rest.strip("| ").replace(" | ", ": ")
    elif sentence := SENTENCE.match(rest):
        rest = sentence[0]
    rest = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", MARKER.sub("", rest))
    return " ".join(rest.strip("*_ \n").split())


def _all_promises() -> dict[str, Promise]:
    """Those of every page; README first."""
    found: dict[str, Promise] = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md"):
        for name, promise in promises_of(str(path.relative_to(ROOT)), path.read_text()).items():
            if name in found:
                raise ValueError(f"promise {name} stands in {found[name].page} and in {promise.page}")
            found[name] = promise
    return found


PROMISES = _all_promises()
"""By the names that tests give them."""


def proofs() -> dict[str, list[Proof]]:
    """The tests that prove each promise, as their files say; nothing is imported.

    Raises:
        KeyError: a test proves a promise that no page makes.
    """
    found: dict[str, list[Proof]] = {name: [] for name in PROMISES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                slow = any(ast.unparse(each) in SLOW for each in node.decorator_list)
                proof = Proof(str(path.relative_to(ROOT)), node.name, slow)
                for name in _named(node):
                    found[name].append(proof)
    return found


def _named(test: ast.FunctionDef) -> list[str]:
    return [
        str(argument.value)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(f"mark.{MARK}")
        for argument in mark.args
        if isinstance(argument, ast.Constant)
    ]
