"""What the training loop waits for before its state may change, and what it does not wait for."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, NoFreeSlot, SmpUnavailable
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor
from holdfast.snapshot.copy.errors import GivenUp, LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.witness import StateChanged, WatchedPieces, Witness
from holdfast.snapshot.state.record import place_tensors
from holdfast.snapshot.step import orders
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.orders import MOVES, CopyOrder, CopyState, Due, Live, SnapshotCopy
from tests.deadlines import DEADLINE_S

SOON_S = 0.05
"""How long to wait for something that should not happen."""

FORM = plan_slot("run", "dp0", [Leaf("w", "F32", (4096,))], 64)


def record(inputs: str | None) -> bytes:
    return b"{}"


def no_difference() -> None:
    """Replicas hold the same."""


def ordered(
    tensor: torch.Tensor | None = None,
    step: int = 1,
    engine: CpuEngine | None = None,
    alike: Callable[[], None] = no_difference,
    reshaped: Callable[[], list[str]] = list,
) -> SnapshotCopy:
    moving = place_tensors(FORM, [("w", torch.zeros(4096) if tensor is None else tensor)])
    engine = engine or CpuEngine()
    witness = Witness(engine, WatchedPieces(moving), step)
    order = CopyOrder(Due(SnapshotId(1, step)), "dp0", FORM, (), record, engine.mark(), alike=alike)
    return SnapshotCopy(order, Live(moving, 4 * 4096, witness, reshaped))


class Together:
    """Runs work in other threads; `join` raises what they raise."""

    def __init__(self, *work: Callable[[], Any]) -> None:
        self._start = threading.Barrier(len(work), timeout=DEADLINE_S)
        self.results: list[Any] = [None] * len(work)
        self._threads = [threading.Thread(target=self._run, args=(i, each), daemon=True) for i, each in enumerate(work)]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int, work: Callable[[], Any]) -> None:
        try:
            self._start.wait()
            self.results[i] = work()
        except BaseException as error:
            self.results[i] = error

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "it hangs"
        return self.results


# ------------------------------------------------------------------ the fence


def test_a_copy_that_has_no_slot_is_given_up_and_not_waited_for() -> None:
    made = ordered()
    assert made.fence(0.0, DEADLINE_S) is False
    assert isinstance(made.error, NoFreeSlot)
    with pytest.raises(NoFreeSlot, match=r"no slot .*step 1"):
        made.read()
    assert made.state is CopyState.WAITING


def test_a_copy_that_has_no_slot_yet_is_waited_for_as_long_as_patience_lasts() -> None:
    made = ordered()
    began = time.monotonic()
    assert made.fence(SOON_S, DEADLINE_S) is False
    assert time.monotonic() - began >= SOON_S


def test_a_copy_that_begins_within_patience_is_waited_for() -> None:
    made = ordered()
    training = Together(lambda: made.fence(DEADLINE_S, DEADLINE_S))
    made.read()
    made.leave_live()
    assert training.join() == [True]
    assert made.error is None


def test_a_copy_that_has_begun_is_waited_for_without_patience() -> None:
    made = ordered()
    made.read()
    training = Together(lambda: made.fence(0.0, DEADLINE_S))
    assert not made.reached(CopyState.COPIED, SOON_S)
    assert training.running
    made.leave_live()
    assert training.join() == [True]


def test_a_copy_that_takes_too_long_is_given_up() -> None:
    made = ordered()
    made.read()
    assert made.fence(0.0, SOON_S) is True
    with pytest.raises(DeadlineExceeded, match=r"step 1 .* took over"):
        made.check()
    assert made.is_confirmed  # a thread that waits to seal it is released


def test_a_copy_that_failed_before_it_began_is_not_waited_for() -> None:
    made = ordered()
    made.abort(SmpUnavailable("gone"))
    made.leave_live()
    assert made.fence(DEADLINE_S, DEADLINE_S) is True
    assert isinstance(made.error, SmpUnavailable)


def test_what_a_snapshot_was_given_up_for_first_is_what_is_told() -> None:
    made = ordered()
    made.abort(GivenUp("an evaluation"))
    assert made.fence(0.0, DEADLINE_S) is False
    made.abort(HoldfastError("another"))
    assert isinstance(made.error, GivenUp)


def test_the_fence_may_be_passed_again() -> None:
    """By each of several optimizers."""
    tensor = torch.zeros(4096)
    made = ordered(tensor)
    made.read()
    made.leave_live()
    assert made.fence(0.0, DEADLINE_S) is True
    tensor.add_(1)
    assert made.fence(0.0, DEADLINE_S) is True
    assert made.error is None


def test_what_the_state_was_is_looked_at_before_it_may_change() -> None:
    """With an engine that queues copies, changes until the fence count, and later ones do not."""
    tensor = torch.zeros(4096)
    engine = CpuEngine()
    engine.queues = True
    made = ordered(tensor, engine=engine)
    witness = made.read().witness
    assert witness is not None
    witness.look(engine)
    made.leave_live()
    slot = memoryview(bytearray(FORM.total_bytes))
    assert made.fence(0.0, DEADLINE_S)
    tensor.add_(1)
    witness.check(slot)
    with pytest.raises(StateChanged):
        again = ordered(tensor).read().witness
        assert again is not None
        again.look(engine)
        again.check(slot)  # the slot holds only zeros


def test_nothing_of_the_live_state_is_held_behind_the_fence() -> None:
    for begins in (True, False):
        made = ordered()
        if begins:
            made.read()
            made.leave_live()
        made.fence(0.0, DEADLINE_S)
        assert made.live is None


def begins(made: SnapshotCopy) -> bool:
    """Act as a copy thread that has its slot; return whether it came in time."""
    try:
        made.read()
    except NoFreeSlot:
        return False
    made.leave_live()
    return True


def test_a_copy_either_begins_or_is_given_up_however_both_threads_meet() -> None:
    outcomes = set()
    for turn in range(300):
        made = ordered()

        patience = 0.0 if turn % 2 else 1e-5
        copied, waited = Together(partial(begins, made), partial(made.fence, patience, DEADLINE_S)).join()
        assert isinstance(copied, bool)
        assert copied == waited == (made.state is not CopyState.WAITING)
        assert isinstance(made.error, NoFreeSlot) != copied
        outcomes.add(copied)
    assert True in outcomes


# ------------------------------------------------------------------ with its threads


class Slots:
    """Stands in for an SMP; hands out its slot when told to."""

    def __init__(self) -> None:
        self.slot = memoryview(mmap.mmap(-1, FORM.total_bytes))
        self.connection = 1
        self.asked = threading.Event()
        self.gives = threading.Event()
        self.gives.set()
        self.sealed: list[SnapshotId] = []
        self.taken: list[TakenSlot] = []
        self.given_back: list[TakenSlot] = []

    def take(self, coord: str, keep: Collection[SnapshotId]) -> TakenSlot:
        self.asked.set()
        assert self.gives.wait(DEADLINE_S)
        self.taken.append(TakenSlot(f"{coord}.0.safetensors", len(self.taken), self.slot))
        return self.taken[-1]

    def seal(self, snapshot: SnapshotId, *_: Any, **options: Any) -> None:
        self.sealed.append(snapshot)

    def give_back(self, slot: TakenSlot) -> None:
        self.given_back.append(slot)


class Gated(CpuEngine):
    """Copies live tensors when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.copying = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.read: list[int] = []

    def copy(self, pieces: Sequence[SlotTensor], *rest: Any, **more: Any) -> None:
        if pieces:
            self.copying.set()
            assert self.go.wait(DEADLINE_S)
            self.read.append(len(pieces))
        super().copy(pieces, *rest, **more)


class Rig:
    def __init__(self) -> None:
        self.slots = Slots()
        self.engine = Gated()
        client = cast(SmpClient, self.slots)
        self.copier = Copier(client, client, self.engine, Pace(), lambda: None)

    def submit(self, tensor: torch.Tensor | None = None, step: int = 1, **options: Any) -> SnapshotCopy:
        made = ordered(tensor, step, self.engine, **options)
        made.confirm()
        self.copier.submit(made)
        return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.slots.gives.set()
    made.engine.go.set()
    made.copier.close(DEADLINE_S)


def test_no_thread_that_copies_takes_the_core_of_the_training_thread_that_wakes_it(rig: Rig) -> None:
    ours = [thread for thread in threading.enumerate() if thread.name in ("holdfast-copy", "holdfast-seal")]
    made = rig.submit()
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    policies = [os.sched_getscheduler(thread.native_id or 0) for thread in ours]
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_thread_of_a_policy_that_somebody_chose_keeps_it() -> None:
    def chosen() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        CpuEngine().enter_thread()
        return os.sched_getscheduler(0)

    assert Together(chosen).join() == [os.SCHED_IDLE]


def test_a_loop_does_not_wait_for_an_smp_that_gives_no_slot(rig: Rig) -> None:
    rig.slots.gives.clear()
    tensor = torch.zeros(4096)
    made = rig.submit(tensor)
    assert rig.slots.asked.wait(DEADLINE_S)
    assert made.fence(0.0, DEADLINE_S) is False
    tensor.fill_(1)  # stands for optim.step()
    rig.slots.gives.set()
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    assert isinstance(made.error, NoFreeSlot)
    assert rig.engine.read == []
    assert (rig.slots.sealed, rig.slots.given_back) == ([], rig.slots.taken)


def test_when_slots_are_given_again_copies_are_made_again(rig: Rig) -> None:
    rig.slots.gives.clear()
    for step in (1, 2, 3):
        assert rig.submit(step=step).fence(0.0, DEADLINE_S) is False
    rig.slots.gives.set()
    made = rig.submit(step=4)
    assert made.fence(DEADLINE_S, DEADLINE_S) is True
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    assert made.error is None
    assert rig.slots.sealed == [made.snapshot]


def test_a_loop_waits_for_a_copy_that_reads_its_state(rig: Rig) -> None:
    rig.engine.go.clear()
    tensor = torch.full((4096,), 3.0)
    made = rig.submit(tensor)
    assert rig.engine.copying.wait(DEADLINE_S)

    def training() -> bool:
        begun = made.fence(0.0, DEADLINE_S)
        tensor.fill_(4)
        return begun

    loop = Together(training)
    assert not made.reached(CopyState.COPIED, SOON_S)
    assert loop.running
    rig.engine.go.set()
    assert loop.join() == [True]
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    made.check()
    offset, _ = FORM.offsets["w"]
    assert set(torch.frombuffer(rig.slots.slot, dtype=torch.float32, count=4096, offset=offset).tolist()) == {3.0}


def test_a_slot_is_not_given_back_and_no_other_is_asked_for_while_a_device_may_write_to_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck() -> None:
        raise DeadlineExceeded("cuda:0 did not get on with a transfer for 60 s")

    monkeypatch.setattr(rig.engine, "finish", stuck)
    monkeypatch.setattr(rig.engine, "settle", stuck)
    for step in (1, 2):
        made = rig.submit(step=step)
        made.fence(DEADLINE_S, DEADLINE_S)
        assert made.reached(CopyState.SEALED, DEADLINE_S)
        assert "cuda:0 did not" in str(made.error)
    assert len(rig.slots.taken) == 1
    assert (rig.slots.given_back, rig.slots.sealed) == ([], [])
    monkeypatch.undo()  # the device gets on: the slot is given back, and snapshots are taken again
    made = rig.submit(step=3)
    made.fence(DEADLINE_S, DEADLINE_S)
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    made.check()
    assert rig.slots.given_back == rig.slots.taken[:1]
    assert rig.slots.sealed == [made.snapshot]


def test_a_copy_that_outlasts_its_deadline_is_not_sealed(rig: Rig) -> None:
    rig.engine.go.clear()
    tensor = torch.zeros(4096)
    made = rig.submit(tensor)
    assert rig.engine.copying.wait(DEADLINE_S)
    assert made.fence(0.0, SOON_S) is True
    tensor.fill_(4)
    rig.engine.go.set()
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    assert isinstance(made.error, DeadlineExceeded)
    assert rig.slots.sealed == []


def differ() -> None:
    raise LayoutChanged("replicas differ")


@pytest.mark.parametrize(
    ("found", "said"), [({"reshaped": lambda: ["w"]}, "w: "), ({"alike": differ}, "replicas differ")]
)
def test_what_is_of_another_shape_or_differs_among_replicas_is_not_sealed(
    rig: Rig, found: dict[str, Any], said: str
) -> None:
    made = rig.submit(**found)
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    assert isinstance(made.error, LayoutChanged) and str(made.error).startswith(said)
    assert (rig.slots.sealed, rig.slots.given_back) == ([], rig.slots.taken)


def test_a_bug_in_a_copy_ends_neither_the_loop_nor_the_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError

    made = rig.submit(reshaped=broken)
    assert made.fence(DEADLINE_S, DEADLINE_S) is True
    assert made.reached(CopyState.SEALED, DEADLINE_S)
    assert str(made.error) == "ZeroDivisionError: "
    after = rig.submit(step=2)
    assert after.reached(CopyState.SEALED, DEADLINE_S)
    assert rig.slots.sealed == [after.snapshot]


# ------------------------------------------------------------------ the table


def test_the_moves_that_are_drawn_are_those_that_are_made() -> None:
    drawn = re.findall("([A-Z]+) → ([A-Z]+)", str(orders.__doc__))
    assert sorted(drawn) == sorted((before.name, then.name) for before, ways in MOVES.items() for then in ways)


def test_a_copy_goes_one_way_and_ends() -> None:
    assert all(then > before for before, ways in MOVES.items() for then in ways)
    assert {then for ways in MOVES.values() for then in ways} | {CopyState.WAITING} == set(CopyState)
