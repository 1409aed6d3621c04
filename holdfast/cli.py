"""The ``holdfast`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import HoldfastError, __version__

if TYPE_CHECKING:
    from holdfast.demo import Kill


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status: 0 if all is well, 1 if not, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    parsed = parser.parse_args(words[:cut])
    if cut < len(words):
        if "command" not in parsed:
            parser.error(f"no command is taken here after --: {' '.join(words[cut + 1 :])}")
        parsed.command = words[cut + 1 :]
    try:
        status: int = parsed.run(parsed)
        return status
    except HoldfastError as error:
        print(f"holdfast: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from holdfast import chaos_command, drain, export, plan, profile, simulate, smp, status, tune

    parser = argparse.ArgumentParser(
        prog="holdfast", description="Keeps a training run on its step: in-memory snapshots, restored bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_matrix(commands)
    _add_audit(commands)
    status.add(commands, _add_json)
    smp.add(commands, _add_json)
    drain.add(commands, _add_json)
    export.add(commands, _add_json)
    _add_gc(commands)
    _add_doctor(commands)
    _add_bench(commands)
    chaos_command.add(commands, _add_json)
    plan.add(commands, _add_json)
    profile.add(commands, _add_json)
    tune.add(commands, _add_json)
    simulate.add(commands, _add_json)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a real Megatron GPT on virtual nodes, kill things, compare to the last bit",
        description="Trains a small megatron-core GPT twice on virtual nodes of this machine: undisturbed, and with a "
        "trainer and a node killed in the middle of steps. Status 0 only if both runs are identical to the last bit, "
        "at most one step was lost each time, nothing was written to disk, and nothing is left behind.",
    )
    demo.add_argument("--nodes", type=int, default=4, help="virtual nodes (default 4)")
    demo.add_argument("--ranks", type=int, default=2, help="trainers on each node (default 2)")
    demo.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    demo.add_argument("--seed", type=int, default=1234, help="seed of weights, data and dropout (default 1234)")
    demo.add_argument("--protect", default="auto", help="k+m such as 2+2, copies:r, auto or none (default auto)")
    demo.add_argument("--lose", type=int, default=1, help="nodes that are killed at once (default 1)")
    demo.add_argument(
        "--kill",
        type=_kill,
        action="append",
        metavar="trainer:RANK[+RANK...]@STEP|node:INDEX[+INDEX...]@STEP",
        help="what to kill in the middle of which step; may be repeated (default: a trainer, then a node)",
    )
    demo.add_argument("--no-kill", action="store_true", help="kill nothing")
    _add_json(demo)
    demo.set_defaults(run=_demo)


def _add_matrix(commands: Any) -> None:
    matrix = commands.add_parser(
        "matrix",
        help="kill and restore every kind of job there is, compare to the last bit",
        description="Runs each cell, one way to train, twice on virtual nodes: undisturbed, and with a trainer and "
        "then a node killed in the middle of steps. Status 0 only if all losses and all final state are the "
        "same to the last bit. From a checkout. 1 to 10 seconds a cell on two cores.",
    )
    matrix.add_argument("--cells", default="all", help="'all', 'quick', or names such as 'TP2;PP2' (default all)")
    matrix.add_argument("--list", action="store_true", help="only list the cells")
    matrix.add_argument("--seed", type=int, default=1234, help="seed of weights, data and dropout (default 1234)")
    matrix.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as Markdown")
    _add_json(matrix)
    matrix.set_defaults(run=_matrix)


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser(
        "audit",
        help="run your job, kill it, resume it: is it exact, and if not, what was forgotten?",
        description="Runs a training command that uses InMemorySnapshot five times for a few steps: undisturbed, "
        "again, killed in the middle of a step, resumed and killed a step later, and resumed; then compares everything "
        "that the training loop can reach at the start of a resumed step, and all outputs and gradients after it. "
        "Status 0 only if nothing differs.",
    )
    audit.add_argument("--steps", type=int, default=8, help="steps of each run (default 8)")
    audit.add_argument("--kill", type=int, default=4, help="after how many steps to kill (default 4)")
    audit.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="names that do not matter")
    audit.add_argument("--deadline", type=float, default=600.0, metavar="SECONDS", help="for each run (default 600)")
    _add_json(audit)
    audit.add_argument("command", nargs=argparse.REMAINDER, help="such as -- torchrun ... train.py")
    audit.set_defaults(run=_audit)


def _add_gc(commands: Any) -> None:
    gc = commands.add_parser(
        "gc",
        help="remove snapshots and SMPs that dead jobs left behind",
        description="Finds arenas of this user that no trainer uses and ends their SMPs. Snapshots in them are lost: "
        "a job that is to be restarted needs them, so only those untouched for a while are taken.",
    )
    gc.add_argument("--job", help="only this job")
    gc.add_argument("--older-than", type=float, default=3600.0, metavar="SECONDS", help="untouched for (default 3600)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--zero", action="store_true", help="overwrite what is removed with zeros first")
    gc.add_argument("--arena", type=Path, help="where to look (default HOLDFAST_ARENA or /dev/shm/holdfast-<uid>)")
    _add_json(gc)
    gc.set_defaults(run=_gc)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has and what is wrong with it",
        description="Looks at packages, erasure code backends, shared memory and the kernel, and says how to mend what "
        "is wrong. Status 1 if there is a problem; notes are about speed.",
    )
    _add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure how fast this machine is at what holdfast does")
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    codes = kinds.add_parser(
        "ec",
        help="erasure codes, compared with memcpy",
        description="Measures every operation of every erasure code backend, in turn with memcpy of the same bytes.",
    )
    codes.add_argument("--quick", action="store_true", help="a few cells, in seconds instead of minutes")
    codes.add_argument("--seed", type=int, default=1234, help="seed of the data (default 1234)")
    codes.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    _add_json(codes)
    codes.set_defaults(run=_bench_ec)
    stall = kinds.add_parser(
        "stall",
        help="what a snapshot costs the training loop, beside the checkpoints of others",
        description="Runs one training loop with each system, a snapshot every step and every 10 steps, each in "
        "processes of its own, and compares what they cost with memcpy of the same bytes. From a checkout; the "
        "peers' virtual environments are made once (about 1 GB each). About an hour; the machine should be idle.",
    )
    stall.add_argument("--quick", action="store_true", help="a small trial without the peers, in half a minute")
    stall.add_argument("--systems", default="all", help="such as holdfast,dcp-thread (default all)")
    stall.add_argument("--ranks", type=_counts, default=(1, 2, 4), help="trainers on this machine (default 1,2,4)")
    stall.add_argument("--every", type=_counts, default=(1, 10), help="steps between snapshots (default 1,10)")
    stall.add_argument("--rounds", type=int, default=2, help="blocks of steps with snapshots (default 2)")
    stall.add_argument("--layers", type=int, default=16, help="32.8 MB of state each (default 16)")
    stall.add_argument("--venvs", type=Path, help="where the peers' environments are (default .venv-peers)")
    stall.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    stall.add_argument("--plot", type=Path, metavar="FILE", help="also draw the lost time, as SVG")
    _add_json(stall)
    stall.set_defaults(run=_bench_stall)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,2,4")
    return counts


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the result as JSON; - is standard output")


def write_json(target: str | None, data: Any) -> None:
    """Write a command's result where ``--json`` says, if it says so."""
    if target is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _demo(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from holdfast.demo import Plan, run
    from holdfast.demo_view import DemoProgress, show

    plan = Plan(parsed.nodes, parsed.ranks, parsed.steps, parsed.seed, parsed.protect, _kills(parsed))
    console = Console(stderr=parsed.json == "-", highlight=False)
    with DemoProgress(console, plan) as progress:
        account = run(plan, progress.tell)
    show(console, account)
    write_json(parsed.json, account.to_json())
    return 0 if account.held else 1


def _matrix(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict
    from datetime import UTC, datetime

    from rich.console import Console

    from holdfast.bench_ec import describe, machine
    from holdfast.matrix import Verdict, choose, markdown, run, show

    console = Console(stderr=parsed.json == "-", highlight=False)
    cells = choose(parsed.cells)
    if parsed.list:
        for cell in cells:
            console.print(f"{cell.name}: {cell.ranks} ranks{', quick' if cell.quick else ''}")
        return 0

    def tell(verdict: Verdict) -> None:
        console.print(f"{verdict.cell.name}: {verdict.difference or 'identical'} ({verdict.seconds:.0f} s)")

    verdicts = run(cells, parsed.seed, tell)
    show(console, verdicts)
    if parsed.markdown:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        parsed.markdown.write_text(markdown(verdicts, when, describe(machine()), parsed.seed))
    write_json(parsed.json, [asdict(verdict) for verdict in verdicts])
    return 1 if any(verdict.difference for verdict in verdicts) else 0


def _audit(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from holdfast.audit import Plan, run, show

    console = Console(stderr=parsed.json == "-", highlight=False, soft_wrap=True)
    plan = Plan(tuple(parsed.command), parsed.steps, parsed.kill, tuple(parsed.ignore), parsed.deadline)
    report = run(plan, lambda name: console.print(f"{name} ..."))
    show(console, report)
    write_json(parsed.json, asdict(report))
    return 0 if report.exact else 1


def _kills(parsed: argparse.Namespace) -> tuple[Kill, ...]:
    from holdfast.demo import Kill

    if parsed.no_kill:
        return ()
    if parsed.kill:
        return tuple(Kill(*kill) for kill in parsed.kill)
    first, second = max(2, parsed.steps * 3 // 10), max(3, parsed.steps * 6 // 10)
    if not 0 <= parsed.lose <= parsed.nodes:
        raise HoldfastError(f"--lose {parsed.lose}: there are {parsed.nodes} nodes")
    last = max(parsed.lose - 1, min(2, parsed.nodes - 1))
    lost = tuple(range(last - parsed.lose + 1, last + 1))
    trainer = Kill("trainer", (parsed.nodes * parsed.ranks // 2 - 1,), first)
    return (trainer, Kill("node", lost, second)) if lost else (trainer,)


def _kill(text: str) -> tuple[str, tuple[int, ...], int]:
    match = re.fullmatch(r"(trainer|node):(\d+(?:\+\d+)*)@(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither trainer:RANK@STEP nor node:INDEX@STEP")
    return match[1], tuple(map(int, match[2].split("+"))), int(match[3])


def _gc(parsed: argparse.Namespace) -> int:
    from holdfast.smp_daemon.spawn import find_leftovers, remove

    found = []
    for leftover in find_leftovers(parsed.arena, job=parsed.job, older_than_s=parsed.older_than):
        smp = f", SMP {leftover.smp.pid}" if leftover.smp else ""
        if not parsed.dry_run:
            remove(leftover, zero=parsed.zero)
        verb = "would remove" if parsed.dry_run else "removed"
        print(f"{verb} {leftover.arena}: job {leftover.job}, {leftover.bytes:,} bytes{smp}", file=sys.stderr)
        found.append(
            {
                "arena": str(leftover.arena),
                "job": leftover.job,
                "bytes": leftover.bytes,
                "smp_pid": leftover.smp.pid if leftover.smp else None,
                "removed": not parsed.dry_run,
            }
        )
    if not found:
        print("nothing to remove", file=sys.stderr)
    write_json(parsed.json, found)
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from holdfast.checks import examine
    from holdfast.doctor import gather, show

    findings = examine(gather())
    show(Console(stderr=parsed.json == "-", highlight=False), findings)
    write_json(parsed.json, [finding.to_json() for finding in findings])
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _bench_ec(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from holdfast.bench_ec import Plan, markdown, quick, run, show

    console = Console(stderr=parsed.json == "-", highlight=False)
    report = run(quick(parsed.seed) if parsed.quick else Plan(seed=parsed.seed), console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    write_json(parsed.json, report.to_json())
    return 0


def _bench_stall(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from holdfast.bench_plot import draw
    from holdfast.bench_stall import Plan, choose, markdown, quick, run, show

    console = Console(stderr=parsed.json == "-", highlight=False)
    plan = Plan(
        choose(parsed.systems),
        parsed.ranks,
        parsed.every,
        parsed.layers,
        parsed.rounds,
        **({"venvs": parsed.venvs} if parsed.venvs else {}),
    )
    report = run(quick() if parsed.quick else plan, console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    if parsed.plot:
        parsed.plot.write_text(draw(report))
    write_json(parsed.json, report.to_json())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
