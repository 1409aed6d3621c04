"""Hypothesis strategies shared by several test modules: layouts, records, and random or damaged JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st

from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
snapshots = st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 2**40))
ports = st.integers(1, 65535)
tags = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
labels = st.from_regex(r"[a-z]{1,4}=[a-z0-9]{1,4}", fullmatch=True)
addresses = st.tuples(st.sampled_from(["127.0.0.1", "::1", "host-7"]), ports)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    node_names = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    coords = draw(st.lists(names, min_size=len(node_names), max_size=2 * len(node_names), unique=True))
    shards = [Shard(coord, draw(st.integers(1, 100))) for coord in coords]
    nodes = tuple(
        Node(
            name,
            *draw(addresses),
            draw(ports),
            tuple(shards[i :: len(node_names)]),
            tuple(draw(st.lists(labels, max_size=2, unique=True))),
            tuple((f"192.168.{n}.1", draw(ports)) for n in range(draw(st.integers(0, 2)))),
        )
        for i, name in enumerate(node_names)
    )
    order = draw(st.permutations(range(len(nodes))))
    cut = draw(st.integers(0, len(nodes)))
    return Layout(
        job=draw(names),
        epoch=draw(st.integers(1, 2**40)),
        revision=draw(st.integers(0, 3)),
        nodes=nodes,
        groups=tuple(tuple(group) for group in (order[:cut], order[cut:]) if group),
        data=draw(st.integers(1, 4)),
        left=tuple(draw(st.lists(names, max_size=2, unique=True))),
        parity=draw(st.integers(0, 2)),
        unit_bytes=draw(st.integers(1, 64)),
        slots=draw(st.integers(2, 16)),
    )


numbers = st.integers(0, 2**53)
digests = st.integers(0, 2**64 - 1)
unit_lengths = st.integers(1, 2**26)
shard_records = st.builds(
    ShardRecord, snapshots, names, numbers, unit_lengths, st.lists(digests, max_size=5).map(tuple)
)


@st.composite
def drawn_parity_records(draw: st.DrawFn) -> ParityRecord:
    unit_bytes = draw(unit_lengths)
    accumulated = st.dictionaries(st.integers(0, 9), digests, max_size=3)
    units = draw(st.lists(st.tuples(st.integers(0, unit_bytes), digests, accumulated), max_size=5))
    lengths, parities, sources = zip(*units, strict=True) if units else ((), (), ())
    return ParityRecord(draw(snapshots), draw(tags), draw(st.integers(0, 9)), unit_bytes, lengths, parities, sources)


parity_records = drawn_parity_records()


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def places(data: Any, *, only_keys: bool = False) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside `data`, at any depth; with `only_keys`, only of values in objects."""
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    inner = [place for key in keys for place in places(data[key], only_keys=only_keys)]
    return [] + [(data, key) for key in keys if isinstance(data, dict) or not only_keys] + inner


@st.composite
def spoilt(draw: st.DrawFn, good: st.SearchStrategy[Any]) -> Any:
    """A value of `good` with one inner value, at any depth, removed or replaced by random JSON."""
    data = through_json(draw(good))
    container, key = draw(st.sampled_from(places(data)))
    if draw(st.booleans()):
        container[key] = draw(json_values)
    else:
        del container[key]
    return data


@st.composite
def lacking_a_key(draw: st.DrawFn, good: st.SearchStrategy[Any], optional: Collection[str] = ()) -> Any:
    """A value of `good` with one key of an object, at any depth, removed; never an `optional` key."""
    data = through_json(draw(good))
    found = [(container, key) for container, key in places(data, only_keys=True) if key not in optional]
    container, key = draw(st.sampled_from(found))
    del container[key]
    return data
