"""Slot files with forged headers: the trainer's own node must refuse to seal them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_HEADER_BYTES
from tests.system.attacks.victim import Victim

Entries = dict[str, Any]


def header_of(slot: memoryview) -> Entries:
    entries: Entries = json.loads(bytes(slot[8 : 8 + int.from_bytes(slot[:8], "little")]))
    return entries


def put(slot: memoryview, entries: Entries) -> None:
    """Write `entries` as the header, padded to the old length so that the stamp stays in its place."""
    length = int.from_bytes(slot[:8], "little")
    text = json.dumps(entries, separators=(",", ":")).encode()
    assert len(text) <= length
    slot[8 : 8 + length] = text.ljust(length)


def at(entries: Entries, name: str, **changes: Any) -> Entries:
    return {**entries, name: {**entries[name], **changes}}


LIES: dict[str, Callable[[Entries], Entries]] = {
    "overlapping": lambda e: at(e, "weight", data_offsets=[0, 12000]) | at(e, "moment", data_offsets=[0, 2574]),
    "beyond the end": lambda e: at(e, "mask", data_offsets=[1 << 40, (1 << 40) + 13]),
    "negative": lambda e: at(e, "mask", data_offsets=[-13, 0]),
    "backwards": lambda e: at(e, "mask", data_offsets=[13, 0]),
    "a gap": lambda e: {k: v for k, v in e.items() if k != "mask"},
    "a longer leaf": lambda e: at(e, "mask", shape=[14]),
    "a shape of a quintillion": lambda e: at(e, "mask", shape=[1 << 60, 1 << 60]),
    "a shape that takes for ever to multiply": lambda e: at(e, "mask", shape=[9] * 900),
    "a dtype that there is not": lambda e: at(e, "mask", dtype="O"),
    "a dtype that is none": lambda e: at(e, "mask", dtype=["U8"]),
    "numbers that are none": lambda e: at(e, "mask", data_offsets=[float("inf"), float("nan")]),
    "no record": lambda e: {k: v for k, v in e.items() if k != "holdfast.record"},
    "another job": lambda e: {**e, "__metadata__": {**e["__metadata__"], "job": "otherjob"}},
    "another shard": lambda e: {**e, "__metadata__": {**e["__metadata__"], "coord": "dp1"}},
    "no metadata": lambda e: {**e, "__metadata__": None},
}


class Writing:
    """A slot that a trainer has written and is about to seal."""

    def __init__(self, victim: Victim) -> None:
        self.trainer = victim.run["dp0"]
        self.snapshot = SnapshotId(victim.run.epoch, 7)
        self.slot = self.trainer.write(self.snapshot, victim.run.kept, victim.run.protected)

    def refused(self) -> None:
        with pytest.raises(ProtocolError):
            self.trainer.seal(self.snapshot)
        assert self.snapshot not in {snapshot for snapshot, _ in self.trainer.client.inventory().shards}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_not_sealed(victim: Victim, lie: str) -> None:
    writing = Writing(victim)
    put(writing.slot, LIES[lie](header_of(writing.slot)))
    writing.refused()


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_header_that_is_too_long_is_not_sealed(victim: Victim, length: int) -> None:
    writing = Writing(victim)
    writing.slot[:8] = length.to_bytes(8, "little")
    writing.refused()


def test_a_header_of_nothing_but_brackets_is_not_sealed(victim: Victim) -> None:
    writing = Writing(victim)
    length = int.from_bytes(writing.slot[:8], "little")
    writing.slot[100 : 8 + length] = b"[" * (length - 92)
    writing.refused()
