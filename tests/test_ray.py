"""Under Ray: SMPs that outlive raylets, and a crew of which only what died is made again. On real clusters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.cluster import History, VirtualCluster
from chaos.drill import TARGET, compare
from chaos.launcher import Launcher
from smp_daemon.errors import ConfigError, Unrecoverable

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RayTaskError

from chaos.ray_cluster import RayFault, VirtualRay
from integrations import ray as shepherds
from integrations.ray_crew import Crew, worse

pytestmark = pytest.mark.cluster

ARGS: dict[str, Any] = {"job": "examples.plain:Replicas", "seed": 7, "steps": 10, "drain": True}


def undisturbed(launcher: Launcher, nodes: int) -> History:
    """The same job on virtual nodes without Ray and without snapshots."""
    args = {**ARGS, "snapshots": False}
    return VirtualCluster(launcher, nodes=nodes, ranks_per_node=1, target=TARGET, args=args, smps=False).run()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/hf-ray-{os.getpid()}")
    yield path
    assert not path.exists(), "the cluster left something behind"


def test_an_actor_is_killed_and_the_other_goes_on_in_the_same_process(launcher: Launcher, folder: Path) -> None:
    expected = undisturbed(launcher, 2)
    with VirtualRay(2, folder) as cluster:
        history = cluster.run(
            {"nodes": 2, "args": {**ARGS, "snapshots": True}},
            [RayFault("node1", 5, lambda ray: ray.kill_actors("node1"))],
        )
        first, second = cluster.seats
    assert compare(expected, history) == ""
    assert {(e["step"], e["how"]) for e in history.of("started", generation=1)} == {(4, "held")}
    same = [before.pid == after.pid for before, after in zip(first, second, strict=True)]
    assert sorted(same) == [False, True]
    assert len({seat.ray_node for seat in second}) == 2


def test_the_front_door_does_not_stand_in_the_way_of_ray() -> None:
    code = "import holdfast.ray, ray; print(ray.__file__ != holdfast.ray.__file__, holdfast.ray.start.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "integrations.ray"]


def test_what_is_wrong_is_said_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="'PATH'"):
        shepherds.start("job", environment={"PATH": "/tmp"})
    with pytest.raises(ConfigError, match="cannot be a job id"):
        shepherds.start("a job")
    with pytest.raises(ConfigError, match="at least one member"):
        Crew(0, job="job")


def test_of_two_failures_the_one_counts_that_says_more() -> None:
    died, raised = RayActorError(), RayTaskError("train", "closed by peer", ValueError())
    final = Unrecoverable("nothing is left")
    assert worse(None, raised) is raised
    assert worse(raised, died) is worse(died, raised) is died
    assert worse(died, final) is worse(final, raised) is final
