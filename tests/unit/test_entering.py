"""What ranks tell each other at the start: each layout is sent once, and one rank speaks for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.snapshot.resume.arrange import Protection, arrange
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import exchange
from tests.unit.test_replicas import Rank, together

NODES = ("a", "a", "b", "b", "spare")
"""The node of each rank."""


DRAWN, NOW_S = 12345, 1.7e9


class Clock:
    """Stands in for a machine. Each rank draws other bits, at another time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def randbits(self, k: int) -> int:
        return DRAWN + self._rank

    def time(self) -> float:
        return NOW_S + self._rank


@dataclass
class Client:
    """Stands in for the client of an SMP."""

    held: Inventory
    system: Clock

    def inventory(self) -> Inventory:
        return self.held


class Told(Rank):
    """A rank that records what it gathers and sends."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank._table, rank.rank)
        self.gathered: list[list[bytes]] = []
        self.sent: list[tuple[int, bytes]] = []

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        self.gathered.append(super().gather(data, among))
        return self.gathered[-1]

    def tell(self, data: bytes, root: int) -> bytes:
        self.sent.append((root, super().tell(data, root)))
        return self.sent[-1][1]


def layout(epoch: int) -> Layout:
    infos = [Node(name, "10.0.0.1", ord(name[0]), 1, (Shard(f"dp{i}", 1000),)) for i, name in enumerate(NODES[:4])]
    return arrange("job", epoch, infos, Protection(1, 1), 3)


def held(node: str, layouts: Sequence[Layout]) -> Inventory:
    return Inventory(
        node,
        "10.0.0.1",
        ord(node[0]),
        1,
        epoch=3,
        layouts={(each.epoch, each.revision): each for each in layouts},
        shards=frozenset((SnapshotId(each.epoch, 7), f"{node} of {each.epoch}") for each in layouts),
    )


def enter(inventories: Sequence[Inventory], coords: Sequence[str], options: StartOptions | None = None) -> list[Any]:
    """For each rank, the record of its messages, and what it has learned or its error."""

    def rank(member: Rank) -> Any:
        told, client = Told(member), Client(inventories[member.rank], Clock(member.rank))
        try:
            return told, exchange(client, told, coords[member.rank], options)  # type: ignore[arg-type]
        except (ConfigError, StateMismatch, ProtocolError) as error:
            return told, error

    return together(rank, len(inventories))


COORDS = [f"dp{rank}" for rank in range(len(NODES))]


def test_every_rank_learns_what_every_node_holds_and_where_every_rank_is() -> None:
    layouts = {"a": [layout(2), layout(3)], "b": [layout(3)], "spare": []}
    inventories = [held(node, layouts[node]) for node in NODES]
    for _, entered in enter(inventories, COORDS, StartOptions(generations=2)):
        assert entered.inventories == [held(node, layouts[node]) for node in ("a", "b", "spare")]
        assert entered.coords == dict(zip(COORDS, NODES, strict=True))
        assert entered.options == StartOptions(generations=2)
        assert (entered.drawn, entered.now_s) == (DRAWN, NOW_S), "those of rank 0"


def test_what_each_has_already_is_not_sent() -> None:
    everywhere = [layout(2), layout(3)]
    for told, _ in enter([held(node, everywhere) for node in NODES], COORDS):
        assert told.sent == []
        [facts, said] = told.gathered
        assert [bool(text) for text in said] == [True, False, True, False, True], "the first of each node speaks"
        assert all(b"unit_bytes" not in text for text in (*facts, *said)), "layouts are named, not sent"


def test_what_some_rank_does_not_have_is_sent_once_by_the_first_that_has() -> None:
    inventories = [
        held(node, [] if node == "spare" else [layout(3)] if node == "b" else [layout(2), layout(3)]) for node in NODES
    ]
    for told, _ in enter(inventories, COORDS):
        assert [root for root, _ in told.sent] == [0, 0]
        assert sorted(text.count(b'"unit_bytes"') for _, text in told.sent) == [1, 1]


def test_where_nothing_is_held_nothing_is_sent() -> None:
    for told, entered in enter([held(node, []) for node in NODES], COORDS):
        assert told.sent == [] and [each.layouts for each in entered.inventories] == [{}] * 3


def test_two_smps_with_one_name_are_refused_on_every_rank() -> None:
    inventories = [held(node, []) for node in NODES]
    inventories[1] = replace(inventories[1], control_port=4242)
    for _, error in enter(inventories, COORDS):
        assert isinstance(error, ConfigError)
        assert "'a', at 10.0.0.1:97 and 10.0.0.1:4242" in str(error)
        assert "HOLDFAST_NODE" in str(error)


def test_two_ranks_with_one_coordinate_are_refused_on_every_rank() -> None:
    for _, error in enter([held(node, []) for node in NODES], ["dp0", "dp1", "dp2", "dp1", "dp4"]):
        assert isinstance(error, StateMismatch) and "coordinate 'dp1'" in str(error)


def test_another_layout_than_was_named_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inventories = [held(node, [] if node == "spare" else [layout(3)]) for node in NODES]
    monkeypatch.setattr("holdfast.snapshot.resume.entering.to_plain", lambda each: {**_plain(each), "epoch": 9})
    for _, error in enter(inventories, COORDS):
        assert isinstance(error, ProtocolError) and "sent another layout" in str(error)


def _plain(each: object) -> Any:
    from holdfast.smp_daemon.shared.plain import to_plain

    return to_plain(each)
