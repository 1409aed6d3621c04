"""Somebody who keeps a machine for others: an upgrade under a running job, another user, too little memory, storage."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.leftovers import find_leftovers, remove
from tools.journeys import bucket, watch
from tools.journeys.hosts import Failed, Running, Shell
from tools.journeys.newcomer import Hold, check_same, checkout, training
from tools.journeys.pages import Docs

START, RUNNING = "docs/start.md", "docs/running.md"
TORCHRUN = (
    "torchrun --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --max-restarts=3 --tee=3 train.py"
)
OLDER = "0.0.9"
"""The version that is installed first: the same code under another name."""

LIMIT, GREED = 3 << 30, 6 << 30
"""Memory of the trainers' control group, and what one of them asks for, in bytes."""

GREEDY = f"""
def held(step, before=held):
    if step == 60 and dist.get_rank() == 1 and os.path.exists("greed"):
        os.remove("greed")
        b"x" * {GREED}
    return before(step)
"""
NOBODY = 65534
TRY = f"""
import os, sys
import holdfast.export.source, holdfast.export.tensors, holdfast.smp_daemon.ops.overview  # all that commands need
from holdfast.cli.main import main, make_parser
make_parser()
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
sys.exit(main(sys.argv[1:]))
"""


def walk(python: Path, folder: Path) -> None:
    """Run the journey. Blocks for minutes; raises `Failed` or `Stale`."""
    docs = checkout(folder / "checkout")
    (docs.root / "train.py").write_text(_with_greed(training(docs)))
    with tempfile.TemporaryDirectory(prefix="holdfast-journey-", dir="/dev/shm") as arena:
        shell = Shell(
            docs.root, python, HOLDFAST_ARENA=arena, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PYTHONUNBUFFERED="1"
        )
        try:
            undisturbed = upgrade(docs, shell)
            greed(docs, shell, undisturbed)
            bucket.outlive_memory(docs, shell, Path(arena), TORCHRUN, undisturbed)
        finally:
            for leftover in find_leftovers(Path(arena)):
                remove(leftover)


def _with_greed(script: str) -> str:
    """The script with a rank that wants too much memory once it is told to. Raises `Failed`."""
    end = "    except (FileNotFoundError, ValueError):\n        return False\n"
    if script.count(end) != 1:
        raise Failed("the script has no place for a rank that wants too much memory")
    return script.replace(end, end + GREEDY)


def upgrade(docs: Docs, shell: Shell) -> list[str]:
    """Install an older version, upgrade it and its SMP while the job trains, and let another user try. Returns what the
    job printed, which ran to its end undisturbed by all that."""
    project = docs.root / "pyproject.toml"
    text = project.read_text()
    project.write_text(re.sub(r'^version = ".*"$', f'version = "{OLDER}"', text, count=1, flags=re.M))
    shell.run(docs.command(START, "Install", "pip install .", {}))
    if OLDER not in shell.run("holdfast --version"):
        raise Failed("the older version is not installed")
    project.write_text(text)
    shell.set({"HOLDFAST_JOB": "my-run"})
    shell.run(docs.command(RUNNING, "By hand", "--detach", {"64GB": "64MB"}))
    hold = Hold(docs)
    hold.at(20)
    job = shell.start(TORCHRUN)
    job.wait_for("step 20 ")
    watch.until(shell, lambda said: "is held" in said or "is safe" in said)
    strangers(shell)
    shell.run(docs.command(START, "Install", "pip install .", {}))
    pid = json.loads(shell.run("holdfast smp status --job my-run --json - 2>/dev/null"))["pid"]
    shell.run(f"kill -KILL {pid}")
    shell.run(docs.command(RUNNING, "By hand", "--detach", {"64GB": "64MB"}))
    hold.at(40)
    job.wait_for("step 40 ")
    said = watch.until(shell, lambda said: re.search(r"step (2[1-9]|3\d|40) is", said) is not None)
    if OLDER in said:
        raise Failed(f"the SMP was not upgraded:\n{said}")
    hold.go()
    _ended(job)
    print("  the SMP was upgraded while the job trained")
    return job.said


def strangers(shell: Shell) -> None:
    """Another user of the machine learns nothing and changes nothing. Raises `Failed`."""
    (shell.folder / "try.py").write_text(TRY)
    where = "--arena $HOLDFAST_ARENA --job my-run"
    for words in ("status", "export --list", "export /tmp/stolen", "drain somewhere"):
        said = shell.run(f"python try.py {words} {where} || true")
        if "permission" not in said or "Traceback" in said:
            raise Failed(f"another user's `holdfast {words}`:\n{said}")
    if "is " not in shell.run("holdfast status"):
        raise Failed("the job's own user is not answered any more")
    print("  another user is refused by each command")


def greed(docs: Docs, shell: Shell, undisturbed: list[str]) -> None:
    """A trainer that wants more memory than its control group has is killed by the kernel; the job goes on."""
    if why := why_no_cgroup():
        print(f"  nothing runs out of memory here: {why}")
        return
    with _cgroup() as group:
        hold = Hold(docs)
        hold.at(60)
        (docs.root / "greed").touch()
        job = shell.start(f"bash -c 'echo $$ >{group}/cgroup.procs && exec {TORCHRUN}'")
        limit = time.monotonic() + 300
        while (docs.root / "greed").exists() or _killed(group) == 0:
            if time.monotonic() > limit or job.process.poll() is not None:
                raise Failed(f"no trainer was killed for its memory:\n{job.last()}")
            time.sleep(0.1)
        hold.go()
        _ended(job)
    check_same(undisturbed, job.said)
    print("  the kernel killed a trainer for its memory; every loss is that of an undisturbed run")


def why_no_cgroup() -> str:
    """Why no control group that limits memory can be made here; empty if one can."""
    if os.geteuid():
        return "control groups are made by root"
    try:
        with _cgroup():
            return ""
    except OSError as error:
        return f"no control group can limit memory: {error}"


@contextmanager
def _cgroup() -> Iterator[Path]:
    """A control group with `LIMIT` of memory, of either version. Raises `OSError`."""
    first = Path("/sys/fs/cgroup/memory")
    base = first if first.is_dir() else Path("/sys/fs/cgroup")
    group = base / f"holdfast-journey-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if base == first else "memory.max")).write_text(str(LIMIT))
        yield group
    finally:
        limit = time.monotonic() + 30
        while group.is_dir() and time.monotonic() < limit:
            with suppress(OSError):  # its last process may not be gone yet
                group.rmdir()
            time.sleep(0.1)


def _killed(group: Path) -> int:
    """How many processes of the group the kernel has killed for their memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            found = re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.M)
            return int(found[1]) if found else 0
    raise Failed(f"{group} does not count what it kills")


def _ended(job: Running) -> None:
    if job.wait() != 0:
        raise Failed(job.last())
