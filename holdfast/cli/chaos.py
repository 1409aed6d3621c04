"""``holdfast chaos``: break a training job in many ways, and check that it ends as if nothing had happened."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from holdfast.cli.arguments import deadline, input_file, output_file
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.smp_daemon.shared.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    chaos = commands.add_parser("chaos", help="kill, hang and damage a job in every way there is; is it still exact?")
    actions = chaos.add_subparsers(title="what to do", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="name the scenarios, and the kinds of faults")
    add_json(listing)
    listing.set_defaults(run=show_list)
    run = actions.add_parser(
        "run",
        help="run scenarios",
        description="Trains a small job on virtual nodes of this machine, undisturbed and with faults, for each "
        "scenario; or, after --, a training command of your own that enters InMemorySnapshot, with faults drawn from "
        "--seed. Status 0 only if every run ended identical to the last bit, no protected step was lost, what was "
        "beyond parity failed loudly, nothing hung, and nothing was left behind.",
        epilog="Your own: holdfast chaos run --seed 7 --faults 4 -- torchrun --nproc-per-node=2 train.py",
    )
    run.add_argument(
        "scenarios", nargs="?", help="'all', 'quick', 'campaign', names with commas, or a TOML file (default quick)"
    )
    run.add_argument("--seed", type=int, help="draw a scenario from this seed")
    run.add_argument("--faults", type=int, default=4, help="number of faults in a drawn scenario (default 4)")
    run.add_argument("--double", action="store_true", help="drawn: each fault is followed by one during recovery")
    run.add_argument("--beyond", action="store_true", help="drawn: the last fault takes more than parity can repair")
    run.add_argument("--defaults", action="store_true", help="drawn: with the hook's own options, as users start it")
    run.add_argument("--profile", help="drawn: as a published study saw failures: llama3, ft-hsdp, rsc-1, ...")
    run.add_argument(
        "--count",
        type=int,
        default=1,
        help="drawn: number of scenarios, from consecutive seeds; a mix, unless an option says which kind (default 1)",
    )
    run.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th scenario, from the I-th on")
    run.add_argument("--html", type=output_file, metavar="FILE", help="also write a self-contained HTML report")
    run.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the table as Markdown")
    run.add_argument("--steps", type=int, default=16, help="your own command: number of steps (default 16)")
    run.add_argument(
        "--nodes", type=int, default=1, help="your own command: number of virtual nodes to start it on (default 1)"
    )
    run.add_argument(
        "--other",
        default="",
        metavar="WORD",
        help="your own command: also kill other processes whose command line contains WORD",
    )
    run.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="your own command: do not compare names that contain a match of this regular expression; may be repeated",
    )
    run.add_argument(
        "--deadline",
        type=deadline,
        default="10min",
        metavar="TIME",
        help="your own command: for each run (default 10min)",
    )
    add_json(run)
    run.set_defaults(run=run_scenarios, command=[])
    replay = actions.add_parser("replay", help="run again what failed in a report")
    replay.add_argument("report", type=input_file, help="a JSON report of `holdfast chaos run`")
    add_json(replay)
    replay.set_defaults(run=run_again)


def show_list(parsed: argparse.Namespace) -> int:
    """``holdfast chaos list``."""
    from holdfast.chaos.faults import Where, injected_by
    from holdfast.chaos.scenario import built_in

    console = console_of(parsed)
    scenarios = built_in()
    table = Table("scenario", "what", "faults", box=None, pad_edge=False)
    for scenario in scenarios:
        table.add_row(scenario.name, scenario.what, ", ".join(fault.kind for fault in scenario.faults))
    console.print(table)
    console.print()
    kinds = Table("fault", "what", "of", box=None, pad_edge=False)
    for kind in injected_by(Where.CLUSTER).values():
        kinds.add_row(kind.name, kind.what + (f" (needs {kind.needs})" if kind.needs else ""), kind.of)
    console.print(kinds)
    write_json(parsed.json, [{"name": each.name, "what": each.what, "peer": each.peer} for each in scenarios])
    return 0


def run_scenarios(parsed: argparse.Namespace) -> int:
    """``holdfast chaos run``."""
    from holdfast.chaos.scenario import choose, draw, several
    from holdfast.snapshot.interval.profiles import profile

    if parsed.command:
        return _run_command(parsed)
    mix = profile(parsed.profile) if parsed.profile else None
    if parsed.seed is None:
        if parsed.double or parsed.beyond or parsed.defaults or mix or parsed.count != 1:
            raise ConfigError(
                "--double, --beyond, --defaults, --profile and --count are for drawn scenarios: say --seed, too"
            )
        return _run(parsed, choose(parsed.scenarios or "quick"))
    if parsed.scenarios:
        raise ConfigError(f"--seed draws a scenario; leave out {parsed.scenarios!r}, or --seed")
    if parsed.count < 1:
        raise ConfigError(f"--count {parsed.count}: draw at least one")
    how = {"double": parsed.double, "beyond": parsed.beyond, "defaults": parsed.defaults, "profile": mix}
    if parsed.count > 1:
        return _run(parsed, list(several(parsed.seed, parsed.count, parsed.faults, **how)))
    return _run(parsed, [draw(parsed.seed, parsed.faults, **how)])


def _run_command(parsed: argparse.Namespace) -> int:
    """``holdfast chaos run --seed N -- COMMAND``."""
    console = console_of(parsed, soft_wrap=True)
    console.print("importing torch")
    from holdfast.audit import show
    from holdfast.chaos.user.command import CommandPlan
    from holdfast.chaos.user.run import run

    for_scenarios = (parsed.scenarios, parsed.beyond, parsed.defaults, parsed.profile, parsed.html, parsed.markdown)
    if any(for_scenarios) or parsed.count != 1:
        raise ConfigError(
            "a command of your own takes --seed, --faults, --double, --steps, --nodes, --other, --ignore, --deadline, "
            "--json"
        )
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


def run_again(parsed: argparse.Namespace) -> int:
    """``holdfast chaos replay``."""
    from holdfast.chaos.scenario import from_json

    try:
        cases = json.loads(parsed.report.read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{parsed.report} is not a report of `holdfast chaos run --json`: {error!r}") from error
    failed = [from_json(case["definition"]) for case in cases if case["problems"]]
    if not failed:
        raise ConfigError(f"nothing failed in {parsed.report}")
    parsed.html = parsed.markdown = None
    parsed.shard = "1/1"
    return _run(parsed, failed)


def shard(scenarios: Sequence[Any], text: str) -> Sequence[Any]:
    """Every N-th scenario from the I-th on; `text` is ``I/N``. Raises `ConfigError`."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise ConfigError(f"--shard takes I/N, as 1/2 and 2/2 for two halves, not {text!r}")
    return scenarios[int(first) - 1 :: int(count)]


def _run(parsed: argparse.Namespace, scenarios: Sequence[Any]) -> int:
    from holdfast.chaos.campaign import Campaign, summary
    from holdfast.chaos.scenario import replay_command, to_json
    from holdfast.cli.chaos_report import markdown, page, told

    scenarios = shard(scenarios, parsed.shard)
    console = console_of(parsed)
    began = time.monotonic()
    verdicts = []
    console.print("importing torch")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Campaign() as campaign, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(scenarios))
        try:
            for number, scenario in enumerate(scenarios, 1):
                progress.update(bar, description=scenario.name)
                if not console.is_terminal:
                    console.print(f"[{number}/{len(scenarios)}] {scenario.name} ...", soft_wrap=True)
                verdict = campaign.run(scenario, replay_command(scenario))
                verdicts.append(verdict)
                progress.advance(bar)
                console.print(Text(f"[{number}/{len(scenarios)}] ").append(line(verdict)), soft_wrap=True)
        except KeyboardInterrupt:
            failed = sum(not verdict.held for verdict in verdicts)
            console.print(f"{len(verdicts)} of {len(scenarios)} scenarios were run, of which {failed} failed")
            raise
    figures = summary(verdicts, time.monotonic() - began)
    console.print()
    *plain, (_, checks) = told(figures)
    console.print(", ".join(f"{name} {value}" for name, value in plain))
    console.print(f"checks, and how often each looked at something: {checks}")
    for command in figures["replay"]:
        console.print(f"to see it again: {command}", style="red")
    cases = [{**verdict.to_json(), "definition": to_json(verdict.scenario)} for verdict in verdicts]
    write_json(parsed.json, {**figures, "cases": cases})
    if parsed.html:
        parsed.html.write_text(page(verdicts, figures))
    if parsed.markdown:
        parsed.markdown.write_text(markdown(verdicts, figures))
    return 1 if figures["failed"] else 0


def line(verdict: Any) -> Text:
    """A verdict as one line."""
    name = verdict.scenario.name
    if verdict.skipped:
        return Text.assemble(("skipped", "yellow"), f" {name}: {verdict.skipped}")
    if not verdict.held:
        return Text.assemble(("FAILED", "red"), f" {name}: {'; '.join(verdict.problems)[:2000]}")
    again = sum(verdict.steps_again)
    if verdict.scenario.beyond_parity:
        told = f", as it must: {name} ({verdict.injected} faults, {verdict.seconds:.1f} s)"
        return Text.assemble(("failed loudly", "green"), told)
    settings = ""
    if verdict.scenario.defaults and verdict.held_up is not None:
        settings = f"a snapshot every {verdict.interval} steps at the rarest, held up {verdict.held_up:.1%}, "
    return Text.assemble(
        ("identical", "green"),
        f" {name} ({verdict.injected} faults, {verdict.restarts} restarts, {again} steps again, "
        f"{settings}{verdict.seconds:.1f} s)",
    )
