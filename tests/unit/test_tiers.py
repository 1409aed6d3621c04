"""Where a restart goes back to, tier by tier: pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError, PlaceError, StateMismatch, Unrecoverable
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted, PersistedRun
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.plan import RestorePlan, plan_persisted, plan_restore
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.snapshot.resume.choice import ATTEMPTS, RestoreAttempts, StartOptions, check_required, tier_of

RUN = Run("5ca1ab1e", 100)
OLD, NEW = SnapshotId(1, 10), SnapshotId(1, 20)
NODES = tuple(Node(f"n{i}", f"10.0.0.{i}", 1, 2, (Shard(f"dp{i}", 100),)) for i in range(3))
LAYOUT = Layout("job", 1, 0, NODES, ((0, 1, 2),), 2, 1, 64, 3)
COORDS = {f"dp{i}": f"n{i}" for i in range(3)}


def seen(*snapshots: SnapshotId, place: str = "/p", others: tuple[str, ...] = (), problem: str = "") -> Persisted:
    return Persisted(place, 1, (PersistedRun(RUN, frozenset(snapshots), others),), problem)


def inventory(index: int, *snapshots: SnapshotId, parity: bool = True) -> Inventory:
    tag = LAYOUT.tag(0)
    return Inventory(
        f"n{index}",
        f"10.0.0.{index}",
        1,
        2,
        epoch=1,
        layouts={(1, 0): LAYOUT},
        shards=frozenset((snapshot, f"dp{index}") for snapshot in snapshots),
        parities=frozenset((snapshot, tag, index) for snapshot in snapshots if parity),
    )


def persisted(snapshot: SnapshotId) -> RestorePlan:
    return plan_persisted(snapshot, LAYOUT, COORDS)


def in_memory(snapshot: SnapshotId) -> RestorePlan:
    return RestorePlan(Sources(snapshot, LAYOUT, {}, {}), (), ())


def test_the_newest_that_every_rank_sees_is_chosen() -> None:
    course = RestoreAttempts()
    assert course.choose_persisted([seen(OLD, NEW), seen(OLD, NEW)], RUN.id) == NEW
    assert course.choose_persisted([seen(OLD, NEW), seen(OLD)], RUN.id) == OLD
    assert course.choose_persisted([seen(NEW), seen(OLD)], RUN.id) is None
    assert course.passed_over == []


def test_without_the_tier_there_is_none() -> None:
    assert RestoreAttempts().choose_persisted([seen(place=""), seen(place="")], RUN.id) is None


def test_nodes_that_persist_at_different_places_are_told() -> None:
    with pytest.raises(ConfigError, match=r"different places \(/p, nowhere\)"):
        RestoreAttempts().choose_persisted([seen(OLD), seen(place="")], RUN.id)


def test_what_cannot_be_seen_is_not_taken_for_nothing() -> None:
    with pytest.raises(PlaceError, match="cannot be seen: it hangs"):
        RestoreAttempts().choose_persisted([seen(OLD), seen(place="?", problem="it hangs"), seen(OLD)], RUN.id)


def test_what_is_not_whole_is_noted_once() -> None:
    course = RestoreAttempts()
    for _ in range(2):
        course.choose_persisted([seen(OLD, others=("step 20 (epoch 1): half",)), seen(OLD)], RUN.id)
    assert course.passed_over == ["step 20 (epoch 1): half (persisted)"]


def test_a_damaged_one_is_not_tried_again_and_one_that_failed_once_is() -> None:
    answers = [seen(OLD, NEW)]
    course = RestoreAttempts()
    course.failed(persisted(NEW), "slow", damaged=False)
    assert course.choose_persisted(answers, RUN.id) == NEW
    course.failed(persisted(NEW), "slow again", damaged=False)
    assert course.choose_persisted(answers, RUN.id) == OLD
    course.failed(persisted(OLD), "a flipped bit", damaged=True)
    assert course.choose_persisted(answers, RUN.id) is None
    assert [reason.rpartition(": ")[2] for reason in course.passed_over] == ["slow", "slow again", "a flipped bit"]


def test_persisted_ones_are_tried_so_often_and_no_more() -> None:
    course = RestoreAttempts()
    many = [SnapshotId(1, step) for step in range(20)]
    tried = 0
    while (snapshot := course.choose_persisted([seen(*many)], RUN.id)) is not None:
        course.failed(persisted(snapshot), "unreachable", damaged=False)
        tried += 1
    assert tried == ATTEMPTS


def test_memory_is_given_up_after_so_many_attempts_and_says_why() -> None:
    course = RestoreAttempts()
    for number in range(ATTEMPTS):
        assert course.given_up == ""
        course.failed(in_memory(NEW), f"reason {number}", damaged=True)
    assert course.given_up == f"recovery failed {ATTEMPTS} times; last: reason {ATTEMPTS - 1}"


@pytest.mark.proves("never-older")
def test_only_what_was_never_promised_is_passed_over_in_memory() -> None:
    course = RestoreAttempts()
    course.failed(in_memory(NEW), "gone", damaged=False)
    assert course.hopeless({NEW}) == set()
    course.failed(in_memory(NEW), "gone", damaged=False)
    assert course.hopeless({NEW}) == {NEW}
    assert course.hopeless({OLD}) == set()


def test_each_plan_is_of_a_tier() -> None:
    everyone = [inventory(i, OLD, NEW) for i in range(3)]

    def tier(inventories: list[Inventory], coords: dict[str, str] = COORDS) -> str:
        plan = plan_restore(inventories, coords)
        assert plan is not None
        return tier_of(plan, inventories, coords)

    assert tier(everyone) == "local"
    assert tier(everyone, {"dp0": "n1", "dp1": "n0", "dp2": "n2"}) == "group"  # ranks have moved
    assert tier([*everyone[:2], inventory(2)]) == "group"  # one shard must be decoded
    partly = [inventory(0, OLD, NEW), inventory(1, OLD), inventory(2, OLD)]
    assert tier(partly) == "previous"
    assert tier_of(persisted(NEW), everyone, COORDS) == "persisted"


def test_a_persisted_snapshot_of_other_ranks_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"3 ranks .* has 2"):
        plan_persisted(NEW, LAYOUT, ["dp0", "dp1"])


def test_what_an_smp_sees_is_read_back() -> None:
    answer = replace(seen(OLD, NEW, others=("a",)), epoch=7)
    assert decode_json(Persisted, encode_json(answer), "") == answer


def test_what_is_persisted_counts_where_a_step_is_required() -> None:
    check_required(persisted(NEW), StartOptions(require=NEW.step), [], [])
    with pytest.raises(Unrecoverable, match=rf"{NEW.step}, persisted \(memory: lost\)"):
        check_required(persisted(NEW), StartOptions(require=NEW.step + 1), [], ["memory: lost"])
