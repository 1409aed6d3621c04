"""The job that is simulated, and the site it runs on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.planner.costs import INTERFERENCE
from holdfast.planner.rates import SmpRates
from holdfast.smp_daemon.shared.errors import ConfigError

RESTARTS = ((1024, 60.0), (16_384, 200.0), (22_528, 300.0), (65_536, 600.0), (98_304, 900.0))
"""Pairs of (GPUs, seconds) for a cold restart without loading. From 16,384 up: FT-HSDP (arXiv 2602.00277); the first
pair is an assumption."""

STORAGE_RATE_PER_GPU = 175e9 * 14 / 200 / 4096
"""Bytes per second: a checkpoint of 175B parameters, 14 bytes each, in 200 s from 4,096 GPUs (ByteCheckpoint, HDFS)."""

SPARES_PER_NODE = 4 / 1024
"""Spares per node of the job: ByteRobust's warm standbys, for the 99th percentile of failures at once."""


def restart_s(gpus: int) -> float:
    """Seconds from new processes to a job that is ready to load, by linear interpolation of `RESTARTS`."""
    if gpus <= RESTARTS[0][0]:
        return RESTARTS[0][1]
    following = next((i for i, (count, _) in enumerate(RESTARTS) if gpus <= count), len(RESTARTS) - 1)
    (low, low_s), (high, high_s) = RESTARTS[following - 1 : following + 1]
    return low_s + (gpus - low) * (high_s - low_s) / (high - low)


@dataclass(frozen=True, slots=True)
class FleetJob:
    """The job. It needs all its nodes, and stops as a whole.

    Attributes:
        step_s: duration of a step without saves, in seconds.
        state_bytes: state of the whole job, each byte counted once.
        detect_s: time from a failure until it is noticed and processes are ended.
        restart_s: time from new processes on all nodes to a job that is ready to load; see the function `restart_s`.
    """

    nodes: int
    gpus_per_node: int = 8
    step_s: float = 6.0
    state_bytes: float = 4.87e12
    detect_s: float = 30.0
    restart_s: float = 60.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ConfigError(f"{self.nodes} nodes of {self.gpus_per_node} GPUs: there must be one of each at least")
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"a step of {self.step_s} s: it must take more than 0 s")
        for name in ("state_bytes", "detect_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: use a number of 0 or more")

    @property
    def gpus(self) -> int:
        """Number of GPUs in the job."""
        return self.nodes * self.gpus_per_node

    @property
    def node_bytes(self) -> float:
        """A node's share of the state."""
        return self.state_bytes / self.nodes


@dataclass(frozen=True, slots=True)
class Site:
    """The site that the job runs on. Rates are bytes per second.

    Attributes:
        gpu_rate: between one GPU and its host's memory.
        network_rate: out of a node, to protect copies and to load lost ones.
        storage_rate: of the shared storage, for the whole job.
        rack: number of nodes in a rack, which one shock hits.
        spares: number of spare machines.
        replace_s: time until an available machine has taken a lost one's place.
        repair_s: time until a broken machine is repaired.
        digest_rate: at which an SMP seals a snapshot.
        interference: training time lost while a node sends, divided by the time of sending.
    """

    gpu_rate: float = 25e9
    network_rate: float = SmpRates().network
    storage_rate: float = 12e9
    rack: int = 2
    spares: int = 1
    replace_s: float = 120.0
    repair_s: float = 4 * 3600.0
    digest_rate: float = SmpRates().digest
    interference: float = INTERFERENCE

    def __post_init__(self) -> None:
        for name in ("gpu_rate", "digest_rate", "network_rate", "storage_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)}: use more than 0 bytes per second")
        if self.rack < 1 or self.spares < 0:
            raise ConfigError(f"racks of {self.rack} nodes and {self.spares} spares: use 1 and 0, or more")
        for name in ("replace_s", "repair_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: use a number of 0 or more")
