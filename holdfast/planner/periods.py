"""Young's interval, and how many slots an interval needs. Pure."""

from __future__ import annotations

import math

LONGEST_STEPS = 1_000_000
"""Most steps between two snapshots that are written to storage."""


def young(cost_s: float, mtbf_s: float) -> float:
    """``sqrt(2 cost mtbf)`` (Young, CACM 17(9), 1974): the first-order optimum for ``cost << mtbf``."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def slots_needed(interval_s: float, commit_s: float, encode_s: float, *, encode_every: int = 1) -> int:
    """How many slots a shard needs so that no snapshot is skipped for lack of a free one.

    A slot is freed when the next younger snapshot of its kind is protected. If every snapshot is encoded, a slot is
    held for one interval plus the time to protect, so ``1 + ceil(protect / interval)`` slots are needed. If only some
    are encoded, three are: for the protected snapshot, the newest sealed one and the one being written; and a fourth if
    encoding takes so long that the one being encoded is none of these. A snapshot that is written to storage has one
    more, see `plan.memory`.
    """
    protect_s = commit_s + encode_s
    if encode_every == 1:
        return 1 + max(1, math.ceil(protect_s / interval_s - 1e-9))
    return 3 + (encode_s > 0 and protect_s > 2 * interval_s)
