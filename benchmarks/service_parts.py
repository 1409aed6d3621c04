"""Parts of `benchmarks/service.py`: SMPs, trainer processes without torch, and HTTP requests.

A trainer receives orders over a pipe, one JSON object each, and answers each with one JSON object.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Wiring
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, SnapshotId
from holdfast.smp_daemon.shared.paths import read_owner
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, write_stamp
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.snapshot.resume.arrange import arrange, node_of_rank, parse_protect

JOB = "bench-service"
DEADLINE_S = 60.0
PAGE = 4096

_fork = multiprocessing.get_context("fork")
Answer = dict[str, Any]


def spread(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {
        "p50_ms": round(statistics.median(ordered) * scale, 3),
        "p99_ms": round(ordered[at] * scale, 3),
        "max_ms": round(ordered[-1] * scale, 3),
        "count": len(ordered),
    }


# ---------------------------------------------------------------------- trainers


class _Shard:
    """A shard with the step number written into every page."""

    def __init__(self, client: SmpClient, coord: str, length: int) -> None:
        self._client = client
        self._coord = coord
        self.form = plan_slot(JOB, coord, [Leaf("state", "U8", (length,))], 64)
        self._content = np.random.default_rng(len(coord) + length).integers(0, 256, length, dtype=np.uint8)

    def take(self, snapshot: SnapshotId, keep: list[SnapshotId], protected: SnapshotId | None) -> Answer:
        clock = [time.perf_counter()]
        taken = self._client.take(self._coord, keep)
        slot = taken.view
        clock.append(time.perf_counter())
        slot[: len(self.form.header)] = self.form.header
        write_stamp(slot, snapshot)
        self._stamp(snapshot.step)
        np.copyto(self._state(slot), self._content)
        clock.append(time.perf_counter())
        self._client.seal(snapshot, self._coord, taken, keep, protected)
        clock.append(time.perf_counter())
        outcome = self._client.await_outcome(snapshot, DEADLINE_S)
        clock.append(time.perf_counter())
        return {"outcome": int(outcome), "seconds": [later - at for at, later in pairwise(clock)]}

    def check(self, slot: memoryview, step: int) -> bool:
        """Whether a slot equals what was written at a step, to the last byte."""
        self._stamp(step)
        return bool(np.array_equal(self._state(slot), self._content))

    def _stamp(self, step: int) -> None:
        self._content[::PAGE] = step % 251
        self._content[1::PAGE] = step // 251 % 251

    def _state(self, slot: memoryview) -> Any:
        offset, leaf = self.form.offsets["state"]
        return np.frombuffer(slot, np.uint8)[offset : offset + leaf.bytes]


def _train(orders: Connection, arena: Path, coord: str, length: int) -> None:
    """Answer orders until the pipe is closed."""
    client = SmpClient(arena, JOB)
    shard = _Shard(client, coord, length)

    def do(order: Answer) -> Answer:
        match order["op"]:
            case "rank":
                inventory = client.inventory()
                rank = node_of_rank(inventory, coord, shard.form.total_bytes)
                return {"rank": to_plain(rank), "inventory": inventory.to_plain()}
            case "join":
                client.join(order["epoch"])
            case "configure":
                client.configure(Layout.read(order["layout"]))
            case "recover":
                found = client.recover(from_plain(Sources, order["sources"]), coord)
                return {"how": found.how, "same": shard.check(found.view, order["step"])}
            case "take":
                keep = [SnapshotId(*pair) for pair in order["keep"]]
                protected = SnapshotId(*order["protected"]) if order["protected"] else None
                return shard.take(SnapshotId(*order["snapshot"]), keep, protected)
        return {}

    while True:
        try:
            order = json.loads(orders.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = do(order)
        except HoldfastError as error:
            answer = {"error": f"{order['op']}: {type(error).__name__}: {error}"}
        orders.send_bytes(json.dumps(answer).encode())


class Trainer:
    """A trainer's process."""

    def __init__(self, node: VirtualNode, coord: str, length: int) -> None:
        self.coord = coord
        self._orders, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_train, args=(theirs, node.arena, coord, length), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, **order: Any) -> None:
        self._orders.send_bytes(json.dumps(order).encode())

    def answer(self) -> Answer:
        """The answer to the last order. Blocks; raises `HoldfastError` on timeout."""
        if not self._orders.poll(2 * DEADLINE_S):
            raise HoldfastError(f"the trainer {self.coord} says nothing")
        answer: Answer = json.loads(self._orders.recv_bytes())
        return answer

    def kill(self) -> None:
        """SIGKILL the trainer and wait for its end."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)
        self._orders.close()


class Job:
    """SMPs on virtual nodes and their trainers, which move in lockstep as under the training hook."""

    def __init__(self, base: Path, stack: ExitStack, shards: Sequence[Sequence[int]], protect: str = "auto") -> None:
        """``shards[i]``: the size of each shard on node i, in bytes."""
        self.nodes = [VirtualNode(i, 0, f"127.0.{i // 200 + 3}.{i % 200 + 1}", base, JOB) for i in range(len(shards))]
        self._places = [(i, length) for i, row in enumerate(shards) for length in row]
        self._protect = parse_protect(protect)
        self.trainers: list[Trainer] = []
        self.requests: Counter[str] = Counter()
        self.lost: list[str] = []
        self.epoch = 0
        self.step = 0
        self.protected: SnapshotId | None = None
        self.began_s = time.perf_counter()
        for node in self.nodes:
            stack.callback(node.close)
            node.launch(Wiring("", []), {"HOLDFAST_REGROUP_AFTER": "0", "HOLDFAST_SCRUB": "0"})
        for node in self.nodes:
            node.wait_ready()
        self.ready_s = time.perf_counter() - self.began_s
        stack.callback(self.kill)

    def start(self) -> None:
        """Start all trainers, restore the newest snapshot, compare it to the last byte, and enter a new epoch.

        Raises:
            HoldfastError: the restored snapshot is older than the newest protected one, or differs.
        """
        self.trainers = [Trainer(self.nodes[i], f"dp{r}", length) for r, (i, length) in enumerate(self._places)]
        ranks = self.ask(op="rank")
        inventories = list({a["rank"]["name"]: Inventory.read(a["inventory"]) for a in ranks}.values())
        plan = plan_restore(inventories, [trainer.coord for trainer in self.trainers]) if self.epoch else None
        if (plan.snapshot if plan else None) is None and self.protected:
            raise HoldfastError(f"{self.protected} was protected, and nothing comes back")
        self.epoch = max(inventory.epoch for inventory in inventories) + 1
        self.ask(op="join", epoch=self.epoch)
        if plan is not None:
            if self.protected and plan.snapshot < self.protected:
                raise HoldfastError(f"{self.protected} was protected, and {plan.snapshot} comes back")
            found = self.ask(op="recover", sources=to_plain(plan.sources), step=plan.snapshot.step)
            if not all(answer["same"] for answer in found):
                raise HoldfastError(f"{plan.snapshot} came back, and differs")
            self.protected, self.step = plan.snapshot, plan.snapshot.step
        layout = arrange(JOB, self.epoch, [from_plain(Node, a["rank"]) for a in ranks], self._protect, 3)
        self.ask(op="configure", layout=to_plain(layout))

    def take(self, fault: Callable[[], None] | None = None) -> list[Answer]:
        """Take one snapshot on all trainers. With `fault`, call it meanwhile and do not wait for the outcome."""
        self.step += 1
        snapshot = SnapshotId(self.epoch, self.step)
        keep = [self.protected] if self.protected else []
        for trainer in self.trainers:
            trainer.tell(op="take", snapshot=snapshot, keep=keep, protected=self.protected)
        if fault is not None:
            fault()
            return []
        answers = [self._note("take", trainer.answer()) for trainer in self.trainers]
        if all(answer.get("outcome") == SnapshotOutcome.PROTECTED for answer in answers):
            self.protected = snapshot
        else:
            self.lost.append(f"{snapshot}: {answers}")
        return answers

    def ask(self, **order: Any) -> list[Answer]:
        """Give all trainers the same order. Raises `HoldfastError` if one fails."""
        for trainer in self.trainers:
            trainer.tell(**order)
        answers = [self._note(order["op"], trainer.answer()) for trainer in self.trainers]
        if self.lost:
            raise HoldfastError(self.lost[-1])
        return answers

    def kill(self) -> None:
        """SIGKILL all trainers."""
        for trainer in self.trainers:
            trainer.kill()
        self.trainers = []

    def memory(self) -> list[dict[str, int]]:
        """`memory_of` each SMP."""
        return [memory_of(node) for node in self.nodes]

    def _note(self, kind: str, answer: Answer) -> Answer:
        self.requests[kind] += 3 if kind == "take" else 1
        if "error" in answer:
            self.lost.append(answer["error"])
        return answer


def memory_of(node: VirtualNode) -> dict[str, int]:
    """An SMP's anonymous and shared memory and the size of its arena, in kilobytes; its descriptors and threads."""
    status = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("Rss", "Threads"))}
    files = [path.stat() for path in node.arena.iterdir() if path.is_file() and not path.name.startswith("smp.log")]
    return {
        "anonymous_kb": int(found["RssAnon"]),
        "shared_kb": int(found["RssShmem"]),
        "threads": int(found["Threads"]),
        "descriptors": len(list(Path(f"/proc/{node.pid}/fd").iterdir())),
        "arena_kb": sum(file.st_blocks for file in files) // 2,
    }


# ---------------------------------------------------------------------- requests over HTTP


def request_all(node: VirtualNode, path: str, rate: float, seconds: float, clients: int = 4) -> Callable[[], Answer]:
    """Start sending `rate` requests per second to an SMP; return a function that waits for the end and returns results.

    The clients are separate processes with one persistent connection each. Requests are due at fixed times regardless
    of earlier response times; a late client catches up, and a request's time counts from when it was due.
    """
    owner = read_owner(node.arena)
    assert owner is not None
    pipes = []
    for client in range(clients):
        mine, theirs = _fork.Pipe(duplex=False)
        arguments = (theirs, owner.http_port, path, clients / rate, client / rate, int(rate * seconds / clients))
        process = _fork.Process(target=_request, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append((mine, process))

    def result() -> Answer:
        times, failed, took = [], 0, 0.0
        for pipe, process in pipes:
            answer = json.loads(pipe.recv_bytes())
            process.join(DEADLINE_S)
            times += answer["times"]
            failed += answer["failed"]
            took = max(took, answer["seconds"])
        return {**spread(times), "lost": failed, "a_second": round(len(times) / took, 1)}

    return result


def _request(pipe: Connection, port: int, path: str, every_s: float, offset_s: float, count: int) -> None:
    began = time.perf_counter()
    times, failed = [], 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    for number in range(count):
        due = began + offset_s + number * every_s
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            ok = reply.status == 200 and len(reply.read()) > 500
        except (OSError, http.client.HTTPException):
            ok = False
            connection.close()
        failed += not ok
        times.append(time.perf_counter() - due)
    pipe.send_bytes(json.dumps({"times": times, "failed": failed, "seconds": time.perf_counter() - began}).encode())
    os._exit(0)
