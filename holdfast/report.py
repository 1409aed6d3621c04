"""One table for every command: lines for a console, Markdown for a page, records for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

GAP = 2
"""Spaces between two columns, and before the lines of a block."""
BETWEEN = "   "
"""Between two cells on a line of a block."""
READABLE = 20
"""A column of text is not made narrower than this many characters; the table turns into blocks instead."""


@dataclass(frozen=True, slots=True)
class Report:
    """A heading, a table and notes. Immutable; `rich.Console.print` prints it, also within other renderables.

    A table that is too wide for the console first wraps its heads and its columns of text between words. If it is still
    too wide, each row becomes a block: the first cell, and below it the others, each after its column's name.
    No word is ever cut: one that is longer than the console is printed whole.

    Attributes:
        columns: names of the columns. Without any name there is no line of heads.
        rows: cells as text, as many in each row as there are columns.
        heading: the title of the table; may be empty.
        notes: paragraphs below the table.
        left: how many columns, counted from the left, are text. The others hold numbers, which are aligned right.
        styles: a style of rich for each row; empty if no row has one.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    heading: str = ""
    notes: Sequence[str] = ()
    left: int = 1
    styles: Sequence[str] = ()

    def lines(self, width: int) -> list[str]:
        """The table without heading and notes, in lines of at most `width` characters. Pure."""
        return [line for line, _ in self._styled(width)]

    def markdown(self) -> str:
        """The heading, the table and the notes as Markdown, without a newline at the end. Pure."""
        heads = [name or " " for name in self.columns]
        ruler = ["---"] * self.left + ["---:"] * (len(heads) - self.left)
        table = "\n".join(f"| {' | '.join(map(_in_a_cell, line))} |" for line in (heads, ruler, *self.rows))
        return "\n\n".join([*([f"## {self.heading}"] if self.heading else []), table, *self.notes])

    def records(self) -> list[dict[str, str]]:
        """Each row as a JSON object, from the column's name to the cell. Pure."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """How rich prints it: the heading, the lines, the notes."""
        from rich.text import Text

        if self.heading:
            yield Text(self.heading, "bold")
        for line, style in self._styled(options.max_width):
            yield Text(line, style, no_wrap=True, overflow="ignore")
        for note in self.notes:
            yield Text(f"\n{note}")

    def _styled(self, width: int) -> Iterator[tuple[str, str]]:
        widths = self._widths(width)
        styles = self.styles or [""] * len(self.rows)
        if widths is not None and any(self.columns):
            yield from ((line, "dim") for line in self._wrapped(self.columns, widths))
        for row, style in zip(self.rows, styles, strict=True):
            fits = widths is not None and _longest_word(row[-1]) <= widths[-1]
            for line in self._wrapped(row, widths) if widths is not None and fits else self._block(row, width):
                yield line, style

    def _widths(self, width: int) -> list[int] | None:
        """The width of each column; None if the table does not fit. A word in the last column of text may be longer:
        one long path does not turn the whole table into blocks, only its own row."""
        cells = list(zip(self.columns, *self.rows, strict=True))
        most = [max(map(len, column)) for column in cells]
        least = []
        for place, column in enumerate(cells):
            if place >= self.left:
                least.append(max(_longest_word(column[0]), *map(len, column[1:]), 0))
            elif place == len(cells) - 1:
                least.append(max(_longest_word(column[0]), min(most[place], READABLE)))
            else:
                least.append(max(*map(_longest_word, column), min(most[place], READABLE)))
        room = width - GAP * (len(most) - 1)
        if sum(least) > room:
            return None
        while sum(most) > room:  # take from the widest column that has something to give
            place = max((place for place in range(len(most)) if most[place] > least[place]), key=most.__getitem__)
            most[place] -= 1
        return most

    def _wrapped(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = (cell[number] if number < len(cell) else "" for cell in cells)
            aligned = (
                part.ljust(width) if place < self.left else part.rjust(width)
                for place, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            yield (" " * GAP).join(aligned).rstrip()

    def _block(self, row: Sequence[str], width: int) -> Iterator[str]:
        """The first cell, and below it the others, each after its column's name: as many on a line as fit."""
        first, *others = row
        if first:
            yield from _wrap(first, width)
        indent, line = " " * GAP, ""
        for name, cell in zip(self.columns[1:], others, strict=True):
            if not cell:
                continue
            pair = f"{name}: {cell}" if name else cell
            if line and len(indent + line + BETWEEN + pair) <= width:
                line += BETWEEN + pair
                continue
            if line:
                yield from _wrap(line, width, indent, indent * 2)
            line = pair
        if line:
            yield from _wrap(line, width, indent, indent * 2)


def say(console: Console, *parts: RenderableType) -> None:
    """Print texts and reports, with empty lines between them. Text is wrapped on a terminal, and in a pipe as it is."""
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part, soft_wrap=not console.is_terminal, crop=False)


def _wrap(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """The text in lines of at most `width` characters, broken between words; one empty line if it is empty."""
    return [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(
            part,
            max(1, width),
            initial_indent=first,
            subsequent_indent=others,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _in_a_cell(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
