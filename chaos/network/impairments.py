"""What a wire does to packets while a fault lasts: pure, seeded; the forwarder holds the clock.

An impairment says of each packet that it concerns what comes of it: copies, each due at some time. None: it is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.chaos.network.packets import flipped

Due = list[tuple[float, bytes]]
Link = tuple[bytes, bytes]
Unit = tuple[int, int] | None

OVERTAKEN_S = (0.001, 0.02)
"""How much later than its successors a packet may come that is out of order."""

SPOILT_EVERY = 16
"""Of packets with units; a unit that is sent again and again must come through in the end."""

BUFFER_S = 0.25
"""What a throttled link holds, in seconds of its rate, before it drops."""


@dataclass(slots=True)
class Impairment:
    """One fault of the network, in force on the links of some nodes until it is over.

    Attributes:
        kind: one of `KINDS`.
        hosts: addresses of the nodes it is done to, 4 bytes each.
        amount: percent, milliseconds, kB/s or bits, as the kind says.
        seed: of what is drawn.
        until_s: when it is over, by the clock that `on` is given.
        hits: packets that were lost, late, spoilt or repeated because of it.
    """

    kind: str
    hosts: frozenset[bytes]
    amount: int
    seed: int
    until_s: float
    hits: int = 0
    source: random.Random = field(init=False)
    free_at: dict[Link, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)

    def on(self, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
        """What comes of a packet that is sent over a link at a time; `unit`: which of its bytes are a unit's."""
        concerned, do = KINDS[self.kind]
        if at >= self.until_s or not concerned(self.hosts, *link):
            return [(at, packet)]
        due = do(self, packet, link, unit, at)
        self.hits += due != [(at, packet)]
        return due

    def drawn(self) -> bool:
        """Whether a packet is hit, `amount` being percent."""
        return self.source.random() * 100 < self.amount


def after_all(impairments: list[Impairment], packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    """What comes of a packet after every impairment, one after another."""
    due = [(at, packet)]
    for impairment in impairments:
        due = [result for when, each in due for result in impairment.on(each, link, unit, when)]
    return due


# ---------------------------------------------------------------------- which links


def _touches(hosts: frozenset[bytes], source: bytes, target: bytes) -> bool:
    return source in hosts or target in hosts


def _crosses(hosts: frozenset[bytes], source: bytes, target: bytes) -> bool:
    return (source in hosts) != (target in hosts)


def _from(hosts: frozenset[bytes], source: bytes, target: bytes) -> bool:
    return source in hosts


def _to(hosts: frozenset[bytes], source: bytes, target: bytes) -> bool:
    return target in hosts


# ---------------------------------------------------------------------- what comes of a packet


def _gone(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return []


def _lost(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return [] if self.drawn() else [(at, packet)]


def _late(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    """Half to one and a half times the amount; never before the packet ahead of it on the link."""
    late_s = self.amount / 1000 * (0.5 + self.source.random())
    self.free_at[link] = max(self.free_at.get(link, 0.0), at + late_s)
    return [(self.free_at[link], packet)]


def _overtaken(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return [(at + self.source.uniform(*OVERTAKEN_S), packet)] if self.drawn() else [(at, packet)]


def _repeated(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return [(at, packet), (at + self.source.uniform(*OVERTAKEN_S), packet)] if self.drawn() else [(at, packet)]


def _throttled(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    free_at = max(self.free_at.get(link, 0.0), at)
    if free_at - at > BUFFER_S:
        return []
    self.free_at[link] = free_at + len(packet) / (self.amount * 1000)
    return [(self.free_at[link], packet)]


def _spoilt(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    """One bit in each of so many packets that carry a unit, one in `SPOILT_EVERY` of them."""
    if unit is None or self.hits >= self.amount or self.source.randrange(SPOILT_EVERY):
        return [(at, packet)]
    return [(at, flipped(packet, self.source.randrange(unit[0] * 8, unit[1] * 8)))]


Concerned = Callable[[frozenset[bytes], bytes, bytes], bool]
Do = Callable[[Impairment, bytes, Link, Unit, float], Due]

KINDS: dict[str, tuple[Concerned, Do]] = {
    "lose-packets": (_touches, _lost),
    "delay-packets": (_touches, _late),
    "reorder-packets": (_touches, _overtaken),
    "repeat-packets": (_touches, _repeated),
    "throttle": (_touches, _throttled),
    "partition": (_crosses, _gone),
    "mute-node": (_from, _gone),
    "deaf-node": (_to, _gone),
    "flip-in-flight": (_touches, _spoilt),
}
"""By name: which links it concerns, and what comes of a packet there."""
