"""``python -m benchmarks.stall``: what a snapshot costs the training loop, compared with other systems' checkpoints.

Every system runs in the same loop (``benchmarks/stall_loop.py``) in processes of its own, one per rank. The other
systems (*peers*) have a virtual environment each, since their pinned requirements differ.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import hot
from benchmarks.arguments import counts
from benchmarks.memory_copy import CopyRow, measure_copies
from holdfast.bench.machine import describe, machine
from holdfast.cli.arguments import Parser, input_file, output_file
from holdfast.cli.main import main
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.leftovers import find_leftovers, remove
from holdfast.report import Report, say
from holdfast.scratch import Scratch
from holdfast.sessions import end
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "benchmarks" / "stall_loop.py"
REQUIREMENTS = ROOT / "benchmarks" / "systems" / "requirements"
CELL_DEADLINE_S = 1200.0
BATCHES = {"cpu": 32, "cuda": 4096}
"""Default batch size, in rows, by device."""

INSTALL_DEADLINE_S = 900.0

BESIDE_ROUNDS_S = 30.0
"""Time of a cell beside its rounds, in seconds: processes start, and restores, memory and survival are measured."""

LEAST_ROUNDS_S = 10.0

TOO_BUSY, SHARE = 0.2, 0.05
"""If *nothing* loses more than `TOO_BUSY` copies, or a row's standard error is more than that and more than this share
of what the row loses, the machine was too busy."""


@dataclass(frozen=True, slots=True)
class SavingMethod:
    """One way to save the training state.

    Attributes:
        key: its name on the command line.
        spec: ``module:class`` of its side of the loop.
        peer: name of its virtual environment and requirements; None for this project's own environment.
        least_ranks: the smallest number of ranks that it makes sense with.
    """

    key: str
    spec: str
    peer: str | None = None
    least_ranks: int = 1


SYSTEMS = (
    SavingMethod("none", "benchmarks.systems.none:Nothing"),
    SavingMethod("copy", "benchmarks.systems.simple:Buffer"),
    SavingMethod("holdfast", "benchmarks.systems.memory:Alone"),
    SavingMethod("protected", "benchmarks.systems.memory:Protected", least_ranks=2),
    SavingMethod("dcp-thread", "benchmarks.systems.dcp:AsyncThread", "dcp"),
    SavingMethod("dcp-process", "benchmarks.systems.dcp:AsyncProcess", "dcp"),
    SavingMethod("torch_checkpointing", "benchmarks.systems.tc:Manager", "tc"),
    SavingMethod("torchsnapshot", "benchmarks.systems.ts:AsyncTake", "ts"),
    SavingMethod("dlrover", "benchmarks.systems.flash:Flash", "flash"),
    SavingMethod("nvrx", "benchmarks.systems.nv:Local", "nv"),
)


README_SYSTEMS = "none,copy,holdfast,protected,dlrover"


@dataclass(frozen=True, slots=True)
class StallBenchmark:
    """What to measure.

    Attributes:
        every: steps between saves.
        layers: layers of the model, with 32.8 MB of state each.
        rounds: least number of blocks with saves, each between two blocks without. block: steps in a block.
        minutes: about how long all of it takes; more rounds are run until rows are steady. None: no more rounds.
        venvs: folder of the peers' virtual environments, which are made if they are missing.
        copies: divides the number of tensors of the plain copies; see `measure_copies`.
        device: ``cpu`` or ``cuda``, where the state is; with ``cuda`` each rank has a GPU of its own.
        batch: rows in a step; None for few on a CPU, and enough to keep a GPU busy.
    """

    systems: tuple[SavingMethod, ...]
    ranks: tuple[int, ...] = (1, 2, 4)
    every: tuple[int, ...] = (1,)
    layers: int = 16
    rounds: int = 2
    block: int = 8
    minutes: float | None = None
    venvs: Path = ROOT / ".venv-peers"
    copies: int = 1
    device: str = "cpu"
    batch: int | None = None


LATER: dict[str, Any] = {"device_extra_bytes": 0, "noise": None, "processor_ratio": None}
"""What older results do not have in their rows."""


@dataclass(slots=True)
class StallReport:
    """The results, with date and machine. `rows` are written by ``benchmarks/stall_loop.py``. `hot`: see
    `benchmarks.hot`; empty in older results."""

    date: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hot: str = ""

    def busy(self, of: Collection[str] = ()) -> list[str]:
        """What says that the machine was too busy; only for results whose rows know their noise. `of`: the systems
        whose rows count; none: all."""
        return [
            f"{row['system']}, {ranks_text(row['ranks'])}, {every_text(row['every'])}: {lost(row)} copies"
            for row in self.rows
            if row["noise"] is not None
            and (not of or row["system"] in of)
            and (
                row["noise"] > max(TOO_BUSY, SHARE * row["lost_ratio"])
                or (row["system"] == "nothing" and abs(row["lost_ratio"]) > TOO_BUSY)
            )
        ]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> StallReport:
        """Read a file that `to_json` wrote. Raises `ConfigError` if it has another content."""
        try:
            told = json.loads(path.read_text())
            rows = [LATER | row for row in told["rows"]]
            copies = [CopyRow(**row) for row in told["copies"]]
            return cls(told["date"], told["machine"], rows, copies, told["failed"], told.get("hot", ""))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a result of `python -m benchmarks.stall --json {path}`: {error!r}"
            ) from error


def quick(device: str = "cpu") -> StallBenchmark:
    """A trial of the measurement in half a minute: only this project, one round, small state."""
    systems = choose("none,copy,holdfast")
    return StallBenchmark(systems, (1,), (2,), layers=2, rounds=1, block=4, copies=16, device=device)


def choose(keys: str) -> tuple[SavingMethod, ...]:
    """Read a list of systems such as ``"holdfast,dcp-thread"``, or ``"all"``. Raises `ConfigError` for unknown ones."""
    known = {system.key: system for system in SYSTEMS}
    names = list(known) if keys == "all" else keys.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no system {unknown[0]!r} to compare with: choose from {', '.join(known)}")
    return tuple(known[name] for name in names)


def run(plan: StallBenchmark, console: Console) -> StallReport:
    """Measure each system with each number of ranks, one after another, for about a minute each.

    The machine should be idle. A system that fails in the loop is noted in the report. With `plan.minutes` the cells
    that are left share the time that is left.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        HoldfastError: a virtual environment cannot be made.
    """
    if plan.device == "cuda":
        _check_devices(max(plan.ranks))
    facts = machine() | {"load_average": os.getloadavg()[0]} | device_facts(plan.device)
    report = StallReport(datetime.now(UTC).isoformat(timespec="seconds"), facts, hot=hot.digest())
    pythons = {system.key: _python(system, plan.venvs, console) for system in plan.systems}
    ends_s = None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    report.copies = measure_copies(plan.copies)
    cells = [(ranks, system) for ranks in plan.ranks for system in plan.systems if ranks >= system.least_ranks]
    for number, (ranks, system) in enumerate(cells):
        console.print(f"{system.key}, {ranks_text(ranks)} ...")
        rounds_s = 0.0
        if ends_s is not None:
            share_s = (ends_s - time.monotonic()) / (len(cells) - number)
            rounds_s = max(LEAST_ROUNDS_S, share_s - BESIDE_ROUNDS_S)
        try:
            report.rows += measure(system, pythons[system.key], ranks, plan, rounds_s)
        except HoldfastError as error:
            report.failed[f"{system.key}, {ranks} ranks"] = str(error)
            console.print(f"  failed: {error}")
    return report


def device_facts(device: str) -> dict[str, Any]:
    """Facts about the GPUs for the report, if the state is on GPUs."""
    if device == "cpu":
        return {}
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"device": found.name, "device_memory_bytes": found.total_memory, "cuda": torch.version.cuda}


def _check_devices(ranks: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < ranks:
        raise ConfigError(
            f"--device cuda with {ranks} ranks needs as many GPUs, and torch sees {count} here: choose fewer --ranks, "
            "or leave --device out"
        )


def measure(
    system: SavingMethod, python: str, ranks: int, plan: StallBenchmark, rounds_s: float = 0.0
) -> list[dict[str, Any]]:
    """The rows of one system with `ranks` ranks. Blocks for a minute or more.

    Args:
        python: the interpreter of the system's virtual environment.
        rounds_s: how long rounds may go on, in seconds, unless rows are steady before.

    Raises:
        HoldfastError: a rank failed; the message has the last line of its log.
    """
    with Scratch("bench") as scratch:
        folder = scratch.path
        command = [python, str(LOOP), "--system", system.spec, "--world", str(ranks), "--port", str(_free_port())]
        command += ["--folder", str(folder), "--out", str(folder / "rows.json"), "--layers", str(plan.layers)]
        command += ["--every", ",".join(map(str, plan.every)), "--rounds", str(plan.rounds)]
        command += ["--block", str(plan.block), "--seconds", str(rounds_s), "--device", plan.device]
        command += ["--batch", str(plan.batch or BATCHES[plan.device])]
        environment = os.environ | ({"PYTHONPATH": str(ROOT)} if system.peer is None else {})
        trainers = []
        for rank in range(ranks):
            with (folder / f"rank{rank}.log").open("wb") as log:
                trainers.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        cwd=folder,
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        try:
            _await(trainers, folder)
            rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
            return rows
        finally:
            for trainer in trainers:
                end(trainer)
            for leftover in find_leftovers(folder):  # SMPs outlive trainers that fail
                remove(leftover)


def _await(trainers: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Block until all trainers have ended well.

    Raises:
        DeadlineExceeded: a rank did not end within `CELL_DEADLINE_S`.
        HoldfastError: a rank failed; the message has the last line of its log.
    """
    limit = time.monotonic() + CELL_DEADLINE_S
    for rank, trainer in enumerate(trainers):
        try:
            status = trainer.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"rank {rank} did not end within {CELL_DEADLINE_S:.0f} s") from None
        if status != 0:
            lines = (folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
            raise HoldfastError(f"rank {rank} ended with status {status}: {lines[-1] if lines else 'its log is empty'}")


def _python(system: SavingMethod, venvs: Path, console: Console) -> str:
    """The interpreter of a system's virtual environment, which is made if it does not exist."""
    if system.peer is None:
        return sys.executable
    python = venvs / system.peer / "bin" / "python"
    ready = venvs / system.peer / ".ready"
    if not ready.exists() and not (venvs / system.peer / "pyvenv.cfg").exists():
        console.print(f"setting up {venvs / system.peer} (once)")
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        _check([sys.executable, "-m", "venv", str(venvs / system.peer)])
        _check([*pip, *pins])
        _check([*pip, "-r", str(REQUIREMENTS / f"{system.peer}.txt")])
        ready.touch()
    return str(python)


def _check(command: Iterable[str]) -> None:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"{error.cmd} took over {INSTALL_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        raise HoldfastError(f"{done.args} failed: {done.stderr.strip()[-1000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


COLUMNS = (
    ("taken", "taken, %"),
    ("stall_p50_ms", "stall p50, ms"),
    ("stall_p99_ms", "p99, ms"),
    ("lost_s", "lost, s"),
    ("lost_ratio", "lost / copy"),
    ("processor_ratio", "processor / copy"),
    ("inflation", "step time ×"),
    ("survives_kill_s", "survives kill, s"),
    ("survives_node_s", "survives node, s"),
    ("extra", "memory / state"),
    ("device_extra", "GPU memory / state"),
    ("restore_s", "restore, s"),
)


OPTIONAL = ("device_extra", "processor_ratio")
"""Columns that are left out where no row has anything in them."""


def compare(rows: Iterable[dict[str, Any]], ranks: int, every: int) -> Report:
    """The table for one number of ranks and one interval; the cheapest system is at the top."""
    chosen = sorted((r for r in rows if (r["ranks"], r["every"]) == (ranks, every)), key=lambda row: row["lost_s"])
    shown = [(key, title) for key, title in COLUMNS if key not in OPTIONAL or any(_value(row, key) for row in chosen)]
    return Report(
        ["system", *(title for _, title in shown)],
        [[row["system"], *(_text(_value(row, key)) for key, _ in shown)] for row in chosen],
        f"{ranks_text(ranks)}, a snapshot {every_text(every)}",
    )


def summary(rows: Sequence[dict[str, Any]]) -> Report:
    """The table of training time that each system loses to one snapshot, in copies of the state, for all ranks and
    intervals; the cheapest systems are at the top. The last row is *nothing*, if its noise is known."""
    names = {row["system"] for row in rows} - {"nothing"}
    noise = ["nothing"] * any(row["system"] == "nothing" and row["noise"] is not None for row in rows)
    ratios = {name: [row["lost_ratio"] for row in rows if row["system"] == name] for name in names}
    cells = {(row["system"], row["ranks"], row["every"]): lost(row) for row in rows}
    places = pairs(rows)
    return Report(
        ["lost / copy", *(f"{ranks_text(ranks)}, {every_text(every)}" for ranks, every in places)],
        [
            [name, *(cells.get((name, *place), "–") for place in places)]
            for name in [*sorted(names, key=lambda name: statistics.median(ratios[name])), *noise]
        ],
        "Training time lost to one snapshot, in copies of the state",
    )


def lost(row: dict[str, Any]) -> str:
    """How many copies of the state a snapshot costs, with the standard error, if it is known, and the share of
    requested snapshots taken, if not all were."""
    part = f" ({row['taken']:.0%} taken)" if row["taken"] < 1 else ""
    noise = "" if row["noise"] is None else f" ± {row['noise']:.2f}"
    return f"{row['lost_ratio']:.2f}{noise}{part}"


def pairs(rows: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """All measured pairs of (ranks, every)."""
    return sorted({(row["ranks"], row["every"]) for row in rows})


def ranks_text(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def every_text(every: int) -> str:
    return f"every {'step' if every == 1 else f'{every} steps'}"


def describe_run(report: StallReport) -> str:
    """Date and machine of a run, as text."""
    computer = report.machine
    load = f", load average {computer['load_average']:.1f} before" if "load_average" in computer else ""
    return f"{report.date[:10]}: {describe(computer)}{load}{_with_device(computer)}"


def _value(row: dict[str, Any], key: str) -> float | None:
    if key == "taken":
        return 100.0 * float(row[key])
    if key in ("extra", "device_extra"):
        return float(row[f"{key}_bytes"]) / float(row["state_bytes"])
    return None if row.get(key) is None else float(row[key])


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def tables(report: StallReport) -> list[Report]:
    """All tables of a report."""
    found = [summary(report.rows), *(compare(report.rows, *place) for place in pairs(report.rows))]
    head = ["copy of", "memcpy, GB/s", "holdfast, GB/s", "holdfast / memcpy"]
    copies = [[row.what, _text(row.memcpy_gbps), _text(row.ours_gbps), _text(row.ratio)] for row in report.copies]
    return [*found, Report(head, copies, "Copies into a slot, one thread")]


def markdown(report: StallReport) -> str:
    """The report as a Markdown page."""
    lines = [
        "# What a snapshot costs the training loop",
        "",
        f"{describe_run(report)}.",
        "",
        f"One loop for all: linear layers with Adam, {_state(report.rows)} of state a rank, one thread a rank; blocks "
        "of steps with saves between blocks without. *Lost* is all training time lost to one save, stall and slower "
        "steps until it is done, of the slowest rank; *copy* is one copy of the same tensors at the same time on all "
        "ranks, in the same run: a memcpy, or from a GPU a transfer into pinned memory. *Survives kill* and *node*: "
        "seconds until the newest state would survive a trainer's SIGKILL, or the loss of its node. *Taken*: of the "
        "snapshots that were asked for; a system that is busy with one skips the next. *Protected* keeps parity on "
        "other nodes, each rank a node, all on this machine; the others, and holdfast without it, survive the death of "
        "processes alone. Medians.",
    ]
    if any(row["noise"] is not None for row in report.rows):
        lines += [
            "",
            "*±*: standard error over the rounds, each with a block without saves on both sides; *nothing* saves "
            "nothing, and should lose nothing. *Processor*: processor time that one save takes on all threads and "
            "processes, trainer and SMP, beyond that of training, divided by that of one copy.",
        ]
    for table in tables(report):
        lines += ["", table.markdown()]
    if busy := report.busy():
        lines += ["", "## The machine was too busy", "", *(f"* {what}" for what in busy)]
    if report.failed:
        lines += ["", "## Failed", "", *(f"* {what}: {why}" for what, why in report.failed.items())]
    return "\n".join(lines) + "\n"


def _with_device(computer: dict[str, Any]) -> str:
    return f", {computer['device']}, CUDA {computer['cuda']}" if "device" in computer else ""


def _state(rows: Iterable[dict[str, Any]]) -> str:
    sizes = sorted({round(row["state_bytes"] / row["ranks"] / 1e6) for row in rows})
    return " or ".join(f"{size:,} MB" for size in sizes)


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="python -m benchmarks.stall",
        description="Runs one training loop with each system, each in processes of its own, and compares what a "
        "snapshot costs with one copy of the same bytes. The peers' virtual environments are made once (about 1 GB "
        "each). A quarter of an hour; the machine should be idle, and the exit status is 1 if it was too busy.",
    )
    parser.add_argument("--quick", action="store_true", help="a small trial without the peers, in half a minute")
    parser.add_argument(
        "--check", action="store_true", help="measure nothing: fail if what copies has changed since the newest result"
    )
    parser.add_argument("--systems", default=README_SYSTEMS, help=f"a list, or all (default {README_SYSTEMS})")
    parser.add_argument("--minutes", type=float, default=15.0, help="about how long all of it takes (default 15)")
    parser.add_argument("--ranks", type=counts, default=(1, 2, 4), help="trainers on this machine (default 1,2,4)")
    parser.add_argument("--every", type=counts, default=(1,), help="steps between snapshots, such as 1,10 (default 1)")
    parser.add_argument("--rounds", type=int, default=2, help="least number of blocks with snapshots (default 2)")
    parser.add_argument("--layers", type=int, default=16, help="32.8 MB of state each (default 16)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the state is; with cuda a GPU a rank (default cpu)",
    )
    parser.add_argument("--batch", type=int, help="rows of a step (default 32, on a GPU 4096)")
    parser.add_argument("--venvs", type=Path, help="where the peers' environments are (default .venv-peers)")
    parser.add_argument(
        "--from",
        dest="source",
        type=input_file,
        metavar="FILE",
        help="measure nothing: show the result that --json wrote there",
    )
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw the lost time, as SVG (extra: plots)"
    )
    add_json(parser)
    parser.set_defaults(run=_command)
    return parser


def _command(parsed: argparse.Namespace) -> int:
    from benchmarks import plots

    if parsed.check:
        hot.check()
        return 0
    plots.check_plots(parsed.plot)
    console = console_of(parsed)
    plan = StallBenchmark(
        choose(parsed.systems),
        parsed.ranks,
        parsed.every,
        parsed.layers,
        parsed.rounds,
        minutes=parsed.minutes,
        device=parsed.device,
        batch=parsed.batch,
        **({"venvs": parsed.venvs} if parsed.venvs else {}),
    )
    if parsed.source:
        report = StallReport.read(parsed.source)
    else:
        report = run(quick(parsed.device) if parsed.quick else plan, console)
    say(console, *tables(report))
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    if parsed.plot:
        plots.write(plots.draw_stall(report), parsed.plot)
    write_json(parsed.json, report.to_json())
    if parsed.source:
        return 0
    busy = [] if parsed.quick else report.busy()
    for what in busy:
        console.print(f"the machine was too busy: {what}")
    return 1 if report.failed or busy else 0


if __name__ == "__main__":
    sys.exit(main(parser=make_parser()))
