"""Every promise has a proof, and every proof belongs to a promise."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.promises import PROMISES, Promise, promises_of, proofs
from tools.proof import Outcomes, table

PAGE = """
Before. <!--promise:a-->*After [a step](page.md#there)
it counts.* Then more.

| what | then |
|---|---|
| <!--promise:b-->this | that; <!--promise:c-->or `a.b`, and more. And more |
"""


def test_a_page_quotes_itself() -> None:
    assert promises_of("page.md", PAGE) == {
        "a": Promise("page.md", "After a step it counts."),
        "b": Promise("page.md", "this: that; or `a.b`, and more. And more"),
        "c": Promise("page.md", "or `a.b`, and more. And more"),
    }


def test_a_promise_stands_in_one_place() -> None:
    with pytest.raises(ValueError, match="twice"):
        promises_of("page.md", PAGE + "<!--promise:a-->Again.")


def test_every_promise_has_a_test_and_all_but_two_one_that_make_test_runs() -> None:
    found = proofs()
    assert found and all(found.values())
    assert {name for name, tests in found.items() if all(test.slow for test in tests)} == {"ray", "survivors"}


def test_the_table_has_a_row_for_each() -> None:
    found = {name: Counter(passed=1) for name in PROMISES}
    assert len(table(found, dict.fromkeys(PROMISES, True)).rows) == len(PROMISES)
    assert not any(Outcomes().found.values())
