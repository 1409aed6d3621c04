"""Flipped bits anywhere, in data, in parity and in transit: each is noticed, and repaired if parity allows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import decode_digested
from tests.relay import relaying
from tests.sampling import sampled
from tests.smp_kit import Ground, Run, SmpProcess, run_on
from tests.system.test_protect import over

SEED = 20260


@dataclass(frozen=True)
class Unit:
    """A sealed unit in an arena: its place in a file, and its stripe."""

    node: int
    path: str
    index: int
    offset: int
    length: int
    stripe: int


def units_of(run: Run, smps: Sequence[SmpProcess], snapshot: SnapshotId) -> list[Unit]:
    """Every unit, data or parity, that the SMPs hold of a snapshot whose group is the whole job."""
    stripes, found = run.layout.stripes(0), []
    for position, smp in enumerate(smps):
        for path in sorted(smp.arena.glob("*.json")):
            record = decode_digested(path.read_bytes())
            if record.get("snapshot") != list(snapshot) or record.get("kind") not in ("shard", "parity"):
                continue
            parity = record["kind"] == "parity"
            for index in range(len(record["digests"])):
                offset = index * record["unit_bytes"]
                length = record["lengths"][index] if parity else min(record["unit_bytes"], record["bytes"] - offset)
                held = stripes.parity_stripes(position)
                stripe = held[index] if parity else stripes.stripe_of(position, index)
                if length:
                    found.append(Unit(position, str(path.with_suffix("")), index, offset, length, stripe))
    return found


def flip(unit: Unit, source: random.Random) -> None:
    """Flip one random bit of a unit."""
    with open(unit.path, "r+b") as slot:  # noqa: PTH123
        slot.seek(unit.offset + source.randrange(unit.length))
        byte = slot.read(1)[0]
        slot.seek(-1, 1)
        slot.write(bytes([byte ^ 1 << source.randrange(8)]))


def images(run: Run, units: Sequence[Unit]) -> list[bytes]:
    contents = []
    for unit in units:
        with open(unit.path, "rb") as slot:  # noqa: PTH123
            slot.seek(unit.offset)
            contents.append(slot.read(unit.length))
    return contents


def scrub_all(run: Run) -> dict[str, int]:
    found = [trainer.client.scrub() for trainer in run]
    return {name: sum(each[name] for each in found) for name in ("units", "damaged", "repaired")}


@sampled("flips", few=1_000, whole=10_000)
@pytest.mark.proves("bits-flip")
def test_flips_at_rest_are_all_noticed_and_mended(ground: Ground, flips: int) -> None:
    source = random.Random(SEED)
    smps = ground.smps(4)
    run = over(run_on(smps, [[60_000], [60_000], [40_000], [50_000]], protect="2+2"))
    snapshot = run.protect(1)
    units = units_of(run, smps, snapshot)
    before = images(run, units)
    by_stripe: dict[int, list[Unit]] = {}
    for unit in units:
        by_stripe.setdefault(unit.stripe, []).append(unit)
    done = 0
    while done < flips:
        # Any units, but no more of a stripe than parity can repair; a unit may be hit several times.
        hit = [u for stripe in by_stripe.values() for u in source.sample(stripe, min(2, len(stripe)))]
        hit = hit[: flips - done]
        for unit in hit:
            flip(unit, source)
        assert scrub_all(run) == {"units": len(units), "damaged": len(hit), "repaired": len(hit)}, f"seed {SEED}"
        done += len(hit)
    assert images(run, units) == before
    assert sum(trainer.client.counters()["units_damaged"] for trainer in run) == flips
    assert sum(trainer.client.counters()["units_repaired"] for trainer in run) == flips


def test_more_flips_in_a_stripe_than_parity_are_noticed_and_not_mended_into_something_else(ground: Ground) -> None:
    source = random.Random(SEED)
    smps, run = ground.job([[300_000]] * 4, protect="3+1")
    snapshot = run.protect(1)
    units = units_of(run, smps, snapshot)
    hit = [unit for unit in units if unit.stripe == 1][:2]
    for unit in hit:
        flip(unit, source)
    spoilt = images(run, units)
    assert scrub_all(run) == {"units": len(units), "damaged": 2, "repaired": 0}
    assert images(run, units) == spoilt
    plan = run.plan()
    damaged = {f"dp{unit.node}" for unit in hit if unit.path.endswith(".safetensors")}
    run.join(2)
    for coord in damaged:
        with pytest.raises(DamagedSnapshot, match="cannot be repaired"):
            run[coord].recover(plan)


@pytest.mark.proves("bits-flip")
def test_flips_are_mended_when_a_job_is_restored(ground: Ground) -> None:
    source = random.Random(SEED)
    smps, run = ground.job([[300_000]] * 4, protect="2+2")
    snapshot = run.protect(1)
    by_stripe: dict[int, list[Unit]] = {}
    for unit in units_of(run, smps, snapshot):
        by_stripe.setdefault(unit.stripe, []).append(unit)
    for stripe in by_stripe.values():
        for unit in source.sample(stripe, 2):
            flip(unit, source)
    plan = run.plan()
    run.join(2)
    recovered = {trainer.coord: trainer.recover(plan) for trainer in run}
    assert {shard.how for shard in recovered.values()} <= {"held", "repaired"}
    assert all(shard.view == run[coord].image(snapshot) for coord, shard in recovered.items())
    scrub_all(run)
    assert scrub_all(run)["damaged"] == 0


# ---------------------------------------------------------------------- in transit


@sampled("times", few=5, whole=40)
@pytest.mark.proves("checked-on-arrival")
def test_a_flip_on_the_way_to_a_new_node_is_noticed_and_the_unit_computed_from_others(
    ground: Ground, times: int
) -> None:
    source = random.Random(SEED)
    smps, run = ground.job([[30_000]] * 4, protect="2+2")
    snapshot = run.protect(1)
    plan = run.plan()
    run.join(2)
    for _ in range(times):
        smps[3].lose().launch().wait_ready()
        fresh = smps[3].client()
        fresh.join(2)
        with relaying(plan.sources.shards["dp0"], flips=[source.randrange(1 << 15)]) as relay:
            sources = replace(
                plan.sources,
                shards={**{c: a for c, a in plan.sources.shards.items() if c != "dp3"}, "dp0": relay.address},
                parities={g: {p: at for p, at in of.items() if p != 3} for g, of in plan.sources.parities.items()},
            )
            try:
                shard = fresh.recover(sources, "dp3")
            except HoldfastError as error:
                raise AssertionError(f"seed {SEED}") from error
            assert shard.view == run["dp3"].image(snapshot)
        fresh.close()
