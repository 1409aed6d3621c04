"""Asking other SMPs what they hold, and how they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.sources import Address

DEADLINE_S = 5.0
AT_ONCE = 16

T = TypeVar("T")

log = get_log(__name__)
_silent = Episodes(log)


def addresses_of(layouts: Collection[Layout]) -> list[Address]:
    """Where the SMPs of these layouts listen for raw bytes; the later of several addresses of a node counts."""
    newest = sorted(layouts, key=lambda layout: (layout.epoch, layout.revision))
    return sorted({node.name: node.bulk for layout in newest for node in layout.nodes}.values())


def take_census(
    job: str, addresses: Collection[Address], counters: Counters, known: Collection[Layout] = ()
) -> list[Inventory]:
    """The inventories of those who answer. Blocks for at most a few times `DEADLINE_S`.

    Args:
        known: layouts that need not be sent.
    """
    return ask_all("inventory", job, addresses, counters, known, Inventory.from_json)


def ask_all(
    op: str,
    job: str,
    addresses: Collection[Address],
    counters: Counters,
    known: Collection[Layout],
    read: Callable[[Any, Mapping[str, Layout]], T],
) -> list[T]:
    """What those who answer to `op` say under its name. Blocks as `take_census`; `known` as there.

    Args:
        read: reads it; is also given the layouts that were not sent, by their digests.
    """
    by_digest = {layout.digest: layout for layout in known}
    message = {"op": op, "job": job, "known": list(by_digest)}

    def ask(address: Address) -> T | None:
        with Links(counters, DEADLINE_S) as links:
            try:
                answer = read(links.call(address, message)[op], by_digest)
                _silent.end(address, "%s answers again", address, extra=about(peer=address))
                return answer
            except (HoldfastError, KeyError) as error:
                text, extra = "%s does not answer %r: %s", about(peer=address)
                _silent.begin(address, text, address, op, error, level=logging.INFO, extra=extra)
                return None

    with ThreadPoolExecutor(AT_ONCE, "census") as pool:
        return [answer for answer in pool.map(ask, addresses) if answer is not None]
