"""``holdfast plan``: how much time and memory snapshots of a job would take, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from holdfast.cli.arguments import parse_protect_every, rate, time
from holdfast.cli.arguments import size as size_in_bytes
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.cli.rates import add_measured, add_rates, say_basis, smp_of
from holdfast.planner.advice import advice
from holdfast.planner.rates import SmpRates
from holdfast.planner.sizing import (
    BASE_BYTES,
    PRESETS,
    RECOMPUTE,
    STATE_BYTES,
    Machine,
    ModelJob,
    Sizes,
    parse_shape,
    size,
)
from holdfast.planner.slots import SlotChoice, best, choices
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.quantities import amount, duration
from holdfast.snapshot.interval.profiles import PUBLISHED, profile
from holdfast.snapshot.resume.arrange import Protection, parse_protect

Row = tuple[str, ModelJob, Sizes]


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    plan = commands.add_parser(
        "plan",
        help="what snapshots of a model would take: bytes, seconds, memory, the shortest interval",
        description="Computes, before anything runs, how much time and memory the snapshots of a job take, what limits "
        "them, and what to buy. Without --model, compares several models and ways to train them. Rates are our last "
        "measured ones unless --measured names your own, from holdfast bench node.",
    )
    models = ", ".join(PRESETS)
    plan.add_argument("--model", help=f"{models}, or layers=,hidden=,inner=,heads=,kv_heads=,vocab=,experts=ACTIVE/ALL")
    plan.add_argument("--nodes", type=int, default=8, help="(default 8)")
    plan.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    plan.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor parallel size (default 1)")
    plan.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline parallel size (default 1)")
    plan.add_argument("--zero", type=int, default=1, metavar="STAGE", help="0 to 3 (default 1)")
    plan.add_argument("--offload", action="store_true", help="optimizer state lives in host memory")
    plan.add_argument("--optimizer", default="adam", help=f"{', '.join(STATE_BYTES)} (default adam)")
    plan.add_argument(
        "--base",
        default="none",
        help=f"format of frozen weights, if only adapters are trained: {', '.join(BASE_BYTES)} (default none)",
    )
    plan.add_argument("--micro-batch", type=int, default=1, help="samples (default 1)")
    plan.add_argument("--sequence", type=int, default=4096, help="tokens (default 4096)")
    plan.add_argument("--recompute", default="selective", help=f"{', '.join(RECOMPUTE)} (default selective)")
    plan.add_argument("--no-flash", action="store_true", help="attention keeps its scores")
    plan.add_argument("--step", default="0", type=time, metavar="TIME", help="how long one takes, such as 12s or 800ms")
    plan.add_argument("--protect", default="auto", help="k+m such as 6+2, copies:r, auto or none (default auto)")
    plan.add_argument("--slots", type=int, default=3, help="slots for each shard (default 3)")
    plan.add_argument(
        "--protect-every",
        default="1",
        metavar="N",
        help="protect one of every N snapshots, or auto: as many as encoding keeps up with (default 1)",
    )
    plan.add_argument("--generations", type=int, default=1, help="protected snapshots that are kept (default 1)")
    plan.add_argument("--persist", action="store_true", help="snapshots are also written to storage")
    plan.add_argument(
        "--device-rate", default="25GB/s", type=rate, metavar="RATE", help="one GPU to host memory (default 25GB/s)"
    )
    plan.add_argument(
        "--copy-rate",
        type=rate,
        metavar="RATE",
        help="memory to memory by one thread, for --offload (default: as measured)",
    )
    add_measured(plan)
    add_rates(plan)
    plan.add_argument(
        "--host-memory",
        default="0",
        type=size_in_bytes,
        metavar="SIZE",
        help="of a node, such as 2TB; warns where the arena is over half",
    )
    plan.add_argument(
        "--gpu-memory",
        type=size_in_bytes,
        default="80GB",
        metavar="SIZE",
        help="of one GPU; warns where it cannot hold what is asked of it (default 80GB)",
    )
    add_json(plan)
    plan.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    smp = smp_of(parsed, parsed.measured)
    machine = Machine(
        parsed.device_rate,
        smp.rates.copy if parsed.copy_rate is None else parsed.copy_rate,
        smp.network,
        parsed.host_memory,
        parsed.gpu_memory,
        smp.digest,
    )
    job = ModelJob(
        parse_shape(parsed.model or "7b"),
        parsed.nodes,
        parsed.gpus_per_node,
        parsed.tensor,
        parsed.pipeline,
        parsed.zero,
        parsed.offload,
        parsed.optimizer,
        parsed.base,
        parsed.micro_batch,
        parsed.sequence,
        parsed.recompute,
        not parsed.no_flash,
        parsed.step,
    )
    protection, every = parse_protect(parsed.protect), parse_protect_every(parsed.protect_every)
    jobs = [(parsed.model, job)] if parsed.model else variants(job)
    rows = [
        (
            name,
            each,
            size(
                each,
                machine,
                protection,
                parsed.slots,
                parsed.generations,
                persists=parsed.persist,
                protect_every=every,
            ),
        )
        for name, each in jobs
    ]
    slots = f"{parsed.slots} slots"
    if every != 1:
        slots += ", one snapshot at a time protected" if every == "auto" else f", one of {every} snapshots protected"
    if parsed.generations > 1:
        slots += f" and {parsed.generations - 1} for older generations"
    if parsed.persist:
        slots += " and one that is written to storage"
    console = console_of(parsed)
    show(console, rows, machine, slots)

    def advised(row: Row) -> list[str]:
        """Advice on what to buy for the job of a row."""
        _, each, sizes = row

        def sized(smp: SmpRates, parity: int) -> Sizes:
            code = Protection(sizes.data + sizes.parity - parity, parity)
            other = replace(machine, network_rate=smp.network, digest_rate=smp.digest)
            return size(each, other, code, parsed.slots, parsed.generations, persists=parsed.persist)

        return list(advice(smp, sizes.parity, each.step_s, sized))

    slowest = max(rows, key=lambda row: row[2].encode_s)
    say_basis(console, smp, [*([f"For {slowest[0]}:"] if len(rows) > 1 else []), *advised(slowest)])
    found = {name: choices_of(each, sizes) for name, each, sizes in rows if sizes.parity}
    if parsed.model and found:
        show_choices(console, *rows[0], found[parsed.model], machine)
    data = [
        {
            "name": name,
            "job": asdict(each),
            "sizes": asdict(sizes),
            "fits_gpu": sizes.device_bytes <= machine.gpu_memory,
            "rates": smp.to_json(),
            "advice": advised((name, each, sizes)),
            "choices": [asdict(choice) for choice in found.get(name, [])],
            "recommended": asdict(choice) if (choice := _best(found.get(name, []), sizes, machine)) else None,
        }
        for name, each, sizes in rows
    ]
    write_json(parsed.json, data)
    return 0


def choices_of(job: ModelJob, sizes: Sizes) -> list[SlotChoice]:
    """What each number of slots and each `protect_every` costs a job that takes snapshots as often as it can: at every
    step, if a copy takes no longer than a step."""
    commit_s = sizes.copy_s + sizes.seal_s
    interval_s = max(job.step_s, sizes.copy_s)
    code = sizes.parity / sizes.data
    return list(choices(interval_s=interval_s, commit_s=commit_s, encode_s=sizes.encode_s, code=code))


def _best(found: list[SlotChoice], sizes: Sizes, machine: Machine) -> SlotChoice | None:
    published = profile(PUBLISHED)
    most = machine.host_memory / 2 / sizes.node_bytes if machine.host_memory else float("inf")
    return best(found, published.memory + published.shock, most)


def show_choices(
    console: Console, name: str, job: ModelJob, sizes: Sizes, found: list[SlotChoice], machine: Machine
) -> None:
    """Print the memory and the cost of each choice, and which one is recommended."""
    chosen = _best(found, sizes, machine)
    head = ("slots", "protect_every", "arena", "skipped", "a crash costs", "a node's loss costs", "")
    cells = [
        [
            str(each.slots),
            str(each.protect_every),
            f"{amount(each.memory * sizes.node_bytes)} ({each.memory:.2f} S)",
            f"{each.skipped:.0%}",
            duration(each.crash_s),
            duration(each.loss_s),
            "recommended" if each == chosen else "",
        ]
        for each in found
    ]
    console.print()
    say(console, Report(head, cells))
    published = profile(PUBLISHED)
    interval = "every step" if job.step_s > sizes.copy_s else f"every {duration(sizes.copy_s)}"
    fits = "" if chosen else f" None of them fits half of a node's {amount(machine.host_memory)} (--host-memory)."
    say(
        console,
        f"\n{name}, a snapshot {interval}, simulated with the decisions that trainers make. 'skipped': snapshots not "
        "taken, for want of a slot. 'a crash costs', \"a node's loss costs\": the work done since the snapshot that "
        f"the job goes back to. Recommended: of the choices that lose at most 10 % more than the best, with failures "
        f"as in {PUBLISHED} ({published.memory + published.shock:.0%} take a node's memory), the one with the least "
        "memory. With 2 slots, a snapshot that is only sealed gives its slot to the next one; a crash while that is "
        f"copied goes back to the protected snapshot.{fits}",
    )


def variants(job: ModelJob) -> list[tuple[str, ModelJob]]:
    """Every preset with ZeRO-3; for 7B, 13B and 70B also the ways to train that "Dissecting the Runtime Performance"
    (arXiv 2311.03687) compares."""
    found = []
    for name, shape in PRESETS.items():
        base = replace(job, shape=shape, zero=3)
        found.append((f"{name} ZeRO-3", base))
        if name in ("7b", "13b", "70b"):
            found += [
                (f"{name} ZeRO-2", replace(base, zero=2)),
                (f"{name} offload", replace(base, offload=True)),
                (f"{name} full recompute", replace(base, recompute="full")),
                (f"{name} no FlashAttention", replace(base, recompute="none", flash=False)),
                (f"{name} 8-bit Adam", replace(base, optimizer="adam-8bit")),
                (f"{name} adapters on 4 bits", replace(base, zero=2, base="4bit")),
            ]
    return found


def show(console: Console, rows: Sequence[Row], machine: Machine, slots: str) -> None:
    """Print the table, its assumptions (`slots` is a description in words), and warnings about what does not fit."""
    head = ("", "on GPU", "captured", "a node", "arena", "copied", "safe", "every")
    cells = []
    for name, _, sizes in rows:
        every = f"{sizes.interval_steps} steps" if sizes.interval_steps else _narrow(sizes.interval_s)
        cells.append(
            [
                name,
                amount(sizes.device_bytes),
                amount(sizes.gpu_bytes),
                amount(sizes.node_bytes),
                amount(sizes.arena_bytes),
                _narrow(sizes.copy_s),
                _narrow(sizes.protected_s) if sizes.parity else "-",
                every,
            ]
        )
    say(console, Report(head, cells))
    first = rows[0]
    code = f"{first[2].data}+{first[2].parity}" if first[2].parity else "no parity: processes only"
    say(
        console,
        f"\n{first[1].nodes} nodes of {first[1].gpus_per_node} GPUs, {code}, {slots}; "
        f"{amount(machine.device_rate)}/s from a GPU, {amount(machine.copy_rate)}/s in memory. 'on GPU' is an estimate "
        "of what each holds, 'captured' each GPU's share of a snapshot, 'arena' the shared memory of a node, 'safe' "
        "when a snapshot is protected, 'every' the shortest interval at which each is.",
    )
    for warning in warnings(rows, machine):
        say(console, warning)


def _narrow(seconds: float) -> str:
    """A duration without spaces, so that the table fits 80 columns."""
    return duration(seconds).replace(" ", "")


def warnings(rows: Sequence[Row], machine: Machine) -> Iterator[str]:
    """Warnings about what does not fit: one line for GPUs, one for arenas. Pure."""
    large = [
        f"{name} {amount(sizes.device_bytes)}" for name, _, sizes in rows if sizes.device_bytes > machine.gpu_memory
    ]
    if large:
        yield (
            f"WARNING: more than the {amount(machine.gpu_memory)} of a GPU (--gpu-memory): {', '.join(large)}: use "
            "more GPUs, --tensor, --pipeline, a higher --zero, --recompute full or a smaller --micro-batch"
        )
    arenas = [
        f"{name} {amount(sizes.arena_bytes)}"
        for name, _, sizes in rows
        if machine.host_memory and sizes.arena_bytes > machine.host_memory / 2
    ]
    if arenas:
        yield (
            f"WARNING: arenas of more than half of a node's {amount(machine.host_memory)} (--host-memory): "
            f"{', '.join(arenas)}: use more nodes, fewer --slots or --generations or less parity"
        )
