"""A pretraining engineer on one machine: Megatron, killed and restarted."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import psutil

from holdfast.leftovers import find_leftovers, remove
from tools.journeys.hosts import Failed, Shell
from tools.journeys.newcomer import checkout
from tools.journeys.pages import Docs

START, MEGATRON = "docs/start.md", "docs/megatron-lm.md"
KILLED_AT = "step 12 "


def walk(python: Path, folder: Path) -> None:
    """Run the journey. Blocks for minutes; raises `Failed` or `Stale`."""
    docs = checkout(folder / "checkout")
    with tempfile.TemporaryDirectory(prefix="holdfast-journey-", dir="/dev/shm") as arena:
        try:
            at_work(docs, Shell(docs.root, python, HOLDFAST_ARENA=arena))
        finally:
            for leftover in find_leftovers(Path(arena)):  # SMPs survive a journey that ends early
                remove(leftover)


def at_work(docs: Docs, shell: Shell) -> None:
    """Install, check the machine and the launcher's options, and run the example."""
    shell.run(docs.command(START, "Install", "pip install '.[", {"lightning": "megatron"}))
    doctor = shell.run(docs.command(START, "Install", "holdfast doctor"))
    if "✗" in doctor:
        raise Failed(doctor)
    launcher = docs.command(MEGATRON, "Into your Megatron-LM run", "torchrun ... -m holdfast.megatron_lm")
    for option in ("--every", "--protect"):
        if option not in launcher or option not in shell.run("python -m holdfast.megatron_lm --help"):
            raise Failed(f"{launcher}: there is no {option}")
    megatron(docs, shell)


def megatron(docs: Docs, shell: Shell) -> None:
    """Run the page's example undisturbed, with a trainer killed, and once more to resume; compare the losses."""
    example = docs.command(MEGATRON, "With megatron-core alone", "torchrun --nproc-per-node 4")
    undisturbed = shell.start(example)
    if undisturbed.wait() != 0:
        raise Failed(undisturbed.last())
    killed = shell.start(example)
    killed.wait_for(KILLED_AT)
    victims = [p for p in psutil.Process(killed.process.pid).children(recursive=True) if _is_trainer(p)]
    victims[-1].kill()
    if killed.wait() == 0:
        raise Failed(f"it ended well although a trainer was killed:\n{killed.last()}")
    again = shell.start(example)
    if again.wait() != 0:
        raise Failed(again.last())
    losses = _losses(undisturbed.said)
    resumed = min(_losses(again.said))
    protected = max(int(step) for step in re.findall(r"protected (\d+)", "\n".join(killed.said)))
    if resumed <= protected or not losses.items() >= (_losses(killed.said) | _losses(again.said)).items():
        raise Failed(
            f"killed when step {protected} was protected, resumed with step {resumed}: of {losses} became "
            f"{_losses(killed.said)} and {_losses(again.said)}"
        )
    print(f"  resumed with step {resumed}; all {len(losses)} losses are those of an undisturbed run")
    if "no job has snapshots" not in shell.run("holdfast status", status=1):
        raise Failed("a job that ended well left its snapshots behind")


def _is_trainer(process: psutil.Process) -> bool:
    return "megatron_gpt" in " ".join(process.cmdline()) and "torchrun" not in " ".join(process.cmdline())


def _losses(lines: list[str]) -> dict[int, str]:
    found = [re.search(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(each[1]): each[2] for each in found if each}
