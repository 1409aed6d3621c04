"""Runs scenarios one after another, on shared launchers, and sums up their verdicts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from holdfast.chaos.cluster import TARGET, History
from holdfast.chaos.launcher import Launcher
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.paths import arena_base
from tests.proof.chaos.actions import obstacle
from tests.proof.chaos.checks import CHECKS
from tests.proof.chaos.cluster import ChaosCluster, ClockedLauncher
from tests.proof.chaos.faults import Fault
from tests.proof.chaos.scenario import WORKLOAD, Scenario
from tests.proof.chaos.verdict import ScenarioVerdict, judge

PRELOAD = ("holdfast.chaos.drill", "tests.proof.chaos.workload", "torch.profiler", "torch._dynamo")
"""Modules that the launcher imports once, so that trainers need not import them as they start."""

DEADLINE_S = 180.0
"""How long a job may take before it counts as hung: ten times what one takes on two slow cores that are idle."""


class Campaign:
    """Runs scenarios. A context manager; not thread-safe."""

    def __init__(
        self, preload: Sequence[str] = (), smp_module: str = "holdfast.smp_daemon", deadline_s: float = DEADLINE_S
    ) -> None:
        """
        Args:
            preload: further modules for the launcher to import.
            smp_module: the module to run as the SMP.
            deadline_s: a run that takes longer counts as hung.
        """
        self._deadline_s = deadline_s
        self._preload = [*PRELOAD, *preload]
        self._launcher = Launcher(self._preload)
        self._clocked: Launcher | None = None
        self._smp_module = smp_module
        self._undisturbed: dict[tuple[Any, ...], History] = {}

    def __enter__(self) -> Campaign:
        self._launcher.wait_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self._launcher.close()
        if self._clocked is not None:
            self._clocked.close()

    def run(self, scenario: Scenario, replay: str) -> ScenarioVerdict:
        """Run a scenario undisturbed, unless that was done before, then with its faults.

        `replay`: the command that runs it again.
        """
        if reason := obstacle(fault.kind for fault in scenario.faults):
            return ScenarioVerdict(scenario, (), 0, 0, 0, (), 0, False, False, (), 0.0, History(), skipped=reason)
        undisturbed = self._reference(scenario)
        launcher = self._launcher_for(scenario)
        began = time.monotonic()
        before = self._ours()
        failure: HoldfastError | None = None
        with _place(scenario) as environment:
            cluster = self._cluster(scenario, launcher, snapshots=True, environment=environment)
            for fault in scenario.faults:
                cluster.add(_fresh(fault))
            try:
                cluster.run()
            except HoldfastError as error:
                failure = error
        leaks = tuple(cluster.history.leaks) + tuple(sorted(self._ours() - before))
        seconds = time.monotonic() - began
        return judge(scenario, undisturbed, cluster.history, failure, leaks, seconds, replay)

    def _reference(self, scenario: Scenario) -> History:
        key = (scenario.nodes, scenario.ranks_per_node, scenario.steps, scenario.seed, repr(scenario.options))
        if key not in self._undisturbed:
            self._undisturbed[key] = self._cluster(scenario, self._launcher, snapshots=False).run()
        return self._undisturbed[key]

    def _launcher_for(self, scenario: Scenario) -> Launcher:
        """The launcher for a scenario: the one with settable clocks, started on first use, only if clocks are set."""
        if not scenario.clocked:
            return self._launcher
        if self._clocked is None:
            self._clocked = ClockedLauncher(self._preload)
            self._clocked.wait_ready()
        return self._clocked

    def _cluster(
        self,
        scenario: Scenario,
        launcher: Launcher,
        *,
        snapshots: bool,
        environment: Mapping[str, str] | None = None,
    ) -> ChaosCluster:
        def place(generation: int, rank: int) -> int:
            node = rank // scenario.ranks_per_node
            return (node + generation) % scenario.nodes if scenario.renumber else node

        return ChaosCluster(
            launcher,
            nodes=scenario.nodes,
            ranks_per_node=scenario.ranks_per_node,
            target=TARGET,
            args={
                "job": WORKLOAD,
                "seed": scenario.seed,
                "steps": scenario.steps,
                "snapshots": snapshots,
                "options": dict(scenario.options),
                "hook": {"protect": scenario.protect, **scenario.hook},
                "drain": False if scenario.defaults else scenario.drain,
                "defaults": scenario.defaults,
            },
            job="chaos",
            smps=snapshots,
            deadline_s=self._deadline_s,
            place=place,
            smp_module=self._smp_module,
            wired=snapshots and scenario.wired,
            environment=environment,
        )

    def _ours(self) -> set[str]:
        """What this process holds on the machine, launchers aside: descendants, descriptors, shared memory."""
        launchers = {launcher.pid for launcher in (self._launcher, self._clocked) if launcher is not None}
        children = psutil.Process().children(recursive=True)
        found = {f"process {child.pid} {child.name()}" for child in children if child.pid not in launchers}
        found |= {f"descriptor {path.name}" for path in Path("/proc/self/fd").iterdir()}
        found |= {str(path) for path in arena_base().glob(f".virtual-{os.getpid()}-*")}
        return found


@contextmanager
def _place(scenario: Scenario) -> Iterator[dict[str, str]]:
    """The variables that make a scenario's SMPs persist to a place on tmpfs; empty if it persists nothing."""
    if not scenario.persist:
        yield {}
        return
    with Scratch("place") as place:
        yield {"HOLDFAST_PERSIST": str(place.path), "HOLDFAST_PERSIST_EVERY": f"{scenario.persist}s"}


def summary(verdicts: Iterable[ScenarioVerdict], seconds: float) -> dict[str, Any]:
    """The figures of a campaign, for ``--json``."""
    ran = [verdict for verdict in verdicts if not verdict.skipped]
    return {
        "faults_asked": sum(verdict.asked for verdict in ran),
        "faults_injected": sum(verdict.injected for verdict in ran),
        "scenarios": len(ran),
        "wrong_states": sum(verdict.wrong for verdict in ran),
        "lost_protected_steps": sum(verdict.lost_protected_steps for verdict in ran),
        "hangs": sum(verdict.hang for verdict in ran),
        "leaks": sum(len(verdict.leaks) for verdict in ran),
        "checks": {check: sum(verdict.checks[check] for verdict in ran) for check in CHECKS},
        "failed": sum(not verdict.held for verdict in ran),
        "seconds": round(seconds, 1),
        "replay": [verdict.replay for verdict in ran if verdict.replay],
    }


def _fresh(fault: Fault) -> Fault:
    """A copy of a fault that has not been injected yet."""
    names = ("who", "point", "step", "kind", "targets", "delay_s", "for_s", "amount", "seed", "nth")
    return Fault(*(getattr(fault, name) for name in names))
