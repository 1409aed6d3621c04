"""The matrix: kills training jobs of many kinds, restores them from memory, and compares to the last bit.

Each cell is one way to train. It runs twice on virtual nodes: undisturbed without the hook, and with it while a trainer
and then a whole node are killed in the middle of steps. All losses and the final state of all ranks must be the same.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from holdfast.chaos.cluster import TARGET, History, VirtualCluster
from holdfast.chaos.differences import compare, steps_done_again
from holdfast.chaos.launcher import Launcher
from holdfast.extras import has
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError

GPT = "tests.proof.gpt:FullGpt"
TRAINER_STEP, NODE_STEP = 4, 7
"""The steps in the middle of which a trainer and a node are killed."""

REAL_MUON = (0, 17)
"""The first release of megatron-core whose Muon needs the real package: the stand-in only fits earlier releases."""

STEPS = 9
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train.

    Attributes:
        job, options: ``module:Class`` of a `chaos.drill.Job`, and its options.
        ranks: number of trainers; two on each node, or one if there are fewer than four.
        quick: whether the cell is in the quick selection.
        drain: see `chaos.drill.train`.
        since: the first release of megatron-core that supports it.
    """

    name: str
    job: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    drain: bool = False
    since: tuple[int, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        return 2 if self.ranks >= 4 else 1

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def _torch(name: str, job: str, ranks: int, *, quick: bool = False, **options: Any) -> Cell:
    return Cell(name, f"tests.proof.jobs.{job}", ranks, options, quick, drain=True)


def _gpt(name: str, ranks: int, *, quick: bool = False, since: tuple[int, ...] = (), **options: Any) -> Cell:
    return Cell(name, GPT, ranks, options, quick, since=since)


CELLS: tuple[Cell, ...] = (
    _gpt("TP2", 2, quick=True),
    _gpt("PP2", 2, tensor=1, pipeline=2),
    _gpt("DP4", 4, tensor=1),
    _gpt("TP2 PP2 DP2", 8, pipeline=2, quick=True),
    _gpt("TP2 PP2 DP2, fp32", 8, pipeline=2, dtype="fp32"),
    _gpt("TP2 PP2 DP2, fp16", 8, pipeline=2, dtype="fp16"),
    _gpt("TP2 PP2 DP2, no distributed optimizer", 8, pipeline=2, distributed=False),
    _gpt("TP2 PP2 DP2, fp32, no distributed optimizer", 8, pipeline=2, dtype="fp32", distributed=False),
    _gpt("TP2 DP2, fp16, no distributed optimizer", 4, dtype="fp16", distributed=False, quick=True),
    _gpt("virtual pipeline", 4, tensor=1, pipeline=2, virtual=2, layers=4, quick=True),
    _gpt("sequence parallel", 4, sequence=True),
    _gpt("recompute", 4, recompute=True),
    _gpt("overlap, TP2 DP4", 8, overlap=True),
    _gpt("overlap, PP2 DP2", 4, tensor=1, pipeline=2, overlap=True, quick=True),
    _gpt("two optimizer instances, DP4", 4, tensor=1, instances=2),
    _gpt("Llama, tied embeddings, TP2 PP2 DP2", 8, pipeline=2, llama=True, tied=True),
    _gpt("tied embeddings, PP2 DP2", 4, tensor=1, pipeline=2, tied=True),
    _gpt("MoE, TP2 PP2 DP2 EP2", 8, pipeline=2, sequence=True, experts=4, expert_parallel=2, expert_tensor=1),
    _gpt(
        "MoE, TP2 EP2, experts cut in two: none has a replica",
        4,
        sequence=True,
        experts=4,
        expert_parallel=2,
        expert_tensor=2,
        expert_capacity=1.0,
    ),
    _gpt(
        "MoE with expert bias, PP2 EP2",
        4,
        tensor=1,
        pipeline=2,
        experts=4,
        expert_parallel=2,
        expert_bias=True,
        quick=True,
    ),
    _gpt("CPU offload of all, DP2", 2, tensor=1, offload=1.0),
    _gpt("CPU offload of a half, overlap, TP2 DP2", 4, offload=0.5, offload_overlap=True, quick=True),
    _gpt("precision aware, bf16 moments, TP2 DP2", 4, aware="bf16"),
    _gpt("precision aware, fp16 moments and main parameters, DP2", 2, tensor=1, aware="fp16"),
    _gpt("precision aware, remainders, overlap, TP2 DP2", 4, aware="remainders", overlap=True, quick=True),
    _gpt("weights in 8 bits, delayed scaling, TP2 DP2", 4, fp8="delayed", quick=True),
    _gpt("weights in 8 bits, a scale for each tensor, DP2", 2, tensor=1, fp8="tensorwise"),
    _gpt("weights in 8 bits, MXFP8, PP2 DP2", 4, tensor=1, pipeline=2, fp8="mxfp8"),
    _gpt("Muon, TP2 DP2", 4, muon=True, distributed=False),
    _gpt("layer-wise Muon, TP2 DP2", 4, muon=True, distributed=False, layer_wise=True, quick=True),
    _gpt(
        "layer-wise Muon, MoE, DP4 EP2",
        4,
        tensor=1,
        experts=4,
        expert_parallel=2,
        muon=True,
        distributed=False,
        layer_wise=True,
    ),
    _gpt(
        "layer-wise Muon in buffers, overlap, TP2 DP2",
        4,
        since=(0, 19),
        muon=True,
        distributed=False,
        layer_wise=True,
        layout=True,
        overlap=True,
    ),
    _torch("one process, foreach", "plain:Plain", 1, quick=True),
    _torch("one process, fused", "plain:Plain", 1, adam="fused"),
    _torch("one process, amsgrad, EMA, two optimizers", "plain:Plain", 1, adam="amsgrad", ema=True, optimizers=2),
    _torch("independent ranks, EMA", "plain:Plain", 2, ema=True),
    _torch("DDP", "plain:Replicas", 2, quick=True),
    _torch("DDP, two optimizers", "plain:Replicas", 4, optimizers=2),
    _torch("FSDP2", "plain:Shards", 4, quick=True),
    _torch("FSDP2, fused", "plain:Shards", 2, adam="fused"),
    _torch("LoRA-FA", "lora_fa:LoraFa", 2, quick=True),
    _torch("ACP-SGD", "acp_sgd:AcpSgd", 2, quick=True),
    _torch("Eva", "eva:EvaJob", 2, quick=True),
    _torch("FedImpro, server", "fed_impro:FedImpro", 2, quick=True),
    _torch("accumulated sub-batches (SJF-BSBF)", "shared_host:SharedHost", 2, quick=True),
    _torch("ZeRO-1 under DDP, LoRA", "zero:Zero", 2, quick=True),
    _torch("ZeRO-1 under DDP, LoRA, 4 ranks", "zero:Zero", 4),
    _torch("pool of unequal stages", "pool:Pool", 3, quick=True),
    _torch("pool of unequal stages, 4 nodes", "pool:Pool", 4),
)


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """The outcome of a cell.

    Attributes:
        difference: how the run differed from the undisturbed one, or why it failed; empty if they are the same.
        restored: the step from which every rank resumed at each restart, and how it got its state.
        skipped: what the cell needs that is missing here; empty if it ran.
    """

    cell: Cell
    difference: str
    restored: tuple[tuple[int, str], ...]
    lost_steps: int
    seconds: float
    skipped: str = ""


def choose(names: str) -> tuple[Cell, ...]:
    """Cells by ``"all"``, ``"quick"``, ``"torch"`` (those that need only torch), or a list such as ``"TP2;PP2"``.

    Raises:
        ConfigError: there is no such cell.
    """
    if names == "all":
        return CELLS
    if names == "torch":
        return tuple(cell for cell in CELLS if cell.job != GPT)
    if names == "quick":
        return tuple(cell for cell in CELLS if cell.quick)
    known = {cell.name: cell for cell in CELLS}
    asked = [name.strip() for name in names.split(";")]
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(f"there is no cell {unknown[0]!r}: choose from {'; '.join(known)}")
    return tuple(known[name] for name in asked)


def lacks(cell: Cell) -> str:
    """What a cell needs that this environment lacks; empty if it can run."""
    if cell.job != GPT:
        return ""
    release = metadata.version("megatron-core")
    numbers = tuple(int(part) for part in release.split(".")[:2])
    if numbers < cell.since:
        return f"megatron-core {'.'.join(map(str, cell.since))} ({release} is installed)"
    if cell.options.get("muon") and numbers >= REAL_MUON and not find_spec("emerging_optimizers"):
        return f"the package emerging-optimizers, which megatron-core {release} asks for"
    return ""


def run(
    cells: Iterable[Cell], seed: int, progress: Callable[[CellVerdict], None], device: str = "cpu"
) -> list[CellVerdict]:
    """Run all cells, one after another, and call `progress` with each verdict. A cell takes 1 to 10 s on two cores.

    `device`: see `chaos.launcher.Launcher`, also for the errors that it raises.
    """
    chosen = list(cells)
    modules = sorted({cell.job.partition(":")[0] for cell in chosen})
    preload = [
        "holdfast.chaos.drill",
        *modules,
        *(["holdfast.integrations.adapters.megatron"] if GPT.partition(":")[0] in modules else []),
        "torch.profiler",
    ]
    verdicts = []
    with Launcher(preload, device=device) as launcher:
        launcher.wait_ready()
        for cell in chosen:
            skipped = lacks(cell)
            verdicts.append(CellVerdict(cell, "", (), 0, 0.0, skipped) if skipped else drill(launcher, cell, seed))
            progress(verdicts[-1])
    return verdicts


def drill(launcher: Launcher, cell: Cell, seed: int) -> CellVerdict:
    """Run one cell undisturbed and with kills, and compare."""
    began = time.monotonic()
    try:
        undisturbed = cluster(launcher, cell, seed, snapshots=False).run()
        disturbed = cluster(launcher, cell, seed, snapshots=True)
        disturbed.kill_trainer(cell.ranks - 1, at="train.step", step=TRAINER_STEP)
        if cell.nodes > 1:
            disturbed.kill_node(0, at="train.step", step=NODE_STEP)
        return judge(cell, undisturbed, disturbed.run(), time.monotonic() - began)
    except HoldfastError as error:
        return CellVerdict(cell, f"{type(error).__name__}: {error}", (), 0, time.monotonic() - began)


def cluster(launcher: Launcher, cell: Cell, seed: int, *, snapshots: bool) -> VirtualCluster:
    """A virtual cluster for a cell's job."""
    args = {"job": cell.job, "seed": seed, "steps": STEPS, "options": dict(cell.options), "drain": cell.drain}
    return VirtualCluster(
        launcher,
        nodes=cell.nodes,
        ranks_per_node=cell.ranks_per_node,
        target=TARGET,
        args=args | {"snapshots": snapshots},
        job="matrix",
        smps=snapshots,
        deadline_s=DEADLINE_S,
    )


def judge(cell: Cell, undisturbed: History, disturbed: History, seconds: float) -> CellVerdict:
    """The verdict on a disturbed run. Pure."""
    kills = 1 + (cell.nodes > 1)
    restored = []
    lost = 0
    difference = compare(undisturbed, disturbed)
    for generation in range(1, len(disturbed.restarts) + 1):
        started = disturbed.of("started", generation=generation)
        restored += [(event["step"], event["how"]) for event in started]
        lost += steps_done_again(disturbed, generation)
    if not difference and len(disturbed.restarts) != kills:
        difference = f"{len(disturbed.restarts)} restarts after {kills} kills"
    if not difference and not all(how for _, how in restored):
        difference = "a rank started without restoring a snapshot"
    if not difference and disturbed.leaks:
        difference = f"left behind: {', '.join(disturbed.leaks)}"
    return CellVerdict(cell, difference, tuple(restored), lost, seconds)


def outcome(verdict: CellVerdict) -> str:
    """The outcome of a cell in words: ``identical``, or what differs or is missing."""
    return f"skipped: needs {verdict.skipped}" if verdict.skipped else verdict.difference or "identical"


def _same(verdict: CellVerdict) -> str:
    """The outcome for a column headed "identical"."""
    return outcome(verdict) if verdict.skipped or verdict.difference else "yes"


def versions() -> dict[str, str]:
    """The versions of the software that trained, by name."""
    found = {"Python": platform.python_version(), "torch": metadata.version("torch")}
    return found | ({"megatron-core": metadata.version("megatron-core")} if has("megatron") else {})


def show(console: Console, verdicts: Iterable[CellVerdict]) -> None:
    """Print the verdicts as a table."""
    say(console, _table(verdicts))


def _table(verdicts: Iterable[CellVerdict]) -> Report:
    rows = [
        (each.cell.name, _same(each), str(each.cell.ranks), str(each.lost_steps), f"{each.seconds:.0f}")
        for each in verdicts
    ]
    return Report(("cell", "identical", "ranks", "steps done again", "seconds"), rows, left=2)


def report(verdicts: Iterable[CellVerdict], when: str, machine: str, seed: int) -> dict[str, Any]:
    """The verdicts as a JSON object; `when` and `machine` are free text."""
    cells = [asdict(verdict) for verdict in verdicts]
    return {"when": when, "machine": machine, "versions": versions(), "seed": seed, "verdicts": cells}


def markdown(verdicts: Iterable[CellVerdict], when: str, machine: str, seed: int) -> str:
    """The verdicts as a Markdown page."""
    made_of = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Killed, restored, compared to the last bit",
        "",
        f"{when}: {machine}; {made_of}. Seed {seed}. Each cell trains {STEPS} steps; a trainer is killed in the middle "
        f"of step {TRAINER_STEP} and, where there are two nodes or more, a whole node in the middle of step "
        f"{NODE_STEP}. *Identical*: all losses of all ranks and all final state are those of an undisturbed run "
        "without the hook.",
        "",
        _table(verdicts).markdown(),
    ]
    return "\n".join(lines) + "\n"
