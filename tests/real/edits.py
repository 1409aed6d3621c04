"""Lines put into a copy of somebody else's script. Pure."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """In `file`, what is `old` becomes `new`; or, if `until` is given, all lines from `old` up to and with `until` are
    indented under `new`.

    `old` stands in the file once. The indentation that its lines have in common does not count.
    """

    file: str
    old: str
    new: str
    until: str = ""


def apply(text: str, edit: Edit) -> str:
    """The text with the edit made.

    Raises:
        ValueError: what is to be changed does not stand there once: the script is another than the edit was made for.
    """
    lines = text.splitlines()
    places = _find(lines, edit.old)
    if len(places) != 1:
        raise ValueError(f"{edit.file} has {edit.old.strip()!r} {len(places)} times, not once: it is another version")
    [(first, after)] = places
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = textwrap.indent(textwrap.dedent(edit.new).strip("\n"), indent).splitlines()
    if edit.until:
        after = next((end for at, end in _find(lines, edit.until) if at >= first), 0)
        if not after:
            raise ValueError(f"{edit.file} has no {edit.until.strip()!r} after {edit.old.strip()!r}")
        new += textwrap.indent("\n".join(lines[first:after]), "    ").splitlines()
    return "\n".join([*lines[:first], *new, *lines[after:]]) + "\n"


def _find(lines: Sequence[str], wanted: str) -> list[tuple[int, int]]:
    """Where these lines stand, however deep they are: the first of them, and the one after."""
    block = textwrap.dedent(wanted).strip("\n")
    many = block.count("\n") + 1
    spans = ((at, at + many) for at in range(len(lines) - many + 1))
    return [(at, end) for at, end in spans if textwrap.dedent("\n".join(lines[at:end])) == block]


def difference(before: str, after: str, name: str) -> str:
    """As ``diff -u`` shows it, with one line of context."""
    made: Sequence[str] = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, n=1, lineterm="")
    )
    return "\n".join(made[2:])
