"""As large as this machine can: three SMPs with slots of 16 GB in all, to which bytes cost as much time as on a node of
640 GB. ``HOLDFAST_TEST_BYTES`` and ``HOLDFAST_TEST_NODE_BYTES`` say other sizes.

What takes long is done beside: the waits that docs/size.md and docs/guarantee.md name hold all the while.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.ops.status import take_statuses
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.quantities import parse_size
from holdfast.smp_daemon.shared.spawn import smp_options
from tests.slowed_smp import SLOWED
from tests.smp_kit import JOB, Ground, Run, SmpProcess, Trainer, playground, run_on

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

BYTES = parse_size(os.environ.get("HOLDFAST_TEST_BYTES", "16GB"), "HOLDFAST_TEST_BYTES")
"""Memory of all slots together."""

NODE_BYTES = parse_size(os.environ.get("HOLDFAST_TEST_NODE_BYTES", "640GB"), "HOLDFAST_TEST_NODE_BYTES")
"""State of a node for which bytes take time."""

GB_A_S = {"digest": 7.9, "populate": 5.0, "send": 1.4}
"""Rates of docs/size.md; memory is reserved ten times as fast, or the test would last hours."""

SLOTS, DATA, NODES = 2, 2, 3
OF_A_SHARD = NODES * (SLOTS + SLOTS / DATA)
"""All slots together, in shards."""

FLOAT_BYTES = 4 + 6 / 7  # a shard of `smp_kit.Trainer` has other leaves, too

SERVES_S = 2.0
"""What a successor may take longer than an SMP with nothing to take over, whatever it holds."""

ANSWER_S = 5.0
"""How long any node may be silent before `holdfast status` goes on without it."""

STEP_S = 5.0
"""How long the training thread waits for an SMP at most."""


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    """A place for three slowed SMPs."""
    shm = os.statvfs("/dev/shm")
    room = min(psutil.virtual_memory().available, shm.f_bavail * shm.f_frsize)
    if room < 2 * BYTES:  # trainers have buffers, and what a lost node had is there twice for a while
        pytest.skip(f"{2 * BYTES:,} bytes of memory are needed, and {room:,} are free: set HOLDFAST_TEST_BYTES")
    stands_for = NODE_BYTES / (BYTES / OF_A_SHARD)
    monkeypatch.setenv(SLOWED, json.dumps({what: stands_for / rate for what, rate in GB_A_S.items()}))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-P", "-m", "tests.slowed_smp"]
    monkeypatch.setattr("tests.smp_kit.smp_command", lambda *who: [*command, *smp_options(*who)])
    with playground(own_python=True) as ground:
        yield ground


class Asking:
    """Asks an SMP for something again and again, in a thread, and keeps the longest time that an answer took."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self.longest_s = 0.0
        self.count = 0
        self.failure: BaseException | None = None
        self._ask = ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            began = time.monotonic()
            try:
                self._ask()
            except BaseException as error:
                self.failure = error
                return
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1


@contextmanager
def in_time(ask: Callable[[], object], limit_s: float) -> Iterator[None]:
    """Meanwhile each answer comes in time."""
    with Asking(ask) as asking:
        yield
    assert asking.failure is None
    assert asking.count
    assert asking.longest_s < limit_s


@contextmanager
def statuses_meanwhile(smps: list[SmpProcess]) -> Iterator[None]:
    """Meanwhile `holdfast status` gets its answers in time from these SMPs."""
    with in_time(lambda: take_statuses(JOB, [smp.control for smp in smps]), ANSWER_S):
        yield


@contextmanager
def answered_meanwhile(smps: list[SmpProcess]) -> Iterator[None]:
    """Meanwhile a step of the first node does, too."""
    with closing(SmpClient(smps[0].arena, JOB)) as client, statuses_meanwhile(smps), in_time(client.inventory, STEP_S):
        yield


def trainers_on(smps: list[SmpProcess], elements: int) -> Run:
    return Run([Trainer(smp, f"dp{rank}", elements) for rank, smp in enumerate(smps)], protect="2+1", slots=SLOTS)


def close(run: Run) -> None:
    for trainer in run:
        trainer.client.close()


def patient_protect(run: Run, step: int) -> None:
    """`Run.protect`, however long it takes while the SMPs work: hours of a test would be a fault, too."""
    snapshot = run.take(step)
    assert {trainer.outcome(snapshot, 3600.0).name for trainer in run} == {"PROTECTED"}
    run.protected = snapshot


def test_the_limits_of_waits_hold_however_much_a_node_has(ground: Ground) -> None:
    smps = ground.smps(NODES)
    live_through_it(ground, smps)
    ground.let_go()
    gc.collect()  # what this process had mapped
    for smp in smps[:2]:
        smp.kill()
    assert main(["gc", "--arena", str(ground.base), "--older-than", "0"]) == 0
    assert not any(smp.arena.exists() for smp in smps)


def live_through_it(ground: Ground, smps: list[SmpProcess]) -> None:
    """A job whose SMP is killed, that loses a node, and whose third node is drained, starts again."""
    elements = int(BYTES / OF_A_SHARD / FLOAT_BYTES)
    began = time.monotonic()
    ground.smp("empty").kill()
    empty_s = time.monotonic() - began
    with answered_meanwhile(smps):  # memory is reserved
        run = run_on(smps, [[elements]] * NODES, protect="2+1", slots=SLOTS)
    with answered_meanwhile(smps):  # shards are digested and encoded
        patient_protect(run, 1)
    close(run)

    began = time.monotonic()
    smps[0].restart()  # killed, with all that it holds
    assert time.monotonic() - began < empty_s + SERVES_S

    smps[1].lose().launch().wait_ready()
    again = trainers_on(smps, elements)
    again.join(2)
    plan = again.plan()
    assert plan.snapshot == run.protected
    with answered_meanwhile([smps[0], smps[2]]):  # what was lost is computed
        recovered = again["dp1"].recover(plan)
    assert recovered.how == "rebuilt"
    assert bytes(recovered.view) == run["dp1"].image(plan.snapshot)
    with answered_meanwhile(smps):
        again.start(3)
        patient_protect(again, 2)
    close(again)

    with statuses_meanwhile(smps[:2]):
        assert main(["drain", "--arena", str(ground.base), "node2", "--deadline", "60min"]) == 0
    smps[2].wait_end()
    assert not smps[2].arena.exists()
    for smp in smps[:2]:
        smp.restart()
    held = [smp.client().inventory() for smp in smps[:2]]
    assert {coord for inventory in held for of, coord in inventory.shards if of == again.protected} >= {"dp0", "dp1"}
