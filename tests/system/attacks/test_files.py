"""Truncated, corrupted and planted files in an arena. In every case the SMP starts, reports what it rejects, and the
job gets every byte back from the rest of the group.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.plain import decode_digested
from holdfast.smp_daemon.shared.records import write_json
from tests.smp_kit import Ground, Run, SmpProcess, flip_a_byte, playground, record_of, run_on, shard_file
from tests.unit.test_damage import instead

SEED = "files"
ODD_NAMES = ("a.b.safetensors", ".x.0.safetensors", "-1.-1.parity", "t-x.0.parity", "dp0.999999999999.safetensors")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with playground() as ground:
        yield ground


class Damaged:
    """Three SMPs that hold a protected snapshot. The first is killed, its files are damaged, and it starts again."""

    def __init__(self, ground: Ground) -> None:
        self.smps = ground.smps(3)
        self.run: Run = run_on(self.smps, [[3000], [3000], [3000]])
        self.snapshot = self.run.protect(1)
        self.smp: SmpProcess = self.smps[0]

    def spoil(self, damage: Callable[[Path], object]) -> None:
        """Damage the first SMP's shard while it is down. Everything must come back."""
        slot = shard_file(self.smp, self.snapshot, "dp0")
        self.smp.kill()
        damage(slot)
        self.smp.launch().wait_ready()
        self.comes_back()

    def comes_back(self) -> None:
        for trainer in self.run:
            if trainer.coord == "dp0":
                trainer.client.reconnect()
        inventories = [trainer.client.inventory() for trainer in self.run]
        epoch = max(inventory.epoch for inventory in inventories) + 1
        plan = self.run.plan(*inventories)
        assert plan.snapshot == self.snapshot
        self.run.join(epoch)
        for trainer in self.run:
            assert trainer.recover(plan).view == trainer.image(self.snapshot)
        assert self.run["dp0"].client.scrub()["damaged"] == 0


@pytest.fixture(scope="module")
def damaged(ground: Ground) -> Damaged:
    return Damaged(ground)


def flip_many(path: Path) -> None:
    source = random.Random(SEED)
    for _ in range(20):
        flip_a_byte(path, source.randrange(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing left of a slot": lambda slot: os.truncate(slot, 0),
    "one byte left of a slot": lambda slot: os.truncate(slot, 1),
    "a slot without its last byte": lambda slot: os.truncate(slot, slot.stat().st_size - 1),
    "a slot that is longer": lambda slot: os.truncate(slot, slot.stat().st_size + 4096),
    "bits of a slot": flip_many,
    "bits of its header": lambda slot: flip_a_byte(slot, 20),
    "a slot that is a link": instead(lambda slot: slot.symlink_to("/etc/passwd")),
    "a slot that is a pipe": instead(os.mkfifo),
    "nothing left of a record": lambda slot: os.truncate(record_of(slot), 0),
    "half of a record": lambda slot: os.truncate(record_of(slot), record_of(slot).stat().st_size // 2),
    "bits of a record": lambda slot: flip_many(record_of(slot)),
    "a record that is a link": lambda slot: instead(lambda path: path.symlink_to("/etc/passwd"))(record_of(slot)),
    "a record that is a pipe": lambda slot: instead(os.mkfifo)(record_of(slot)),
    "a record of brackets": lambda slot: record_of(slot).write_text("[" * 1_000_000),
    "a record of huge numbers": lambda slot: change(record_of(slot), bytes=1 << 80, unit_bytes=1 << 80),
    "a record of another snapshot's lengths": lambda slot: change(record_of(slot), bytes=17),
    "a record of negative numbers": lambda slot: change(record_of(slot), bytes=-5),
    "a record without digests": lambda slot: change(record_of(slot), digests=[]),
    "a board without its end": lambda slot: os.truncate(slot.with_name("board"), 8),
    "a board of noise": lambda slot: slot.with_name("board").write_bytes(random.Random(SEED).randbytes(640)),
    "files with odd names": lambda slot: [slot.with_name(name).write_bytes(b"x" * 100) for name in ODD_NAMES],
    "a file that says it holds a later snapshot": lambda slot: slot.with_name("layout-9-9.json").write_bytes(
        next(slot.parent.glob("layout-*.json")).read_bytes()
    ),
}


def change(path: Path, **changes: object) -> None:
    write_json(path, decode_digested(path.read_bytes()) | changes)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.proves("spoilt-files")
def test_what_was_spoilt_while_no_smp_ran_comes_back(damaged: Damaged, damage: str) -> None:
    damaged.spoil(DAMAGE[damage])


def test_a_slot_that_is_cut_under_a_running_smp_costs_that_smp_at_most(damaged: Damaged) -> None:
    """Only this user can truncate it. The kernel then kills the process that reads it; a successor takes over."""
    slot = shard_file(damaged.smp, damaged.snapshot, "dp0")
    os.truncate(slot, 4096)
    try:
        damaged.run["dp0"].client.scrub()
    except HoldfastError:
        pass
    damaged.smp.restart()
    damaged.comes_back()


@pytest.mark.proves("scrub")
def test_bits_that_flip_under_a_running_smp_are_mended(damaged: Damaged) -> None:
    flip_many(shard_file(damaged.smp, damaged.snapshot, "dp0"))
    found = damaged.run["dp0"].client.scrub()
    assert found["damaged"] == found["repaired"] > 0
    damaged.comes_back()
