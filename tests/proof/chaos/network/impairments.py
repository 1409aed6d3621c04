"""What a wire does to packets while a fault lasts. Pure and seeded; the forwarder has the clock.

For each packet an impairment returns the copies that arrive, each with its due time. No copies: the packet is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.proof.chaos.network.packets import flipped

Due = list[tuple[float, bytes]]
Link = tuple[bytes, bytes]
Unit = tuple[int, int] | None

OVERTAKEN_S = (0.001, 0.02)
"""Range of the extra delay of a packet that is overtaken, or of its second copy, in seconds."""

SPOILT_EVERY = 16
"""One in this many packets with units is damaged, so that a unit that is sent again comes through in the end."""

BUFFER_S = 0.25
"""How much a throttled link buffers before it drops packets, in seconds of its rate."""


@dataclass(slots=True)
class Impairment:
    """One fault of the network, in force on the links of some nodes until it is over.

    Attributes:
        kind: one of `KINDS`.
        hosts: addresses of the nodes that it strikes, 4 bytes each.
        amount: percent, milliseconds, kB/s or bits, as the kind says.
        seed: seed of the random choices.
        until_s: when it is over, on the clock of the times that `on` gets.
        hits: number of packets that it lost, delayed, damaged or repeated.
        free_at: when the last packet on each link arrives.
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
        """The copies that arrive of a packet sent over `link` at time `at`. `unit`: its bytes that belong to a unit."""
        concerned, do = KINDS[self.kind]
        if at >= self.until_s or not concerned(self.hosts, *link):
            return [(at, packet)]
        due = do(self, packet, link, unit, at)
        self.hits += due != [(at, packet)]
        return due

    def drawn(self) -> bool:
        """Draw whether a packet is hit; `amount` is in percent."""
        return self.source.random() * 100 < self.amount


def after_all(impairments: list[Impairment], packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    """The copies that arrive of a packet after all impairments, one after another."""
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


# ---------------------------------------------------------------------- what happens to a packet


def _gone(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return []


def _lost(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    return [] if self.drawn() else [(at, packet)]


def _late(self: Impairment, packet: bytes, link: Link, unit: Unit, at: float) -> Due:
    """Delay a packet by 0.5 to 1.5 times the amount, but never let it overtake another on the link."""
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
    """Flip a bit in each of up to `amount` packets that carry a unit, one in `SPOILT_EVERY` of them at random."""
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
"""For each kind, by name: which links it concerns, and what happens to a packet there."""
