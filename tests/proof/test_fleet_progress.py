"""Steps and saves by arithmetic, compared with steps and saves one by one; and which copies are left."""

from __future__ import annotations

import math
from random import Random

import pytest

from benchmarks.fleet.copies import Copies
from benchmarks.fleet.engine import Machines
from benchmarks.fleet.groups import Groups, place
from benchmarks.fleet.progress import MARKS, Save, Timeline
from holdfast.ec import crowded


def one_by_one(pace: Timeline, first: int, elapsed_s: float) -> tuple[int, float, float, dict[str, int | None]]:
    """(steps, stall, unfinished, newest of each mark) by doing each step and each save in turn."""
    now, step, stall = 0.0, first, 0.0
    newest: dict[str, int | None] = dict.fromkeys(MARKS)
    while now + pace.step_s <= elapsed_s:
        now += pace.step_s
        step += 1
        for save in pace.saves:
            if step % save.every:
                continue
            for mark in MARKS:
                if now + save.after_s(mark) <= elapsed_s:
                    newest[mark] = step
        stalls = sum(save.stall_s for save in pace.saves if step % save.every == 0)
        paid = min(stalls, elapsed_s - now)
        now, stall = now + paid, stall + paid
        if paid < stalls:
            break
    return step - first, stall, elapsed_s - now, newest


@pytest.mark.parametrize("seed", range(300))
def test_arithmetic_and_one_step_after_another_agree(seed: int) -> None:
    random = Random(seed)
    saves = [
        Save(
            random.randrange(1, 12),
            random.choice([0.0, 0.25, 3.0, 40.0]),
            *(random.choice([0.0, 0.5, 7.0, 60.0, math.inf]) for _ in MARKS),
        )
        for _ in range(random.randrange(3))
    ]
    pace = Timeline(random.choice([0.5, 1.0, 4.0]), saves)
    first, elapsed = random.randrange(50), random.randrange(0, 1600) / 8
    steps, stall, unfinished, newest = one_by_one(pace, first, elapsed)
    spent = pace.spent(first, elapsed)
    assert (spent.steps, spent.stall_s, spent.unfinished_s) == (steps, stall, unfinished)
    for mark in MARKS:
        found = pace.newest(mark, first, elapsed)
        assert (found.step if found else None) == newest[mark], mark


def test_saves_are_counted_from_step_0_and_not_from_a_restart() -> None:
    pace = Timeline(1.0, [Save(100, 0.0, persisted_s=0.0)])
    assert pace.newest("persisted", 70, 29.0) is None
    found = pace.newest("persisted", 70, 31.0)
    assert found is not None and (found.step, found.finished_s) == (100, 30.0)


def test_a_step_that_was_restored_is_not_saved_again() -> None:
    pace = Timeline(1.0, [Save(10, 5.0, sealed_s=0.0)])
    assert pace.spent(100, 9.5).stall_s == 0
    assert pace.newest("sealed", 100, 9.5) is None


PACE = Timeline(10.0, [Save(10, 0.0, sealed_s=2.0, protected_s=300.0)])


def test_two_snapshots_become_protected_one_after_the_other_though_training_stops() -> None:
    copies = Copies(Groups((0, 0), 1))
    copies.trained(PACE, 0, 0.0, 150.0)
    assert (copies.sealed, copies.protected) == (10, None)
    copies.trained(PACE, 10, 160.0, 265.0)
    assert (copies.sealed, copies.protected) == (20, None)
    copies.settle(400.0)
    assert copies.protected == 10
    copies.settle(560.0)
    assert copies.protected == 20


def test_of_sealed_snapshots_the_newest_that_is_to_be_protected_is_though_training_stops() -> None:
    pace = Timeline(10.0, [Save(10, 0.0, sealed_s=2.0), Save(30, 0.0, protected_s=300.0)])
    copies = Copies(Groups((0, 0), 1))
    copies.trained(pace, 0, 0.0, 450.0)
    assert (copies.sealed, copies.protected) == (40, None)
    copies.settle(599.0)
    assert copies.protected is None
    copies.settle(600.0)
    assert copies.protected == 30


def test_what_was_being_protected_when_a_node_went_never_is() -> None:
    copies = Copies(Groups((0, 0), 1))
    copies.trained(PACE, 0, 0.0, 450.0)
    assert (copies.sealed, copies.protected) == (40, 10)
    copies.lose([0], 460.0)
    copies.settle(10_000.0)
    assert copies.best() == ("protected", 10)


def test_a_ticket_of_an_earlier_loss_comes_too_late() -> None:
    copies = Copies(Groups((0, 0, 0), 1))
    copies.protected = 5
    copies.lose([0], 1.0)
    first = copies.degraded[0]
    copies.lose([0], 2.0)
    second = copies.degraded[0]
    assert first != second
    copies.repaired(0, first)
    assert copies.degraded == {0: second}
    assert copies.beyond == 0
    copies.lose([1], 3.0)
    assert copies.best() == ("start", 0)
    assert copies.beyond == 1


def test_after_a_fall_back_to_storage_every_group_is_whole_again() -> None:
    copies = Copies(Groups((0, 0, 0), 1))
    copies.sealed = copies.protected = 5
    copies.lose([0, 1], 1.0)
    assert copies.best() == ("start", 0)
    copies.restored("start", 0)
    assert copies.degraded == {}
    copies.protected = 3
    copies.lose([2], 2.0)
    assert copies.best() == ("protected", 3)
    copies.lose([0], 3.0)
    assert copies.best() == ("start", 0)


def test_of_equal_steps_memory_is_asked_before_storage() -> None:
    copies = Copies(None)
    assert copies.best() == ("start", 0)
    copies.persisted = 7
    assert copies.best() == ("persisted", 7)
    copies.protected = 7
    assert copies.best() == ("protected", 7)
    copies.sealed = 7
    assert copies.best() == ("sealed", 7)
    copies.persisted = 8
    assert copies.best() == ("persisted", 8)


@pytest.mark.parametrize("rack", [1, 2, 4, 8])
@pytest.mark.parametrize(("size", "parity"), [(8, 1), (8, 2), (2, 1)])
def test_no_group_has_more_of_a_rack_than_it_may_lose(size: int, parity: int, rack: int) -> None:
    groups = place(256, size, parity, rack, spread=True)
    members: dict[int, list[int]] = {}
    for node, group in enumerate(groups.of):
        members.setdefault(group, []).append(node)
    racks = [(f"rack={node // rack}",) for node in range(256)]
    assert not crowded(list(members.values()), racks, [parity] * len(members))
    assert {len(group) for group in members.values()} == {size}
    for first in range(0, 256, rack):
        assert groups.survives(range(first, first + rack))


def test_neighbours_are_a_group_where_racks_are_not_looked_at() -> None:
    assert place(6, 2, 1, 2, spread=False).of == (0, 0, 1, 1, 2, 2)


def test_the_place_that_has_waited_longest_gets_the_next_machine() -> None:
    machines = Machines(1)
    assert [machines.breaks(place) for place in (4, 5, 6)] == [True, False, False]
    assert machines.empty == {4, 5, 6}
    assert [machines.repaired() for _ in range(3)] == [5, 6, None]
    assert machines.spares == 1
    machines.arrives(5)
    assert machines.empty == {4, 6}
