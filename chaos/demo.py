"""``holdfast demo``: train undisturbed, train again with kills, compare to the last bit, and account for the time.

`chaos.cluster` does the work; `account`, which is pure, turns its history into figures; `holdfast.chaos.demo_view`
draws them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.chaos.cluster import TARGET, History, Restart, VirtualCluster
from holdfast.chaos.differences import compare, longest_interval, most_held_up, steps_done_again
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.recovery import phases
from holdfast.chaos.runner import Event
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.resume.arrange import parse_protect

JOB = "holdfast.chaos.gpt:Gpt"
PRELOAD = ("holdfast.chaos.drill", "holdfast.chaos.gpt", "holdfast.integrations.adapters.megatron", "torch.profiler")
"""Modules that the launcher imports once, so that trainers need not import them as they start."""

JOB_DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Kill:
    """Trainers or nodes that are killed at once, in the middle of a step.

    `kind` is ``trainer`` or ``node``; `targets` are ranks or node indices.
    """

    kind: str
    targets: tuple[int, ...]
    step: int

    def __str__(self) -> str:
        return f"{self.kind}{'s' * (len(self.targets) > 1)} {'+'.join(map(str, self.targets))}"

    @property
    def option(self) -> str:
        """The command-line option for this kill."""
        return f"--kill {self.kind}:{'+'.join(map(str, self.targets))}@{self.step}"


def kind_of(fault: str) -> str:
    """The `Kill.kind` that a fault of this kind is: ``trainer`` or ``node``."""
    return "node" if fault == "lose-node" else "trainer"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo does. `kills` are ordered by step; `defaults`: see `chaos.scenario.Scenario`; `device`: see
    `chaos.launcher.Launcher`.

    On GPUs, which ranks may share, each rank trains a whole model: between GPUs, gloo moves only sums.
    """

    nodes: int
    ranks_per_node: int
    steps: int
    seed: int
    protect: str
    kills: tuple[Kill, ...]
    defaults: bool = False
    device: str = "cpu"

    @property
    def code(self) -> str:
        """The code in effect, such as ``2+1``, or that there is none."""
        code = parse_protect(self.protect).for_nodes(self.nodes)
        return f"{code.data}+{code.parity}" if code.parity and self.nodes > 1 else "nothing against the loss of nodes"

    @property
    def options(self) -> dict[str, Any]:
        """The options of `chaos.gpt.Gpt`."""
        return {} if self.device == "cpu" else {"tensor": 1, "distributed": False}

    def __post_init__(self) -> None:
        world = self.nodes * self.ranks_per_node
        if self.device != "cpu" and world < 2:
            raise ConfigError(f"{world} ranks: data parallel training needs 2 or more")
        if self.device == "cpu" and (world % 2 or world < 4):
            raise ConfigError(f"{world} ranks: tensor parallel 2 x data parallel 2 or more needs an even number >= 4")
        if not 1 <= self.steps <= 10_000:
            raise ConfigError(f"--steps {self.steps}: choose 1 to 10000")
        steps = [kill.step for kill in self.kills]
        if steps != sorted(set(steps)):
            raise ConfigError(f"kills must be in ascending order, at different steps; these are at steps {steps}")
        code = parse_protect(self.protect)
        if code.data + code.parity > self.nodes:
            raise ConfigError(
                f"--protect {self.protect}: {code.data}+{code.parity} needs {code.data + code.parity} nodes, and there "
                f"are {self.nodes}: use more --nodes, or a smaller code"
            )
        survivable = min(code.parity, self.nodes - 1)
        for kill in self.kills:
            limit = world if kill.kind == "trainer" else self.nodes
            if not all(0 <= target < limit for target in kill.targets):
                raise ConfigError(f"{kill.option}: there are {kill.kind}s 0 to {limit - 1}")
            if len(set(kill.targets)) != len(kill.targets):
                raise ConfigError(f"{kill.option}: the same target is named twice")
            if not 2 <= kill.step <= self.steps:
                raise ConfigError(f"{kill.option}: choose a step from 2 to {self.steps}")
            if kill.kind == "node" and len(kill.targets) > survivable:
                raise ConfigError(
                    f"{kill.option}: {self.nodes} nodes with --protect {self.protect} survive the loss of "
                    f"{survivable} at once; use more nodes, or more parity such as --protect 2+2"
                )


@dataclass(frozen=True, slots=True)
class DemoRecovery:
    """One recovery. `phases` has the seconds of each phase, in order, from the kill to the first new step."""

    kill: Kill
    restored_step: int
    lost_steps: int
    bytes_fetched: int
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class Account:
    """The results of the demo. `tracebacks`: errors that an SMP did not expect."""

    plan: DemoPlan
    identical: bool
    difference: str
    losses: list[float]
    recoveries: list[DemoRecovery]
    disk_bytes_written: int
    leaks: list[str]
    tracebacks: list[str]
    seconds: float
    interval: int
    held_up: float | None

    @property
    def held(self) -> bool:
        """Whether every promise of the demo was kept."""
        return (
            self.identical
            and self.disk_bytes_written == 0
            and not self.leaks
            and not self.tracebacks
            and len(self.recoveries) == len(self.plan.kills)
            and (self.plan.defaults or all(recovery.lost_steps <= 1 for recovery in self.recoveries))
        )

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        plan, found = self.plan, asdict(self)
        del found["plan"]
        found["recoveries"] = [each.pop("kill") | each for each in found["recoveries"]]
        return found | {
            "steps": plan.steps,
            "nodes": plan.nodes,
            "ranks": plan.nodes * plan.ranks_per_node,
            "seed": plan.seed,
            "protect": plan.protect,
            "code": plan.code,
            "defaults": plan.defaults,
        }


def run(plan: DemoPlan, progress: Callable[[str, Event], None]) -> Account:
    """Run the demo; call `progress` with (``import``, ``undisturbed`` or ``disturbed``, event) meanwhile.

    Raises:
        HoldfastError: a run did not finish; everything that it started is gone.
    """
    began = time.monotonic()
    args = {"job": JOB, "seed": plan.seed, "steps": plan.steps, "hook": {"protect": plan.protect}}
    args |= {"defaults": plan.defaults, "options": plan.options}
    args["drain"] = not plan.defaults  # steps of a tiny model end before a busy machine has protected the last one
    progress("import", {"kind": "begin"})
    with Launcher(PRELOAD, device=plan.device) as launcher:
        launcher.wait_ready()

        def cluster(phase: str, snapshots: bool) -> VirtualCluster:
            progress(phase, {"kind": "begin"})
            return VirtualCluster(
                launcher,
                nodes=plan.nodes,
                ranks_per_node=plan.ranks_per_node,
                target=TARGET,
                args=args | {"snapshots": snapshots},
                job="demo",
                smps=snapshots,
                deadline_s=JOB_DEADLINE_S,
                on_event=lambda event: progress(phase, event),
            )

        undisturbed = cluster("undisturbed", False).run()
        disturbed = cluster("disturbed", True)
        for kill in plan.kills:
            if kill.kind == "trainer":
                disturbed.kill_trainer(*kill.targets, at="train.step", step=kill.step)
            else:
                disturbed.kill_node(*kill.targets, at="train.step", step=kill.step)
        history = disturbed.run()
    return account(plan, undisturbed, history, time.monotonic() - began)


def account(plan: DemoPlan, undisturbed: History, disturbed: History, seconds: float) -> Account:
    """The figures of a finished demo."""
    difference = compare(undisturbed, disturbed)
    last = {e["step"]: float.fromhex(e["loss"]) for e in disturbed.of("step", rank=0)}
    return Account(
        plan=plan,
        identical=not difference,
        difference=difference,
        losses=[last[step] for step in sorted(last)],
        recoveries=[_recovery(disturbed, n, restart) for n, restart in enumerate(disturbed.restarts, 1)],
        disk_bytes_written=disturbed.disk_bytes_written,
        leaks=disturbed.leaks,
        tracebacks=disturbed.tracebacks,
        seconds=seconds,
        interval=longest_interval(disturbed),
        held_up=most_held_up(disturbed),
    )


def _recovery(history: History, generation: int, restart: Restart) -> DemoRecovery:
    fault = restart.faults[0]
    started = history.of("started", generation=generation)
    return DemoRecovery(
        kill=Kill(kind_of(fault.kind), fault.targets, fault.step or 0),
        restored_step=started[0]["step"],
        lost_steps=steps_done_again(history, generation),
        bytes_fetched=sum(event["bytes_fetched"] for event in started),
        phases=phases(history, generation, restart),
    )
