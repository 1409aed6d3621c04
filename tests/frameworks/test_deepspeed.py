"""DeepSpeed's checkpoints in memory, with its own engine: every ZeRO stage, restarted jobs, a lost node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.chaos.cluster import JobFailed, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.leftovers import find_leftovers, remove
from holdfast.smp_daemon.shared.errors import HoldfastError

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.cluster
STEPS = 6
NO_FP16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    reason="DeepSpeed refuses fp16 on this CPU",
)


def run(
    launcher: Launcher, arena: Path, *, world: int = 2, **args: Any
) -> tuple[dict[tuple[int, int], str], list[Any]]:
    """The loss of each step on each rank, and each rank's digests of all parameters at the end."""
    cluster = VirtualCluster(
        launcher,
        nodes=world,
        ranks_per_node=1,
        target="tests.jobs:deepspeed",
        args={"arena": str(arena), "memory": True, "keep": True, "steps": STEPS, "precision": "bf16"} | args,
        job="deepspeed",
        smps=False,
        deadline_s=240,  # DeepSpeed compiles code when it first runs on a machine
    )
    history = cluster.run()
    ends = sorted(history.of("end"), key=lambda event: int(event["rank"]))
    return (
        {(event["rank"], event["step"]): event["value"] for event in history.of("loss")},
        [end["digests"] for end in ends],
    )


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(1, "bf16", marks=pytest.mark.slow),
        pytest.param(2, "fp16", marks=NO_FP16),
        (3, "bf16"),
        pytest.param(0, "fp32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.proves("deepspeed")
def test_a_job_that_is_started_again_goes_on_bit_for_bit(
    launcher: Launcher, arena: Path, stage: int, precision: str
) -> None:
    kind: dict[str, Any] = {"stage": stage, "precision": precision}
    losses, state = run(launcher, arena, memory=False, **kind)
    first, _ = run(launcher, arena, steps=3, **kind)
    (lost,) = [leftover for leftover in find_leftovers(arena) if leftover.path.parent.name == "node1"]
    remove(lost)
    shutil.rmtree(arena / "node1")
    assert list(arena.glob("*/files/latest"))
    rest, again = run(launcher, arena, keep=False, **kind)
    assert not list(arena.glob("*/files/latest")), "it names a checkpoint that is gone"
    assert {step for _, step in first} == {0, 1, 2}
    assert {step for _, step in rest} == {3, 4, 5}
    assert first | rest == losses
    assert again == state
    assert not list(find_leftovers(arena))


def test_another_number_of_ranks_is_refused(launcher: Launcher, arena: Path) -> None:
    run(launcher, arena, stage=1, steps=1)
    with pytest.raises(JobFailed, match=r"of 2 ranks .* has 1"):
        run(launcher, arena, world=1, stage=1)


def test_objects_of_its_own_come_back(arena: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    from holdfast.snapshot.state.values import decode, encode

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False)
    value = {"a": [fragment_address(3, 4), ZeroStageEnum.weights, torch.Size([1, 2])], "b": (scaler,)}
    back = decode(encode(value, "", {}), lambda name: torch.empty(0))
    assert back["a"] == value["a"] and list(map(type, back["a"])) == list(map(type, value["a"]))
    assert type(back["b"][0]) is DynamicLossScaler and vars(back["b"][0]) == vars(scaler)


def test_a_part_of_a_save_that_failed_is_not_loaded(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.integrations.deepspeed import MemoryCheckpointEngine

    def fail(*arguments: object) -> None:
        raise HoldfastError("another node did not answer")

    path = str(tmp_path / "last" / "states.pt")
    engine = MemoryCheckpointEngine(job="deepspeed")
    for saved in (1, 2):
        engine.save({"step": saved}, path)
        engine.commit(None)
    assert engine.load(path) == {"step": 2}
    with monkeypatch.context() as failing:
        failing.setattr(engine._memory.client, "await_outcome", fail)
        engine.save({"step": 3}, path)
        with pytest.raises(HoldfastError, match="did not answer"):
            engine.commit(None)
    with pytest.raises(HoldfastError, match="a save has failed"):
        engine.load(path)
    engine.commit(None)
    assert engine.load(path) == {"step": 3}
    engine.close(keep=False)
