"""A snapshot that lacks state is not sealed, does not count if it was, and is passed over by a restart."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import InMemorySnapshot, Unrecoverable
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    HoldfastError,
    IncompleteSnapshot,
    StaleEpoch,
    StateMismatch,
    failure_of,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.slotfile import write_stamp
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.resume.attempt import agree_on
from holdfast.snapshot.state.completeness import check_complete
from holdfast.snapshot.state.live import Change, LiveTensor, Tree
from holdfast.snapshot.state.record import Values, encode_record
from holdfast.snapshot.step import capture
from tests.deadlines import DEADLINE_S
from tests.smp_kit import Crash
from tests.unit.test_capture import Rig, Slots
from tests.unit.test_plan import JOBS, NEW, OLD, World, whole
from tests.unit.test_state import Toy, toy

# ---------------------------------------------------------------------- what is listed and what is held

LEAVES = ("model0.w", "optim.model0.w.m", "optim.model0.w.m.scale", "optim.model0.w.main", "optim1.named.x.t")


def trees() -> tuple[Tree, Tree]:
    """Fixed and late values that are complete with `LEAVES`."""
    fixed = {
        "optim": [
            {"prefix": "optim", "order": {"model0.w": ["step", "m", "master_param", 7], "model0.b": []}},
            {"prefix": "optim1", "order": {"named.x": ["t"]}},
        ],
        "schedulers": ["StepLR"],
        "flags": {"parameters": ["a"] * 9, "modules": ["m"]},
    }
    late = {
        "optim": [{"state": {"model0.w": {"step": 3, 7: "seven"}}}, {"state": {}}],
        "scheduler": [{"last_epoch": 1}],
        "flags": {"requires_grad": b"xx", "training": b"x"},
    }
    return fixed, late


def test_what_is_listed_is_held_by_a_leaf_or_a_value() -> None:
    fixed, late = trees()
    assert failure_of(lambda: check_complete(fixed, late, LEAVES), DamagedSnapshot) is None
    assert failure_of(lambda: check_complete({}, {}, ("w",)), DamagedSnapshot) is None


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda f, v: v["optim"][0]["state"]["model0.w"].pop("step"), "optim.model0.w.step"),
        (lambda f, v: v["optim"][0]["state"].clear(), "optim.model0.w.7"),
        (lambda f, v: v["optim"][0]["state"].update({"model0.b": {"n": 1}}), "optim.model0.b.n"),
        (lambda f, v: f["optim"][0]["order"]["model0.b"].append("m"), "optim.model0.b.m"),
        (lambda f, v: f["optim"][1]["order"].clear(), "optim1.named.x.t"),
        (lambda f, v: v["optim"].pop(), "1 of 2 optimizers"),
        (lambda f, v: v["scheduler"].clear(), "0 of 1 schedulers"),
        (lambda f, v: v["flags"].update({"requires_grad": b"x"}), "requires_grad"),
    ],
)
def test_what_is_missing_or_not_listed_is_named(spoil: Callable[[Tree, Tree], object], name: str) -> None:
    fixed, late = trees()
    spoil(fixed, late)
    with pytest.raises(IncompleteSnapshot, match=name):
        check_complete(fixed, late, LEAVES)


# ---------------------------------------------------------------------- before the seal


def counting() -> Toy:
    """A toy with an optimizer that counts its steps."""
    made = toy()
    made.live.append(LiveTensor("optim.w.m", torch.ones(2), Change.STEP))
    made.fixed_tree = {"optim": [{"prefix": "optim", "order": {"w": ["n", "m"]}}]}
    made.late_tree = {"optim": [{"state": {"w": {"n": 1}}}]}
    return made


@pytest.fixture
def watched() -> Iterator[tuple[Rig, Watched]]:
    slots = Watched()
    rig = Rig(counting(), slots)
    rig.plan()
    yield rig, slots
    rig.copier.close(DEADLINE_S)


def test_a_snapshot_that_would_lack_something_is_given_up_and_laid_out_anew(watched: tuple[Rig, Watched]) -> None:
    rig, _ = watched
    rig.take()
    n = rig.adapter.late_tree["optim"][0]["state"]["w"].pop("n")
    with pytest.raises(LayoutChanged, match=r"optim\.w\.n"):
        rig.begin()
    with pytest.raises(StateMismatch, match=r"optim\.w\.n"):
        rig.plan()
    rig.adapter.late_tree["optim"][0]["state"]["w"]["n"] = n
    rig.plan()
    rig.take()


def test_a_tensor_that_nothing_lists_is_refused_with_the_layout(watched: tuple[Rig, Watched]) -> None:
    rig, _ = watched
    rig.adapter.live.append(LiveTensor("optim.w.more", torch.ones(2), Change.STEP))
    with pytest.raises(StateMismatch, match=r"optim\.w\.more"):
        rig.plan()


# ---------------------------------------------------------------------- after the seal


class Watched(Slots):
    """Counts how often slots are read back; `spoil` is done to one after it was sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[SnapshotId] = []
        self.said: list[str] = []
        self.spoil: Callable[[memoryview], None] = lambda slot: None

    def say(self, text: str) -> None:
        self.said.append(text)

    def sealed_shard(self, snapshot: SnapshotId, coord: str, slot: TakenSlot) -> RecoveredShard:
        found = super().sealed_shard(snapshot, coord, slot)
        self.read.append(snapshot)
        self.spoil(slot.view)
        return found


def test_the_first_snapshot_of_each_layout_is_read_back(watched: tuple[Rig, Watched]) -> None:
    rig, slots = watched
    first = rig.begin()
    rig.end(first)
    rig.take()
    assert slots.read == [first.snapshot]
    rig.plan()
    second = rig.begin()
    rig.end(second)
    rig.take()
    assert slots.read == [first.snapshot, second.snapshot]


def flip(name: str, rig: Rig) -> Callable[[memoryview], None]:
    def spoil(slot: memoryview) -> None:
        slot[rig.form.offsets[name][0]] ^= 1

    return spoil


@pytest.mark.parametrize("name", ["model.weight", "optim.w.m", "holdfast.record"])
def test_bytes_that_are_not_those_that_were_sealed_fail_the_snapshot_until_one_is_well(
    watched: tuple[Rig, Watched], name: str
) -> None:
    rig, slots = watched
    slots.spoil = flip(name, rig)
    job = rig.begin()
    rig.run(job)
    with pytest.raises(DamagedSnapshot, match=name):
        job.check()
    slots.spoil = lambda slot: None
    rig.take()
    rig.take()
    assert len(slots.read) == 2
    assert name in slots.said[0], "operators are told, too"


def test_a_slot_that_another_snapshot_has_taken_says_nothing(watched: tuple[Rig, Watched]) -> None:
    rig, slots = watched

    def reuse(slot: memoryview) -> None:
        write_stamp(slot, SnapshotId(7, 7))
        flip("optim.w.m", rig)(slot)

    slots.spoil = reuse
    rig.take()
    slots.spoil = lambda slot: None
    rig.take()
    rig.take()
    assert len(slots.read) == 2, "the next one was read instead"


# ---------------------------------------------------------------------- whole jobs


class Counting(torch.optim.Optimizer):
    """Counts the steps of each parameter in a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["n"] = state.get("n", 0) + 1
            parameter -= parameter.grad / state["n"]


def life(until: int, **options: Any) -> tuple[int, InMemorySnapshot]:
    """Enter, train until a step, and crash. Returns the first step, and the hook."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optim = Counting(model.parameters())
    began = -1
    with pytest.raises(Crash):
        with InMemorySnapshot(model, optim, max_repeats=0, **options) as snap:
            began = snap.step
            assert [state["n"] for state in optim.state.values()] == [began] * (2 if began else 0)
            for _ in range(began, until):
                snap.begin()
                snap.drain(60)
                optim.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optim.step()
            snap.begin()
            snap.drain(60)
            seen.append((snap.sealed_step, snap.protected_step, snap.statistics.failed))
            raise Crash
    return began, snap


seen: list[tuple[int | None, int | None, int]] = []
"""How each life ended: newest sealed and protected step as the ranks had agreed by then, and failed snapshots."""


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """``lose(steps)``: records of these steps lack a number that they list, as a fault in the trainer would do."""

    def lose(steps: range) -> None:
        def lossy(snapshot: SnapshotId, coord: str, early: Values, late: Values, *rest: Any) -> bytes:
            held = copy.deepcopy(late.encoded)
            if snapshot.step in steps:
                del held["optim"][0]["state"]["model0.weight"]["n"]
            return encode_record(snapshot, coord, early, Values(held, late.tensors), *rest)

        monkeypatch.setattr(capture, "encode_record", lossy)

    return lose


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)


def test_a_first_snapshot_that_cannot_be_read_back_does_not_count(
    arena: Path, lose: Callable[[range], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout is made with step 1; the records of steps 2 and 3 lack something."""
    rehearse = capture.Capture._rehearse

    def rehearse_and_then_lose(self: capture.Capture, *args: Any) -> None:
        rehearse(self, *args)
        lose(range(4))

    monkeypatch.setattr(capture.Capture, "_rehearse", rehearse_and_then_lose)
    seen.clear()
    life(3)
    assert seen == [(None, None, 2)]
    assert "optim.model0.weight.n" in errors(caplog)
    lose(range(0))
    began, _ = life(6)
    assert began == 0, "none of them was restored"
    assert life(6)[0] in (5, 6)


def test_a_snapshot_that_lacks_something_is_passed_over_for_an_older_one(
    arena: Path, lose: Callable[[range], None], caplog: pytest.LogCaptureFixture
) -> None:
    lose(range(4, 9))
    life(5, generations=3)
    caplog.clear()
    began, snap = life(3, generations=3)
    assert began == 3
    assert all("optim.model0.weight.n" in reason for reason in snap.restored.passed_over)
    assert len(snap.restored.passed_over) == 2
    assert "step 3" in errors(caplog) and "step 4" in errors(caplog)
    assert life(3, generations=3)[0] == 3, "and so does every start until there is a newer one"
    lose(range(0))
    life(6, generations=3)
    assert life(6, generations=3)[0] in (5, 6)


def test_if_nothing_else_is_held_the_refusal_names_what_is_missing(arena: Path, lose: Callable[[range], None]) -> None:
    lose(range(2, 9))
    life(6)
    with pytest.raises(Unrecoverable, match=r"optim\.model0\.weight\.n"):
        life(6)


def test_the_commit_record_of_another_snapshot_is_not_taken(arena: Path) -> None:
    model = torch.nn.Linear(4, 3)
    with InMemorySnapshot(model, Counting(model.parameters())) as snap:
        with pytest.raises(StaleEpoch):
            snap._session.rank.client.sealed_shard(
                SnapshotId(9, 9), "dp0", TakenSlot("dp0.0.safetensors", 1, memoryview(b""))
            )


# ---------------------------------------------------------------------- decisions


def test_one_rank_that_finds_it_incomplete_is_enough() -> None:
    class Both:
        """The agreement of two ranks, of which this one met `failure`, and the other `other`."""

        def __init__(self, other: HoldfastError | None) -> None:
            self.other = other

        def minimum(self, mine: list[int]) -> Callable[[], list[int]]:
            kinds: list[type[HoldfastError]] = [StateMismatch, DamagedSnapshot, IncompleteSnapshot]
            theirs = [int(self.other is None), *(int(not isinstance(self.other, kind)) for kind in kinds)]
            return lambda: list(map(min, mine, theirs))

    agreement: Any = Both(IncompleteSnapshot("lacks n"))
    assert agree_on(agreement, None) == (False, True, False, False)
    agreement = Both(None)
    assert agree_on(agreement, None) == (True, True, True, True)
    assert agree_on(agreement, DamagedSnapshot("flipped")) == (False, True, False, True)


def test_an_incomplete_snapshot_is_planned_for_no_more_even_if_it_was_protected() -> None:
    job = JOBS["two nodes"]
    inventories = list(World(job, [whole(job, OLD), whole(job, NEW)], NEW).inventories.values())
    plan = plan_restore(inventories, job.shards)
    assert plan is not None and plan.snapshot == NEW
    plan = plan_restore(inventories, job.shards, incomplete={NEW: "lacks n"})
    assert plan is not None and plan.snapshot == OLD
    with pytest.raises(Unrecoverable, match="lacks n"):
        plan_restore(inventories, job.shards, incomplete={NEW: "lacks n", OLD: "lacks m"})
    unprotected = list(World(job, [whole(job, OLD), whole(job, NEW)], OLD).inventories.values())
    plan = plan_restore(unprotected, job.shards, incomplete={NEW: "lacks n"})
    assert plan is not None and plan.snapshot == OLD
