"""``holdfast chaos``: inject faults into your own training job, and check that it is still exact."""

from __future__ import annotations

import argparse
import random
import shlex
from typing import Any

from holdfast.cli.arguments import add_runs
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    chaos = commands.add_parser("chaos", help="inject faults into a training job and check that it is still exact")
    actions = chaos.add_subparsers(title="what to do", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="name the kinds of faults")
    add_json(listing)
    listing.set_defaults(run=show_list)
    run = actions.add_parser(
        "run",
        help="run your training command with faults",
        description="Runs the command after --, which enters InMemorySnapshot, undisturbed and then with faults drawn "
        "from --seed. Status 0 only if it ended identical to the last bit, no protected step was lost, nothing hung, "
        "and nothing was left behind.",
        epilog="holdfast chaos run --seed 7 --faults 4 -- torchrun --nproc-per-node=2 train.py",
    )
    run.add_argument("--seed", type=int, help="draw the faults from this seed (default: one that is printed)")
    run.add_argument("--faults", type=int, default=4, help="number of faults (default 4)")
    double = "each fault that ends training is followed by one in the recovery"
    run.add_argument("--double", action="store_true", help=double)
    run.add_argument("--steps", type=int, default=16, help="number of steps (default 16)")
    run.add_argument("--nodes", type=int, default=1, help="number of virtual nodes to start it on (default 1)")
    run.add_argument(
        "--other",
        default="",
        metavar="WORD",
        help="also kill other processes whose command line contains WORD",
    )
    add_runs(run)
    add_json(run)
    run.set_defaults(run=run_command, command=[])


def show_list(parsed: argparse.Namespace) -> int:
    """``holdfast chaos list``."""
    from holdfast.chaos.faults import CATALOGUE

    kinds = Report(("name", "what", "of"), [(kind.name, kind.what, kind.of) for kind in CATALOGUE.values()], left=3)
    say(console_of(parsed), kinds)
    write_json(parsed.json, kinds.records())
    return 0


def run_command(parsed: argparse.Namespace) -> int:
    """``holdfast chaos run --seed N -- COMMAND``."""
    if not parsed.command:
        raise ConfigError("no command given: holdfast chaos run -- python train.py")
    console = console_of(parsed, soft_wrap=True)
    console.print("importing torch")
    from holdfast.audit import show
    from holdfast.chaos.user.command import CommandPlan
    from holdfast.chaos.user.run import run

    seed = parsed.seed if parsed.seed is not None else random.SystemRandom().randrange(1 << 20)
    plan = CommandPlan(
        tuple(parsed.command),
        seed,
        parsed.faults,
        parsed.double,
        parsed.other,
        parsed.steps,
        parsed.nodes,
        tuple(parsed.ignore),
        parsed.deadline,
    )
    console.print(f"seed {seed}")
    verdict = run(plan, console.print)
    seen = verdict.run
    options = [f"--seed {seed} --faults {plan.faults} --steps {plan.steps}", *["--double"] * plan.double]
    options += [f"--nodes {plan.nodes}"] * (plan.nodes > 1)
    options += [f"--other {shlex.quote(plan.other)}"] * bool(plan.other)
    options += [f"--ignore {shlex.quote(pattern)}" for pattern in plan.ignore]
    replay = f"holdfast chaos run {' '.join(options)} -- {shlex.join(plan.command)}"
    write_json(parsed.json, verdict.to_json(replay))
    looked = ", ".join(f"{check} {count}" for check, count in verdict.checks.items())
    console.print(f"checks, and how often each looked at something: {looked}")
    for problem in verdict.problems:
        console.print(f"FAILED: {problem}", style="red")
    if verdict.problems:
        show(console, verdict.report)
        console.print(f"to see it again: {replay}")
        return 1
    again = sum(verdict.steps_again)
    console.print(
        f"identical: {len(seen.injected)} faults, {seen.starts - 1} times started again, {again} steps done "
        f"again, {verdict.report.compared:,} values compared"
    )
    return 0
