"""An SMP whose arena is deleted under it, or replaced, ends: nothing would find it, nor the memory that it holds."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.smp_daemon.shared.spawn import running_owner
from tests.deadlines import await_that
from tests.smp_kit import IN_THREADS, JOB, Ground


def replace(arena: Path) -> None:
    """As `rm -rf` does, with another SMP that is faster than this one notices."""
    shutil.rmtree(arena)
    arena.mkdir(mode=0o700)
    (arena / "smp.json").touch()


def replace_parent(arena: Path) -> None:
    shutil.rmtree(arena.parent)
    arena.parent.touch()


@pytest.mark.parametrize(
    "happens",
    [
        shutil.rmtree,
        replace,
        lambda arena: arena.rename(arena.with_name("elsewhere")),
        replace_parent,
    ],
    ids=["deleted", "replaced", "moved", "parent"],
)
def test_it_ends_although_trainers_are_connected(ground: Ground, happens: Callable[[Path], object]) -> None:
    [smp], run = ground.job([[3000]])
    run.protect(1)
    happens(smp.arena)
    assert smp.wait_end() == 0
    with pytest.raises(SmpUnavailable):
        run["dp0"].client.inventory()


def test_without_smp_json_it_is_found_again(ground: Ground) -> None:
    smp = ground.smp()
    (smp.arena / "smp.json").unlink()
    await_that(lambda: (smp.arena / "smp.json").exists())
    assert running_owner(smp.arena) == smp.owner


def test_without_a_few_files_it_answers_as_before(ground: Ground) -> None:
    [smp], run = ground.job([[3000]])
    snapshot = run.protect(1)
    client = run["dp0"].client
    (record,) = smp.arena.glob("*.safetensors.json")
    record.unlink()
    [status] = look(JOB, smp.control).statuses
    assert status.inventory.shards == {(snapshot, "dp0")}
    count = len(client.slots(1, "dp0"))
    record.with_suffix("").unlink()
    assert len(client.slots(1, "dp0")) == count - 1


@pytest.mark.parametrize("takes", ["deletes", "empties", "puts a directory"])
@pytest.mark.parametrize("file", ["node.json", "layout-*.json", "*.safetensors.json", "*.parity.json"])
def test_what_a_successor_needs_is_written_again_while_it_runs(ground: Ground, file: str, takes: str) -> None:
    smps, run = ground.job([[3000], [3000]])
    run.protect(1)
    held = run["dp0"].client.inventory()
    (path,) = smps[0].arena.glob(file)
    content = path.read_bytes()
    path.unlink()
    if takes == "empties":
        path.touch()
    elif takes == "puts a directory":
        path.mkdir()
    await_that(lambda: f"{path.name} was lost" in (smps[0].arena / "smp.log").read_text())
    assert path.read_bytes() == content
    smps[0].restart()
    run["dp0"].client.reconnect()
    again = run["dp0"].client.inventory()
    assert (again.shards, again.parities, again.layouts) == (held.shards, held.parities, held.layouts)


def test_it_goes_on_where_what_is_gone_cannot_be_written_again(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = ground.prepare()
    smp = Smp(JOB, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS)

    def write_bytes(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left", str(path))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_bytes)
        (smp.arena.path / "smp.json").unlink()
        for _ in range(3):
            smp.look()
    assert not smp.stopped.is_set()
    smp.look()
    smp.close()
    assert (smp.arena.path / "smp.json").exists()
    assert len([line for line in caplog.messages if "cannot be written again" in line]) == 1


def test_it_says_why_in_its_log(ground: Ground) -> None:
    smp = ground.smp()
    there = smp.arena.with_name("elsewhere")
    smp.arena.rename(there)
    assert smp.wait_end() == 0
    assert str(smp.arena) in (there / "smp.log").read_text()
