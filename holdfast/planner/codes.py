"""Which codes a job could take, and what each of them survives. Pure."""

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
"""Survival is told for so long."""

LARGEST_GROUP = 16
"""Of the codes that are tried. The rebuilding of one node keeps all others of its group busy."""

MOST_PARITY = 4

PLACEMENTS = ("labelled", "neighbours", "random")


@dataclass(frozen=True, slots=True)
class Domains:
    """What fails together.

    Attributes:
        nodes: that one shock hits; Meta RSC's racks hold 2.
        placement: ``labelled``: groups are planned over `HOLDFAST_DOMAINS`, no more than m of a domain in one;
            ``neighbours``: nodes have no labels, neighbours are grouped and fail together; ``random``: neither.

    Raises:
        ConfigError: no nodes, or no such placement.
    """

    nodes: int = 2
    placement: str = "neighbours"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"{self.nodes} nodes fail together: give 1 or more")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"{self.placement!r} is no placement: choose one of {', '.join(PLACEMENTS)}")


@dataclass(frozen=True, slots=True)
class Code:
    """k+m in a job: its groups, and how often more is lost than it covers.

    Attributes:
        sizes: nodes of each group.
        fatal: share of shocks that cost data.
        loss_rate: losses of data to nodes and shocks per second, of the whole job.
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
        """1 - survival, also where that is too small to see in a float next to 1."""
        return -math.expm1(-self.loss_rate * SURVIVAL_S)

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}" if self.parity else "none"


def judge(data: int, parity: int, nodes: int, model: FailureModel, domains: Domains, window_s: float) -> Code:
    """What k+m survives in a job of `nodes`, if a lost node is protected again after `window_s`.

    Raises:
        ConfigError: the code needs more nodes than there are, or a number is out of its range.
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
    """All (k, m) that are tried for a job of `nodes`; (0, 0) is no parity."""
    return [(0, 0)] + [
        (k, m)
        for m in range(1, MOST_PARITY + 1)
        for k in range(1, min(LARGEST_GROUP, nodes) - m + 1)
        if k >= m or k == 1  # less memory is never had with fewer data than parity units, but for plain copies
    ]


def _fatal(sizes: Sequence[int], parity: int, hit: int, placement: str, rate: float, window_s: float) -> float:
    if placement == "labelled":
        return shock_spread(sizes, parity, hit, rate, window_s)
    return (shock_neighbours if placement == "neighbours" else shock_random)(sizes, parity, hit)
