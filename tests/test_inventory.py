"""What an SMP says that it holds, on its way through JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from tests.strategies import json_values, lacking_a_key, layouts, names, ports, snapshots, spoilt, tags, through_json

quick = settings(deadline=None, derandomize=True, max_examples=60)
many = settings(deadline=None, derandomize=True, max_examples=200)

positions = st.integers(0, 7)
inventories = st.builds(
    Inventory,
    node=names,
    host=names,
    control_port=ports,
    bulk_port=ports,
    epoch=st.integers(0, 9),
    protected=st.none() | snapshots,
    trainers=st.integers(0, 9),
    layouts=st.lists(layouts(), max_size=2).map(lambda many: {(each.epoch, each.revision): each for each in many}),
    shards=st.frozensets(st.tuples(snapshots, names), max_size=4),
    parities=st.frozensets(st.tuples(snapshots, tags, positions), max_size=4),
    unpromised=st.frozensets(snapshots, max_size=3),
)


@quick
@given(inventories)
def test_an_inventory_comes_back_from_json(inventory: Inventory) -> None:
    assert Inventory.from_json(through_json(inventory.to_json())) == inventory


@many
@given(json_values)
def test_random_json_is_no_inventory(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Inventory.from_json(data)


@quick
@given(lacking_a_key(inventories.map(Inventory.to_json)))
def test_an_inventory_that_lacks_a_key_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Inventory.from_json(data)


@many
@given(spoilt(inventories.map(Inventory.to_json)))
def test_a_spoilt_inventory_never_raises_anything_else(data: Any) -> None:
    try:
        Inventory.from_json(data)
    except ProtocolError:
        pass


def test_an_infinite_number_is_refused() -> None:
    good = Inventory("a", "h", 1, 2).to_json()
    for bad in (
        {"epoch": float("inf")},
        {"trainers": float("inf")},
        {"protected": [1, float("inf")]},
        {"shards": [[1, float("inf"), "dp0"]]},
        {"parities": [[1, 2, "tag", float("inf")]]},
    ):
        with pytest.raises(ProtocolError, match="not an inventory"):
            Inventory.from_json({**good, **bad})


@quick
@given(layouts())
def test_layouts_of_one_epoch_are_told_apart_by_their_revision(layout: Layout) -> None:
    newer = replace(layout, revision=layout.revision + 1)
    both = {(layout.epoch, layout.revision): layout, (layout.epoch, newer.revision): newer}
    assert Inventory.from_json(through_json(Inventory("a", "h", 1, 2, layouts=both).to_json())).layouts == both


def test_an_inventory_says_where_bytes_are_served() -> None:
    assert Inventory("a", "10.0.0.1", 7000, 7001).bulk == ("10.0.0.1", 7001)
