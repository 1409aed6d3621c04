"""Real SMPs that are killed at failpoints, one life after another, while real trainers continue.

The point at which an SMP stops is set when it is started, so it may be reached during the start itself. The remains of
a dead SMP are judged by its files alone, before a successor takes them over.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.chaos.launcher import Launcher
from holdfast.chaos.trainer import ENV as TRAINER_ENV
from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.plain import decode_digested, from_plain
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord, digest
from tests.deadlines import DEADLINE_S
from tests.proof.crash_jobs import END
from tests.smp_kit import JOB, Ground, Held, Rules, SmpProcess

Event = dict[str, Any]
TARGET = "tests.proof.crash_jobs:endure"


class Job:
    """Two trainers on two nodes. The first node's SMP, `victim`, is killed repeatedly."""

    def __init__(self, ground: Ground, launcher: Launcher, *, rules: Rules = (), start: bool = False) -> None:
        """`rules`: where the victim stops in its first life. `start`: whether trainers start absent SMPs."""
        self.ground = ground
        self.victim, self.other = ground.prepare("node0", rules=rules), ground.prepare("node1")
        self.events: list[Event] = []
        self._launcher = launcher
        self._start = start
        self._orders = ground.base / "orders"
        self._growth = 0
        self._order(0)
        self._path = ground.base / "events"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self._path))
        self._listening.listen(16)
        self._readers: dict[socket.socket, bytes] = {}
        self._exits: list[Event] = []

    def launch(self) -> None:
        """Start the SMPs."""
        for smp in (self.victim.launch(), self.other.launch()):
            smp.wait_ready()

    def train(self, rules: Rules = ()) -> None:
        """Start the trainers; `rules`: where the first trainer stops."""
        ranks = []
        grown: list[int] = next((e["grown"] for e in reversed(self.events) if e["kind"] == "step"), [])
        for rank, smp in enumerate((self.victim, self.other)):
            args = {"orders": str(self._orders), "start": self._start, "grown": grown}
            trainer = {"rank": rank, "world": 2, "generation": 0, "events": str(self._path), "args": args}
            environment = {
                TRAINER_ENV: json.dumps(trainer),
                ARENA_ENV: str(smp.arena.parent),
                "HOLDFAST_JOB": JOB,
                "HOLDFAST_NODE": smp.name,
                "HOLDFAST_HOST": smp.host,
                failpoints.ENV: "",
                **(self.ground.points.environment(f"rank{rank}", rules) if rank == 0 else {}),
            }
            log = str(self.ground.base / f"rank{rank}.log")
            ranks.append({"rank": rank, "env": environment, "log": log, "place": ()})
        self._exits.clear()
        self._launcher.spawn(TARGET, ranks, (self.ground.host(), ()))

    def kill_trainers(self) -> None:
        """SIGKILL both trainers and wait for their end."""
        self._launcher.kill()
        self.wait(lambda: len(self._exits) == 2, "the trainers did not end")

    def grow(self) -> None:
        """Tell the trainers to grow the state, which needs a new layout."""
        self._growth += 1
        self._order(self._growth)

    def finish(self) -> None:
        """End training; assert that it ended well, with both ranks in the state of undisturbed training."""
        self.order_end()
        self.wait(lambda: len(self._exits) == 2, "the job did not end")
        assert [e["status"] for e in self._exits] == [0, 0], self.logs()
        ends = [e for e in self.events if e["kind"] == "end"]
        assert [e["same"] for e in ends] == [True, True], self.logs()
        assert not [e for e in ends if e["left"]], self.logs()

    def order_end(self) -> None:
        """Tell the trainers to end; returns at once."""
        self._order(END)

    def of(self, kind: str) -> list[Event]:
        """All events of one kind that the trainers reported."""
        return [event for event in self.events if event["kind"] == kind]

    def protected(self) -> int:
        """The newest protected step that the trainers know of."""
        return max((e["protected"] or 0 for e in self.events if e["kind"] == "step"), default=0)

    def await_protected(self, step: int) -> None:
        """Block until `step` or a later step is protected."""
        self.wait(lambda: self.protected() >= step, f"nothing from step {step} on became protected")

    def await_point(self, point: str) -> Held:
        """Block until the victim stops at `point`."""
        held: list[Held] = []

        def reached() -> bool:
            held.extend(self.ground.points.reached(self.victim.name, point))
            return bool(held)

        self.wait(reached, f"nobody came to {point}")
        return held[0]

    def wait(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Block until `happened()` is true. Fails if a trainer ends with a status other than 0 or SIGKILL."""
        limit = time.monotonic() + DEADLINE_S
        while not happened():
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"{otherwise}\n{self.logs()}")
            failed = [e for e in self._exits if e["status"] not in (0, -9)]
            assert not failed, self.logs()
            sources: list[Any] = [self._launcher, self._listening, self.ground.points, *self._readers]
            ready, _, _ = select.select(sources, [], [], 1.0)
            for source in ready:
                if source is self._launcher:
                    self._exits += [m for m in self._launcher.messages() if m["kind"] == "exit"]
                elif source is self._listening:
                    self._readers[self._listening.accept()[0]] = b""
                elif source is self.ground.points:
                    self.ground.points.take()
                else:
                    self._read(source)

    def logs(self) -> str:
        """The last part of every process's log."""
        paths = [path for pattern in ("*.log", "*.stderr", "*/*/*.log") for path in self.ground.base.glob(pattern)]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in paths)

    def close(self) -> None:
        """End the remaining trainers and close all sockets."""
        self._launcher.end_trainers()
        for sock in (*self._readers, self._listening):
            sock.close()

    def _read(self, sock: socket.socket) -> None:
        data = sock.recv(1 << 16)
        if not data:
            del self._readers[sock]
            sock.close()
            return
        *lines, self._readers[sock] = (self._readers[sock] + data).split(b"\n")
        self.events += [json.loads(line) for line in lines]

    def _order(self, order: int) -> None:
        part = self._orders.with_suffix(".part")
        part.write_text(str(order))
        part.replace(self._orders)


@contextmanager
def job(ground: Ground, launcher: Launcher, **options: Any) -> Iterator[Job]:
    """A `Job` for a ``with`` block."""
    made = Job(ground, launcher, **options)
    try:
        yield made
    finally:
        made.close()


def next_life(smp: SmpProcess, rules: Rules) -> None:
    """Kill an SMP, and start a successor in its arena, which stops where `rules` say, even before it serves."""
    smp.kill()
    smp.rules = rules
    smp.launch()


def held_whole(arena: Path) -> set[SnapshotId]:
    """Snapshots for which an arena without an SMP holds a shard and parity whose bytes match their digests."""
    shards: set[SnapshotId] = set()
    parities: set[SnapshotId] = set()
    for path in arena.glob("*.json"):
        if path.name.endswith(".safetensors.json"):
            record: ShardRecord | ParityRecord = from_plain(ShardRecord, decode_digested(path.read_bytes()))
        elif path.name.endswith(".parity.json"):
            record = from_plain(ParityRecord, decode_digested(path.read_bytes()))
        else:
            continue
        content = memoryview(path.with_suffix("").read_bytes())
        places = [record.unit(index) for index in range(len(record.digests))]
        if [digest(content[o : o + n]) for o, n in places] == list(record.digests):
            (shards if isinstance(record, ShardRecord) else parities).add(record.snapshot)
    return shards & parities
