"""Work on bytes may be slow, and not stuck."""

from __future__ import annotations

from holdfast.smp_daemon.shared.deadlines import Progress


def test_work_that_moves_is_never_stuck_however_long_it_takes() -> None:
    now = 0.0
    progress = Progress(lambda: now, 10.0)
    for _ in range(1000):
        now += 9.0
        assert not progress.is_stuck
        progress.moved()
    assert progress.left_s == 10.0


def test_work_that_moves_nothing_is_stuck_after_its_patience_and_not_before() -> None:
    now = 5.0
    progress = Progress(lambda: now, 10.0)
    now = 14.0
    assert (progress.left_s, progress.is_stuck) == (1.0, False)
    now = 15.0
    assert (progress.left_s, progress.is_stuck) == (0.0, True)
    progress.moved()
    assert not progress.is_stuck
