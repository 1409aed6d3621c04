"""Edits of a copy of a third-party script. Pure."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """Replaces `old` by `new` in `file`; with `until`, indents all lines from `old` through `until` under `new`.

    `old` must occur exactly once in the file. The common indentation of its lines is ignored.
    """

    file: str
    old: str
    new: str
    until: str = ""


def apply(text: str, edit: Edit) -> str:
    """The text with the edit made.

    Raises:
        ValueError: `old` does not occur exactly once, or `until` not after it: this is another version of the script.
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
    """Indices of the first line and after the last line of each occurrence of these lines, at any indentation."""
    block = textwrap.dedent(wanted).strip("\n")
    many = block.count("\n") + 1
    spans = ((at, at + many) for at in range(len(lines) - many + 1))
    return [(at, end) for at, end in spans if textwrap.dedent("\n".join(lines[at:end])) == block]


def difference(before: str, after: str, name: str) -> str:
    """The difference as of ``diff -u``, with one line of context."""
    made: Sequence[str] = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, n=1, lineterm="")
    )
    return "\n".join(made[2:])
