"""Chaos is tested itself: it must notice each of the broken builds in `tests.mutants`."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign import Campaign
from tests.mutants import ENV, MUTANTS

pytestmark = pytest.mark.cluster
QUICK = {"no-fence", "no-digests", "promise-forgotten", "unchecked-on-arrival"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_a_broken_build_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setenv(ENV, name)
    with Campaign(preload=["tests.mutants.trainer"], smp_module="tests.mutants", deadline_s=40.0) as campaign:
        verdict = campaign.run(mutant.shown_by(), "")
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert not verdict.held, f"{mutant.what}: nobody noticed"
    assert any(mutant.sign in problem for problem in verdict.problems), verdict.problems
