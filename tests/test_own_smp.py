"""A trainer's own SMP that does not answer: the training thread does not wait for it in every step."""

from __future__ import annotations

from unittest.mock import patch

import psutil
import pytest

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.snapshot.own_smp import LEAST_PAUSE_S, OwnSmp
from tests.smp_kit import Ground, suspend


def test_an_smp_that_stands_still_is_asked_more_and_more_seldom(ground: Ground) -> None:
    smp = ground.smp()
    now_s = 0.0
    own = OwnSmp(smp.arena, smp.job, "dp0", start=False, now=lambda: now_s)
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
            now_s += pause_s
    finally:
        process.resume()
    own.attach(2, lambda: None)
    assert own.client.inventory().epoch == 2
    own.close()
