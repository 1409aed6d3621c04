"""Asks other SMPs what they hold and what state they are in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, SmpUnavailable, VersionMismatch
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import PeerInventory, PeerRequest
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.shared.transport import Message

DEADLINE_S = 5.0
"""Timeout for the answer of one SMP, in seconds."""

AT_ONCE = 16
"""Number of SMPs that are asked at the same time."""

T = TypeVar("T")

log = get_log(__name__)
_silent = Episodes(log)


def addresses_of(layouts: Collection[Layout], names: Collection[str] | None = None) -> list[Address]:
    """The control addresses of the SMPs in these layouts. If a node has several, the one in the newest layout counts.

    Args:
        names: only these nodes; None: all.
    """
    newest = sorted(layouts, key=lambda layout: (layout.epoch, layout.revision))
    found = {node.name: node.control for layout in newest for node in layout.nodes}
    return sorted(address for name, address in found.items() if names is None or name in names)


def gather_inventories(
    job: str,
    addresses: Collection[Address],
    known: Collection[Layout] = (),
    network: Network = MACHINE,
    failures: dict[Address, HoldfastError] | None = None,
) -> list[Inventory]:
    """The inventories of the SMPs that answer. Blocks for at most about `DEADLINE_S` per `AT_ONCE` addresses.

    Args:
        known: layouts that need not be sent.
        failures: as in `ask_all`.

    Raises:
        VersionMismatch: an SMP is alive but of a version that cannot be asked. It must not count as lost: it may hold
            the newest snapshot.
    """
    by_digest = {layout.digest: layout for layout in known}
    message = PeerInventory(job=job, known=frozenset(by_digest))
    failures = {} if failures is None else failures
    found = ask_all(message, addresses, lambda reply: Inventory.read(reply, by_digest), network, failures)
    for error in failures.values():
        if isinstance(error, VersionMismatch):
            raise error
    return found


def ask_all(
    message: PeerRequest,
    addresses: Collection[Address],
    read: Callable[[Message], T],
    network: Network = MACHINE,
    failures: dict[Address, HoldfastError] | None = None,
) -> list[T]:
    """Send `message` to all addresses and return the answers that came, parsed by `read`. Blocks like
    `gather_inventories`.

    Args:
        failures: receives the error of each SMP that gives no answer.
    """

    def ask(address: Address) -> T | None:
        try:
            answer = read(peers.ask(address, message, DEADLINE_S))
            _silent.end(address, "%s:%d answers again", *address, extra=about(peer=address))
            return answer
        except VersionMismatch as error:
            mismatch = VersionMismatch(f"{address[0]}:{address[1]} cannot be asked: {error}")
            _silent.begin(address, "%s", mismatch, extra=about(peer=address))
            failed[address] = mismatch
            return None
        except HoldfastError as error:
            text, args = (
                ("%s", ()) if isinstance(error, SmpUnavailable | DeadlineExceeded) else ("%s:%d refuses: %s", address)
            )
            _silent.begin(address, text, *args, error, level=logging.INFO, extra=about(peer=address))
            failed[address] = error
            return None

    failed = {} if failures is None else failures
    with PeerClient(message.job, network=network) as peers, network.Pool(AT_ONCE, "inventories") as pool:
        return [answer for answer in pool.map(ask, addresses) if answer is not None]
