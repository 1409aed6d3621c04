"""Chaos itself is tested: it must notice each broken build in `tests.proof.mutants`."""

from __future__ import annotations

import re

import pytest

from tests.deadlines import DEADLINE_S
from tests.proof.chaos.campaign import Campaign
from tests.proof.chaos.checks import PROMISES
from tests.proof.mutants import ENV, MUTANTS
from tests.sampling import chosen

pytestmark = pytest.mark.cluster
QUICK = {"no-fence", "no-digests", "promise-forgotten", "unchecked-on-arrival"}


@pytest.mark.parametrize("name", chosen(MUTANTS, QUICK))
def test_a_broken_build_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setenv(ENV, name)
    with Campaign(
        preload=["tests.proof.mutants.trainer"], smp_module="tests.proof.mutants", deadline_s=DEADLINE_S
    ) as campaign:
        verdict = campaign.run(mutant.shown_by(), "")
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert not verdict.held, f"{mutant.what}: nobody noticed"
    said = [text for check, text in verdict.breaches if check == mutant.sign and re.search(mutant.says, text)]
    assert said, verdict.breaches


def test_every_promise_is_known_to_be_checked() -> None:
    assert {mutant.sign for mutant in MUTANTS.values()} == set(PROMISES)
