"""Wall clocks that are set for some processes only."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import arena_base
from tests.deadlines import DEADLINE_S
from tests.proof.chaos.cluster import ClockedLauncher
from tests.proof.chaos.network import clocks
from tests.scripts import completed, python

DAY_S, HOUR_S = 86400, 3600

pytestmark = pytest.mark.skipif(bool(clocks.unavailable()), reason=clocks.unavailable() or "-")

LOOK = """
import ctypes, json, os, sys, threading, time
from pathlib import Path
from tests.proof.chaos.network import clocks

class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]

class Timeval(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("us", ctypes.c_long)]

libc = ctypes.CDLL(None, use_errno=True)

def in_a_while(clock):
    now = Timespec()
    libc.clock_gettime(clock, ctypes.byref(now))
    return Timespec(now.s + (now.ns + 200_000_000) // 10**9, (now.ns + 200_000_000) % 10**9)

def took(wait):
    before = time.monotonic()
    wait()
    return time.monotonic() - before

def look():
    of_day, whole = Timeval(), Timespec()
    libc.gettimeofday(ctypes.byref(of_day), None)
    libc.timespec_get(ctypes.byref(whole), 1)
    return {
        "walls": [time.time(), time.clock_gettime(5), of_day.s + of_day.us / 1e6, libc.time(None), whole.s],
        "monotonic": time.monotonic(),
    }

def waits():
    space = [ctypes.create_string_buffer(64) for _ in range(4)]
    semaphore, mutex, condition, word = (ctypes.byref(each) for each in space)
    real, mono = in_a_while, lambda: in_a_while(time.CLOCK_MONOTONIC)
    libc.pthread_mutex_lock(mutex)
    futex = 202 if os.uname().machine == "x86_64" else 98
    bitset, private, by_wall = 9, 128, 256
    cases = {
        "sem_timedwait": lambda: libc.sem_timedwait(semaphore, ctypes.byref(real(0))),
        "sem_clockwait": lambda: libc.sem_clockwait(semaphore, 0, ctypes.byref(real(0))),
        "sem_clockwait, monotonic": lambda: libc.sem_clockwait(semaphore, 1, ctypes.byref(mono())),
        "mutex": lambda: libc.pthread_mutex_timedlock(mutex, ctypes.byref(real(0))),
        "condition": lambda: libc.pthread_cond_timedwait(condition, mutex, ctypes.byref(real(0))),
        "condition, clock": lambda: libc.pthread_cond_clockwait(condition, mutex, 0, ctypes.byref(real(0))),
        "condition, monotonic": lambda: libc.pthread_cond_clockwait(condition, mutex, 1, ctypes.byref(mono())),
        "futex": lambda: libc.syscall(
            futex, word, bitset | private | by_wall, 0, ctypes.byref(real(0)), None, ctypes.c_uint(0xFFFFFFFF)
        ),
        "event": lambda: threading.Event().wait(0.2),
    }
    return {name: took(wait) for name, wait in cases.items()}

mine, other = Path(os.environ["HOLDFAST_CLOCK"]), Path(sys.argv[1])
seen = {"before": look()}
clocks.set_clock(mine, 86400)
seen["ahead"], seen["waits ahead"] = look(), waits()
clocks.set_clock(mine, -3600)
seen["behind"], seen["waits behind"] = look(), waits()
print(json.dumps(seen), flush=True)
if os.fork() == 0:
    clocks.follow(str(other))
    print(json.dumps(look()), flush=True)
    os._exit(0)
os.wait()
print(json.dumps(look()))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process saw as its clock was set, its fork with another clock, and the process afterwards."""
    directory = tmp_path_factory.mktemp("clocks")
    mine, other = directory / "mine", directory / "other"
    clocks.set_clock(mine, 0)
    clocks.set_clock(other, DAY_S)
    settings = os.environ | clocks.compile_shim(directory) | {clocks.ENV: str(mine)}
    began = {"wall": time.time(), "monotonic": time.monotonic()}
    done = python(LOOK, other, env=settings, timeout=2 * DEADLINE_S)
    first, fork, after = (json.loads(line) for line in done.stdout.splitlines())
    return {**first, "fork": fork, "after": after, "began": began}


@pytest.mark.parametrize(
    ("when", "ahead_s"), [("before", 0), ("ahead", DAY_S), ("behind", -HOUR_S), ("fork", DAY_S), ("after", -HOUR_S)]
)
def test_every_wall_clock_jumps_and_no_monotonic_one(seen: dict[str, Any], when: str, ahead_s: int) -> None:
    began, looked = seen["began"], seen[when]
    assert began["monotonic"] < looked["monotonic"] < began["monotonic"] + 2 * DEADLINE_S
    expected = began["wall"] + looked["monotonic"] - began["monotonic"] + ahead_s
    assert looked["walls"] == pytest.approx([expected] * 5, abs=1.5)


@pytest.mark.parametrize("when", ["waits ahead", "waits behind"])
def test_waits_last_as_long_as_they_should(seen: dict[str, Any], when: str) -> None:
    assert len(seen[when]) == 9
    for name, seconds in seen[when].items():
        assert 0.19 <= seconds < DEADLINE_S, name


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(arena_base().glob(".clocks-*"))
    monkeypatch.setattr(clocks, "unavailable", lambda: "needs a C compiler, cc")
    with pytest.raises(ConfigError, match="C compiler"):
        ClockedLauncher([])
    assert set(arena_base().glob(".clocks-*")) - before == set()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=": no such thing"):
        clocks.compile_shim(tmp_path)


def test_a_clock_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = "import sys; from tests.proof.chaos.network import clocks; clocks.follow(sys.argv[1])"
    settings = os.environ | clocks.compile_shim(tmp_path)
    done = completed([sys.executable, "-c", text, str(tmp_path / "no")], env=settings)
    assert "FileNotFoundError" in done.stderr and str(tmp_path / "no") in done.stderr
