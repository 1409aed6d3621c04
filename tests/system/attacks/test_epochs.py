"""A process of an older epoch cannot write anything, on any path. The tables here list every operation; an operation
that is missing from them fails a test.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import xxhash

from holdfast.smp_daemon.answers import TrainerRequest
from holdfast.smp_daemon.shared import client as client_module
from holdfast.smp_daemon.shared import trainer_slots
from holdfast.smp_daemon.shared.board import WORDS, Board
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.messages import Hello, PeerBulk, PeerControl
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.versions import spoken
from tests.deadlines import DEADLINE_S
from tests.scripts import started
from tests.smp_kit import JOB, SmpProcess, playground, read_line
from tests.system.attacks.victim import Victim, ask, ask_control

Message = dict[str, Any]
STALE = "StaleEpoch"


def operations(kinds: Any) -> set[str]:
    """The tags of the messages in a union."""
    return {str(kind.__struct_config__.tag) for kind in get_args(kinds)}


class Zombie:
    """A job in its second epoch, and the messages of a process of its first, each with the reply that it must get."""

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        run = victim.run
        self.plan = run.plan()
        self.layout = to_plain(run.layout)
        self.old = SnapshotId(1, 2)
        self.mapped = run["dp0"].write(self.old, run.kept, run.protected)
        self.board = Board(victim.smp.arena / "board")
        assert self.board.epoch == 1
        run.start(2)
        run.protect(3)

    @property
    def trainer_says(self) -> dict[str, tuple[Message, str | None]]:
        """Messages of a trainer of epoch 1, each with the error that it must get; None: it is answered."""
        written = {"snapshot": self.old, "coord": "dp0"}
        sources = to_plain(self.plan.sources)
        return {
            "hello": ({"job": JOB, "speaks": spoken()}, None),
            "inventory": ({}, None),
            "inventories": ({"addresses": []}, None),
            "join": ({"epoch": 1}, STALE),
            "configure": ({"layout": {**self.layout, "slots": 4}}, STALE),
            "slots": ({"coord": "dp0", "epoch": 1}, STALE),
            "seal": ({**written, "slot": "dp0.0.safetensors", "taken": 1, "keep": []}, STALE),
            "recover": ({"sources": sources, "coord": "dp1", "epoch": 1}, STALE),
            "lend": ({"sources": sources, "epoch": 1}, STALE),
            "unit": ({"coord": "dp1", "unit": 0, "epoch": 1}, STALE),
            "repair_parity": ({"sources": sources, "group": 0, "position": 0, "epoch": 1}, STALE),
            "counters": ({}, None),
            "scrub": ({}, None),
            "say": ({"text": "I am back", "epoch": 1}, STALE),
            "ended": ({"coord": "dp0", "step": 2, "failure": "killed", "epoch": 1}, STALE),
            "leave": ({"deadline_s": 1, "epoch": 1}, STALE),
            "finish": ({"epoch": 1}, STALE),
            "stop": ({"remove": True}, "ConfigError"),
            "persist": ({"snapshot": self.old}, None),
            "persisted": ({}, None),
            "persisted_layout": ({"run": UNNAMED.id, "snapshot": self.old}, "ConfigError"),
        }

    @property
    def smp_says(self) -> dict[str, tuple[Message, str | None]]:
        """The same for an SMP of epoch 1."""
        regrouping = {"epoch": 1, "sources": to_plain(self.plan.sources), "layout": {**self.layout, "revision": 1}}
        of = {"snapshot": self.victim.snapshot}
        unit = {"op": "shard_unit", "coord": "dp0", "unit": 0}
        term = {"at": list(self.victim.smp.bulk), "factor": 1, "what": unit}
        tag = self.victim.run.layout.tag(0)
        accumulated = {"epoch": 1, "snapshot": self.old, "tag": tag, "stripe": 0, "position": 1, "digest": 0}
        return {
            "accumulate": (accumulated, STALE),
            "shard": ({"coord": "dp0"}, None),
            "ping": ({}, None),
            "parity_done": ({"epoch": 1, "snapshot": [2, 3], "tag": tag, "position": 1}, STALE),
            "inventory": ({}, None),
            "status": ({}, None),
            "regroup": ({}, None),
            "enlist": ({"epoch": 1}, "ConfigError"),
            "give_up": ({"runs": [UNNAMED.id]}, "ConfigError"),
            "drain": ({"deadline_s": 0, "spares": []}, "DeadlineExceeded"),
            "adopt": (regrouping, STALE),
            "encode": (regrouping, STALE),
            "release": (regrouping, STALE),
            "fetch": ({**of, "what": {"op": "partial", "terms": [term], "length": 10, "position": 1}}, None),
        }


@pytest.fixture(scope="module")
def zombie() -> Iterator[Zombie]:
    with playground() as ground:
        yield Zombie(Victim(ground))


def held(smp: SmpProcess) -> dict[str, int]:
    """A digest of every file of the arena, except those in which the SMP describes itself; of the board, its words for
    trainers."""
    files = [path for path in smp.arena.iterdir() if path.is_file() and path.name not in ("smp.log", "smp.json")]
    contents = {path.name: path.read_bytes() for path in files}
    contents["board"] = contents["board"][: 8 * WORDS]
    return {name: xxhash.xxh3_64_intdigest(content) for name, content in contents.items()}


@pytest.fixture
def untouched(zombie: Zombie) -> Iterator[Zombie]:
    """The zombie of this module. After the test, not a byte of any arena may have changed."""
    before = [held(smp) for smp in zombie.victim.smps]
    inventories = [trainer.client.inventory() for trainer in zombie.victim.run]
    yield zombie
    assert [held(smp) for smp in zombie.victim.smps] == before
    for trainer, inventory in zip(zombie.victim.run, inventories, strict=True):
        now = trainer.client.inventory()
        assert (now.epoch, now.shards, now.parities, now.layouts) == (2, *_of(inventory))


def _of(inventory: Any) -> tuple[Any, ...]:
    return inventory.shards, inventory.parities, inventory.layouts


# ---------------------------------------------------------------------- the tables are complete


def test_every_operation_of_trainers_is_in_the_table(zombie: Zombie) -> None:
    assert set(zombie.trainer_says) == operations(TrainerRequest)


def test_every_operation_of_smps_is_in_the_table(zombie: Zombie) -> None:
    """Unknown operations are refused before anything else."""
    assert set(zombie.smp_says) == operations(PeerBulk) | operations(PeerControl)
    other = {"op": "another", "job": JOB}
    for reply in (ask(zombie.victim.smp.bulk, other), ask_control(zombie.victim.control, other)):
        assert "is answered" in reply["message"]


def test_trainers_map_nothing_but_slots_and_the_board() -> None:
    """Mapped memory is written without a message to the SMP. A third mapping would need a test below."""
    modules = (client_module, trainer_slots)
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    calls = [ast.unparse(node.func) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    maps = sorted(call for call in calls if call.endswith((".mmap", "files.map", "system.map", "Board")))
    assert maps == ["Board", "files.map"]


# ---------------------------------------------------------------------- each operation is fenced


TRAINER_OPERATIONS = (
    *("hello", "inventory", "inventories", "join", "configure", "seal", "recover", "lend"),
    *(
        "unit",
        "repair_parity",
        "counters",
        "scrub",
        "say",
        "ended",
        "leave",
        "finish",
        "stop",
        "persist",
        "persisted",
    ),
    "persisted_layout",
)


@pytest.mark.parametrize("op", TRAINER_OPERATIONS)
@pytest.mark.proves("older-epochs")
def test_a_trainer_of_an_older_epoch_writes_nothing(untouched: Zombie, op: str) -> None:
    message, error = untouched.trainer_says[op]
    assert ask(untouched.victim.local, {"op": op, **message}).get("error") == error


@pytest.mark.parametrize("op", sorted(operations(PeerBulk)))
@pytest.mark.proves("older-epochs")
def test_an_smp_of_an_older_epoch_writes_nothing(untouched: Zombie, op: str) -> None:
    message, error = untouched.smp_says[op]
    payload = bytes(100) if op == "accumulate" else b""
    assert ask(untouched.victim.smp.bulk, {"op": op, "job": JOB, **message}, payload).get("error") == error


@pytest.mark.parametrize("op", sorted(operations(PeerControl)))
def test_what_an_smp_of_an_older_epoch_tells_is_refused(untouched: Zombie, op: str) -> None:
    message, error = untouched.smp_says[op]
    assert ask_control(untouched.victim.control, {"op": op, "job": JOB, **message}).get("error") == error


def test_what_is_written_into_a_slot_of_an_older_epoch_goes_nowhere(untouched: Zombie) -> None:
    untouched.mapped[:] = b"\xff" * untouched.mapped.nbytes


def test_an_older_board_is_nobodys(untouched: Zombie) -> None:
    """On an older board a trainer could pause the SMP for ever, and overwrite outcomes."""
    assert untouched.board.epoch == 2, "whoever looks at it is told that its epoch is over"
    untouched.board.pause(0, time.monotonic() + 3600)
    untouched.board.post(3, untouched.board.outcome(1, 3))
    assert Board(untouched.victim.smp.arena / "board").paused_for(time.monotonic()) == 0


def test_the_connection_of_a_dead_older_trainer_takes_nothing_with_it(untouched: Zombie) -> None:
    """When a connection ends, the SMP frees nothing: a newer epoch has replaced what it had taken."""
    client = SmpClient(untouched.victim.smp.arena, JOB)
    client._call(Hello(job=JOB, speaks=spoken()))
    client.close()


# ---------------------------------------------------------------------- a real process, stopped and continued


ZOMBIE = """
import json, sys, time
from pathlib import Path
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.messages import Finish
client = SmpClient(Path(sys.argv[1]), sys.argv[2])
epoch = int(sys.argv[3])
client.join(epoch)
snapshot = SnapshotId(epoch, 9)
kept = SnapshotId(*json.loads(sys.argv[4]))
said = {}


def stop_here():
    print("stopped", flush=True)
    sys.stdin.readline()


def late(call):
    calls = []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            stop_here()
        return call(*arguments)

    return stopped


client.slots(epoch, "dp0")
if sys.argv[5] == "chosen":
    client._slots._owners.change = late(client._slots._owners.change)
if sys.argv[5] == "taken":
    client._slots.map = late(client._slots.map)
try:
    slot = client.take("dp0", [kept])
except HoldfastError as error:
    slot, said["open"] = TakenSlot("dp0.0.safetensors", 1, memoryview(bytearray(1))), type(error).__name__
if sys.argv[5] == "opened":
    stop_here()
slot.view[:] = b"\\x55" * slot.view.nbytes
client.board.pause(0, time.monotonic() + 100)
for name, call in {
    "seal": lambda: client.seal(snapshot, "dp0", slot, [kept]),
    "take": lambda: client.take("dp0", []),
    "join": lambda: client.join(epoch),
    "say": lambda: client.say("I was away"),
    "finish": lambda: client._call(Finish(epoch=epoch)),
}.items():
    try:
        call()
        said[name] = None
    except HoldfastError as error:
        said[name] = type(error).__name__
print(json.dumps(said), flush=True)
"""


@pytest.mark.parametrize("when", ["chosen", "taken", "opened"])
@pytest.mark.proves("fenced")
def test_a_trainer_that_was_stopped_and_goes_on_writes_nothing(zombie: Zombie, when: str) -> None:
    """It is stopped once it has chosen a slot and not taken it; once it has taken it and not opened it; and after."""
    victim = zombie.victim
    run, smp = victim.run, victim.smp
    old = run.epoch
    kept = json.dumps(list(run.protected or ()))
    command = [sys.executable, "-c", ZOMBIE, str(smp.arena), JOB, str(old), kept, when]
    with started(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}) as process:
        assert read_line(process.stdout) == "stopped\n"
        process.send_signal(signal.SIGSTOP)
        run.start(old + 1)
        run.protect(11)
        before = held(smp)
        process.send_signal(signal.SIGCONT)
        print("go on", file=process.stdin, flush=True)
        assert set(json.loads(read_line(process.stdout)).values()) == {STALE}
        assert process.wait(DEADLINE_S) == 0
    assert held(smp) == before
    assert Board(smp.arena / "board").paused_for(time.monotonic()) == 0
    run.start(2 + old)  # the other tests of this module only need a job that works
