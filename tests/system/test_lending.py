"""Units of any shard for a trainer of any node: held here, held elsewhere, or computed; checked, and not kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StaleEpoch, Unrecoverable
from holdfast.smp_daemon.shared.messages import AskInventories
from holdfast.smp_daemon.shared.sources import Sources
from tests.smp_kit import Run, SmpProcess, flip_a_byte, playground, run_on, shard_file

ELEMENTS = 3000


@pytest.fixture
def job() -> Iterator[tuple[Run, list[SmpProcess]]]:
    with playground() as ground:
        smps = ground.smps(3)
        yield run_on(smps, [[ELEMENTS], [ELEMENTS + 500], [ELEMENTS]]), smps


def lent(run: Run, by: str, coord: str, sources: Sources) -> bytes:
    """All units of a shard, one after another."""
    client, layout = run[by].client, run.layout
    client.lend(sources)
    slot = memoryview(bytearray(layout.shard_bytes(coord)))
    for index in range(-(-slot.nbytes // layout.unit_bytes)):
        client.unit(coord, index, slot[index * layout.unit_bytes : (index + 1) * layout.unit_bytes])
    return bytes(slot)


def test_units_come_from_here_from_others_and_from_parity(job: tuple[Run, list[SmpProcess]]) -> None:
    run, smps = job
    snapshot = run.protect(1)
    before = run.inventories()
    plan = run.plan(*before)
    for coord in ("dp0", "dp1", "dp2"):
        assert lent(run, "dp0", coord, plan.sources) == run[coord].image(snapshot)
    lost = run.plan(before[0], before[2])
    smps[1].kill()
    assert lent(run, "dp0", "dp1", lost.sources) == run["dp1"].image(snapshot)
    assert run["dp0"].client.inventory() == before[0], "nothing of it is kept"


def test_a_damaged_unit_is_computed(job: tuple[Run, list[SmpProcess]]) -> None:
    run, smps = job
    snapshot = run.protect(1)
    plan = run.plan()
    flip_a_byte(shard_file(smps[0], snapshot, "dp0"))
    assert lent(run, "dp0", "dp0", plan.sources) == run["dp0"].image(snapshot)
    assert lent(run, "dp2", "dp0", plan.sources) == run["dp0"].image(snapshot)


def test_what_cannot_be_had_is_an_error(job: tuple[Run, list[SmpProcess]]) -> None:
    run, smps = job
    run.protect(1)
    plan = run.plan()
    client = run["dp0"].client
    with pytest.raises(ProtocolError, match="first what to `lend`"):
        client.unit("dp0", 0, memoryview(bytearray(1)))
    client.lend(plan.sources)
    with pytest.raises(ProtocolError, match="no unit 999"):
        client.unit("dp0", 999, memoryview(bytearray(1)))
    with pytest.raises(ProtocolError, match=r"'dp7' .*epoch 1"):
        client.unit("dp7", 0, memoryview(bytearray(1)))
    with pytest.raises(ConfigError, match="memory only"):
        client.lend(Sources(plan.snapshot, run.layout, {}, {}, persisted=True))
    smps[1].kill()
    smps[2].kill()
    with pytest.raises(Unrecoverable):
        client.unit("dp1", 0, memoryview(bytearray(min(run.layout.unit_bytes, run.layout.shard_bytes("dp1")))))


def test_who_is_of_an_older_epoch_gets_nothing(job: tuple[Run, list[SmpProcess]]) -> None:
    run, smps = job
    run.protect(1)
    plan = run.plan()
    run["dp0"].client.lend(plan.sources)
    smps[0].client().join(2)
    with pytest.raises(StaleEpoch):
        run["dp0"].client.unit("dp0", 0, memoryview(bytearray(1)))


def test_who_lends_remembers_whose_units_they_are() -> None:
    """A node that is new to the job holds nothing of it, and may be the only one that the next start asks."""
    with playground() as ground:
        smps = ground.smps(3)
        run, new = run_on(smps[:2], [[ELEMENTS], [ELEMENTS]]), smps[2].client()
        run.protect(1)
        new.join(2)
        assert new.inventory().layouts == {}
        new.lend(run.plan().sources)
        assert new.inventory().layouts == {(1, 0): run.layout}


def test_an_smp_asks_others_what_they_hold(job: tuple[Run, list[SmpProcess]]) -> None:
    run, smps = job
    run.protect(1)
    theirs = run["dp1"].client.inventory()
    [found] = run["dp0"].client.inventories([theirs.control])
    assert (found.node, found.shards, found.parities, found.layouts) == (
        theirs.node,
        theirs.shards,
        theirs.parities,
        {},
    )
    smps[1].kill()
    assert run["dp0"].client.inventories([theirs.control]) == []
    with pytest.raises(ProtocolError, match="addresses"):
        run["dp0"].client._call(AskInventories(addresses=None))  # type: ignore[arg-type]
