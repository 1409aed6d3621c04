"""Every unit is checked before it is copied: whole ones arrive bit for bit, and damaged ones never do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard
from holdfast.smp_daemon.shared.plan import RestorePlan
from holdfast.smp_daemon.shared.records import Unit, digest_units
from holdfast.smp_daemon.shared.slotfile import SlotFormat, write_stamp
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.starts import ScriptBlock
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.engines import FEW_THREADS, LOAD_THREADS, CpuEngine, SlotTensor, address_of, load_threads
from holdfast.snapshot.resume import loading
from holdfast.snapshot.resume.attempt import Restored, SameWorld
from holdfast.snapshot.resume.loading import check_range, load_checked
from tests.deadlines import DEADLINE_S
from tests.scripts import python
from tests.unit.test_engines import plain, strided, transposed
from tests.unit.test_state import SNAPSHOT, toy, whole_slot
from tests.unit.test_tensors import bits, random_bits

SEED = 7
UNIT = 64
UNITS = 20
BYTES = UNITS * UNIT - 10
"""The last unit is short."""

HOLDER = b"\xa5"
"""What live tensors hold before the load."""


class Slot:
    """A sealed shard of random bytes, and tensors to load from it: one after another, with gaps at both ends."""

    def __init__(
        self, sizes: Sequence[int] = (100, 1, 300, 64, 500), unit_bytes: int = UNIT, size: int = BYTES
    ) -> None:
        self.image = random.Random(SEED).randbytes(size)
        self.memory = bytearray(self.image)
        digests = digest_units(memoryview(self.image), unit_bytes)
        self.shard = RecoveredShard(memoryview(self.memory), "held", 0, unit_bytes, digests)
        self.pieces: list[SlotTensor] = []
        offset = UNIT + 5
        for length in sizes:
            tensor = torch.frombuffer(bytearray(HOLDER * length), dtype=torch.uint8)
            self.pieces.append(SlotTensor(tensor, offset, length))
            offset += length
        self.repaired: list[list[int]] = []

    def damage(self, *units: int) -> None:
        for unit in units:
            self.memory[unit * self.shard.unit_bytes] ^= 0x10

    def repair(self, units: list[int]) -> None:
        """Repair in place, as an SMP would, after checking that no tensor holds bytes of these units."""
        self.repaired.append(units)
        for unit in units:
            assert self.untouched(unit), f"unit {unit} was copied"
        self.memory[:] = self.image

    def do_not_mend(self, units: list[int]) -> None:
        self.repaired.append(units)

    def untouched(self, unit: int) -> bool:
        """Whether nothing of a unit was copied."""
        begin, end = unit * self.shard.unit_bytes, (unit + 1) * self.shard.unit_bytes
        for piece in self.pieces:
            held = bytes(piece.tensor.numpy())
            part = held[max(0, begin - piece.offset) : max(0, end - piece.offset)]
            if part.strip(HOLDER):
                return False
        return True

    def loaded(self) -> bool:
        """Whether every tensor holds its bytes of the shard."""
        return all(
            bytes(piece.tensor.numpy()) == self.image[piece.offset : piece.offset + piece.bytes]
            for piece in self.pieces
        )


def never(units: list[int]) -> None:
    raise AssertionError(f"units {units} are whole")


def on_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(count)))


# ---------------------------------------------------------------------- whole shards


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool])
shapes = st.lists(st.integers(0, 9), max_size=2).map(tuple)
tensors = st.tuples(dtypes, shapes, st.sampled_from([plain, transposed, strided]), st.integers(0, 40))


@given(st.lists(tensors, max_size=6), st.integers(1, 200), st.integers(0, 30), st.randoms(use_true_random=False))
def test_every_tensor_arrives_bit_for_bit_however_it_lies_across_units(
    drawn: list[tuple[torch.dtype, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor], int]],
    unit_bytes: int,
    after: int,
    source: random.Random,
) -> None:
    slot, pieces, wanted = bytearray(), [], []
    for seed, (dtype, shape, view, gap) in enumerate(drawn):
        content = bits(random_bits(dtype, shape, seed))
        slot += source.randbytes(gap)
        slot += bytes(-len(slot) % dtype.itemsize)
        pieces.append(SlotTensor(view(torch.zeros(shape, dtype=dtype)), len(slot), len(content)))
        wanted.append(content)
        slot += content
    slot += source.randbytes(after)
    pairs = list(zip(pieces, wanted, strict=True))
    source.shuffle(pairs)
    sealed = memoryview(slot)
    shard = RecoveredShard(sealed, "held", 0, unit_bytes, digest_units(sealed, unit_bytes))
    load_checked(CpuEngine(), [piece for piece, _ in pairs], shard, never)
    assert [bits(piece.tensor) for piece, _ in pairs] == [content for _, content in pairs]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), max_size=8), st.integers(1, 100))
def test_runs_are_cut_at_the_borders_of_units_of_sources_or_targets(
    drawn: list[tuple[int, int]], unit_bytes: int
) -> None:
    table = runs.make_runs([(source, 10_000 * (i + 1), length) for i, (source, length) in enumerate(drawn)])
    for column in (0, 1):
        parts = runs.cut(table, column, unit_bytes).astype(np.int64)
        first, last = parts[:, column], parts[:, column] + parts[:, 2] - 1
        assert (first // unit_bytes == last // unit_bytes).all()
        moved = [(source + i, target + i) for source, target, length in parts.tolist() for i in range(length)]
        assert moved == [(source + i, target + i) for source, target, length in table.tolist() for i in range(length)]


def test_a_piece_beyond_the_slot_is_refused_before_anything_is_written() -> None:
    for offset, length in ((BYTES - 3, 4), (BYTES + UNIT, 1), (-1, 4)):
        slot = Slot()
        beyond = SlotTensor(torch.zeros(length, dtype=torch.uint8), offset, length)
        with pytest.raises(ProtocolError, match=f"at {offset} .*{BYTES}"):
            load_checked(CpuEngine(), [*slot.pieces, beyond], slot.shard, slot.repair)
        assert all(slot.untouched(unit) for unit in range(UNITS)) and not slot.repaired


def test_half_of_it_is_done_midway() -> None:
    slot, seen = Slot(), []
    half = UNITS // 2 * UNIT

    def midway() -> None:
        seen.append([bytes(piece.tensor.numpy()) for piece in slot.pieces])

    load_checked(CpuEngine(), slot.pieces, slot.shard, never, midway=midway)
    assert len(seen) == 1 and slot.loaded()
    for piece, held in zip(slot.pieces, seen[0], strict=True):
        done = max(0, min(piece.bytes, half - piece.offset))
        assert held == slot.image[piece.offset : piece.offset + done] + HOLDER * (piece.bytes - done)


# ---------------------------------------------------------------------- damaged shards


@pytest.mark.parametrize("damaged", [[0], [3], [UNITS - 1], [0, 4, 5, 9, 10, UNITS - 1], list(range(UNITS))], ids=str)
@pytest.mark.parametrize("cores", [1, 3])
def test_damaged_units_are_mended_all_at_once_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, damaged: list[int], cores: int
) -> None:
    on_cores(monkeypatch, cores)
    monkeypatch.setattr(loading, "GROUP_BYTES", 4 * UNIT)
    slot = Slot()
    slot.damage(*damaged)
    load_checked(CpuEngine(), slot.pieces, slot.shard, slot.repair)
    assert slot.repaired == [damaged]
    assert slot.loaded()


def test_every_bit_of_every_unit_counts() -> None:
    source = random.Random(SEED)
    for _ in range(300):
        slot, at = Slot(), source.randrange(BYTES)
        slot.memory[at] ^= 1 << source.randrange(8)
        load_checked(CpuEngine(), slot.pieces, slot.shard, slot.repair)
        assert slot.repaired == [[at // UNIT]] and slot.loaded()


@pytest.mark.parametrize("damaged", [[0], [3, 7], [UNITS - 1]], ids=str)
def test_what_cannot_be_mended_is_not_copied_and_named(damaged: list[int]) -> None:
    slot = Slot()
    slot.damage(*damaged)
    with pytest.raises(DamagedSnapshot, match=rf"^{len(damaged)} units? .* unit {damaged[0]}, cannot"):
        load_checked(CpuEngine(), slot.pieces, slot.shard, slot.do_not_mend)
    assert slot.repaired == [damaged], "it is asked for once"
    assert all(slot.untouched(unit) for unit in damaged)
    assert not all(slot.untouched(unit) for unit in range(UNITS)), "the rest was done"


def test_what_mending_raises_comes_through() -> None:
    slot = Slot()
    slot.damage(3)

    def repair(units: list[int]) -> None:
        raise SmpUnavailable("gone")

    with pytest.raises(SmpUnavailable, match="gone"):
        load_checked(CpuEngine(), slot.pieces, slot.shard, repair)
    assert slot.untouched(3)


# ---------------------------------------------------------------------- other copy engines


@pytest.mark.parametrize("mended", [True, False])
def test_what_is_not_plain_is_loaded_once_all_units_are_whole(mended: bool) -> None:
    slot = Slot()
    slot.damage(UNITS - 1)
    odd = SlotTensor(torch.zeros(4, 6, dtype=torch.uint8).t(), 0, 24)

    def repair(units: list[int]) -> None:
        assert not odd.tensor.any()
        slot.repair(units)

    if mended:
        load_checked(CpuEngine(), [odd], slot.shard, repair)
        assert bytes(odd.tensor.flatten().tolist()) == slot.image[:24]
        return
    with pytest.raises(DamagedSnapshot, match=f"unit {UNITS - 1}, cannot"):
        load_checked(CpuEngine(), [odd], slot.shard, slot.do_not_mend)
    assert not odd.tensor.any()


# ---------------------------------------------------------------------- ranges


def test_only_the_units_of_a_range_are_checked_and_each_once() -> None:
    slot = Slot()
    slot.damage(0, 5, 7, 9)
    taken: set[int] = set()
    for offset, length in ((UNIT, UNIT), (6 * UNIT, UNIT), (8 * UNIT + 3, UNIT - 3), (10 * UNIT, 0)):
        check_range(slot.shard, offset, length, taken, never)
    assert taken == {1, 6, 8}
    check_range(slot.shard, 8 * UNIT, 2 * UNIT + 1, taken, slot.repair)
    assert slot.repaired == [[9]]
    slot.damage(9)
    check_range(slot.shard, 9 * UNIT, 8, taken, never)


def test_a_range_that_cannot_be_mended_or_is_not_there_is_refused() -> None:
    slot = Slot()
    slot.damage(UNITS - 1)
    with pytest.raises(DamagedSnapshot, match=f"unit {UNITS - 1}, cannot"):
        check_range(slot.shard, BYTES - 1, 1, set(), slot.do_not_mend)
    for offset, length in ((BYTES - 1, 2), (-1, 1), (3, -1), (BYTES + 1, 0)):
        with pytest.raises(ProtocolError, match="not within"):
            check_range(slot.shard, offset, length, set(), never)


# ---------------------------------------------------------------------- threads and memory


def test_a_thread_copies_a_unit_right_after_its_digest_and_then_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, str, int]] = []
    begin = int(np.frombuffer((slot := Slot()).memory, np.uint8).ctypes.data)
    copy, matches = runs.copy, Unit.matches

    def noted_copy(table: runs.Runs) -> None:
        copy(table)
        units = {(int(source) - begin) // UNIT for source in table[:, 0]}
        done.extend((threading.get_ident(), "copy", unit) for unit in units)

    def noted_matches(unit: Unit) -> bool:
        done.append((threading.get_ident(), "digest", (address_of(unit.view) - begin) // UNIT))
        return matches(unit)

    on_cores(monkeypatch, 3)
    monkeypatch.setattr(loading, "GROUP_BYTES", 4 * UNIT)
    monkeypatch.setattr(runs, "copy", noted_copy)
    monkeypatch.setattr(Unit, "matches", noted_matches)
    load_checked(CpuEngine(), slot.pieces, slot.shard, never)
    assert slot.loaded()
    assert sorted(unit for _, what, unit in done if what == "digest") == list(range(UNITS))
    filled = {(p.offset + i) // UNIT for p in slot.pieces for i in range(p.bytes)}
    assert sorted(unit for _, what, unit in done if what == "copy") == sorted(filled)
    for thread in {thread for thread, _, _ in done}:
        mine = [(what, unit) for who, what, unit in done if who == thread]
        assert all(mine[mine.index(("copy", unit)) - 1] == ("digest", unit) for what, unit in mine if what == "copy")
        copied = [unit for what, unit in mine if what == "copy"]
        assert copied == sorted(copied)
        order = sorted(unit for what, unit in mine if what == "digest")
        breaks = sum(after != before + 1 for before, after in pairwise(order))
        assert breaks < -(-len(order) // 2), "units of a group are contiguous"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(1, 1, 1), (2, 8, 2), (64, 16, FEW_THREADS), (64, 8, 7), (20, 1, 10)],  # 8 and 16 in the last two, for 20 units
)
def test_as_many_threads_work_at_once_as_a_rank_has_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    meeting, seen = threading.Barrier(threads), set()
    matches = Unit.matches

    def meet(unit: Unit) -> bool:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            meeting.wait(DEADLINE_S)
        return matches(unit)

    on_cores(monkeypatch, cores)
    slot = Slot()
    monkeypatch.setattr(Unit, "matches", meet)
    check_range(slot.shard, 0, BYTES, set(), never)
    assert len(seen) == threads


def test_more_threads_than_a_device_takes_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(monkeypatch, 256)
    assert load_threads() == LOAD_THREADS


LOAD_256_MB = """
import mmap, tempfile
import torch
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.snapshot.resume.loading import load_checked
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor

def memory(line):
    return int(next(row for row in open("/proc/self/status") if row.startswith(line)).split()[1]) << 10

def load(length, unit_bytes=2 << 20):
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(length)
        view = memoryview(mmap.mmap(file.fileno(), length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    torch.frombuffer(view, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    shard = RecoveredShard(view, "held", 0, unit_bytes, digest_units(view, unit_bytes))
    step = length // 8
    pieces = [SlotTensor(torch.ones(step, dtype=torch.uint8), at, step) for at in range(0, length, step)]
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak counts from now on
    load_checked(CpuEngine(), pieces, shard, lambda units: 1 / 0)
    grown = memory("VmHWM") - before
    assert all(torch.equal(p.tensor, torch.frombuffer(view, dtype=torch.uint8)[p.offset:][:p.bytes]) for p in pieces)
    return grown

load(16 << 20)  # threads and libraries take their memory once
print(load(256 << 20))
"""


def test_memory_does_not_grow_while_256_mb_are_loaded() -> None:
    done = python(LOAD_256_MB)
    assert int(done.stdout) < 16 << 20


class Peers:
    """Stands in for a client whose SMP holds one shard and can repair any unit of it."""

    node = "node0"
    system = MACHINE
    unit_bytes = 8
    """Short, so that some units have bytes of one tensor only."""

    def __init__(self, form: SlotFormat, slot: memoryview) -> None:
        slot[: len(form.header)] = form.header
        write_stamp(slot, SNAPSHOT)
        self.whole = bytes(slot)
        self.slot = slot
        self.shard = RecoveredShard(slot, "held", 0, self.unit_bytes, digest_units(slot, self.unit_bytes))
        self.record, _ = form.record

    def recover(self, sources: object, coord: str, *, check: bool = True) -> RecoveredShard:
        if check:
            self.slot[:] = self.whole
        return self.shard

    def attempt(self) -> SameWorld:
        node = Node("a", "127.0.0.1", 1, 2, (Shard("dp0", self.slot.nbytes),))
        layout = Layout("run", SNAPSHOT.epoch, 0, (node,), ((0,),), 1, 0, self.unit_bytes, 2)
        plan = RestorePlan(Sources(SNAPSHOT, layout, {}, {}), (), ())
        found, block = Restored(1, UNNAMED), ScriptBlock(1, "Toy")
        attempt = SameWorld(cast(SmpClient, self), plan.sources, {"dp0": "a"}, "dp0", block, found)
        attempt.recover()
        return attempt


def test_what_is_damaged_before_it_is_read_is_mended() -> None:
    peers = Peers(*whole_slot(toy()))
    peers.slot[peers.record + 1] ^= 1
    assert peers.attempt().open().record["coord"] == "dp0"


@pytest.mark.parametrize("where", ["header", "record"])
def test_values_that_were_read_before_their_unit_changed_are_not_believed(where: str) -> None:
    peers = Peers(*whole_slot(toy()))
    attempt = peers.attempt()
    attempt.open().values()
    peers.slot[20 if where == "header" else peers.record + 1] ^= 1
    with pytest.raises(DamagedSnapshot, match="it was read"):
        load_checked(CpuEngine(), [], attempt.shard, attempt.repair)


def test_a_tensor_whose_unit_changes_after_the_header_was_read_is_mended() -> None:
    form, slot = whole_slot(toy())
    peers = Peers(form, slot)
    attempt = peers.attempt()
    attempt.open().values()
    offset, leaf = form.offsets["model.weight"]
    slot[offset + leaf.bytes // 2] ^= 1
    tensor = torch.zeros(leaf.bytes, dtype=torch.uint8)
    load_checked(CpuEngine(), [SlotTensor(tensor, offset, leaf.bytes)], attempt.shard, attempt.repair)
    assert tensor.numpy().tobytes() == peers.whole[offset : offset + leaf.bytes]
