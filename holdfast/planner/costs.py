"""What snapshots, restarts and rebuilding cost in one job, measured or assumed; and the levels that follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.planner.checks import not_negative, positive, within
from holdfast.planner.measured import Measured
from holdfast.planner.rates import SmpRates
from holdfast.planner.waste import Level
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import duration

INTERFERENCE = 0.05
"""Training time lost while an SMP copies, sends or persists, divided by the time of that. An assumption: a job measures
its own, and `holdfast profile` writes it down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Rates and times to use where nothing was measured. Replace each by a measured number. Rates are bytes per second.

    Attributes:
        step_s: duration of a step without snapshots. None: a measured profile has it.
        state_bytes: size of one node's state. None: a measured profile has it.
        device_rate: from one GPU to host memory.
        copy_rate: at which a snapshot in host memory is digested.
        network_rate: at which encoding sends out of a node.
        persist_rate: from a node to storage; 0: snapshots are not persisted.
        interference: fraction of the time of copying, sending or persisting that training loses. This project's copies
            cost 0.09 of a memcpy with an idle core, 1.2 to 1.6 without one.
        restart_s, rebuild_s: from the death of processes, and from the loss of a node, to the next step.
    """

    step_s: float | None = None
    state_bytes: float | None = None
    gpus_per_node: int = 8
    device_rate: float = 25e9
    copy_rate: float = SmpRates().digest
    network_rate: float = SmpRates().network
    persist_rate: float = 0.0
    interference: float = INTERFERENCE
    restart_s: float = 300.0
    rebuild_s: float = 600.0

    def __post_init__(self) -> None:
        if self.step_s is not None:
            positive("the time of a step", self.step_s, " s")
        if self.state_bytes is not None:
            positive("the state of a node", self.state_bytes, " bytes")
        if self.gpus_per_node < 1:
            raise ConfigError(f"{self.gpus_per_node} GPUs a node: give 1 or more")
        for name in ("device_rate", "copy_rate", "network_rate"):
            positive(f"the {name.replace('_', ' ')}", getattr(self, name), " bytes per second")
        not_negative("the persist rate", self.persist_rate, " bytes per second")
        within("the interference", self.interference, 0.0, 1.0)
        not_negative("the time of a restart", self.restart_s, " s")
        not_negative("the time to rebuild a node", self.rebuild_s, " s")


OVERLAP = 0.9
"""Share of a step in which the state does not change: forward and backward, without the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes that a plan is computed from.

    Attributes:
        snapshot_cost_s: training time lost to copying and sealing a snapshot.
        encode_cost_s, encode_s: training time lost to encoding, and how long it runs; **for each parity unit of a
            stripe**.
        persist_cost_s, persist_s: the same for a persist; `persist_s` is 0 if snapshots are not persisted.
        commit_s: time from the boundary until a snapshot is sealed.
        assumed: what was not measured, as text.
    """

    step_s: float
    state_bytes: float
    snapshot_cost_s: float
    encode_cost_s: float
    persist_cost_s: float
    commit_s: float
    encode_s: float
    persist_s: float
    restart_s: float
    rebuild_s: float
    assumed: tuple[str, ...] = ()

    @property
    def persists(self) -> bool:
        """Whether there is a storage tier."""
        return self.persist_s > 0

    def levels(self, parity: int, process: float, memory: float, beyond: float) -> tuple[Level, ...]:
        """The levels with `parity` parity units per stripe, lowest first.

        Without parity, memory losses need the level *beyond*. Without a storage tier that level does not exist: such
        failures end the run.

        Args:
            process, memory, beyond: failures of each class per second, in the whole job.
        """
        encode_s = parity * self.encode_s
        commit = [Level("process", self.snapshot_cost_s, self.commit_s, self.restart_s, process)]
        if parity:
            latency_s = self.commit_s + encode_s
            commit.append(Level("memory", parity * self.encode_cost_s, latency_s, self.rebuild_s, memory))
        if self.persists:
            latency_s = self.commit_s + encode_s + self.persist_s
            restart_s = self.rebuild_s + self.persist_s
            rate = beyond if parity else beyond + memory
            commit.append(Level("beyond", self.persist_cost_s, latency_s, restart_s, rate))
        return tuple(commit)


def assume(assumptions: Assumptions) -> Costs:
    """Costs from assumed rates alone.

    A copy stalls training for the part that does not fit into the `OVERLAP` of a step. While copying, digesting,
    sending and persisting last, training loses the interference. Encoding sends the state once for each parity unit.

    Raises:
        ConfigError: the time of a step or the state is missing.
    """
    step_s, state = assumptions.step_s, assumptions.state_bytes
    if step_s is None or state is None:
        missing = "--step, such as 12s," if step_s is None else "--state of one node, such as 98GB, or --model"
        raise ConfigError(f"the plan needs {missing} or --profile FILE, which holdfast profile measures on your job")
    copy_s = state / (assumptions.device_rate * assumptions.gpus_per_node)
    seal_s = state / assumptions.copy_rate
    encode_s = state / assumptions.network_rate
    persist_s = state / assumptions.persist_rate if assumptions.persist_rate else 0.0
    slowed = assumptions.interference
    return Costs(
        step_s=step_s,
        state_bytes=state,
        snapshot_cost_s=max(0.0, copy_s - OVERLAP * step_s) + slowed * (copy_s + seal_s),
        encode_cost_s=slowed * encode_s,
        persist_cost_s=slowed * persist_s,
        commit_s=copy_s + seal_s,
        encode_s=encode_s,
        persist_s=persist_s,
        restart_s=assumptions.restart_s,
        rebuild_s=assumptions.rebuild_s,
        assumed=("all times", f"that copying, encoding and persisting slow training down by {slowed:.0%}"),
    )


def from_measured(measured: Measured, assumptions: Assumptions) -> Costs:
    """Costs from a measured profile, with assumptions for what it lacks.

    The training time lost to one snapshot is divided between copying and sealing on one side and encoding on the other,
    in proportion to their durations. The duration and cost of encoding are proportional to m.
    """
    busy_s = measured.copy_s + measured.seal_s + measured.encode_s
    share = measured.encode_s / busy_s if busy_s and measured.parity else 0.0
    visible_s = measured.visible_s()
    assumed = []
    slowed = measured.interference if measured.interference is not None else assumptions.interference
    if assumptions.persist_rate:
        how = "as copying and encoding did" if measured.interference is not None else "which is not measured"
        assumed.append(f"that persisting slows training down by {slowed:.1%}, {how}")
    encode_s, encode_cost_s = measured.encode_s, visible_s * share
    if measured.parity:
        encode_s, encode_cost_s = encode_s / measured.parity, encode_cost_s / measured.parity
    else:
        encode_s = measured.state_bytes / assumptions.network_rate
        encode_cost_s = slowed * encode_s
        assumed.append("encoding")
    persist_s = measured.persist_s
    if persist_s is None:
        persist_s = measured.state_bytes / assumptions.persist_rate if assumptions.persist_rate else 0.0
    restart_s, rebuild_s = measured.restart_s, measured.rebuild_s
    if restart_s is None:
        restart_s = assumptions.restart_s
        assumed.append(f"a restart of {duration(restart_s)}")
    if rebuild_s is None:
        rebuild_s = assumptions.rebuild_s
        assumed.append(f"{duration(rebuild_s)} to replace a node")
    return Costs(
        step_s=measured.step_s,
        state_bytes=measured.state_bytes,
        snapshot_cost_s=visible_s * (1.0 - share),
        encode_cost_s=encode_cost_s,
        persist_cost_s=slowed * persist_s,
        commit_s=measured.copy_s + measured.seal_s,
        encode_s=encode_s,
        persist_s=persist_s,
        restart_s=restart_s,
        rebuild_s=rebuild_s,
        assumed=tuple(assumed),
    )
