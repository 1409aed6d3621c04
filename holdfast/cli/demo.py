"""``holdfast demo``: train, kill, compare."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import add_json, console_of, write_json
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.chaos.demo import Kill


SEED = 1234
"""Of weights, data and dropout."""


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    demo = commands.add_parser(
        "demo",
        help="train a real Megatron GPT on virtual nodes, kill things, compare to the last bit",
        description="Trains a small megatron-core GPT twice on virtual nodes of this machine: undisturbed, and with a "
        "trainer and a node killed in the middle of steps. Status 0 only if both runs are identical to the last bit, "
        "at most one step was lost each time, nothing was written to disk, and nothing is left behind.",
    )
    demo.add_argument("--nodes", type=int, default=4, help="virtual nodes (default 4)")
    demo.add_argument("--ranks", type=int, default=2, help="trainers on each node (default 2)")
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where trainers train; several may share a GPU (default cpu)",
    )
    demo.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    demo.add_argument("--protect", default="auto", help="k+m such as 2+2, copies:r, auto or none (default auto)")
    demo.add_argument(
        "--kill",
        type=_kill,
        action="append",
        metavar="trainer:RANK[+RANK...]@STEP|node:INDEX[+INDEX...]@STEP",
        help="what to kill in the middle of which step; may be repeated (default: a trainer, then a node)",
    )
    demo.add_argument(
        "--defaults",
        action="store_true",
        help="with the hook's own options: snapshots as often as the overhead budget allows; lost steps are reported, "
        "and do not fail the demo",
    )
    add_json(demo)
    demo.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from holdfast.chaos.demo import DemoPlan, run
    from holdfast.chaos.demo_view import DemoProgress, show

    plan = DemoPlan(
        parsed.nodes,
        parsed.ranks,
        parsed.steps,
        SEED,
        parsed.protect,
        _kills(parsed),
        parsed.defaults,
        parsed.device,
    )
    require("megatron", "holdfast demo", "break a job of your own with holdfast chaos run -- COMMAND")
    console = console_of(parsed)
    with DemoProgress(console, plan) as progress:
        account = run(plan, progress.tell)
    show(console, account)
    write_json(parsed.json, account.to_json())
    return 0 if account.held else 1


def _kills(parsed: argparse.Namespace) -> tuple[Kill, ...]:
    from holdfast.chaos.demo import Kill

    if parsed.kill:
        return tuple(Kill(*kill) for kill in parsed.kill)
    first, second = max(2, parsed.steps * 3 // 10), max(3, parsed.steps * 6 // 10)
    trainer, node = parsed.nodes * parsed.ranks // 2 - 1, min(2, parsed.nodes - 1)
    return (Kill("trainer", (trainer,), first), Kill("node", (node,), second))


def _kill(text: str) -> tuple[str, tuple[int, ...], int]:
    match = re.fullmatch(r"(trainer|node):(\d+(?:\+\d+)*)@(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither trainer:RANK@STEP nor node:INDEX@STEP")
    return match[1], tuple(map(int, match[2].split("+"))), int(match[3])
