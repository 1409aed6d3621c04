"""``python -m tests.proof.chaos``: break a small training job in every way there is; is it still exact?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from holdfast.cli.arguments import Parser, input_file, output_file
from holdfast.cli.main import main
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="python -m tests.proof.chaos", description="Breaks a small job on virtual nodes.")
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="name the scenarios, and the kinds of faults")
    add_json(listing)
    listing.set_defaults(run=show_list)
    run = actions.add_parser(
        "run",
        help="run scenarios",
        description="Trains a small job on virtual nodes of this machine, undisturbed and with faults, for each "
        "scenario. Status 0 only if every run ended identical to the last bit, no protected step was lost, what was "
        "beyond parity failed loudly, nothing hung, and nothing was left behind.",
    )
    run.add_argument(
        "scenarios", nargs="?", help="'all', 'quick', 'campaign', names with commas, or a TOML file (default quick)"
    )
    run.add_argument("--seed", type=int, help="draw a scenario from this seed")
    run.add_argument("--faults", type=int, default=4, help="number of faults in a drawn scenario (default 4)")
    run.add_argument("--double", action="store_true", help="drawn: each fault is followed by one during recovery")
    run.add_argument("--beyond", action="store_true", help="drawn: the last fault takes more than parity can repair")
    run.add_argument("--announced", action="store_true", help="drawn: nodes are drained, and others lost, in turn")
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
    add_json(run)
    run.set_defaults(run=run_scenarios)
    replay = actions.add_parser("replay", help="run again what failed in a report")
    replay.add_argument("report", type=input_file, help="a JSON report of a run")
    add_json(replay)
    replay.set_defaults(run=run_again)
    return parser


def show_list(parsed: argparse.Namespace) -> int:
    """``list``."""
    from tests.proof.chaos.actions import ACTIONS
    from tests.proof.chaos.faults import CATALOGUE
    from tests.proof.chaos.scenario import built_in

    console = console_of(parsed)
    scenarios = built_in()
    rows = [(each.name, each.what, ", ".join(fault.kind for fault in each.faults)) for each in scenarios]
    say(console, Report(("scenario", "what", "faults"), rows, left=3))
    console.print()
    kinds = [
        (kind.name, kind.what + (f" (needs {kind.needs})" if kind.needs else ""), kind.of)
        for kind in CATALOGUE.values()
        if kind.name in ACTIONS
    ]
    say(console, Report(("fault", "what", "of"), kinds, left=3))
    write_json(parsed.json, [{"name": each.name, "what": each.what, "peer": each.peer} for each in scenarios])
    return 0


def run_scenarios(parsed: argparse.Namespace) -> int:
    """``run``."""
    from holdfast.planner.profiles import profile
    from tests.proof.chaos.scenario import choose, draw, several

    mix = profile(parsed.profile) if parsed.profile else None
    drawn = {way: getattr(parsed, way) for way in ("double", "beyond", "announced", "defaults")}
    if parsed.seed is None:
        if any(drawn.values()) or mix or parsed.count != 1:
            raise ConfigError(f"--{', --'.join(drawn)}, --profile and --count are for drawn scenarios: say --seed, too")
        return _run(parsed, choose(parsed.scenarios or "quick"))
    if parsed.scenarios:
        raise ConfigError(f"--seed draws a scenario; leave out {parsed.scenarios!r}, or --seed")
    if parsed.count < 1:
        raise ConfigError(f"--count {parsed.count}: draw at least one")
    if parsed.count > 1:
        return _run(parsed, list(several(parsed.seed, parsed.count, parsed.faults, profile=mix, **drawn)))
    return _run(parsed, [draw(parsed.seed, parsed.faults, profile=mix, **drawn)])


def run_again(parsed: argparse.Namespace) -> int:
    """``replay``."""
    from tests.proof.chaos.scenario import from_json

    try:
        cases = json.loads(parsed.report.read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{parsed.report} is not a report of a run: {error!r}") from error
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
    from tests.proof.chaos.campaign import Campaign, summary
    from tests.proof.chaos.report import markdown, page, told
    from tests.proof.chaos.scenario import replay_command, to_json

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


if __name__ == "__main__":
    sys.exit(main(parser=make_parser()))
