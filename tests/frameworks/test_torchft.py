"""torchft's checkpoints through memory: every value is exact, and a replica that is killed comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.leftovers import find_leftovers
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, ProtocolError, StateMismatch

pytest.importorskip("torchft")
from holdfast.integrations.torchft import MemoryTransport
from tests.deadlines import DEADLINE_S

SOON = timedelta(seconds=DEADLINE_S)
AT_ONCE = timedelta(seconds=0.1)


@pytest.fixture
def arena(arena: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_JOB", "torchft")
    return arena


@pytest.fixture
def pair(arena: Path) -> Iterator[tuple[MemoryTransport[Any], MemoryTransport[Any]]]:
    """The transports of a healthy replica, and of one that comes back."""
    both = MemoryTransport[Any](job="healthy"), MemoryTransport[Any](job="back")
    yield both
    for transport in both:
        transport.shutdown()
    assert not list(find_leftovers(arena))


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Linear(300, 200)
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optim.step()
    return {
        "user": {"default": {"model": model.state_dict(), "optim": optim.state_dict(), "note": (1, None, b"\x00")}},
        "torchft": {"step": 7, "batches_committed": 14},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.proves("torchft")
def test_what_was_sent_is_received(pair: tuple[MemoryTransport[Any], MemoryTransport[Any]]) -> None:
    healthy, back = pair
    sent = state()
    assert isinstance(sent["user"]["default"]["model"], OrderedDict)
    healthy.send_checkpoint([1], 7, sent, SOON)
    healthy.disallow_checkpoint()
    received = back.recv_checkpoint(0, healthy.metadata(), 7, SOON)
    assert same(received, sent)


def test_the_state_may_change_as_soon_as_it_was_sent(pair: tuple[MemoryTransport[Any], MemoryTransport[Any]]) -> None:
    healthy, back = pair
    weights = torch.arange(100_000)
    healthy.send_checkpoint([1], 1, {"weights": weights}, SOON)
    weights.zero_()
    assert torch.equal(back.recv_checkpoint(0, healthy.metadata(), 1, SOON)["weights"], torch.arange(100_000))


def test_only_the_step_that_was_asked_for_is_received(
    pair: tuple[MemoryTransport[Any], MemoryTransport[Any]],
) -> None:
    healthy, back = pair
    with pytest.raises(DeadlineExceeded, match=r"step 4 .* 0: .*no shard"):
        back.recv_checkpoint(0, healthy.metadata(), 4, AT_ONCE)
    for step in (4, 5, 6):
        healthy.send_checkpoint([1], step, {"step": step, "grows": torch.zeros(step * 1000)}, SOON)
        assert back.recv_checkpoint(0, healthy.metadata(), step, SOON)["step"] == step
    with pytest.raises(DeadlineExceeded, match=r"newest .* step 6"):
        back.recv_checkpoint(0, healthy.metadata(), 7, AT_ONCE)


def test_what_an_earlier_run_has_sent_of_that_step_is_not_received(
    pair: tuple[MemoryTransport[Any], MemoryTransport[Any]],
) -> None:
    """Every run sends its first weights as step 0, and a run that was killed leaves them."""
    killed, back = pair
    killed.send_checkpoint([1], 0, {"run": 1}, SOON)
    again = MemoryTransport[Any](job="healthy")
    with pytest.raises(DeadlineExceeded, match="of step 0, by an earlier process"):
        back.recv_checkpoint(0, again.metadata(), 0, AT_ONCE)
    again.send_checkpoint([1], 0, {"run": 2}, SOON)
    assert back.recv_checkpoint(0, again.metadata(), 0, SOON) == {"run": 2}
    again._memory.close()


def test_a_sender_whose_smp_died_sends_through_another(
    pair: tuple[MemoryTransport[Any], MemoryTransport[Any]], arena: Path
) -> None:
    healthy, back = pair
    healthy.send_checkpoint([1], 1, {"x": 1}, SOON)
    smp = psutil.Process(healthy._memory.client.pid)
    smp.kill()
    smp.wait(DEADLINE_S)
    metadata = healthy.metadata()
    healthy.send_checkpoint([1], 2, {"x": 2}, SOON)
    assert back.recv_checkpoint(0, metadata, 2, SOON) == {"x": 2}


def test_what_cannot_be_kept_exactly_is_named(pair: tuple[MemoryTransport[Any], MemoryTransport[Any]]) -> None:
    with pytest.raises(StateMismatch, match=r"model\.loader is a _thread\.lock"):
        pair[0].send_checkpoint([1], 1, {"model": {"loader": threading.Lock()}}, SOON)


@pytest.mark.parametrize("text", ["", "{}", '{"job": "x", "address": 3}', '{"address": ["h", 1]}', '["a"]', "\x00"])
def test_metadata_of_something_else_is_refused(arena: Path, text: str) -> None:
    transport = MemoryTransport[Any](job="back")
    with pytest.raises(ProtocolError, match="metadata of a `MemoryTransport`"):
        transport.recv_checkpoint(0, text, 1, AT_ONCE)
    transport.shutdown()


def test_sharded_tensors_are_sharded_as_before(arena: Path, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(24.0).view(4, 6)
        sent = {"weights": distribute_tensor(whole, mesh, [Shard(0)])}
        blank = {"weights": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])}
        healthy, back = MemoryTransport[Any](job="healthy"), MemoryTransport[Any](job="back", like=lambda: blank)
        healthy.send_checkpoint([1], 1, sent, SOON)
        received = back.recv_checkpoint(0, healthy.metadata(), 1, SOON)["weights"]
        assert isinstance(received, DTensor) and received.placements == (Shard(0),)
        assert torch.equal(received.full_tensor(), whole)
        with pytest.raises(StateMismatch, match=r"weights is sharded: .*MemoryTransport\(like="):
            healthy.recv_checkpoint(0, healthy.metadata(), 1, SOON)
        blank["weights"] = distribute_tensor(torch.zeros(4, 5), mesh, [Shard(0)])
        with pytest.raises(StateMismatch, match=r"float32\[4, 6\] .* torch.float32\[4, 5\]"):
            back.recv_checkpoint(0, healthy.metadata(), 1, SOON)
        healthy.shutdown()
        back.shutdown()
    finally:
        dist.destroy_process_group()


ATTEMPTS = 4
"""How often a replica is killed at most: torchft's hook for DDP may fail an assertion of its own in the survivor
(``assert fut._fut``, 0.2.0), which then restarts as well."""


class Replica:
    """One replica group of the example, under torchrun, and what it prints."""

    def __init__(self, number: int, lighthouse: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "8"]
        command += ["--standalone", "-m", "holdfast.examples.torchft_replicas"]
        told = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": lighthouse, "STEPS": "1000000"}
        self.process = subprocess.Popen(command, env=os.environ | told, stdout=subprocess.PIPE, text=True)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)  # a full pipe would block the process
        self._reader.start()
        self.starts = 0
        self.sums: dict[int, str] = {}
        """The sum of weights that it printed after each step that it made together with another replica."""

    def read(self, count: int) -> int:
        """Read until it has made `count` more steps with another replica; return the number of the last."""
        step = 0
        while count:
            if match := re.match(r"step (\d+) participants 2 sum (\S+)", self._line()):
                step = int(match[1])
                self.sums[step] = match[2]
                count -= 1
        return step

    def kill_worker(self) -> None:
        """Kill the training process, and wait until torchrun has started another."""
        (worker,) = [child for child in psutil.Process(self.process.pid).children() if child.cmdline()]
        worker.kill()
        self.sums.clear()  # the other may not have counted its last step
        while "is up" not in self._line():
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self) -> str:
        line = self._lines.get(timeout=60)
        assert line, "it has ended"
        if "is up" in line:
            self.starts += 1
            self.sums.clear()
        return line

    def end(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.proves("torchft")
def test_a_replica_that_is_killed_comes_back_with_the_same_weights(arena: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    replicas: list[Replica] = []
    try:
        replicas += [Replica(number, lighthouse.address()) for number in range(2)]
        for replica in replicas:
            assert "is up" in replica._line()
            replica.read(3)
        for _ in range(ATTEMPTS):
            replicas[1].kill_worker()
            together = replicas[1].read(6)
            while together not in replicas[0].sums:
                replicas[0].read(1)
            if replicas[0].starts == 1:
                break
            replicas[0].starts = 1
        else:
            pytest.fail("the survivor never survived")
        common = replicas[0].sums.keys() & replicas[1].sums.keys()
        assert len(common) >= 5
        assert {step for step in common if replicas[0].sums[step] != replicas[1].sums[step]} == set()
    finally:
        for replica in replicas:
            replica.end()
        lighthouse.shutdown()


def test_the_metadata_is_plain(arena: Path) -> None:
    transport = MemoryTransport[Any]()
    data = json.loads(transport.metadata())
    transport.shutdown()
    transport.shutdown()
    assert data["job"] == "torchft.replica0.rank0" and data["address"][0] == "127.0.0.1"
