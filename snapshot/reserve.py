"""Memory for snapshots, laid out by all ranks together."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from smp_daemon.client import SmpClient
from smp_daemon.errors import ConfigError, HoldfastError
from smp_daemon.layout import Layout
from snapshot.agreement import Agreement
from snapshot.arrange import Protection, RankInfo, arrange, shortfalls

log = logging.getLogger(__name__)


def reserve(
    client: SmpClient,
    agreement: Agreement,
    job: str,
    epoch: int,
    coord: str,
    slot_bytes: int,
    protection: Protection,
    slots: int,
    domains: Sequence[str] = (),
) -> Layout:
    """Agree on the layout of `epoch`, in which the caller is `coord` and needs slots of `slot_bytes`, and have every
    SMP reserve its memory. A collective call; blocks.

    Raises:
        HoldfastError: it cannot be reserved, here or for another rank; so on every rank.
    """
    mine = RankInfo.of(coord, client.inventory(), slot_bytes, tuple(domains))
    everyone = [RankInfo.from_json(json.loads(t)) for t in agreement.gather(json.dumps(asdict(mine)).encode())]
    layout = arrange(job, epoch, everyone, protection, slots)
    problem: HoldfastError | None = None
    try:
        client.configure(layout)
    except HoldfastError as error:
        problem = error
    if agreement.minimum([int(problem is None)])() != [1]:
        raise problem or ConfigError("another rank's SMP could not reserve its memory; see that rank's error")
    if layout.coords[0] == coord:
        for shortfall in shortfalls(layout):
            log.warning("%s", shortfall)
    return layout
