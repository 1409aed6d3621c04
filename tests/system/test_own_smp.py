"""A trainer's own SMP that does not answer: the training thread does not wait for it in every step."""

from __future__ import annotations

from unittest.mock import patch

import psutil
import pytest

from holdfast.smp_daemon.shared import spawn
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.smp_daemon.shared.spawn import running_owner
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot import rank
from holdfast.snapshot.rank import LEAST_PAUSE_S, OwnSmp
from tests.deadlines import DEADLINE_S
from tests.smp_kit import Ground, ManualClock, suspend


def test_an_smp_that_stands_still_is_asked_more_and_more_seldom(ground: Ground) -> None:
    smp, clock = ground.smp(), ManualClock()
    own = OwnSmp(smp.arena, smp.job, "dp0", start=False, system=clock)
    own.attach(1, lambda: None)
    process = psutil.Process(own.client.pid)
    suspend(process.pid)
    try:
        for pause_s in (LEAST_PAUSE_S, 2 * LEAST_PAUSE_S):
            with pytest.raises(SmpUnavailable, match=f"asked again in {pause_s:.0f} s"):
                own.attach(2, lambda: None)
            with patch.object(SmpClient, "join", side_effect=AssertionError("it is asked, and waited for")):
                with pytest.raises(SmpUnavailable, match="asked again later"):
                    own.attach(2, lambda: None)
            clock.now_s += pause_s
    finally:
        process.resume()
    own.attach(2, lambda: None)
    assert own.client.inventory().epoch == 2
    own.close()


def test_an_smp_that_replaces_one_and_its_arena_is_where_the_others_look_for_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = ground.smp()
    monkeypatch.setenv("HOLDFAST_HOST", smp.host)
    monkeypatch.setattr(rank, "ATTACH_DEADLINE_S", DEADLINE_S)
    own = OwnSmp(smp.arena, smp.job, "dp0", start=True)
    smp.lose()
    own.attach(1, lambda: None)
    assert own.client.pid != smp.owner.pid
    owner = running_owner(smp.arena)
    assert owner is not None
    assert (owner.control, owner.bulk_addresses) == (smp.control, smp.owner.bulk_addresses)
    own.finish(1)
    own.close()


def test_the_training_thread_does_not_wait_for_another_process_that_starts_an_smp(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = ground.smp()
    monkeypatch.setenv("HOLDFAST_HOST", smp.host)
    monkeypatch.setattr(rank, "ATTACH_DEADLINE_S", 0.2)
    own = OwnSmp(smp.arena, smp.job, "dp0", start=True)
    smp.kill()
    with spawn._turn_to_start(smp.arena, MACHINE) as is_my_turn:
        assert is_my_turn()  # as long as it takes: `attach` returns although nobody gives the turn back
        with pytest.raises(SmpUnavailable, match="asked again in"):
            own.attach(1, lambda: None)
    own.close()
