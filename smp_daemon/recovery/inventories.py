"""Asks other SMPs what they hold and what state they are in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, SmpUnavailable, VersionMismatch
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import PeerInventory, PeerStatus
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, Network

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
        SmpUnavailable: as `ask_all`.
        VersionMismatch: an SMP is alive but of a version that cannot be asked. It must not count as lost: it may hold
            the newest snapshot.
    """
    failures = {} if failures is None else failures
    found = ask_all(PeerInventory, job, addresses, Inventory.read, known, network, failures)
    for error in failures.values():
        if isinstance(error, VersionMismatch):
            raise error
    return found


def ask_all(
    kind: type[PeerInventory | PeerStatus],
    job: str,
    addresses: Collection[Address],
    read: Callable[[object, Mapping[str, Layout]], T],
    known: Collection[Layout] = (),
    network: Network = MACHINE,
    failures: dict[Address, HoldfastError] | None = None,
) -> list[T]:
    """What these SMPs answer to a message of that kind, parsed by `read`. `known`, and how long it blocks: as
    `gather_inventories`.

    Args:
        failures: receives the error of each SMP that gives no answer.

    Raises:
        SmpUnavailable: this process cannot start a thread.
    """
    by_digest = {layout.digest: layout for layout in known}
    message = kind(job=job, known=frozenset(by_digest))

    def ask(address: Address) -> T | None:
        try:
            answer = read(peers.ask(address, message, DEADLINE_S), by_digest)
            _silent.end(address, "%s:%d answers again", *address, extra=about(peer=address))
            return answer
        except HoldfastError as error:
            if not isinstance(error, SmpUnavailable | DeadlineExceeded):  # these name the SMP
                error = type(error)(f"{address[0]}:{address[1]} cannot be asked: {error}")
            level = logging.WARNING if isinstance(error, VersionMismatch) else logging.INFO
            _silent.begin(address, "%s", error, level=level, extra=about(peer=address))
            failed[address] = error
            return None

    failed = {} if failures is None else failures
    with PeerClient(job, network=network) as peers, network.Pool(AT_ONCE, "inventories") as pool:
        try:
            answers = pool.map(ask, addresses)
        except RuntimeError as error:
            raise SmpUnavailable(f"no SMP can be asked: {error}") from error
        return [answer for answer in answers if answer is not None]
