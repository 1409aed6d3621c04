"""Distributed checkpoints to and from memory, by DCP's own planners: other numbers of ranks, a lost node, wrong ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.cluster import JobFailed, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.leftovers import find_leftovers, remove

pytestmark = pytest.mark.cluster
NODES = 2


def ends(launcher: Launcher, target: str, job: str, world: int, **args: Any) -> list[dict[str, Any]]:
    """What the ranks of a job report at their end."""
    size: Any = {"nodes": NODES, "ranks_per_node": world // NODES}
    return (
        VirtualCluster(launcher, **size, target=target, args=args, job=job, smps=False, deadline_s=90).run().of("end")
    )


def run(launcher: Launcher, arena: Path, mode: str, world: int, **args: Any) -> list[dict[str, Any]]:
    return ends(launcher, "tests.jobs:checkpoint", "dcp", world, mode=mode, arena=str(arena), **args)


@pytest.mark.proves("dcp")
def test_what_four_ranks_saved_two_and_eight_load(launcher: Launcher, arena: Path) -> None:
    saved = run(launcher, arena, "save", 4, saves=3)
    for world in (2, 8, 4):
        loaded = run(launcher, arena, "load", world)
        assert len(loaded) == world
        for end in loaded:
            assert end["digests"] == saved[0]["digests"]
            assert end["notes"] == {"step": 3, "text": "xxx", "nested": {"numbers": [1, 2, 2]}}


@pytest.mark.proves("dcp")
def test_a_lost_node_is_computed_from_parity(launcher: Launcher, arena: Path) -> None:
    saved = run(launcher, arena, "save", 4, saves=2)
    (lost,) = [leftover for leftover in find_leftovers(arena) if leftover.path.parent.name == "node1"]
    remove(lost)
    loaded = run(launcher, arena, "load", 2)
    assert [end["digests"] for end in loaded] == [saved[0]["digests"]] * 2


def test_a_restarted_job_saves_on(launcher: Launcher, arena: Path) -> None:
    run(launcher, arena, "save", 4, saves=2)
    saved = run(launcher, arena, "save", 2, saves=1)
    assert run(launcher, arena, "load", 4)[0]["digests"] == saved[0]["digests"]


def test_a_checkpoint_of_another_id_is_not_loaded(launcher: Launcher, arena: Path) -> None:
    run(launcher, arena, "save", 2, saves=1)
    with pytest.raises(JobFailed, match="'mine', not 'other'"):
        run(launcher, arena, "load", 2, id="other")


@pytest.mark.parametrize(("rank", "why"), [(0, "1 of 2 ranks"), (1, "job as rank 0")])
def test_a_save_by_one_rank_is_refused_at_once(launcher: Launcher, arena: Path, rank: int, why: str) -> None:
    (end,) = run(launcher, arena, "save by one", 2, rank=rank)
    (failure,) = end["failures"]
    assert why in failure and "no_dist=True" in failure


def test_a_rank_that_cannot_save_its_part_keeps_nobody_waiting(launcher: Launcher, arena: Path) -> None:
    for end in run(launcher, arena, "save what one cannot", 2, rank=1):
        other, own = end["failures"]
        assert "that rank's error" in other and "could not be had" in own


def test_where_nothing_was_saved_there_is_nothing(launcher: Launcher, arena: Path) -> None:
    with pytest.raises(JobFailed, match="'dcp' has no"):
        run(launcher, arena, "load", 2)


def whole(launcher: Launcher, arena: Path, mode: str, world: int, pipeline: int, tensor: int) -> dict[str, str]:
    """Digests of all tensors, each reported by a rank that has it."""
    args = {"mode": mode, "arena": str(arena), "pipeline": pipeline, "tensor": tensor}
    found: dict[str, str] = {}
    for end in ends(launcher, "tests.layout_jobs:checkpoint", "layout", world, **args):
        assert all(found.get(name, digest) == digest for name, digest in end["digests"].items())
        found |= end["digests"]
    return found


def test_other_tensor_and_pipeline_sizes_load_what_was_saved(launcher: Launcher, arena: Path) -> None:
    saved = whole(launcher, arena, "save", 4, pipeline=1, tensor=2)
    assert len(saved) == 4 * 2 * 4
    for world, pipeline, tensor in ((4, 2, 1), (2, 1, 2)):
        assert whole(launcher, arena, "load", world, pipeline, tensor) == saved
