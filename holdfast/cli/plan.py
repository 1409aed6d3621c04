"""``holdfast plan``, also called ``tune``: how often to take snapshots, how to protect them, and what that takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import input_file, rate, size, some_time
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.cli.rates import add_interference, add_measured, add_rates, cores_here, read_measured, share, smp_of
from holdfast.planner.costs import Assumptions, Costs, assume, from_measured
from holdfast.planner.failures import (
    CLASSES,
    DAY_S,
    FailureModel,
    from_profile,
    learn,
    parse_log,
    span,
)
from holdfast.planner.measured import Measured
from holdfast.planner.model import PRESETS, STATE_BYTES, parse_shape, state_bytes
from holdfast.planner.plan import CORES, Recommendation, Targets, recommend
from holdfast.planner.profiles import PROFILES, PUBLISHED, profile
from holdfast.planner.rates import KIND, SmpRates, basis
from holdfast.planner.reasons import reasons, survival_text
from holdfast.planner.survival import PLACEMENTS, Domains
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import amount, duration
from holdfast.snapshot.resume.arrange import parse_protect

DEFAULT_NODES = 8
MOST_NODES = 100_000
"""For as many it computes for a minute."""
GOES_BACK = {"process": "a crash", "memory": "a lost node", "beyond": "a loss beyond memory"}


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    plan = commands.add_parser(
        "plan",
        aliases=["tune"],
        help="how often to take snapshots, how to protect them, and what that takes",
        description="Recommends the interval between snapshots, the code k+m, slots, memory and SMP cores of a job, "
        "and says what to expect and why. It needs the time of a step and the state, or a profile by holdfast profile. "
        "What was not measured is assumed, and named. docs/tuning.md derives every formula. "
        "tune is the same command.",
        epilog="holdfast plan --model 70b --nodes 8 --step 12s; "
        "or measured: holdfast profile -- torchrun ... train.py, then holdfast plan --profile profile.json",
    )
    job = plan.add_argument_group("the job")
    job.add_argument(
        "--profile", type=input_file, metavar="FILE", help="what holdfast profile measured on your job; else --step"
    )
    job.add_argument("--step", type=some_time, metavar="TIME", help="a step without snapshots, such as 12s")
    job.add_argument("--state", type=size, metavar="SIZE", help="state of one node, such as 98GB; or --model")
    job.add_argument(
        "--model", help=f"{', '.join(PRESETS)}, or layers=,hidden=,inner=,heads=,kv_heads=,vocab=,experts="
    )
    job.add_argument("--optimizer", default="adam", help=f"of --model: {', '.join(STATE_BYTES)} (default adam)")
    job.add_argument("--nodes", type=int, metavar="N", help=f"(default: those of the profile, or {DEFAULT_NODES})")
    job.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="R",
        help="nodes that hold the same state: all under DDP, the replicas of HSDP (default 1). Each copies its share",
    )
    job.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(default 8)")
    rates = plan.add_argument_group("the machine")
    add_measured(rates)
    add_rates(rates)
    rates.add_argument(
        "--device-rate", type=rate, default="25GB/s", metavar="RATE", help="one GPU to host memory (default 25GB/s)"
    )
    rates.add_argument(
        "--persist-rate", type=rate, default="0", metavar="RATE", help="a node to storage (default 0: no such tier)"
    )
    add_interference(rates)
    failures = plan.add_argument_group("what fails, and how long it takes to come back")
    names = ", ".join(PROFILES)
    failures.add_argument("--failures", default=PUBLISHED, metavar="NAME", help=f"of {names} (default {PUBLISHED})")
    failures.add_argument(
        "--mtbf",
        type=some_time,
        metavar="TIME",
        help="mean time between failures of one node, such as 1000d; --failures then only says what fails",
    )
    failures.add_argument(
        "--log", type=input_file, metavar="CSV", help="own incidents: time and class or cause; see docs/tuning.md"
    )
    failures.add_argument("--log-nodes", type=int, metavar="N", help="nodes of the job of the log (default --nodes)")
    failures.add_argument(
        "--log-span", type=some_time, metavar="TIME", help="what the log covers, such as 90d (default: from its lines)"
    )
    failures.add_argument(
        "--domain-nodes", type=int, default=2, metavar="N", help="nodes that fail together, as a rack (default 2)"
    )
    failures.add_argument(
        "--placement", default="neighbours", metavar="HOW", help=f"{', '.join(PLACEMENTS)} (default neighbours)"
    )
    failures.add_argument(
        "--restart", type=some_time, default="5min", metavar="TIME", help="from dead processes to the next step (5min)"
    )
    failures.add_argument(
        "--rebuild", type=some_time, default="10min", metavar="TIME", help="from a lost node to the next step (10min)"
    )
    aims = plan.add_argument_group("what is wanted")
    aims.add_argument(
        "--overhead-budget", type=share, default="1%", metavar="SHARE", help="of training time; 0: any (default 1%%)"
    )
    aims.add_argument("--memory-budget", type=size, metavar="SIZE", help="shared memory of a node (default: any)")
    aims.add_argument(
        "--target-survival",
        type=share,
        default="0.999",
        metavar="SHARE",
        help="of what is in memory, for 30 days (default 0.999)",
    )
    aims.add_argument(
        "--protect", default="choose", metavar="CODE", help="choose, or k+m, copies:r, auto, none (default choose)"
    )
    aims.add_argument("--generations", type=int, default=1, help="protected snapshots that are kept (default 1)")
    plan.add_argument("--seed", type=int, default=1, metavar="N", help="of the Monte Carlo (default 1)")
    add_json(plan)
    plan.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    profiled, smp = _profile(parsed), smp_of(parsed, parsed.measured)
    default = profiled.nodes if profiled is not None else DEFAULT_NODES
    nodes = parsed.nodes if parsed.nodes is not None else default
    if not 1 <= nodes <= MOST_NODES or parsed.gpus_per_node < 1:
        raise ConfigError(
            f"{nodes} nodes of {parsed.gpus_per_node} GPUs: --nodes is 1 to {MOST_NODES}, --gpus-per-node 1 or more"
        )
    if not 1 <= parsed.replicas <= nodes:
        raise ConfigError(f"--replicas {parsed.replicas} on {nodes} nodes: choose 1 to {nodes}")
    costs = _costs(parsed, profiled, smp, nodes)
    model = _failures(parsed, nodes)
    domains = Domains(parsed.domain_nodes, parsed.placement)
    targets = _targets(parsed, nodes)
    found = recommend(costs, model, nodes, domains, targets)
    found = replace(found, why=tuple(reasons(found, model, domains, targets, parsed.replicas)))
    used = smp.with_cores(found.setting.cores) if found.setting.cores else None
    console = console_of(parsed)
    say(console, *show(parsed, found), *([" ".join(basis(used, cores_here()))] if used else []))
    job = {"model": parsed.model, "nodes": nodes, "gpus_per_node": parsed.gpus_per_node, "step_s": found.costs.step_s}
    write_json(parsed.json, found.to_json() | {"job": job, "rates": (used or smp).to_json()})
    return 0


def show(parsed: argparse.Namespace, found: Recommendation) -> Iterator[Any]:
    """What to do, what to expect, what else there is, and why."""
    setting, costs = found.setting, found.costs
    code, state = setting.code, costs.state_bytes
    gpus = f"{found.nodes} x {parsed.gpus_per_node} GPUs"
    what = f"{parsed.model}, {amount(state * found.nodes)} of state, " if parsed.model else ""
    times = f"{setting.memory_bytes / state:.3g} times its state"
    advice = [
        ("interval", f"every {_count(setting.periods[0], 'step')} ({duration(found.interval_s)})"),
        ("protect", f"{code}, {_groups(code.sizes)}" if code.parity else "none: processes only"),
        ("protect_every", _how_often(found.encode_every)),
        ("slots", str(setting.slots)),
        ("memory", f"{amount(setting.memory_bytes)} a node, {times}"),
        ("SMP cores", f"{setting.cores:.3g} a node" if setting.cores else "as measured"),
        ("storage", f"every {duration(setting.periods[-1] * costs.step_s)}" if found.persist_every else "none"),
        ("spare nodes", str(found.spares)),
    ]
    yield Report(
        ("recommended", ""),
        advice,
        f"{what}{amount(state)} a node on {gpus}, a step of {duration(costs.step_s)}",
        left=2,
    )
    back = ", ".join(
        f"{GOES_BACK[level.name]} {duration(seconds)}"
        for level, seconds in zip(setting.levels, found.going_back_s, strict=True)
    )
    yield (
        f"Snapshots take {found.overhead:.2%} of the time. Effective training time {found.played.mean:.2%} ± "
        f"{found.played.error:.2%} (Monte Carlo, seed {found.seed}): {duration((1 - found.played.mean) * DAY_S)} lost "
        f"a day, with restarts. Work done again, on average: {back}."
    )
    yield Report(
        ("protection", "code", "slots", "memory of a node", "survives 30 days"),
        [
            (
                each.name,
                str(each.code),
                str(each.slots),
                f"{amount(each.memory_bytes)} ({each.memory_bytes / state:.2f} x state)",
                survival_text(each.code.risk),
            )
            for each in found.compared
        ],
        left=2,
    )
    yield Report(("", ""), [("*", reason) for reason in found.why], "Why", left=2)


def _count(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count:,} {noun}s"


def _how_often(every: int) -> str:
    return f"{every}" + (": every snapshot" if every == 1 else f": one in {every}") if every else "-"


def _groups(sizes: tuple[int, ...]) -> str:
    counts = {size: sizes.count(size) for size in sorted(set(sizes))}
    return " and ".join(f"{_count(n, 'group') if n > 1 else 'a group'} of {size} nodes" for size, n in counts.items())


def _profile(parsed: argparse.Namespace) -> Measured | None:
    """The profile of the job, if there is one."""
    if parsed.profile is None:
        return None
    if parsed.step or parsed.state or parsed.model:
        raise ConfigError("--step, --state or --model together with --profile, which has what they say: drop one")
    try:
        data = read_measured(parsed.profile)
        if isinstance(data, dict) and data.get("kind") == KIND:
            raise ConfigError(f"it holds rates of a machine, by {KIND}: give it with --measured")
        return Measured.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"--profile {parsed.profile}: {error}") from error


def _costs(parsed: argparse.Namespace, profiled: Measured | None, smp: SmpRates, nodes: int) -> Mapping[float, Costs]:
    """What snapshots cost, for each number of cores to consider: with a profile of encoding only that measured."""
    if parsed.state and parsed.model:
        raise ConfigError("--state and --model both say how large the state is: drop one")
    state = parsed.state / parsed.replicas if parsed.state else None
    if parsed.model:
        state = state_bytes(parse_shape(parsed.model), parsed.optimizer) / nodes
    assumptions = Assumptions(
        step_s=parsed.step,
        state_bytes=state,
        gpus_per_node=parsed.gpus_per_node,
        device_rate=parsed.device_rate,
        persist_rate=parsed.persist_rate,
        interference=parsed.interference,
        restart_s=parsed.restart,
        rebuild_s=parsed.rebuild,
    )
    if profiled is not None and profiled.parity:
        return {0.0: from_measured(profiled, assumptions)}
    found = {}
    for cores in (smp.cores,) if smp.given_cores else CORES:
        with_cores = smp.with_cores(cores)
        rated = replace(assumptions, copy_rate=with_cores.digest, network_rate=with_cores.network)
        found[cores] = assume(rated) if profiled is None else from_measured(profiled, rated)
    return found


def _failures(parsed: argparse.Namespace, nodes: int) -> FailureModel:
    prior = from_profile(profile(parsed.failures), parsed.mtbf)
    if parsed.log is None:
        return prior
    incidents = parse_log(_text_of(parsed.log))
    span_s = parsed.log_span or span(incidents)
    estimate = learn(incidents, parsed.log_nodes if parsed.log_nodes is not None else nodes, span_s, prior)
    seen = ", ".join(f"{kind} {estimate.events[kind]}" for kind in CLASSES)
    return replace(estimate.model, source=f"{estimate.model.source} ({seen})")


def _targets(parsed: argparse.Namespace, nodes: int) -> Targets:
    code = None
    if parsed.protect != "choose":
        chosen = parse_protect(parsed.protect).for_nodes(nodes)
        code = (chosen.data, chosen.parity) if chosen.parity and nodes > 1 else (0, 0)
    return Targets(
        overhead_budget=parsed.overhead_budget or None,
        memory_budget=parsed.memory_budget,
        target_survival=parsed.target_survival,
        code=code,
        generations=parsed.generations,
        seed=parsed.seed,
    )


def _text_of(log: Path) -> str:
    try:
        return log.read_text("utf-8-sig")  # spreadsheets write a mark before the header
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--log {log}: {error}; give a text file that can be read") from error
