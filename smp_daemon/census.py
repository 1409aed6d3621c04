"""Asking other SMPs what they hold."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from smp_daemon.counters import Counters
from smp_daemon.errors import HoldfastError
from smp_daemon.inventory import Inventory
from smp_daemon.layout import Layout
from smp_daemon.links import Links
from smp_daemon.sources import Address

DEADLINE_S = 5.0
AT_ONCE = 16

log = logging.getLogger(__name__)


def addresses_of(layouts: Collection[Layout]) -> list[Address]:
    """Where the SMPs of these layouts listen for raw bytes; the later of several addresses of a node counts."""
    newest = sorted(layouts, key=lambda layout: (layout.epoch, layout.revision))
    return sorted({node.name: node.bulk for layout in newest for node in layout.nodes}.values())


def take_census(job: str, addresses: Collection[Address], counters: Counters) -> list[Inventory]:
    """The inventories of those who answer. Blocks for at most a few times `DEADLINE_S`."""

    def ask(address: Address) -> Inventory | None:
        with Links(counters, DEADLINE_S) as links:
            try:
                reply = links.call(address, {"op": "inventory", "job": job})
                return Inventory.from_json(reply["inventory"])
            except HoldfastError as error:
                log.info("%s does not say what it holds: %s", address, error)
                return None

    with ThreadPoolExecutor(AT_ONCE, "census") as pool:
        return [inventory for inventory in pool.map(ask, addresses) if inventory is not None]
