"""An SMP whose arena is deleted under it, or replaced, ends: nothing would find it, nor the memory that it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.smp_daemon.shared.spawn import running_owner
from holdfast.smp_daemon.storage.arena import Arena
from tests.smp_kit import Ground, playground, run_on


@pytest.fixture
def ground() -> Iterator[Ground]:
    with playground() as ground:
        yield ground


def replace(arena: Path) -> None:
    """As `rm -rf` does, with another SMP that is faster than this one notices."""
    shutil.rmtree(arena)
    arena.mkdir(mode=0o700)
    (arena / "lock").touch()
    (arena / "smp.json").touch()


@pytest.mark.parametrize(
    "happens",
    [
        shutil.rmtree,
        replace,
        lambda arena: (arena / "smp.json").unlink(),
        lambda arena: (arena / "lock").unlink(),
        lambda arena: arena.rename(arena.with_name("elsewhere")),
    ],
    ids=["deleted", "replaced", "without smp.json", "without lock", "moved"],
)
def test_it_ends_although_trainers_are_connected(ground: Ground, happens: Callable[[Path], object]) -> None:
    smp = ground.smp()
    run = run_on([smp], [[3000]])
    run.protect(1)
    happens(smp.arena)
    assert smp.wait_end() == 0
    with pytest.raises(SmpUnavailable):
        run["dp0"].client.inventory()


def test_another_takes_over_what_is_left(ground: Ground) -> None:
    smp = ground.smp()
    run = run_on([smp], [[3000]])
    snapshot = run.protect(1)
    (smp.arena / "smp.json").unlink()
    assert smp.wait_end() == 0
    smp.launch().wait_ready()
    assert running_owner(smp.arena) == smp.owner
    assert smp.client().inventory().shards == {(snapshot, "dp0")}


def test_it_says_why_in_its_log(ground: Ground) -> None:
    smp = ground.smp()
    (smp.arena / "lock").unlink()
    assert smp.wait_end() == 0
    assert str(smp.arena / "lock") in (smp.arena / "smp.log").read_text()


def test_an_arena_is_lost_only_once_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    arena = Arena(path)
    (path / "smp.json").touch()
    assert not arena.lost()
    (path / "smp.json").replace(path / "old")
    assert str(path / "smp.json") in arena.lost()
    (path / "smp.json").touch()
    assert not arena.lost()
    (path / "lock").unlink()
    (path / "lock").touch()
    assert str(path / "lock") in arena.lost()
