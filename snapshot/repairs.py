"""The parity of the restored snapshot, which SMPs recompute beside the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.errors import HoldfastError, failure_of
from holdfast.smp_daemon.shared.logs import Episodes
from holdfast.snapshot.rank import Rank

REPAIR_EVERY_S = 1.0
"""How often to look for an SMP that recomputes lost parity in place of one that went away, in seconds."""


@dataclass(eq=False)
class Repairs:
    """This rank's part of them. Used by the training thread.

    Args:
        _order: orders this rank's part of its SMP, and returns whether it has one; None: nothing was restored.
    """

    _rank: Rank
    _order: Callable[[], bool] | None
    _episodes: Episodes
    _wait_for_copies: Callable[[], None]
    _ordered: tuple[int | None, int | None] | None = None  # in which epoch, and on which connection
    _has_part: bool = False  # whether this rank has ordered any repair
    _attach_s: float = -math.inf  # when an SMP was last looked for to order them of

    def state(self) -> RepairState:
        """The repair of this rank's part of the restored snapshot's parity, as its SMP has posted. It is ordered anew
        in a new epoch, and of an SMP that takes another's place."""
        client, order = self._rank.client, self._order
        if order is None:
            return RepairState.UNDER_WAY
        now = self._rank.system.monotonic()
        if client.connection is None and now - self._attach_s >= REPAIR_EVERY_S:
            self._attach_s = now
            failure_of(lambda: self._rank.smp.attach(self._rank.progress.epoch, self._wait_for_copies), HoldfastError)
        if (place := (client.epoch, client.connection)) != self._ordered:
            try:
                self._has_part, self._ordered = order(), place
            except HoldfastError as error:
                self._episodes.begin("repair", "the parity of the restored snapshot is not being repaired: %s", error)
                return RepairState.UNDER_WAY
        return client.repaired() if self._has_part else RepairState.WHOLE
