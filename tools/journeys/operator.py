"""A platform engineer with three hosts: the service, its status and metrics, a lost node, and a drained one."""

from __future__ import annotations

import re
from pathlib import Path

from tools.journeys import watch
from tools.journeys.hosts import Failed, Host, Shell, network
from tools.journeys.newcomer import Hold, check_same, checkout, training
from tools.journeys.pages import Docs
from tools.journeys.student import START, finish, prepared, run_over

RUNNING = "docs/running.md"
NAMES = ("alpha", "beta", "gamma")
MEMORY = {"64GB": "64MB"}
"""Replaces the page's memory limit by one that these hosts can spare."""
JOB = "my-run"
"""The name of the job in the pages."""


def walk(python: Path, folder: Path) -> None:
    """Run the journey. Blocks for minutes; raises `Failed` or `Stale`."""
    docs = checkout(folder / "checkout")
    (docs.root / "train.py").write_text(training(docs))
    Shell(docs.root, python).run(docs.command(START, "Install", "pip install .", {}))
    with network(folder) as wires:
        hosts = [wires.host(name, number) for number, name in enumerate(NAMES, 1)]
        shells = [served(docs, python, host, hosts[0]) for host in hosts]
        hold = Hold(docs)
        hold.at(20)
        undisturbed = run_over(docs, shells, "undisturbed")
        undisturbed[0].wait_for("step 20 ")
        look(docs, shells[1])
        hold.go()
        finish(undisturbed)
        shells = [served(docs, python, host, hosts[0]) for host in hosts]  # the end of a job ends its SMPs
        hold.at(60)
        killed = run_over(docs, shells, "killed")
        killed[0].wait_for("step 60 ")
        hosts[2].cut_power()
        hold.go()
        killed[2].process.wait(60)
        hosts[2] = wires.host(NAMES[2], 3)
        shells[2] = served(docs, python, hosts[2], hosts[0])
        shells[2].set({"RUN": "killed"})
        killed[2] = shells[2].start(killed[2].command)
        finish(killed)
        check_same(undisturbed[0].said, killed[0].said)
        print("  every loss and the weights are those of an undisturbed run")
        hold.at(30)
        drain(docs, [served(docs, python, host, hosts[0]) for host in hosts])


def served(docs: Docs, python: Path, host: Host, head: Host) -> Shell:
    """Start an SMP by hand on a host; return a terminal there."""
    shell = prepared(docs, python, host, head)
    shell.run(docs.command(START, "Start the job", "export HOLDFAST_JOB="))
    shell.run(docs.command(RUNNING, "By hand", "--detach", MEMORY))
    shell.run(docs.command(RUNNING, "By hand", "holdfast smp status"))
    return shell


def look(docs: Docs, shell: Shell) -> None:
    """Check the status and metrics of a training job. Raises `Failed`."""
    said = watch.status(docs, shell)
    if not re.search(r"is safe against the loss of any 1 node", said):
        raise Failed(said)
    url = watch.page(shell, said)
    for path, words in (("", "<!doctype html>"), ("metrics", "holdfast_safe_step"), ("healthz", "ok")):
        if words not in (answer := watch.fetch(shell, f"{url}{path}")):
            raise Failed(f"{url}{path}: {answer[:300]}")
    found = watch.jobs(docs, shell)
    if [len(job["nodes"]) for job in found] != [len(NAMES)]:
        raise Failed(f"{len(NAMES)} nodes, and of the job is said: {found}")


def drain(docs: Docs, shells: list[Shell]) -> None:
    """Stop a job with Ctrl-C, drain a node, and remove the rest. Raises `Failed`."""
    running = run_over(docs, shells, "stopped")
    running[0].wait_for("step 30 ")
    for each in running:
        each.interrupt()
    for each in running:
        each.wait()
    said = shells[0].run(docs.command(RUNNING, "Taking a node away", "holdfast drain", {"node7": NAMES[2]}))
    if "may be taken away" not in said:
        raise Failed(said)
    for shell in shells[:2]:
        shell.run(docs.command(RUNNING, "By hand", "--remove"))
        if "no job has snapshots" not in shell.run("holdfast status", status=1):
            raise Failed("something is left of a job that was removed")
