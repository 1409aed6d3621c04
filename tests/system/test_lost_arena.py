"""An SMP whose arena is deleted under it, or replaced, ends: nothing would find it, nor the memory that it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.smp_daemon.shared.spawn import running_owner
from holdfast.smp_daemon.storage.arena import Arena
from tests.deadlines import await_that
from tests.smp_kit import JOB, Ground, run_on


def replace(arena: Path) -> None:
    """As `rm -rf` does, with another SMP that is faster than this one notices."""
    shutil.rmtree(arena)
    arena.mkdir(mode=0o700)
    (arena / "smp.json").touch()


@pytest.mark.parametrize(
    "happens",
    [
        shutil.rmtree,
        replace,
        lambda arena: arena.rename(arena.with_name("elsewhere")),
    ],
    ids=["deleted", "replaced", "moved"],
)
def test_it_ends_although_trainers_are_connected(ground: Ground, happens: Callable[[Path], object]) -> None:
    smp = ground.smp()
    run = run_on([smp], [[3000]])
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
    smp = ground.smp()
    run = run_on([smp], [[3000]])
    snapshot = run.protect(1)
    client = run["dp0"].client
    (record,) = smp.arena.glob("*.safetensors.json")
    record.unlink()
    [status] = look(JOB, smp.control).statuses
    assert status.inventory.shards == {(snapshot, "dp0")}
    count = len(client.slots(1, "dp0"))
    record.with_suffix("").unlink()
    assert len(client.slots(1, "dp0")) == count - 1


def test_it_says_why_in_its_log(ground: Ground) -> None:
    smp = ground.smp()
    there = smp.arena.with_name("elsewhere")
    smp.arena.rename(there)
    assert smp.wait_end() == 0
    assert str(smp.arena) in (there / "smp.log").read_text()


def test_an_arena_is_gone_only_once_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    arena = Arena(path)
    assert not arena.directory.is_gone
    path.rename(tmp_path / "old")
    assert arena.directory.is_gone
    path.mkdir(mode=0o700)
    assert arena.directory.is_gone
