"""`holdfast export`: what others load equals what was trained, to the last bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from holdfast.chaos.cluster import VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.cli.export import export
from holdfast.cli.main import main
from holdfast.export.source import offers, one_job
from holdfast.export.tensors import SlotCopy, read_slot, whole_tensors, write_safetensors
from holdfast.smp_daemon.persist.manifest import folder, run_folder, shard_name
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DamagedSnapshot,
    NotFound,
    StateMismatch,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import decode_digested, encode_digested
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, read_format, write_stamp
from tests.smp_kit import JOB, Ground, Run, flip_a_byte, playground, run_on
from tests.system.test_persister import await_persisted, persist


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_torch_loads_what_several_ranks_held(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    args = {"kind": kind, "folder": str(tmp_path)}
    cluster = VirtualCluster(
        launcher, nodes=2, ranks_per_node=1, target="tests.jobs:exported", args=args, deadline_s=90
    )
    (end,) = cluster.run().of("end")
    assert end["loaded"] == end["trained"]
    assert len(end["trained"]) > 20
    assert (end["report"]["step"], end["report"]["format"]) == (3, "dcp")
    with safe_open(tmp_path / "safetensors" / "dp0.safetensors", framework="np") as file:
        shape = file.get_slice(next(filter(lambda name: name.endswith("0.weight"), list(file.keys())))).get_shape()
        assert shape == ([37, 24] if kind == "ddp" else [19, 24])  # FSDP parameters are exported as each rank has them
        assert file.metadata()["step"] == "3"
    assert json.loads((tmp_path / "safetensors" / "dp1.json").read_text())["coord"] == "dp1"


# ---------------------------------------------------------------------- from storage, and with the command


@pytest.fixture
def persisted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ground, Run, SnapshotId, str]]:
    with playground() as ground:
        place = str(ground.base / "place")
        Path(place).mkdir()
        monkeypatch.setenv("HOLDFAST_PERSIST", place)
        monkeypatch.setenv("HOLDFAST_PERSIST_EVERY", "100ms")
        run = run_on(ground.smps(2), [[3000], [1000]])
        snapshot = run.protect(12)
        persist(run, snapshot)
        await_persisted(run["dp0"].client, 1)
        yield ground, run, snapshot, place


def test_a_shard_is_the_same_from_memory_and_from_a_place(
    persisted: tuple[Ground, Run, SnapshotId, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ground, run, snapshot, place = persisted
    for url in (place, None):
        with one_job(offers(url, JOB, ground.base)).choose(12) as source:
            for trainer in run:
                out = memoryview(bytearray(trainer.form.total_bytes))
                source.fill(trainer.coord, out)
                assert bytes(out) == trainer.image(snapshot)
    assert main(["export", str(tmp_path / "a"), "--from", place, "--json", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report").read_text())["step"] == 12
    assert main(["export", str(tmp_path / "b"), "--job", JOB, "--arena", str(ground.base), "--step", "12"]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["dp0.json", "dp0.safetensors", "dp1.json", "dp1.safetensors"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    with safe_open(tmp_path / "a" / "dp0.safetensors", framework="np") as file:
        offset, leaf = run["dp0"].form.offsets["weight"]
        assert file.get_tensor("weight").tobytes() == run["dp0"].image(snapshot)[offset : offset + leaf.bytes]
    assert main(["export", "--list", "--from", place]) == 0
    assert main(["export", "--list", "--job", JOB, "--arena", str(ground.base)]) == 0
    assert capsys.readouterr().out.count("12") >= 4
    in_memory, on_storage = (one_job(offers(url, None, ground.base)).snapshots for url in (None, place))
    assert in_memory == on_storage
    (listed,) = on_storage
    assert (listed.snapshot, listed.shards, listed.why_not) == (snapshot, 2, "")


def test_a_lost_shard_is_computed_for_an_export(persisted: tuple[Ground, Run, SnapshotId, str], tmp_path: Path) -> None:
    ground, run, snapshot, _ = persisted
    export(tmp_path / "before", job=JOB, arena=ground.base)
    owner = [smp for smp in ground._smps if smp.name == "node1"]
    owner[0].lose()
    export(tmp_path / "after", job=JOB, arena=ground.base)
    for name in ("dp0.safetensors", "dp1.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert snapshot.step == 12
    assert {trainer.coord for trainer in run} == {"dp0", "dp1"}


def test_what_cannot_be_exported_is_said(persisted: tuple[Ground, Run, SnapshotId, str], tmp_path: Path) -> None:
    ground, _, _, place = persisted
    for url in (place, None):
        with pytest.raises(ConfigError, match=r"step 7 .*'testrun' .*is not in .*: there is 12"):
            export(tmp_path / "x", place=url, job=JOB, arena=ground.base, step=7)
        with pytest.raises(NotFound, match="of job 'other'"):
            export(tmp_path / "x", place=url, job="other", arena=ground.base)
    with pytest.raises(ConfigError, match="is there already"):
        export(tmp_path, place=place)
    assert list(tmp_path.iterdir()) == []


def shard_file(place: str, snapshot: SnapshotId, coord: str) -> Path:
    return Path(place) / folder(JOB, UNNAMED.id, snapshot) / shard_name(coord)


def test_what_is_persisted_is_read_without_holdfast(persisted: tuple[Ground, Run, SnapshotId, str]) -> None:
    _, run, snapshot, place = persisted
    with safe_open(shard_file(place, snapshot, "dp1"), framework="np") as file:
        offset, leaf = run["dp1"].form.offsets["weight"]
        assert file.get_tensor("weight").tobytes() == run["dp1"].image(snapshot)[offset : offset + leaf.bytes]
        assert file.metadata()["coord"] == "dp1"


def test_files_of_another_format_are_an_error_that_names_them(
    persisted: tuple[Ground, Run, SnapshotId, str], tmp_path: Path
) -> None:
    _, run, snapshot, place = persisted
    whole = shard_file(place, snapshot, "dp0").with_name("snapshot.json")
    whole.write_bytes(encode_digested({**decode_digested(whole.read_bytes()), "format": 1}))
    why = r"step 12.*snapshot\.json .*format 1.* use the version that wrote it"
    with pytest.raises(Unrecoverable, match=why):
        export(tmp_path / "x", place=place)
    (listed,) = one_job(offers(place, None, None)).snapshots
    assert re.search(why, f"{listed.snapshot}: {listed.why_not}")
    (told,) = run["dp0"].client.persisted().runs  # a start is told that it is there, and does not begin from nothing
    assert told.has_state and not told.snapshots
    assert re.search(why, told.others[0])


def test_an_export_of_damaged_files_fails_and_leaves_nothing(
    persisted: tuple[Ground, Run, SnapshotId, str], tmp_path: Path
) -> None:
    _, _, snapshot, place = persisted
    file = shard_file(place, snapshot, "dp1")
    flip_a_byte(file, at=file.stat().st_size // 2)
    with pytest.raises(DamagedSnapshot, match=r"dp1 of step 12 .*is damaged: unit 0"):
        export(tmp_path / "x", place=place)
    file.unlink()
    with pytest.raises(Unrecoverable, match=r"dp1\.safetensors is not there"):
        export(tmp_path / "x", place=place)
    assert list(tmp_path.iterdir()) == []


def test_the_run_to_export_is_chosen_as_for_a_start(
    persisted: tuple[Ground, Run, SnapshotId, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, _, snapshot, place = persisted
    for url in (place, None):
        found = one_job(offers(url, JOB, ground.base))
        monkeypatch.setenv("HOLDFAST_RUN", UNNAMED.id)
        with found.choose(None) as source:
            assert source.snapshot == snapshot
        monkeypatch.setenv("HOLDFAST_RUN", "0badcafe")
        with pytest.raises(ConfigError, match="0badcafe"):
            found.choose(None)


def test_a_job_is_asked_for_only_where_there_are_several(
    persisted: tuple[Ground, Run, SnapshotId, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, _, _, place = persisted
    monkeypatch.delenv("HOLDFAST_JOB", raising=False)
    (Path(place) / run_folder("other", UNNAMED.id)).mkdir()
    assert [each.job for each in offers(place, None, None)] == ["other", JOB]
    with pytest.raises(ConfigError, match=r"--job .*: there are other, testrun"):
        one_job(offers(place, None, None))
    assert one_job(offers(None, None, ground.base)).job == JOB
    with pytest.raises(NotFound, match="no job"):
        one_job(offers(None, None, ground.base / "nosuch"))


# ---------------------------------------------------------------------- whole tensors


def slot_of(coord: str, leaves: list[Leaf], shared: list[Leaf]) -> SlotCopy:
    form = plan_slot("job", coord, leaves, 400)
    view = memoryview(bytearray(form.total_bytes))
    view[: len(form.header)] = form.header
    write_stamp(view, SnapshotId(1, 2))
    for offset, leaf in form.offsets.values():
        view[offset : offset + leaf.bytes] = bytes((len(coord) + i) % 251 for i in range(leaf.bytes))
    offset, capacity = form.record
    record = {"coord": coord, "fixed": {"shared": {leaf.name: [leaf.dtype, list(leaf.shape)] for leaf in shared}}}
    view[offset : offset + capacity] = json.dumps(record).encode().ljust(capacity)
    return read_slot(coord, view, read_format(view)[0])


def test_parts_of_replicas_are_put_together_in_each_replica_set(tmp_path: Path) -> None:
    whole = Leaf("w", "F32", (4, 3))
    slots = [
        slot_of(f"pp{pp}-dp{dp}", [Leaf("w@0:5" if dp == 0 else "w@5:12", "F32", (5 if dp == 0 else 7,))], [whole])
        for pp in (0, 1)
        for dp in (0, 1)
    ]
    tensors = whole_tensors(slots)
    assert {coord: [t.name for t in found] for coord, found in tensors.items()} == {
        "pp0-dp0": ["w"],
        "pp0-dp1": [],
        "pp1-dp0": ["w"],
        "pp1-dp1": [],
    }
    by_coord = {slot.coord: slot for slot in slots}
    write_safetensors(tmp_path / "x.safetensors", tensors["pp1-dp0"], by_coord, {})
    with safe_open(tmp_path / "x.safetensors", framework="np") as file:
        content = file.get_tensor("w")
    assert content.shape == (4, 3)
    parts = [slots[2].form.offsets["w@0:5"], slots[3].form.offsets["w@5:12"]]
    expected = b"".join(slot.view[at : at + leaf.bytes] for slot, (at, leaf) in zip(slots[2:], parts, strict=True))
    assert content.tobytes() == expected
    with pytest.raises(StateMismatch, match="the whole"):
        whole_tensors(slots[:1])


def test_long_complex_numbers_become_pairs(tmp_path: Path) -> None:
    slot = slot_of("dp0", [Leaf("c", "C128", (3,)), Leaf("empty", "F32", (0, 2))], [])
    write_safetensors(tmp_path / "x.safetensors", whole_tensors([slot])["dp0"], {"dp0": slot}, {"a": "b"})
    with safe_open(tmp_path / "x.safetensors", framework="np") as file:
        assert file.get_tensor("c").shape == (3, 2)
        assert file.get_tensor("c").dtype == np.float64
        assert file.get_tensor("empty").shape == (0, 2)
        assert file.metadata() == {"a": "b"}
