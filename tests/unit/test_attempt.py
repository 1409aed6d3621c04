"""One attempt to restore: tensors come from this rank's shard and its replicas', on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    HoldfastError,
    IncompleteSnapshot,
    ProtocolError,
    StateMismatch,
)
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard
from holdfast.smp_daemon.shared.plan import RestorePlan
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.smp_daemon.shared.slotfile import Leaf, write_stamp
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.starts import ScriptBlock
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.copy.engines import CpuEngine
from holdfast.snapshot.resume.attempt import Restored, SameWorld, Verdict, load
from holdfast.snapshot.resume.elastic import OtherWorld
from holdfast.snapshot.resume.regions import Region, held_in, index_of, plan_reads, range_runs
from holdfast.snapshot.state.live import LiveTensor
from holdfast.snapshot.state.replicas import agree_on_shares
from tests.unit.test_replicas import Rank, state, together
from tests.unit.test_state import SNAPSHOT, Toy, whole_slot

RANKS = 3
COORDS = {f"dp{rank}": "node0" for rank in range(RANKS)}
UNIT = 64


@dataclass
class Replica(Toy):
    """An adapter of one of `RANKS` replicas."""

    coord: str = ""
    loaded: bool = False

    def coordinate(self) -> str:
        return self.coord

    def replica_set(self) -> str:
        return "all"

    def load(self, *values: object) -> None:
        self.loaded = True


class Holder:
    """Stands in for a client whose SMP holds one shard, and can repair nothing of it."""

    system = MACHINE

    def __init__(self, slot: memoryview) -> None:
        self.slot = slot
        self.digests = digest_units(slot, UNIT)

    def recover(self, sources: object, coord: str, *, check: bool = True) -> RecoveredShard:
        return RecoveredShard(self.slot, "held", 0, UNIT, self.digests)


def blank(items: list[LiveTensor]) -> list[LiveTensor]:
    return [LiveTensor(item.name, torch.zeros_like(item.tensor), item.change, item.replicated) for item in items]


def restored(
    rank: Rank, spoil: Callable[[int, memoryview], None] = lambda rank, slot: None, live: list[LiveTensor] | None = None
) -> tuple[HoldfastError | None, Verdict | None, Replica]:
    """Take a snapshot of `state`, and restore it into tensors of zeros.

    Args:
        spoil: changes a rank's slot after it was sealed.
        live: other tensors to restore into.
    """
    items, coord = state(rank.rank), f"dp{rank.rank}"
    sharing = agree_on_shares(rank, "all", iter(items))
    form, slot = whole_slot(Replica(items, coord=coord), SNAPSHOT, sharing)
    slot[: len(form.header)] = form.header
    write_stamp(slot, SNAPSHOT)
    holder = Holder(slot)
    lengths = [int(text) for text in rank.gather(str(slot.nbytes).encode())]
    spoil(rank.rank, slot)
    shards = tuple(Shard(coord, length) for coord, length in zip(COORDS, lengths, strict=True))
    layout = Layout("run", SNAPSHOT.epoch, 0, (Node("node0", "127.0.0.1", 1, 2, shards),), ((0,),), 1, 0, UNIT, 2)
    plan = RestorePlan(Sources(SNAPSHOT, layout, {}, {}), (), ())
    block = ScriptBlock(1, "Toy")
    attempt = SameWorld(cast(SmpClient, holder), plan.sources, COORDS, coord, block, Restored(1, UNNAMED))
    attempt.recover()
    adapter = Replica(blank(items) if live is None else live, coord=coord)
    try:
        failure, verdict = load(attempt, rank, adapter, CpuEngine())
    except StateMismatch as error:
        return error, None, adapter
    return failure, verdict, adapter


def untouched(adapter: Replica) -> bool:
    return not adapter.loaded and not any(item.tensor.any() for item in adapter.live)


def test_every_replica_gets_its_own_state_and_all_parts_of_what_they_share() -> None:
    for rank, (failure, verdict, adapter) in enumerate(together(restored, RANKS)):
        assert (failure, verdict) == (None, Verdict(True, True, True, True))
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(adapter.live, state(rank), strict=True))
        assert adapter.loaded


def test_who_has_no_replicas_gets_its_own_state() -> None:
    [(failure, _, adapter)] = together(lambda rank: restored_alone(rank), 1)
    assert failure is None
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(adapter.live, state(0), strict=True))


def restored_alone(rank: Rank) -> tuple[HoldfastError | None, Verdict | None, Replica]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "COORDS", {"dp0": "node0"})
        return restored(rank)


def test_what_is_missing_on_one_rank_is_refused_on_all_and_nothing_is_written() -> None:
    def work(rank: Rank) -> tuple[HoldfastError | None, Verdict | None, Replica]:
        live = blank(state(0))
        return restored(rank, live=live[:-1] if rank.rank == 1 else live)

    found = together(work, RANKS)
    assert "odd is not in this job" in str(found[1][0])
    for failure, _, adapter in found:
        assert isinstance(failure, StateMismatch)
        assert untouched(adapter)


def test_a_record_that_one_replica_cannot_read_has_all_try_again() -> None:
    def spoil(rank: int, slot: memoryview) -> None:
        if rank == 2:
            slot[-1] ^= 1  # the record is the last leaf

    found = together(lambda rank: restored(rank, spoil), RANKS)
    assert isinstance(found[2][0], DamagedSnapshot)
    for failure, verdict, adapter in found:
        assert failure is not None
        assert verdict == Verdict(False, True, False, True)
        assert untouched(adapter)


@pytest.mark.parametrize("error", [KeyError("flags"), ProtocolError("the record is no JSON")])
def test_a_record_that_cannot_be_understood_is_no_better_in_any_copy(error: Exception) -> None:
    def work() -> None:
        raise error

    nobody: Any = SimpleNamespace(snapshot=SNAPSHOT)
    for world in (SameWorld, OtherWorld):
        attempt = world(nobody, nobody, COORDS, "dp0", ScriptBlock(1, "Toy"), Restored(1, UNNAMED))
        assert isinstance(attempt.problem_of(work), IncompleteSnapshot)


def test_bytes_that_one_rank_cannot_read_keep_all_from_going_on() -> None:
    def spoil(rank: int, slot: memoryview) -> None:
        if rank == 0:
            header = 8 + int.from_bytes(slot[:8], "little")
            slot[header] ^= 1

    found = together(lambda rank: restored(rank, spoil), RANKS)
    assert [type(failure) for failure, _, _ in found] == [DamagedSnapshot, type(None), type(None)]
    assert not any(adapter.loaded for _, _, adapter in found)


# ---------------------------------------------------------------------- parts, as they are named in slots


def problem(*parts: tuple[str, str, tuple[int, ...], int]) -> str:
    shared = {"w": Leaf("w", "F32", (64,))}
    held = [held for i, part in enumerate(parts) for held in held_in(f"dp{i}", [part], shared, {})]
    index = index_of(held, [f"dp{i}" for i in range(len(parts))])
    return plan_reads(Region("w", "F32", (64,), range_runs(0, 64)), index)[1]


def test_a_part_that_nobody_has_is_named() -> None:
    assert problem(("w@0:32", "F32", (32,), 0), ("w@32:64", "F32", (32,), 0)) == ""
    assert "w[32:64]" in problem(("w@0:32", "F32", (32,), 0))
    assert "w is not in" in problem()


@pytest.mark.parametrize(("name", "shape"), [("w@0:32", (31,)), ("w@0:32", (33,)), ("w@32:65", (33,)), ("w", (63,))])
def test_a_part_of_another_length_than_its_name_says_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(StateMismatch, match="no part of"):
        problem((name, "F32", shape, 0))
