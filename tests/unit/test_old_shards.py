"""Descriptions of old shards: names are valid for the whole job, and some state must not be divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.copy.tensors import Block
from holdfast.snapshot.resume.elastic import (
    OldManifest,
    _check_private,
)
from holdfast.snapshot.resume.regions import Read, Region, index_of, plan_reads, range_runs, region_of
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.state.values import decode_plain, encode


def manifest(coord: str = "dp0", **said: Any) -> OldManifest:
    empty: dict[str, Any] = {"leaves": [], "shared": {}, "blocks": {}, "optimizers": [], "digests": {}}
    return OldManifest(coord, **{**empty, "streams": {}, "carried": [], "values": {}, **said})


def test_parts_that_replicas_kept_are_ranges_of_the_whole() -> None:
    shared = {"w": ["F32", [2, 3]]}
    old = [
        manifest("dp0", shared=shared, leaves=[["w@0:4", "F32", [4], 100]]),
        manifest("dp1", shared=shared, leaves=[["w@4:6", "F32", [2], 200]]),
    ]
    index = index_of((held for each in old for held in each.held()), ["dp1", "dp0"])
    reads, problem = plan_reads(Region("w", "F32", (2, 3), range_runs(0, 6)), index)
    assert (reads, problem) == ([Read("dp0", 100, 0, 16), Read("dp1", 200, 16, 8)], "")


def test_what_is_divided_in_no_known_way_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"w is divided .*not known"):
        region_of("w", (2,), Block((4,), ()))
    with pytest.raises(StateMismatch, match=r"same parallel sizes"):
        list(manifest(leaves=[["w", "F32", [2], 0]], blocks={"w": [[4], []]}).held())


def test_a_manifest_is_told_as_json() -> None:
    said = manifest(leaves=[("w", "F32", (2,), 0)], digests={"w": "ab"})
    assert decode_json(OldManifest, encode_json(said), "") == said
    with pytest.raises(ProtocolError):
        decode_json(OldManifest, b'{"coord": "dp0"}', "")


def live(name: str, change: Change) -> LiveTensor:
    return LiveTensor(name, torch.zeros(1), change)


def is_guessed(name: str, change: Change, *digests: str) -> bool:
    """Whether a new rank may take the value of the first old rank, when the old ranks' values have these digests."""
    try:
        _check_private([live(name, change)], [manifest(f"dp{i}", digests={name: d}) for i, d in enumerate(digests)])
    except StateMismatch as error:
        assert "different values" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", ["model0.w", "optim.0.0.residual"])
def test_parameters_and_moments_that_differ_are_not_guessed(name: str) -> None:
    """Such as a compressor's residuals of each rank's own errors, or models that no wrapper keeps identical."""
    assert is_guessed(name, Change.STEP, "a", "a")
    assert not is_guessed(name, Change.STEP, "a", "b")


@pytest.mark.parametrize(("name", "change"), [("model0.mean", Change.ANY), ("tracked.ema.w", Change.STEP)])
def test_buffers_and_tracked_state_may_be_a_ranks_own(name: str, change: Change) -> None:
    assert is_guessed(name, change, "a", "b")


def test_plain_values_of_an_optimizer_hold_no_tensor() -> None:
    assert decode_plain(encode({"0.0": {"step": 3}}, "", {})) == {"0.0": {"step": 3}}
    with pytest.raises(ProtocolError, match="a tensor among values"):
        decode_plain(encode({"0.0": torch.ones(2)}, "", {}))
