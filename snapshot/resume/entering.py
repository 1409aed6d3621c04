"""What ranks tell each other on entering: the node of each rank, what each node holds, and each layout once.

A layout grows with the job, and as a rule every node has the same ones. So the first rank of each node speaks for it
and names layouts by their digests. A layout is sent only if some rank does not have it from its own SMP.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.identity import ID_DIGITS
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.plain import Count, decode_json, encode_json, pack, to_plain, unpack
from holdfast.smp_daemon.shared.sources import Address
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.choice import StartOptions


@dataclass(frozen=True, slots=True)
class Entering:
    """A rank's description of itself.

    Attributes:
        smp: the address of its node's SMP.
        drawn: random bits. Those of rank 0 name what the start begins: its epoch, and a new run.
        now_s: the time by its clock, in seconds since 1970.
    """

    coord: str
    node: str
    smp: Address
    options: StartOptions
    drawn: Count
    now_s: float


@dataclass(frozen=True, slots=True)
class Entered:
    """What all ranks know once they have told each other; the same on every rank.

    Attributes:
        inventories: one of each node's SMP.
        coords: the node of every coordinate.
        options: the start options of each rank.
        drawn, now_s: those of rank 0.
    """

    inventories: list[Inventory]
    coords: dict[str, str]
    options: list[StartOptions]
    drawn: int
    now_s: float


def exchange(client: SmpClient, agreement: Agreement, coord: str, options: StartOptions | None = None) -> Entered:
    """Tell the other ranks about this one and its node, and hear the same from them. A collective call.

    Raises:
        StateMismatch: two ranks have the same coordinate; raised on every rank.
        ConfigError: two SMPs have the same node name; raised on every rank.
    """
    with _uncollected():
        own = client.inventory()
    system = client.system
    drawn = system.randbits(4 * ID_DIGITS)
    mine = Entering(coord, own.node, own.control, options or StartOptions(), drawn, system.time())
    texts = agreement.gather(encode_json(mine))
    with _uncollected():
        everyone = [decode_json(Entering, text, "what a rank says on entering") for text in texts]
    coords = {told.coord: told.node for told in everyone}
    if len(coords) < len(everyone):
        [(twice, _)] = Counter(told.coord for told in everyone).most_common(1)
        raise StateMismatch(f"two ranks have the coordinate {twice!r}")
    speaker = first_ranks(everyone)
    layouts = {layout.digest: layout for layout in own.layouts.values()}
    speaks = speaker[own.node] == agreement.rank
    texts = agreement.gather(encode_json(own.to_plain(layouts.keys())) if speaks else b"")
    with _uncollected():
        told = {node: decode_json(dict[str, object], texts[rank], "an inventory") for node, rank in speaker.items()}
    layouts |= _sent(agreement, layouts, {speaker[node]: _digests(plain) for node, plain in told.items()})
    with _uncollected():
        inventories = [Inventory.read(plain, layouts) for plain in told.values()]
    first = everyone[0]
    return Entered(inventories, coords, [each.options for each in everyone], first.drawn, first.now_s)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector. While a hundred thousand lasting objects are made it would scan the whole process
    again and again: with 16,384 ranks, for twice as long as it takes to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def first_ranks(everyone: Sequence[Entering]) -> dict[str, int]:
    """By node, the rank that speaks for it. Raises `ConfigError` if two SMPs use the same node name."""
    speaker: dict[str, int] = {}
    for rank, told in enumerate(everyone):
        first = everyone[speaker.setdefault(told.node, rank)]
        if first.smp != told.smp:
            raise ConfigError(
                f"two SMPs call their node {told.node!r}, at {first.smp[0]}:{first.smp[1]} and "
                f"{told.smp[0]}:{told.smp[1]}: give each host its own HOLDFAST_NODE"
            )
    return speaker


def _digests(plain: Mapping[str, object]) -> list[str]:
    named = plain.get("layouts")
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def _sent(agreement: Agreement, known: Mapping[str, Layout], named: Mapping[int, Sequence[str]]) -> dict[str, Layout]:
    """The layouts that not all ranks know, by digest, from the first rank that named each. A collective call.

    Args:
        named: by rank, digests of the layouts that it can send.
    """
    senders: dict[str, int] = {}
    for rank, digests in sorted(named.items()):
        for digest in digests:
            senders.setdefault(digest, rank)
    ordered = sorted(senders)
    found: dict[str, Layout] = {}
    if not ordered:
        return found
    for digest, everywhere in zip(ordered, agreement.minimum([int(d in known) for d in ordered])(), strict=True):
        if not everywhere:
            sends = senders[digest] == agreement.rank
            text = agreement.tell(pack(to_plain(known[digest])) if sends else b"", senders[digest])
            with _uncollected():
                found[digest] = Layout.read(unpack(dict[str, object], text, "a layout"))
            if found[digest].digest != digest:
                raise ProtocolError(f"rank {senders[digest]} sent another layout than it had named")
    return found
