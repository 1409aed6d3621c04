"""``python -m tools.proof``: runs the tests that prove the promises of README and docs; prints a table of results."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from rich.console import Console

from holdfast.report import Report
from tests.promises import MARK, PROMISES


class Outcomes:
    """A pytest plugin that counts the outcomes of the tests of each promise."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {name: Counter() for name in PROMISES}
        self._proves: dict[str, tuple[str, ...]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = [name for mark in item.iter_markers(MARK) for name in mark.args]
            self._proves[item.nodeid] = tuple(marks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name in self._proves.get(report.nodeid, ()):
                self.found[name][report.outcome] += 1


def main(arguments: list[str]) -> int:
    """Return 0 only if every promise has a test that passed, and none that failed."""
    outcomes = Outcomes()
    pytest.main(["-m", MARK, "-q", "--no-header", "-p", "no:xdist", *arguments], plugins=[outcomes])
    kept = {name: counts["passed"] > 0 and not counts["failed"] for name, counts in outcomes.found.items()}
    Console().print(table(outcomes.found, kept))
    return 0 if all(kept.values()) else 1


def table(found: dict[str, Counter[str]], kept: dict[str, bool]) -> Report:
    """A row for each promise."""
    outcomes = ("passed", "failed", "skipped")
    rows = [
        (f"{'✓' if kept[name] else '✗'} {name}", promise.page, *(str(found[name][each] or "") for each in outcomes))
        for name, promise in PROMISES.items()
    ]
    styles = ["green" if kept[name] else "red" for name in PROMISES]
    return Report(("promise", "where", *outcomes), rows, left=2, styles=styles)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
