"""Which codes a job could use, and what each of them survives. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.ec import plan_groups
from holdfast.planner.survival import job_loss_rate, shock_neighbours, shock_random, shock_spread, survive
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.checks import not_negative, within
from holdfast.snapshot.interval.failures import DAY_S, FailureModel

SURVIVAL_S = 30 * DAY_S
"""The time that survival is computed for, in seconds."""

LARGEST_GROUP = 16
"""Largest k + m to try. Rebuilding one node keeps all other nodes of its group busy."""

MOST_PARITY = 4

PLACEMENTS = ("labelled", "neighbours", "random")


@dataclass(frozen=True, slots=True)
class Domains:
    """Which nodes fail together.

    Attributes:
        nodes: number of nodes that one shock hits; Meta RSC's racks hold 2.
        placement: ``labelled``: groups are planned with `HOLDFAST_DOMAINS`, so that a domain has at most m nodes in a
            group if possible; ``neighbours``: nodes have no labels, and neighbours form groups and fail together;
            ``random``: the nodes that fail together are at random places.

    Raises:
        ConfigError: the number of nodes is less than 1, or the placement is unknown.
    """

    nodes: int = 2
    placement: str = "neighbours"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"{self.nodes} nodes fail together: give 1 or more")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"{self.placement!r} is not a placement: choose one of {', '.join(PLACEMENTS)}")


@dataclass(frozen=True, slots=True)
class Code:
    """A code k+m in a job: its groups, and how often more is lost than it covers.

    Attributes:
        data, parity: k and m; 0 and 0 without parity.
        sizes: number of nodes in each group.
        fatal: share of shocks that lose data.
        loss_rate: how often data is lost by node losses and shocks, per second, in the whole job.
    """

    data: int
    parity: int
    sizes: tuple[int, ...]
    fatal: float
    loss_rate: float

    @property
    def memory(self) -> float:
        """Bytes in memory for each byte of a snapshot: 1 + m/k."""
        return 1.0 + self.parity / self.data if self.parity else 1.0

    @property
    def survival(self) -> float:
        """Probability that memory keeps the data for `SURVIVAL_S`."""
        return survive(self.loss_rate, SURVIVAL_S)

    @property
    def risk(self) -> float:
        """1 - survival, exact even where it is too small to subtract from 1 in a float."""
        return -math.expm1(-self.loss_rate * SURVIVAL_S)

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}" if self.parity else "none"


def judge(data: int, parity: int, nodes: int, model: FailureModel, domains: Domains, window_s: float) -> Code:
    """Compute what k+m survives in a job of `nodes` nodes, if a lost node's bytes are protected again after `window_s`.

    Raises:
        ConfigError: the code needs more nodes than the job has, or a number is out of its range.
    """
    if nodes < 1:
        raise ConfigError(f"{nodes} nodes: give 1 or more")
    not_negative("the repair window", window_s, " s")
    rates = model.job(nodes)
    if not parity:
        return Code(0, 0, (1,) * nodes, 1.0, rates["memory"] + rates["shock"])
    within("k", data, 1, 254)
    within("k + m", data + parity, 2, 255)
    if data + parity > nodes:
        raise ConfigError(
            f"{data}+{parity} needs {data + parity} nodes, and there are {nodes}: give k + m of 2 to {nodes}, "
            f"or more nodes"
        )
    sizes = tuple(len(group) for group in plan_groups(nodes, data + parity))
    fatal = _fatal(sizes, parity, min(domains.nodes, nodes), domains.placement, model.memory, window_s)
    rate = job_loss_rate(sizes, parity, model.memory, window_s) + rates["shock"] * fatal
    return Code(data, parity, sizes, fatal, rate)


def candidates(nodes: int) -> list[tuple[int, int]]:
    """All (k, m) to try for a job of `nodes` nodes; (0, 0) is no parity."""
    return [(0, 0)] + [
        (k, m)
        for m in range(1, MOST_PARITY + 1)
        for k in range(1, min(LARGEST_GROUP, nodes) - m + 1)
        if k >= m or k == 1  # with 1 < k < m, a larger k takes less memory; k = 1 is plain copies
    ]


def _fatal(sizes: Sequence[int], parity: int, hit: int, placement: str, rate: float, window_s: float) -> float:
    if placement == "labelled":
        return shock_spread(sizes, parity, hit, rate, window_s)
    return (shock_neighbours if placement == "neighbours" else shock_random)(sizes, parity, hit)
