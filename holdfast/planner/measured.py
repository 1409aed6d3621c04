"""Measurements of a run's own snapshots: the input of the tuner, as the hook records it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from holdfast.planner.checks import not_negative, positive, within
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.limits import MAX_SLOTS, MIN_SLOTS
from holdfast.smp_daemon.shared.plain import from_plain

FORMAT = 1
"""Version of the JSON; other versions are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the steps of one run, in seconds and bytes. None: not measured, an assumption is used instead.

    Attributes:
        step_s: time of a *baseline* step: no snapshot was worked on.
        snapshot_step_s: time of an *overlapped* step: a snapshot was copied, sealed or encoded meanwhile.
        stall_s: how long one snapshot held up the training loop.
        copy_s, seal_s, encode_s: times of one snapshot's phases on the slowest node, one after the other.
        persist_s: time until a snapshot is in storage.
        restart_s: from the death of processes to the next step, with state from the node's own memory.
        rebuild_s: from the loss of a node to the next step, its replacement included.
        state_bytes: size of one node's state; of several nodes, the largest.
        slots: slots per shard.
        data, parity: k and m with which `encode_s` was measured; 0 parity: nothing was encoded.
        interval_steps: steps between snapshots during the measurement.
        quiet_steps, busy_steps, snapshots, persists, restarts, rebuilds: how many baseline steps, overlapped steps
            and so on the means cover.
        step_sd_s, snapshot_step_sd_s: standard deviations of single steps.
        nodes: number of nodes in the job.

    Raises:
        ConfigError: a value is out of its range.
    """

    step_s: float
    snapshot_step_s: float
    stall_s: float
    copy_s: float
    seal_s: float
    encode_s: float
    state_bytes: int
    slots: int
    parity: int
    data: int
    interval_steps: int
    quiet_steps: int
    busy_steps: int
    snapshots: int
    nodes: int
    persist_s: float | None = None
    restart_s: float | None = None
    rebuild_s: float | None = None
    persists: int = 0
    restarts: int = 0
    rebuilds: int = 0
    step_sd_s: float | None = None
    snapshot_step_sd_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_s", "snapshot_step_s", "state_bytes", "interval_steps", "nodes"):
            positive(f"profile: {name}", getattr(self, name))
        for name in ("quiet_steps", "busy_steps", "snapshots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"profile: {name} is {getattr(self, name)}: at least 1 must have been measured")
        within("profile: slots", self.slots, MIN_SLOTS, MAX_SLOTS)
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                not_negative(f"profile: {field.name}", value)
        if self.parity and not self.data:
            raise ConfigError(f"profile: parity is {self.parity} and data 0: a code has at least 1 data unit")

    def visible_s(self) -> float:
        """Training time that one snapshot takes: the extra time of its overlapped steps over baseline steps, and at
        least the stall. (The difference of two noisy means may even be negative; the stall is lost for sure.)
        """
        return max(self.stall_s, (self.snapshot_step_s - self.step_s) * self.busy_steps / self.snapshots)

    @property
    def interference(self) -> float | None:
        """Share of the time of copying, sealing and encoding that training lost, whatever took it; None: it took no
        time. What is assumed where there is no profile."""
        busy_s = self.copy_s + self.seal_s + self.encode_s
        return min(1.0, self.visible_s() / busy_s) if busy_s else None

    def visible_error_s(self) -> float | None:
        """Standard error of `visible_s`; None if the spread was not measured."""
        if self.step_sd_s is None or self.snapshot_step_sd_s is None:
            return None
        variance = self.step_sd_s**2 / self.quiet_steps + self.snapshot_step_sd_s**2 / self.busy_steps
        return float(variance**0.5) * self.busy_steps / self.snapshots

    def to_json(self) -> dict[str, Any]:
        """As plain values, with the version of the format."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Measured:
        """The profile that `to_json` wrote. Raises `ConfigError`, which names the key, if `data` is anything else."""
        if not isinstance(data, dict):
            raise ConfigError(f"profile: {type(data).__name__} is not a measured profile: it must be a JSON object")
        if data.get("format") != FORMAT:
            raise ConfigError(f"profile: format is {data.get('format')!r}, and this version reads {FORMAT}")
        given = {key: value for key, value in data.items() if key != "format"}
        if unknown := sorted(given.keys() - {field.name for field in fields(cls)}):
            raise ConfigError(f"profile: unknown keys {unknown}")
        try:
            return from_plain(cls, given, "a measured profile")
        except ProtocolError as error:
            raise ConfigError(f"profile: {error}") from error
