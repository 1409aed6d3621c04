"""`Report`: whatever the table and the console, all of it is there, and fits."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from holdfast.report import Report

WORDS = st.text("abcdefghij0123456789.,%|[]", min_size=1, max_size=30)
CELLS = st.lists(WORDS, max_size=8).map(" ".join)
"""Words of at most 30 characters, which any console from 40 columns on can show whole."""


@st.composite
def reports(draw: st.DrawFn) -> Report:
    count = draw(st.integers(1, 12))
    row = st.lists(CELLS, min_size=count, max_size=count)
    return Report(draw(row), draw(st.lists(row, max_size=6)), left=draw(st.integers(1, count)))


def printed(report: Report, width: int, *, soft_wrap: bool = False) -> str:
    target = io.StringIO()
    Console(file=target, width=width, markup=False, highlight=False).print(report, soft_wrap=soft_wrap)
    return target.getvalue()


@given(reports(), st.integers(40, 200))
@settings(max_examples=200, deadline=None)
def test_every_cell_is_there_and_no_line_is_wider_than_the_console(report: Report, width: int) -> None:
    lines = report.lines(width)
    assert max(map(len, lines), default=0) <= width
    # The words of wrapped cells stand side by side, so they are counted, not looked for in order.
    wanted = sorted(word for row in report.rows for cell in row for word in cell.split())
    found = [word for line in lines for word in line.split()]
    for word in wanted:
        assert word in found  # whole: not cut, and not run together with the next column's
        found.remove(word)
    assert printed(report, width).splitlines() == lines


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_table_that_fits_has_aligned_columns(width: int) -> None:
    report = Report(("name", "bytes", "s"), [("a", "1,024", "0.1"), ("longer", "7", "12.5")])
    assert report.lines(width) == ["name    bytes     s", "a       1,024   0.1", "longer      7  12.5"]


def test_text_wraps_between_words_and_numbers_stay_whole() -> None:
    text = "one two three four five six seven eight nine ten"
    report = Report(("what", "why", "held up for"), [("x", text, "12.3 GB")], left=2)
    assert report.lines(44) == [
        "what  why                        held up for",
        "x     one two three four five        12.3 GB",
        "      six seven eight nine ten",
    ]
    assert report.lines(35)[:2] == ["what  why                   held up", "                                for"]


def test_a_table_that_is_too_wide_turns_into_blocks() -> None:
    heads = ("system", *(f"measurement {number}" for number in range(9)))
    report = Report(heads, [("ours", *map(str, range(9))), ("theirs", *map(str, range(9)))], styles=("", "red"))
    first, *rest = report.lines(60)
    assert first == "ours"
    assert rest[0] == "  measurement 0: 0   measurement 1: 1   measurement 2: 2"
    assert rest.index("theirs") == len(rest) // 2


def test_one_long_word_in_the_last_column_of_text_turns_only_its_row_into_a_block() -> None:
    report = Report(("", ""), [("first", "one two"), ("second", "at /" + "x" * 35), ("third", "three")], left=2)
    assert report.lines(40) == ["first   one two", "second", "  at", "    /" + "x" * 35, "third   three"]


def test_a_word_longer_than_the_console_is_printed_whole() -> None:
    path = "/very" * 20
    assert path in printed(Report(("", "path"), [("a", path)], left=2), 40, soft_wrap=True)


def test_markdown_has_the_heading_the_table_and_the_notes() -> None:
    report = Report(("a", "", "c"), [("x|y", "two\nlines", "3")], heading="Title", notes=("a note",), left=2)
    assert report.markdown() == ("## Title\n\n| a |   | c |\n| --- | --- | ---: |\n| x\\|y | two lines | 3 |\n\na note")
    assert Report(("a",), [("b",)]).markdown() == "| a |\n| --- |\n| b |"


def test_rows_are_records() -> None:
    assert Report(("name", "of"), [("a", "b")]).records() == [{"name": "a", "of": "b"}]


def test_a_heading_and_notes_are_printed_around_the_table() -> None:
    text = printed(Report(("a",), [("[b]",)], heading="Title", notes=("one two three",)), 40)
    assert re.fullmatch(r"Title\na\n\[b\]\n\none two three\n", text)
