"""The ``holdfast`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from holdfast import HoldfastError, __version__


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status: 0 if all is well, 1 if not, 2 for wrong usage."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        return status
    except HoldfastError as error:
        print(f"holdfast: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Keeps a training run on its step: in-memory snapshots, restored bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_gc(commands)
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
    demo.add_argument("--protect", default="auto", help="k+1, auto or none (default auto)")
    demo.add_argument(
        "--kill",
        type=_kill,
        action="append",
        metavar="trainer:RANK@STEP|node:INDEX@STEP",
        help="what to kill in the middle of which step; may be repeated (default: a trainer, then a node)",
    )
    demo.add_argument("--no-kill", action="store_true", help="kill nothing")
    _add_json(demo)
    demo.set_defaults(run=_demo)


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
    gc.add_argument("--arena", type=Path, help="where to look (default HOLDFAST_ARENA or /dev/shm/holdfast-<uid>)")
    _add_json(gc)
    gc.set_defaults(run=_gc)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the result as JSON; - is standard output")


def _write_json(target: str | None, data: Any) -> None:
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
    _write_json(parsed.json, account.to_json())
    return 0 if account.held else 1


def _kills(parsed: argparse.Namespace) -> tuple[tuple[str, int, int], ...]:
    if parsed.no_kill:
        return ()
    if parsed.kill:
        return tuple(parsed.kill)
    first, second = max(2, parsed.steps * 3 // 10), max(3, parsed.steps * 6 // 10)
    return (("trainer", parsed.nodes * parsed.ranks // 2 - 1, first), ("node", min(2, parsed.nodes - 1), second))


def _kill(text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"(trainer|node):(\d+)@(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither trainer:RANK@STEP nor node:INDEX@STEP")
    return match[1], int(match[2]), int(match[3])


def _gc(parsed: argparse.Namespace) -> int:
    from smp_daemon.spawn import find_leftovers, remove

    found = []
    for leftover in find_leftovers(parsed.arena, job=parsed.job, older_than_s=parsed.older_than):
        smp = f", SMP {leftover.smp.pid}" if leftover.smp else ""
        if not parsed.dry_run:
            remove(leftover)
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
    _write_json(parsed.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
