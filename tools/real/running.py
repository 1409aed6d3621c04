"""Executes one run: set up in its own folders, trained undisturbed, trained under kills, and compared."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.leftovers import find_leftovers, remove
from holdfast.scratch import Scratch
from tools.real import programs
from tools.real.comparison import STEP, compare, read
from tools.real.driver import Kill, Outcome, drive, plan
from tools.real.edits import Edit, apply, difference
from tools.real.environments import ROOT, WORK, Absent, checkout, interpreter, versions
from tools.real.run import Run

NOTES, SAID = "REAL_NOTES", "REAL_SAID"

KILLS = 3
ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?((?:[a-z_.]+\.)?[A-Z]\w+(?:Error|Mismatch|Exceeded|Exception|Unrecoverable): .*)$", re.M
)
"""Matches the last line of a traceback."""


@dataclass(slots=True)
class Result:
    """The result of a run.

    Attributes:
        outcome: ``exact``, ``differs``, or ``skipped``.
        said: why it was skipped, or what differs.
        kills: descriptions of the kills.
        resumed: number of completed steps at which each successor began.
        again: number of repeated steps.
        losses, final: number of losses and of final values that were compared.
        lines: holdfast's lines in the script, as a diff.
        fits: edits that made the script small, as a diff.
    """

    name: str
    framework: str
    what: str
    page: str
    outcome: str
    said: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    command: str = ""
    steps: int = 0
    kills: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    again: int = 0
    losses: int = 0
    final: int = 0
    seconds: float = 0.0
    lines: str = ""
    fits: str = ""


def execute(run: Run, real: Path | None, pythons: Mapping[str, Path], seed: int) -> Result:
    """Execute a run. Blocks; leaves no processes behind."""
    began = time.monotonic()
    result = Result(run.name, run.framework, run.what, run.page, "skipped", ranks=max(1, run.ranks))
    try:
        source = checkout(real, run.checkout) if run.checkout else ROOT
        if gone := [name for name in run.files if not (source / name).exists()]:
            raise Absent(f"{source} has no {', '.join(gone)}: its checkout is not whole, or of another time")
        python = interpreter(run.python, pythons)
        result.versions = versions(python, ("torch", *filter(None, (run.package,)), *run.needs))
    except Absent as missing:
        result.said = str(missing)
        return result
    if not run.package:
        release = run.checkout.rpartition("-")[2]
        result.versions[run.framework] = release if release[:1].isdigit() else "main"
    home = WORK / "runs" / run.name
    shutil.rmtree(home, ignore_errors=True)
    with Scratch("real") as scratch:
        try:
            both = _by_program if run.program else _both
            result.outcome, result.said = "differs", both(run, source, python, home, scratch.path, seed, result)
        finally:
            for leftover in find_leftovers(scratch.path):
                remove(leftover)
    if not result.said:
        result.outcome = "exact"
    result.seconds = time.monotonic() - began
    return result


def _both(run: Run, source: Path, python: Path, home: Path, arena: Path, seed: int, result: Result) -> str:
    """Train undisturbed and under kills; return a description of the difference, empty if there is none."""
    try:
        plain = _set_up(run, source, python, home / "plain", run.fits, result)
        killed = _set_up(run, source, python, home / "killed", (*run.fits, *run.lines), result)
    except ValueError as other:
        return str(other)
    outcome = _train(run, source, python, plain, arena, (), protected=False)
    if problem := _problem(outcome, plain, "undisturbed"):
        return problem
    notes = read(plain / "notes")
    result.steps = sum(kind == STEP for kind, _ in notes[0][0])
    evaluations = sum(kind == "eval" for kind, _ in notes[0][0])
    try:
        kills = plan(f"{run.name} {seed}", KILLS, result.ranks, result.steps, evaluations)
    except ValueError as short:
        return str(short)
    result.command = _shown(_command(run, source, Path("python"), killed / "work", len(kills), protected=True), source)
    outcome = _train(run, source, python, killed, arena, kills, protected=True)
    result.kills = outcome.killed
    if problem := _problem(outcome, killed, "killed"):
        return problem
    if len(outcome.killed) < len(kills):
        return f"it ended after {len(outcome.killed)} of {len(kills)} kills"
    verdict = compare(notes, read(killed / "notes"), len(kills))
    result.resumed, result.again, result.losses, result.final = verdict[1:]
    return verdict.difference


def _by_program(run: Run, source: Path, python: Path, home: Path, arena: Path, seed: int, result: Result) -> str:
    """The same for a program that kills by itself; see `tools.real.programs`."""
    program = f"tools/real/{run.program}"
    for name, asked in (("plain", ["--bare"]), ("killed", [f"--kills={KILLS}", f"--seed={seed}"])):
        folder = home / name
        (folder / "work").mkdir(parents=True)
        ranks = f"--ranks={result.ranks}"
        command = [program, "--out", str(folder / "notes"), ranks, *run.arguments.split(), *asked]
        result.command = " ".join(["python", *command]).replace(f"{ROOT}/", "")
        environment = _environment(run, python, arena, {"PYTHONPATH": str(ROOT)})
        outcome = drive(
            [str(python), str(ROOT / program), *command[1:]], environment, folder, (), again=False,
            deadline_s=run.deadline_s,
        )  # fmt: skip
        if problem := _problem(outcome, folder, name):
            return problem
    plain, killed = home / "plain" / "notes", home / "killed" / "notes"
    result.kills, result.steps = programs.kills(killed), programs.steps(plain)
    if len(result.kills) < KILLS:
        return f"it ended after {len(result.kills)} of {KILLS} kills"
    verdict = programs.compare(plain, killed)
    result.resumed, result.again, result.losses, result.final = verdict[1:]
    return verdict.difference


def _set_up(run: Run, source: Path, python: Path, folder: Path, edits: Sequence[Edit], result: Result) -> Path:
    """Make a folder with the script, its data and the edits; store the edits' diffs in `result`."""
    folder.mkdir(parents=True)
    (folder / "notes").mkdir()
    work = folder / "work"
    work.mkdir()
    for name in run.files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, work / name)
        else:
            shutil.copy(source / name, work / name)
    if run.make is not None:
        run.make(work, python)
    shown: dict[bool, str] = {True: "", False: ""}
    for edit in edits:
        path = work / edit.file
        before = path.read_text()
        path.write_text(apply(before, edit))
        shown[edit in run.lines] += difference(before, path.read_text(), edit.file) + "\n"
    result.lines, result.fits = shown[True].strip(), shown[False].strip()
    return folder


def _train(
    run: Run, source: Path, python: Path, folder: Path, arena: Path, kills: Sequence[Kill], *, protected: bool
) -> Outcome:
    work = folder / "work"
    places = {"source": str(source), "work": str(work)}
    given = {name: value.format(**places) for name, value in run.variables}
    path = ":".join(filter(None, [str(ROOT), given.pop("PYTHONPATH", "")]))
    given |= {"PYTHONPATH": path, "HF_HOME": str(work / "hub"), NOTES: str(folder / "notes"), SAID: run.said}
    environment = _environment(run, python, arena, given)
    command = _command(run, source, python, work, len(kills), protected=protected)
    return drive(command, environment, folder, kills, again=not run.ranks, deadline_s=run.deadline_s)


def _environment(run: Run, python: Path, arena: Path, more: Mapping[str, str]) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    config = arena / "bin" / "python3-config"  # Megatron-LM's build needs it, and virtual environments lack it
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"#!{python}\nimport sysconfig\nprint(sysconfig.get_config_var('EXT_SUFFIX'))\n")
    config.chmod(0o755)
    return mine | {
        "PATH": f"{config.parent}:{python.parent}:{mine['PATH']}",
        "HOLDFAST_JOB": run.name,
        "HOLDFAST_ARENA": str(arena / "arena"),
        "HOLDFAST_EVERY": "1",  # with steps of milliseconds, snapshots would be rare
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **more,
    }


def _command(run: Run, source: Path, python: Path, work: Path, restarts: int, *, protected: bool) -> list[str]:
    command = [str(python)]
    if run.ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={run.ranks}", f"--max-restarts={restarts}"]
    command += ["-m", "tools.real.probe"]
    for module in run.first:
        command += ["--first", module]
    if protected:
        command += run.launcher.split()
    return command + [part.format(source=source, work=work) for part in f"{run.script} {run.arguments}".split()]


def _shown(command: Sequence[str], source: Path) -> str:
    return " ".join(command).replace(f"{source.parent}/", "$REAL/")


def _problem(outcome: Outcome, folder: Path, which: str) -> str:
    if outcome.status == 0:
        return ""
    how = "did not end in time" if outcome.hung else f"ended with status {outcome.status}"
    log = folder / "log"
    errors = ERROR.findall(log.read_text(errors="replace"))
    said = f": {errors[0]}" if errors else ""
    return f"the {which} run {how}{said}; see {log.relative_to(ROOT)}"
