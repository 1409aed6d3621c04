"""Orders of a regrouping: whoever gave one asks again while bytes move, and another order ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.smp_daemon.recovery import reconciler
from holdfast.smp_daemon.recovery.reconciler import Reconciler
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable, StaleEpoch
from holdfast.smp_daemon.shared.layout import Node, Shard
from holdfast.smp_daemon.shared.messages import Encode, Regroup, Release
from holdfast.smp_daemon.shared.sources import as_laid_out
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.snapshot.resume.arrange import Protection, arrange
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import JOB, Ground
from tests.system.test_regroup import SNAPSHOT
from tests.unit.test_reconcile import layout_of

LAYOUT = layout_of(4, 3, 1)
SOURCES = as_laid_out(SNAPSHOT, LAYOUT)


class Ordered:
    """A node that has adopted a layout. The test says how computing its parity goes on: by a unit (True), or an end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes: SimpleQueue[bool | Exception] = SimpleQueue()
        self.attempts = 0
        self.board = SimpleNamespace(moves=3)
        store: Any = SimpleNamespace(
            job="job",
            node="node0",
            network=MACHINE,
            changed=threading.Condition(threading.RLock()),
            state=SimpleNamespace(check_epoch=lambda epoch: None),
            outcomes=SimpleNamespace(board=self.board),
            arena=SimpleNamespace(layouts={(LAYOUT.epoch, LAYOUT.revision): LAYOUT}),
            holdings=SimpleNamespace(held=lambda: [ShardKey(SNAPSHOT, "dp0")], known_damage=lambda key: []),
        )
        self.reconciler = Reconciler(store, "chain")
        monkeypatch.setattr(reconciler, "repair_parity", self.work)

    def work(self, store: Any, sources: Any, key: Any, go_on: Callable[[], None]) -> int:
        self.attempts += 1
        while (how := self.goes.get(timeout=DEADLINE_S)) is True:
            go_on()
            self.board.moves += 1
        if isinstance(how, Exception):
            raise how
        return 7

    def encode(self, epoch: int = SNAPSHOT.epoch) -> Encode:
        return Encode(job="job", epoch=epoch, sources=SOURCES, layout=LAYOUT)

    def until_moved(self, count: int) -> None:
        while self.reconciler.obey(self.encode()).moved < count:
            assert self.attempts == 1


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ordered]:
    monkeypatch.setattr(reconciler, "ANSWER_S", 0.01)
    made = Ordered(monkeypatch)
    yield made
    made.reconciler.close()
    for thread in threading.enumerate():
        if thread.name == "phase":
            made.goes.put(False)
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_whoever_asks_again_hears_whether_bytes_move_and_starts_nothing_new(ordered: Ordered) -> None:
    before = ordered.reconciler.obey(ordered.encode())
    assert not before.done
    ordered.goes.put(True)
    ordered.until_moved(before.moved + 1)
    ordered.goes.put(False)
    while not ordered.reconciler.obey(ordered.encode()).done:
        assert ordered.attempts == 1


def test_what_failed_is_told_once_and_is_tried_again_if_it_is_ordered_again(ordered: Ordered) -> None:
    ordered.goes.put(SmpUnavailable("away"))
    with pytest.raises(SmpUnavailable):
        while True:
            assert not ordered.reconciler.obey(ordered.encode()).done
    ordered.goes.put(False)
    while not ordered.reconciler.obey(ordered.encode()).done:
        assert ordered.attempts <= 2


def full(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Let no thread of that name start so many times, as if the control group had all that it may have. Returns where
    it is noted that one was to start."""
    wanted: list[str] = []
    start = threading.Thread.start

    def may_start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            wanted.append(thread.name)
            if len(wanted) <= times:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    return wanted


def test_an_order_for_which_there_was_no_thread_is_carried_out_if_it_is_given_again(
    ordered: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch, "phase", 1)
    with pytest.raises(SmpUnavailable, match="can't start new thread"):
        ordered.reconciler.obey(ordered.encode())
    ordered.goes.put(False)
    limit = time.monotonic() + DEADLINE_S
    while not ordered.reconciler.obey(ordered.encode()).done:
        assert time.monotonic() < limit


@pytest.fixture
def smp(ground: Ground) -> Iterator[Smp]:
    """An SMP in this process, in an epoch with a layout of its own."""
    host = ground.host()
    smp = Smp(JOB, "node0", ground.base / "node0" / JOB, host, environment={"HOLDFAST_REGROUP_AFTER": "0"})
    smp.store.join(1)
    own = Node("node0", host, smp.owner.control_port, smp.owner.bulk_port, (Shard("dp0", 4096),))
    smp.store.configure(arrange(JOB, 1, [own], Protection(0, 0), 2))
    yield smp
    smp.close()


def test_parity_for_which_there_was_no_thread_may_be_ordered_again(smp: Smp, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = full(monkeypatch, "reconcile", 2)
    for count in (1, 2):
        with pytest.raises(RuntimeError):
            smp.reconciler.order_parity(SOURCES, 0, 1)
        assert len(wanted) == count


def test_a_regrouping_for_which_there_was_no_thread_is_tried_again(smp: Smp, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = full(monkeypatch, "inventories", 1)
    smp.monitor.lead(Regroup(job=JOB))
    await_that(lambda: wanted)
    smp.monitor.lead(Regroup(job=JOB))
    await_that(lambda: wanted[1:])


def test_another_order_ends_the_one_before_and_who_gave_that_hears_so(ordered: Ordered) -> None:
    assert not ordered.reconciler.obey(ordered.encode()).done
    ordered.reconciler.obey(ordered.encode(SNAPSHOT.epoch + 1))
    with pytest.raises(StaleEpoch):
        while True:
            ordered.goes.put(True)  # either of the two takes it
            assert not ordered.reconciler.obey(ordered.encode()).done


def test_nothing_is_released_before_new_parity_is_here(ordered: Ordered) -> None:
    release = Release(job="job", epoch=SNAPSHOT.epoch, sources=SOURCES, layout=LAYOUT)
    with pytest.raises(ProtocolError, match="yet to be"):
        while True:
            assert not ordered.reconciler.obey(release).done
