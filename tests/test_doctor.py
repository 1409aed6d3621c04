"""``holdfast doctor``: what it makes of good and bad machines, and that it never crashes on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor import Facts, Finding, Mount, examine, mount_of

ROOT = Path(__file__).parent.parent
GIB = 1 << 30

GOOD = Facts(
    python="3.11.7",
    packages={"torch": "2.13.0", "megatron-core": "0.16.1", "pyeclib": "1.8.0", "grpcio": "1.85.1"},
    auto=("isal", ""),
    unusable={"isal": "", "numpy": "", "pyeclib": ""},
    isal="/usr/lib/libisal.so.2",
    arena=Path("/dev/shm/holdfast-0"),
    parent=Path("/dev/shm"),
    writable=True,
    mount=Mount(Path("/dev/shm"), "tmpfs", frozenset({"rw"})),
    room=32 * GIB,
    memory_bytes=64 * GIB,
    swap_bytes=0,
    files=20_000,
    kernel="6.1",
    populate=True,
    idle=True,
    streaming=True,
)
DISK = Mount(Path("/"), "ext4", frozenset({"rw"}))


def doctor(*, env: dict[str, str] | None = None, before: str = "pass") -> tuple[int, dict[str, Finding], str]:
    """The command, in a process where `before` was executed: its status, what it found, and what it showed."""
    code = f"{before}\nimport sys\nfrom holdfast.cli import main\nsys.exit(main(['doctor', '--json', '-']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )
    assert done.stdout, done.stderr
    return done.returncode, {each["name"]: Finding(**each) for each in json.loads(done.stdout)}, done.stderr


def test_the_command_reports_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "doctor", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    findings = json.loads(done.stdout)
    assert [finding["name"] for finding in findings] == [finding.name for finding in examine(GOOD)]
    assert done.returncode == any(finding["verdict"] == "problem" for finding in findings)
    for finding in findings:
        assert list(finding) == ["name", "value", "verdict", "fix"]
        assert finding["verdict"] in ("ok", "note", "problem")
        assert bool(finding["fix"]) == (finding["verdict"] != "ok")
        assert finding["name"] in done.stderr


def test_a_missing_isal_is_a_note_with_the_fix() -> None:
    status, findings, _ = doctor(before="import ec.isal; ec.isal._candidates = lambda: ['libisal-none.so']")
    for name in ("erasure code", "backend isal"):
        assert findings[name].verdict == "note"
        assert "libisal-none.so" in findings[name].value
        assert "libisal2" in findings[name].fix
    assert "auto takes numpy" in findings["erasure code"].value
    assert findings["backend numpy"].verdict == "ok"
    assert status == any(finding.verdict == "problem" for finding in findings.values())


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.modules['pyeclib'] = sys.modules['pyeclib.ec_iface'] = None",
        "import pyeclib.ec_iface as e\ndef refuse(*a, **k): raise e.ECBackendInstanceNotAvailable('no ISA-L')\n"
        "e.ECDriver = refuse",
    ],
    ids=["not installed", "without its ISA-L"],
)
def test_an_unusable_pyeclib_is_a_note(before: str) -> None:
    _, findings, _ = doctor(before=before)
    assert findings["backend pyeclib"].verdict == "note"
    assert findings["backend pyeclib"].fix


def test_an_arena_that_cannot_be_is_a_problem() -> None:
    status, findings, shown = doctor(env={"HOLDFAST_ARENA": "/proc/none/such"})
    assert status == 1
    assert findings["arena's file system"] == Finding(
        "arena's file system",
        "proc on /proc, not tmpfs",
        "problem",
        "snapshots belong in memory: set HOLDFAST_ARENA to a directory on tmpfs",
    )
    assert findings["arena's room"].verdict == "problem"
    assert "HOLDFAST_ARENA" in shown


def test_a_good_machine_has_nothing_to_fix() -> None:
    assert [finding for finding in examine(GOOD) if finding.verdict != "ok" or finding.fix] == []
    assert "/usr/lib/libisal.so.2" in next(f.value for f in examine(GOOD) if f.name == "backend isal")


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "fix"),
    [
        ({"packages": {"torch": None}}, "torch", "problem", "pip install torch"),
        ({"packages": {"grpcio": None}}, "grpcio", "problem", "pip install grpcio"),
        ({"packages": {"pyeclib": None}}, "pyeclib", "note", "pip install pyeclib"),
        ({"packages": {"megatron-core": None}}, "megatron-core", "note", "holdfast[megatron]"),
        ({"auto": ("numpy", "no usable ISA-L")}, "erasure code", "note", "libisal2"),
        ({"unusable": {"isal": "no usable ISA-L"}}, "backend isal", "note", "libisal2"),
        ({"writable": False}, "arena", "problem", "make /dev/shm writable"),
        ({"mount": DISK}, "arena's file system", "problem", "a directory on tmpfs"),
        ({"room": 64 << 20}, "arena's room", "problem", "--shm-size"),
        ({"room": 2 * GIB}, "arena's room", "note", "remount"),
        ({"swap_bytes": GIB}, "swap", "note", "swapoff"),
        ({"files": 256}, "open files", "note", "ulimit -n 1024"),
        ({"populate": False}, "kernel", "note", "Linux 5.14"),
        ({"idle": False}, "SCHED_IDLE", "note", "HOLDFAST_PRIORITY=idle"),
        ({"streaming": False}, "copies", "note", "install a C compiler"),
    ],
)
def test_each_bad_fact_is_found_alone_and_comes_with_its_fix(
    changes: dict[str, Any], name: str, verdict: str, fix: str
) -> None:
    found = [finding for finding in examine(replace(GOOD, **changes)) if finding.verdict != "ok"]
    assert [(finding.name, finding.verdict) for finding in found] == [(name, verdict)]
    assert fix in found[0].fix


def test_swap_does_not_matter_to_a_tmpfs_that_is_not_swapped() -> None:
    mount = Mount(Path("/dev/shm"), "tmpfs", frozenset({"rw", "noswap"}))
    found = examine(replace(GOOD, swap_bytes=GIB, mount=mount))
    assert {finding.verdict for finding in found} == {"ok"}


def test_a_path_lies_on_its_deepest_and_latest_mount() -> None:
    shm = GOOD.mount
    over = Mount(Path("/dev/shm"), "ramfs", frozenset())
    beside = Mount(Path("/dev/shm2"), "tmpfs", frozenset())
    assert mount_of(Path("/dev/shm/job"), [DISK, shm, beside]) is shm
    assert mount_of(Path("/dev/shm"), [shm, DISK, over]) is over
    assert mount_of(Path("/dev/shm3"), [shm, beside, DISK]) is DISK
