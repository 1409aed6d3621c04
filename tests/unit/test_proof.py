"""Every promise has a proof, and every proof belongs to a promise."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.promises import PROMISES, ROOT, proofs
from tools.proof import Outcomes, table


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_stands_where_it_is_said_to_word_for_word(name: str) -> None:
    promise = PROMISES[name]
    assert _plain(promise.text) in _plain((ROOT / promise.page).read_text())


def test_every_promise_has_a_test_and_all_but_two_one_that_make_test_runs() -> None:
    found = proofs()
    assert all(found.values())
    assert [name for name, tests in found.items() if all(test.slow for test in tests)] == ["ray", "survivors"]


def test_the_table_has_a_row_for_each() -> None:
    found = {name: Counter(passed=1) for name in PROMISES}
    assert table(found, dict.fromkeys(PROMISES, True)).row_count == len(PROMISES)
    assert not any(Outcomes().found.values())


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)
