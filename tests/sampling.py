"""Tests of which `make test` runs only a sample of the cases, and `make slow` all: another test in `make test` proves
the same promise, or the full set rarely fails where the sample passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(name: str, few: int, whole: int) -> pytest.MarkDecorator:
    """Parametrize a test by the number of its cases, `name`: `few` in `make test`, `whole` in `make slow`."""
    return pytest.mark.parametrize(name, [few, pytest.param(whole, marks=pytest.mark.slow)])


def chosen(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`; all that are not `kept` are marked slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]
