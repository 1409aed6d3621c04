"""Who holds what of a snapshot, on its way through JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_daemon.errors import ProtocolError
from smp_daemon.sources import Sources
from tests.strategies import addresses, json_values, lacking_a_key, layouts, names, snapshots, spoilt, through_json

quick = settings(deadline=None, derandomize=True, max_examples=60)
many = settings(deadline=None, derandomize=True, max_examples=200)

positions = st.integers(0, 7)
sources = st.builds(
    Sources,
    snapshots,
    layouts(),
    st.dictionaries(names, addresses, min_size=1, max_size=4),
    st.dictionaries(st.tuples(positions, positions), addresses, max_size=4),
)


@quick
@given(sources)
def test_sources_come_back_from_json(source: Sources) -> None:
    assert Sources.from_json(through_json(source.to_json())) == source


@many
@given(json_values)
def test_random_json_is_no_sources(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Sources.from_json(data)


@quick
@given(sources.map(Sources.to_json).flatmap(lambda data: st.sampled_from(sorted(data)).map(lambda key: (data, key))))
def test_sources_that_lack_a_part_are_refused(lacking: tuple[Any, str]) -> None:
    data, key = lacking
    with pytest.raises(ProtocolError):
        Sources.from_json({name: part for name, part in data.items() if name != key})


@quick
@given(lacking_a_key(sources.map(lambda source: {**source.to_json(), "shards": {}})))
def test_sources_whose_layout_lacks_a_key_are_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Sources.from_json(data)


@many
@given(spoilt(sources.map(Sources.to_json)))
def test_spoilt_sources_never_raise_anything_else(data: Any) -> None:
    try:
        Sources.from_json(data)
    except ProtocolError:
        pass


@quick
@given(sources)
def test_an_infinite_number_is_refused(source: Sources) -> None:
    for bad in ({"snapshot": [1, float("inf")]}, {"parities": [[0, 0, "host", float("inf")]]}):
        with pytest.raises(ProtocolError, match="not the sources"):
            Sources.from_json({**source.to_json(), **bad})
