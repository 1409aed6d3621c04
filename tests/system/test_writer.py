"""Slots that are written on demand: the snapshot that a write promised stays until the next write has promised one."""

from __future__ import annotations

import pytest
import torch

from holdfast.smp_daemon.shared.errors import HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import newest_protected
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.memory import SLOTS, Memory
from tests.deadlines import DEADLINE_S
from tests.smp_kit import Ground, SmpProcess


class Closing(Agreement):
    """Notes whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def writer(smp: SmpProcess) -> Memory:
    alone = Agreement()
    return Memory(smp.job, "", smp.arena.parent, start=False, protect="none", deadline_s=DEADLINE_S, agreement=alone)


def write(writer: Memory, record: bytes = b"{}") -> SnapshotId:
    return writer.write(lambda: ({"weight": torch.ones(5)}, record))


def held(smp: SmpProcess) -> set[SnapshotId]:
    return {snapshot for snapshot, _ in smp.client().inventory().shards}


def test_after_a_restart_neither_what_was_promised_nor_what_is_newer_is_given_up(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that dies while it writes leaves a snapshot that may lack parity, and nothing shows it."""
    smp = ground.smp()
    first = writer(smp)
    write(first)
    promised = write(first)
    with monkeypatch.context() as dying:
        dying.setattr(first.client, "await_outcome", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(first)
    newer = SnapshotId(promised.epoch, promised.step + 1)
    assert held(smp) == {promised, newer}
    second = writer(smp)
    with monkeypatch.context() as failing:
        failing.setattr(second.client, "seal", refuse)
        with pytest.raises(HoldfastError, match="refused"):
            write(second)
    assert held(smp) == {promised, newer}
    assert newest_protected([smp.client().inventory()]) == promised
    last = write(second)
    assert last in held(smp)
    assert held(smp) - {promised, newer, last} == set()
    final = write(second)
    assert held(smp) == {last, final}


def test_a_write_for_which_there_is_no_memory_keeps_no_later_one_from_its_slots(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = writer(ground.smp())
    write(own)
    with monkeypatch.context() as full:
        full.setattr(own.client, "configure", refuse)
        with pytest.raises(HoldfastError, match="refused"):
            own.write(lambda: ({"weight": torch.ones(5000)}, b"{}"))
    first = write(own)
    assert write(own) == SnapshotId(first.epoch, first.step + 1)


def test_a_write_that_is_interrupted_as_it_is_sealed_gives_its_slot_back(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = writer(ground.smp())
    with monkeypatch.context() as interrupted:
        interrupted.setattr(own.client, "seal", lambda *arguments: 1 / 0)
        for _ in range(SLOTS):
            with pytest.raises(ZeroDivisionError):
                write(own)
    write(own)


def test_a_record_of_another_length_needs_no_other_layout_while_there_is_room(ground: Ground) -> None:
    """Of a thousand ranks, one has a record that is a page longer or shorter with each write."""
    first = writer(ground.smp())
    epochs = [write(first, b"x" * length).epoch for length in (2, 4000, 9000, 17000, 5000, 90000)]
    assert [epoch - epochs[0] for epoch in epochs] == [0, 0, 1, 1, 1, 2]


def refuse(*arguments: object, **more: object) -> None:
    raise HoldfastError("refused")


def test_a_memory_that_cannot_be_made_or_ended_keeps_no_connections(ground: Ground) -> None:
    smp, others = ground.smp(), Closing()
    nowhere = smp.arena.parent / "nowhere"
    with pytest.raises(SmpUnavailable):
        Memory(smp.job, "", nowhere, start=False, agreement=others)
    assert others.is_closed
    others = Closing()
    own = Memory(smp.job, "", smp.arena.parent, start=False, agreement=others)
    smp.kill()
    with pytest.raises(SmpUnavailable):
        own.close(keep=False)
    assert others.is_closed and own.client.connection is None
