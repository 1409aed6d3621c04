"""The way from a training loop to its slots: hook, capture, copier and copy engine, over a device that lags behind."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.snapshot.copy.witness import Witness
from holdfast.snapshot.step.orders import SnapshotCopy
from tests.deadlines import DEADLINE_S
from tests.proof.device.queues import EAGER, LAZY
from tests.proof.device.seam import FAULTS, Cpu, Emulated, SeamLoop, SeamOutcome, missed, observe, twin
from tests.proof.device.standin import EmulatedCuda

ORDERS = [LAZY, EAGER, 1, 2]


@pytest.fixture
def arena() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield base / "seam"
    shutil.rmtree(base)


def seen(loop: SeamLoop, arena: Path, order: str | int = LAZY, *, ring: bool = False) -> SeamOutcome:
    standin = EmulatedCuda(order)
    standin.refused = lambda nth: ring
    return observe(Emulated(standin), loop, twin(Cpu(), loop), arena, "seam")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ring", [False, True], ids=["registered", "ring"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_every_slot_is_what_a_twin_that_synchronises_has(
    arena: Path, order: str | int, ring: bool, own_stream: bool
) -> None:
    outcome = seen(SeamLoop(steps=30 if order == LAZY else 12, own_stream=own_stream), arena, order, ring=ring)
    assert outcome.exact, outcome
    assert len(outcome.taken) >= 6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "loop",
    [
        SeamLoop(moves=True),
        SeamLoop(turns="steps"),
        SeamLoop(turns="data"),
        SeamLoop(captured=5),
        SeamLoop(captured=5, turns="steps"),
    ],
)
def test_so_it_is_in_loops_of_other_kinds(arena: Path, order: str | int, loop: SeamLoop) -> None:
    outcome = seen(loop, arena, order)
    assert outcome.exact, outcome


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_copy_that_is_checked_before_its_step_ends_finds_nothing_changed(
    arena: Path, order: str | int, own_stream: bool
) -> None:
    """The step may run on a stream that the copy thread does not know."""
    fence, check = SnapshotCopy.fence, Witness.check
    checked: dict[Witness, threading.Event] = defaultdict(threading.Event)

    def checking(witness: Witness, slot: memoryview) -> None:
        check(witness, slot)
        checked[witness].set()

    def fencing(copy: SnapshotCopy, patience_s: float, deadline_s: float) -> bool:
        if copy.live is not None and copy.live.witness is not None:
            assert checked[copy.live.witness].wait(DEADLINE_S) or copy.error is not None
        return fence(copy, patience_s, deadline_s)

    with patch.object(Witness, "check", checking), patch.object(SnapshotCopy, "fence", fencing):
        outcome = seen(SeamLoop(steps=6, own_stream=own_stream), arena, order)
    assert outcome.exact, outcome


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_broken_on_purpose_is_found_by_its_own_sign(arena: Path, name: str) -> None:
    def made(late_copies: bool) -> Emulated:
        return Emulated(EmulatedCuda(LAZY if late_copies else EAGER))

    assert not missed(FAULTS[name], made, Cpu(), arena)


@pytest.mark.parametrize("name", FAULTS)
def test_a_loop_that_fails_in_another_way_has_no_sign_of_a_fault(name: str) -> None:
    to_the_end = [1, 4, 14]
    for outcome in (SeamOutcome(15, to_the_end, failure="no memory"), SeamOutcome(15, to_the_end, given_up=3)):
        assert not outcome.exact
        assert not FAULTS[name].shows(outcome)
    assert not FAULTS[name].shows(SeamOutcome(15))


def test_a_fault_that_a_device_does_not_show_is_not_counted_as_found(arena: Path) -> None:
    """A CPU has no fence to leave out."""
    assert "no sign" in missed(FAULTS["no-fence"], lambda late_copies: Cpu(), Cpu(), arena)
