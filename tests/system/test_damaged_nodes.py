"""Small files of one node are damaged while its SMP is down: the job comes back by itself, exactly and protected."""

from __future__ import annotations

import pytest

from holdfast.chaos.cluster import History
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.runner import Event
from tests.sampling import chosen
from tests.system.test_cluster import assert_whole, make
from tests.unit.test_damage import DAMAGE

pytestmark = pytest.mark.cluster

FILES = {
    "node.json": "node.json",
    "smp.json": "smp.json",
    "smp.sock": "smp.sock",
    "board": "board",
    "layout": "layout-*.json",
    "record": "*.safetensors.json",
    "shard": "*.safetensors",
    "parity": "*.parity*",
}


CASES = [
    ("node.json", "one bit in the middle"),
    ("node.json", "gone"),
    ("node.json", "a directory with files"),
    ("smp.json", "noise"),
    ("smp.json", "a pipe"),
    ("smp.sock", "a directory"),
    ("board", "cut to nothing"),
    ("board", "a pipe"),
    ("layout", "one bit in the middle"),
    ("layout", "a directory"),
    ("record", "one bit in the middle"),
    ("shard", "a directory with files"),
    ("parity", "a link to nothing"),
]


def run_with(launcher: Launcher, file: str, damage: str, *, restart: bool) -> tuple[History, list[str]]:
    """A job of three nodes. The SMP of node 1 is killed at step 6, files of it are damaged, and another SMP starts."""
    damaged: list[str] = []

    def spoil(event: Event) -> None:
        if event["kind"] == "smp-ended" and not damaged:
            for path in sorted(cluster.arena_of(1).glob(FILES[file])):
                DAMAGE[damage](path)
                damaged.append(path.name)

    cluster = make(launcher, on_event=spoil, steps=14)
    cluster.kill_smp(1, at="train.step", step=6)
    if restart:  # its own trainer's end: one that lives writes to the board, and a board that is cut ends it by SIGBUS
        cluster.kill_trainer(1, at="train.step", step=6)
    return cluster.run(), damaged


@pytest.mark.parametrize(("file", "damage"), chosen(CASES, CASES[1::4]))
def test_the_job_starts_again_from_a_whole_step(launcher: Launcher, file: str, damage: str) -> None:
    history, damaged = run_with(launcher, file, damage, restart=True)
    assert damaged
    assert_whole(history, 3, least=4, steps=14)
    assert len(history.restarts) == 1 and history.tracebacks == []
    assert max(event["protected"] or 0 for event in history.of("step")) > 6


@pytest.mark.parametrize(
    "file", chosen(["node.json", "layout", "board", "smp.json", "smp.sock"], ["node.json", "board"])
)
def test_trainers_train_on_and_are_protected_again(launcher: Launcher, file: str) -> None:
    damage = "a directory" if file == "smp.sock" else "cut in half"
    history, damaged = run_with(launcher, file, damage, restart=False)
    assert damaged and history.restarts == [] and history.tracebacks == []
    assert_whole(history, 3, least=0, steps=14)
    assert max(event["protected"] or 0 for event in history.of("step")) > 6
