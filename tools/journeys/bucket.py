"""Snapshots on S3: a job whose only machine loses its memory goes on from a bucket. moto's server stands for S3."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from holdfast.leftovers import find_arenas, remove
from tools.journeys import watch
from tools.journeys.hosts import Failed, Running, Shell
from tools.journeys.newcomer import Hold, check_same, told
from tools.journeys.pages import Docs

PERSIST = "docs/persist.md"
THEIRS, PLACE = "/mnt/shared/snapshots", "s3://holdfast-journey/snapshots"
HELD_AT = 60


def outlive_memory(docs: Docs, shell: Shell, arena: Path, launch: str, undisturbed: list[str]) -> None:
    """Train until a snapshot is in the bucket, cut the power, and start again. Raises `Failed` or `Stale`.

    Args:
        launch: starts the job. undisturbed: what it printed when nothing happened to it.
    """
    shell.run(docs.command(PERSIST, "Snapshots on storage", "pip install s3fs"))
    shell.run("pip install -qq 'moto[server]'")
    with _s3(shell):
        shell.set({"HOLDFAST_JOB": "on-s3"})
        shell.run(docs.command(PERSIST, "Snapshots on storage", "export HOLDFAST_PERSIST=", {THEIRS: PLACE}))
        shell.run(docs.command(PERSIST, "Snapshots on storage", "export HOLDFAST_PERSIST_EVERY=", {"30min": "1s"}))
        hold = Hold(docs)
        hold.at(HELD_AT)
        job = shell.start(launch)
        job.wait_for(f"step {HELD_AT} ")
        watch.until(shell, lambda said: f"is persisted at {PLACE}" in said)
        _cut_power(job, arena)
        hold.go()
        again = shell.start(launch)
        if again.wait() != 0:
            raise Failed(again.last())
        check_same(undisturbed, job.said + again.said)
        resumed = min(told(again.said))
        if not 0 < resumed <= HELD_AT:
            raise Failed(f"it went on with step {resumed}")
        shell.run(docs.command(PERSIST, "Snapshots on storage", "holdfast export --list", {THEIRS: PLACE}))
        shell.run(docs.command(PERSIST, "Snapshots on storage", "--format dcp", {THEIRS: PLACE}))
        if not list((docs.root / "result").glob("*.distcp")):
            raise Failed("the export has no file of DCP")
    print(f"  without any memory it went on from S3 with step {resumed}; every loss is that of an undisturbed run")


@contextmanager
def _s3(shell: Shell) -> Iterator[None]:
    """A server with an empty bucket on loopback, which the shell's variables name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = shell.start(f"moto_server -H 127.0.0.1 -p {port}")
    try:
        server.wait_for("Running on")
        shell.set(
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        )
        shell.run(f"python -c \"import s3fs; s3fs.S3FileSystem().mkdir('{PLACE.split('/')[2]}')\"")
        yield
    finally:
        server.process.terminate()
        server.wait()


def _cut_power(job: Running, arena: Path) -> None:
    """Kill the job and its SMP at once, and lose what is in memory."""
    for process in [*psutil.Process(job.process.pid).children(recursive=True), psutil.Process(job.process.pid)]:
        process.kill()
    for leftover in find_arenas(arena):
        remove(leftover)
    job.wait()
