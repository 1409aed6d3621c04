"""What `make test` samples, and `make test-all` runs whole: grids of cases, numbers of cases, examples of hypothesis.

Another test in `make test` proves the same promise, or the full set rarely fails where the sample passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIERS = {"test": 60, "all": 400}
"""The profiles of hypothesis, one for each tier, and the number of examples of each test."""

COSTLY = 6
"""How many times fewer examples a test gets whose examples take long."""


def register_profiles() -> None:
    """Make the tiers known to ``pytest --hypothesis-profile``, and `test` the default."""
    for name, examples in TIERS.items():
        settings.register_profile(
            name,
            deadline=None,
            derandomize=True,
            max_examples=examples,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
    settings.load_profile("test")


def costly() -> settings:
    """Settings of a test whose examples take long."""
    return settings(max_examples=settings().max_examples // COSTLY)


def sampled(name: str, few: int, whole: int) -> pytest.MarkDecorator:
    """Parametrize a test by the number of its cases, `name`: `few`, and `whole` where slow tests run."""
    return pytest.mark.parametrize(name, [few, pytest.param(whole, marks=pytest.mark.slow)])


def chosen(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`; all that are not `kept` are marked slow.

    A case that is a tuple is the values of several parameters.
    """
    return [case if case in kept else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
