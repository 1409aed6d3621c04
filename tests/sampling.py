"""What `make test` has a part of, and `make slow` all of: because another test there keeps the same promise, or seldom
breaks where the part does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(name: str, few: int, whole: int) -> pytest.MarkDecorator:
    """A test of a number of cases called `name`: `few` of them in `make test`, `whole` in `make slow`."""
    return pytest.mark.parametrize(name, [few, pytest.param(whole, marks=pytest.mark.slow)])


def chosen(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which those that are not `kept` are slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]
