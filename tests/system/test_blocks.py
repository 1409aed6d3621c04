"""Several trainings in one script: a start goes on with the state of the block that it enters, or is refused."""

from __future__ import annotations

import hashlib
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.starts import Record, ScriptBlock, Start
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.resume.attempt import Attempt, Restored, SameWorld
from holdfast.snapshot.resume.blocks import BLOCK, check_block, check_order, describe
from holdfast.snapshot.resume.elastic import OtherWorld
from holdfast.snapshot.state.record import LOOP
from tests.scripts import completed

SWEEP = """
import hashlib, os, signal, sys
import torch
from holdfast import InMemorySnapshot

torch.set_num_threads(1)
first, kill = int(sys.argv[1]), sys.argv[2]
for block, rate in enumerate((0.1, 0.01, 0.001), 1):
    if block < first:
        continue
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=rate)
    with InMemorySnapshot(model, optim, block=block if first > 1 else None) as snap:
        for step in snap.steps(5):
            optim.zero_grad(); model(torch.randn(2, 4)).square().mean().backward()
            if f"{block}.{step}" == kill:
                snap.drain(60)
                os.kill(os.getpid(), signal.SIGKILL)
            optim.step()
            print(block, step, flush=True)
    sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(block, sha.hexdigest(), flush=True)
"""


def sweep(first: int = 1, kill: str = "") -> tuple[int, list[str], str]:
    done = completed([sys.executable, "-c", SWEEP, str(first), kill])
    return done.returncode, done.stdout.splitlines(), done.stderr


def digest(folder: Path) -> dict[str, str]:
    """What an arena holds: the files of its slots, by name."""
    slots = sorted(folder.rglob("*.safetensors"))
    assert slots
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in slots}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class OtherNet(Net):
    """Has the same tensors by the same names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()  # type: ignore[no-any-return]


class Broke(Exception):
    pass


def enter(kind: type[Net] = Net, *, steps: int = 3, ends: str = "", **options: Any) -> tuple[int, torch.Tensor]:
    """Train in a block; returns the step that it began with, and weights as they were then. `ends`: ``raise``,
    ``break`` or ``finish``."""
    torch.manual_seed(1)
    net = kind()
    optim = torch.optim.Adam(net.parameters(), lr=0.1)
    with InMemorySnapshot(net, optim, strict=True, **options) as snap:
        began, weights = snap.step, net.layer.weight.detach().clone()
        for step in snap.steps(steps + began):
            optim.zero_grad()
            net(torch.randn(2, 4)).sum().backward()
            optim.step()
            if step == steps - 2 and ends:
                snap.drain(60)
                if ends == "raise":
                    raise Broke
                if ends == "finish":
                    snap.finish()
                break
    return began, weights


def test_a_start_that_enters_a_finished_block_is_refused_and_the_interrupted_one_goes_on(arena: Path) -> None:
    status, undisturbed, said = sweep()
    assert status == 0 and "block=2" in said  # the second training is told before it can be lost
    status, before, _ = sweep(kill="2.3")
    assert status == -signal.SIGKILL
    held = digest(arena / "test")
    for _ in range(2):
        status, lines, error = sweep()
        assert status == 1 and not lines
        assert "ConfigError" in error and "block 1" in error and "block 2" in error and "block=2" in error
    assert digest(arena / "test") == held
    status, after, error = sweep(first=2)
    assert status == 0, error
    assert after[0] == "2 3"
    assert before + after == undisturbed
    assert not (arena / "test").exists()


def test_an_exception_does_not_end_a_block(arena: Path) -> None:
    for _ in range(2):
        assert enter()[0] == 0
    with pytest.raises(Broke):
        enter(ends="raise")
    began, _ = enter()
    assert began > 0, "the third block goes on"
    assert enter()[0] == 0


def test_a_block_that_was_left_early_is_not_taken_for_the_next(arena: Path) -> None:
    assert enter(ends="break")[0] == 0
    held = digest(arena / "test")
    with pytest.raises(ConfigError, match=r"block 1 .*block 2 .*finish"):
        enter()
    assert digest(arena / "test") == held
    assert enter(block=1)[0] > 0
    assert not (arena / "test").exists()


def test_a_block_that_is_said_to_be_over_is_followed_by_the_next(arena: Path) -> None:
    assert enter(ends="finish")[0] == 0
    assert enter()[0] == 0


def test_a_second_hook_of_a_job_is_refused_while_one_is_entered(arena: Path) -> None:
    """It would restore what the first one holds, whose snapshots then end. In a job of its own it may be entered."""
    net = Net()
    optim = torch.optim.Adam(net.parameters())
    with ThreadPoolExecutor(1) as threads, InMemorySnapshot(net, optim, strict=True) as snap:
        for step in snap.steps(4):
            if step == 2:
                assert snap.drain(60)
                for here in (enter, threads.submit(enter).result):
                    with pytest.raises(ConfigError, match=r"one hook, .*job="):
                        here()
                assert enter(job="other")[0] == 0
            optim.zero_grad()
            net(torch.randn(2, 4)).sum().backward()
            optim.step()
    assert enter()[0] == 0


def test_another_model_whose_tensors_fit_is_refused_by_name(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Broke):
        enter(ends="raise")
    torch.manual_seed(1)
    fresh = Net().layer.weight.detach()
    net = OtherNet()
    before = net.layer.weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"\bNet, Adam.*OtherNet, Adam"):
        InMemorySnapshot(net, torch.optim.Adam(net.parameters())).__enter__()
    assert torch.equal(net.layer.weight, before)
    monkeypatch.setenv("HOLDFAST_DRIFT", "accept")
    began, weights = enter(OtherNet)
    assert began > 0 and not torch.equal(weights, fresh)
    assert any("OtherNet" in record.getMessage() for record in caplog.records)


def inventory(start: Start | None, *, holds: bool = True) -> Inventory:
    shards = frozenset({(SnapshotId(1, 3), "dp0")}) if holds else frozenset[tuple[SnapshotId, str]]()
    return Inventory("a", "10.0.0.1", 1, 2, shards=shards, record=Record(start))


@pytest.mark.parametrize("held", [1, 3])
def test_only_what_is_held_of_another_block_is_refused(held: int) -> None:
    start, mine = Start(4, 10, block=ScriptBlock(held, "Net, Adam")), ScriptBlock(2, "Net, Adam")
    with pytest.raises(ConfigError, match=rf"block {held} .*block 2 .*block={held}"):
        check_order([inventory(None), inventory(start)], mine)
    with pytest.raises(ConfigError, match=rf"block={held}"):
        check_block({BLOCK: to_plain(ScriptBlock(held, "Net, Adam"))}, mine)
    check_order([inventory(start, holds=False)], mine)
    check_order([inventory(Start(4, 10))], mine)
    check_order([inventory(Start(4, 10, block=mine))], mine)
    check_block({BLOCK: to_plain(mine)}, mine)


@pytest.mark.parametrize("world", [SameWorld, OtherWorld])
def test_a_snapshot_of_another_block_is_refused_with_any_number_of_ranks(world: type[Attempt]) -> None:
    nobody: Any = None
    sources: Any = SimpleNamespace(snapshot=SnapshotId(1, 3))
    attempt = world(nobody, sources, {"dp0": "a"}, "dp0", ScriptBlock(2, "Net"), Restored(2, UNNAMED))
    with pytest.raises(ConfigError, match="block=1"):
        attempt.rebuild(nobody, {LOOP: {BLOCK: to_plain(ScriptBlock(1, "Net"))}})


def test_blocks_are_counted_by_arena(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapshotHook, "blocks", {})
    enter()
    enter(block=5)
    with pytest.raises(Broke):
        enter(ends="raise", job="other")
    enter(job="other")
    assert {path.name: number for path, number in SnapshotHook.blocks.items()} == {"test": 6, "other": 2}


def test_a_block_is_described_by_classes_without_wrappers_that_another_world_may_not_have() -> None:
    net = Net()
    optims = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
    plain = describe(1, TorchAdapter(net, optims))
    assert describe(1, TorchAdapter(torch.compile(net, backend="eager"), optims)) == plain
    assert str(plain) == "block 1 (Net, 2 SGD)"
    many = [torch.nn.Sequential(*[type(f"Kind{i}", (Net,), {})()]) for i in range(2)] + [
        type(f"AKindWithALongName{i}", (Net,), {})() for i in range(40)
    ]
    assert len(describe(1, TorchAdapter(many, torch.optim.SGD(many[0].parameters(), lr=0.1))).given) <= 200


@pytest.mark.parametrize("block", [0, -1, "two"])
def test_a_number_that_no_block_has_is_refused(arena: Path, block: Any) -> None:
    with pytest.raises(ConfigError, match="block="):
        enter(block=block)
