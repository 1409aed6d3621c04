"""A student with two machines: torchrun on both, a worker that dies, and a machine that loses power."""

from __future__ import annotations

import time
from pathlib import Path

from tools.journeys import watch
from tools.journeys.hosts import Failed, Host, Network, Running, Shell, network
from tools.journeys.newcomer import Hold, check_same, checkout, training
from tools.journeys.pages import Docs

START, TORCHRUN = "docs/start.md", "docs/torchrun.md"
HOSTS = "Several hosts"
SLACK_S = 5.0
"""By how much a recovery may differ from a stopwatch that is stopped by a line that torchrun passes on, in seconds."""


def walk(python: Path, folder: Path) -> None:
    """Run the journey. Blocks for minutes; raises `Failed` or `Stale`."""
    docs = checkout(folder / "checkout")
    (docs.root / "train.py").write_text(training(docs))
    Shell(docs.root, python).run(docs.command(START, "Install", "pip install .", {}))
    with network(folder) as wires:
        hosts = [wires.host("alpha", 1), wires.host("beta", 2)]
        shells = [prepared(docs, python, host, hosts[0]) for host in hosts]
        for shell in shells:
            shell.run(docs.command(START, "Install", "holdfast doctor"))
        undisturbed = run_over(docs, shells, "undisturbed")
        finish(undisturbed)
        hold = Hold(docs)
        hold.at(60)
        killed = run_over(docs, shells, "killed")
        killed[0].wait_for("step 60 ")
        shells[1].run("kill -9 $(pgrep -f '[ ]train.py$' | tail -1)")
        hold.at(100)
        killed[0].wait_for("step 100 ")
        cut = time.monotonic()
        replaced = lose(docs, python, wires, hosts, killed)
        hold.at(120)
        for _ in range(2):  # a step prints its loss before it is done
            killed[0].wait_for(" loss ")
        took_s = time.monotonic() - cut
        killed[0].wait_for("step 120 ")
        parts = watch.recovery(docs, shells[0], took_s, SLACK_S)
        print(f"  {took_s:.1f} s from the power cut to the first new step; status, page and metrics: {parts}")
        hold.go()
        finish([killed[0], replaced])
        check_same(undisturbed[0].said, killed[0].said)
        print("  every loss and the weights are those of an undisturbed run")
        for shell in shells[:1]:
            if "no job has snapshots" not in shell.run("holdfast status", status=1):
                raise Failed("a job that ended well left its snapshots behind")


def prepared(docs: Docs, python: Path, host: Host, head: Host) -> Shell:
    """A terminal on a host with address and token set as on the page."""
    shell = Shell(docs.root, python, host, HEAD=head.name)
    token = head.home / ".holdfast-token"
    if host is head:
        shell.run(docs.command(START, HOSTS, "> ~/.holdfast-token"))
    else:  # stands for copying it between hosts
        (host.home / token.name).write_bytes(token.read_bytes())
        (host.home / token.name).chmod(0o600)
    shell.run(docs.command(START, HOSTS, "export HOLDFAST_TOKEN_FILE="))
    shell.run(docs.command(START, HOSTS, "export HOLDFAST_HOST="))
    shell.run(docs.command(TORCHRUN, "Under torchrun", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE"))
    return shell


def run_over(docs: Docs, shells: list[Shell], run: str) -> list[Running]:
    """Start the page's command on every host."""
    for shell in shells:
        shell.set({"RUN": run})
    own = {"--nnodes=4": f"--nnodes={len(shells)}", "--nproc-per-node=8": "--nproc-per-node=1"}
    command = docs.command(TORCHRUN, "Under torchrun", "torchrun --nnodes=4", own)
    return [shell.start(command) for shell in shells]


def lose(docs: Docs, python: Path, wires: Network, hosts: list[Host], running: list[Running]) -> Running:
    """Cut the power of the second machine, replace it by an empty one, and start the agent there again."""
    hosts[1].cut_power()
    running[1].process.wait(60)
    hosts[1] = wires.host(hosts[1].name, 2)
    shell = prepared(docs, python, hosts[1], hosts[0])
    shell.set({"RUN": "killed"})
    return shell.start(running[1].command)


def finish(running: list[Running]) -> None:
    """Wait until all have ended. Raises `Failed` unless all end with status 0."""
    for each in running:
        if each.wait() != 0:
            raise Failed(each.last())
