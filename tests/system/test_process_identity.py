"""An SMP's process is recognized by when it started since the boot, whatever the time of day was set to meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared.processes import ran_s, start_ticks
from holdfast.smp_daemon.shared.spawn import running_owner
from tests.scripts import completed
from tests.smp_kit import Ground

AHEAD_S = 5
AFTER_A_STEP = "mount --make-rprivate / && mount --bind {stat} /proc/stat && exec {command}"
"""The only trace that a step of the clock leaves in ``/proc``: the time of the boot, from which others compute when
processes started."""


def after_a_step(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``holdfast`` as if the clock had been set ahead."""
    stat = folder / "stat"
    stat.write_text(
        re.sub(r"^btime (\d+)", lambda m: f"btime {int(m[1]) + AHEAD_S}", Path("/proc/stat").read_text(), flags=re.M)
    )
    command = f"{sys.executable} -m holdfast.cli {' '.join(words)}"
    inside = ["sh", "-c", AFTER_A_STEP.format(stat=stat, command=command)]
    own = [] if os.getuid() == 0 else ["--map-root-user"]
    try:
        done = completed(["unshare", *own, "--mount", *inside])
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if re.search("unshare: |mount: ", done.stderr):
        pytest.skip(f"/proc/stat cannot be replaced here: {done.stderr.strip()}")
    return done


def test_a_step_of_the_clock_hides_no_smp(ground: Ground, tmp_path: Path) -> None:
    smp = ground.smp()
    where = ("--job", smp.job, "--arena", str(smp.arena.parent))
    status = after_a_step(tmp_path, "smp", "status", *where)
    assert status.returncode == 0 and str(smp.owner.pid) in status.stdout, status.stderr
    stopped = after_a_step(tmp_path, "smp", "stop", *where)
    assert stopped.returncode == 0, stopped.stderr
    assert smp.wait_end() == 0
    assert running_owner(smp.arena) is None


def test_a_step_of_the_clock_keeps_no_smp_from_gc(ground: Ground, tmp_path: Path) -> None:
    smp = ground.smp()
    done = after_a_step(tmp_path, "gc", "--job", smp.job, "--arena", str(smp.arena.parent), "--older-than", "0")
    assert done.returncode == 0 and not smp.arena.exists(), done.stderr
    assert smp.wait_end() < 0


def test_the_start_of_a_process_is_known() -> None:
    began = time.monotonic()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert start_ticks(process.pid) == start_ticks(process.pid) > start_ticks(os.getpid())
        assert 0 <= ran_s(process.pid) <= time.monotonic() - began + 1 / os.sysconf("SC_CLK_TCK")
        process.kill()
    with pytest.raises(ProcessLookupError):
        start_ticks(process.pid)
