"""Rebuilding a lost node's bytes on real SMPs: every code, both ways to compute, and further losses on the way."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, Unrecoverable
from holdfast.smp_daemon.shared.plan import RestorePlan, plan_restore
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.smp_daemon.shared.transport import call, connect
from tests.smp_kit import PROTECTED, Ground, Run, SmpProcess, Trainer, run_on

SIZES = [30_000, 12_345, 30_001, 999, 25_000, 18_000]


def protected(ground: Ground, protect: str, nodes: int, **options: Any) -> tuple[list[SmpProcess], Run]:
    smps, run = ground.job([[SIZES[i], 500 + i] for i in range(nodes)], protect=protect, **options)
    run.protect(1)
    return smps, run


def replace_nodes(run: Run, smps: Sequence[SmpProcess], lost: Collection[int]) -> None:
    """Lose nodes and replace them; all are lost before the first is replaced."""
    for i in lost:
        smps[i].lose()
    begin(run, smps, lost)


def begin(run: Run, smps: Sequence[SmpProcess], nodes: Collection[int]) -> None:
    """Start SMPs, and trainers that know them."""
    for i in nodes:
        smps[i].launch().wait_ready()
        for segment, elements in enumerate([SIZES[i], 500 + i]):
            coord = f"dp{2 * i + segment}"
            run.trainers[coord] = Trainer(smps[i], coord, elements)


def restart(run: Run) -> RestorePlan:
    plan = run.plan()
    run.epoch += 1
    run.join(run.epoch)
    return plan


def assert_whole(run: Run, plan: RestorePlan, rebuilt: Collection[int]) -> int:
    """Check that every shard comes back to the last byte; return the number of bytes fetched."""
    count = 0
    for coord, trainer in run.trainers.items():
        shard = trainer.recover(plan)
        assert shard.view == trainer.image(plan.snapshot), coord
        assert shard.how == ("rebuilt" if int(coord[2:]) // 2 in rebuilt else "held")
        assert all(shard.unit(unit).matches() for unit in range(len(shard.digests))), coord
        count += shard.bytes_fetched
    return count


@pytest.mark.parametrize("method", ["chain", "decode"])
@pytest.mark.parametrize(
    ("protect", "nodes"), [("2+2", 4), ("copies:1", 3), ("copies:2", 4), ("3+1", 5), ("4+2", 6), ("1+1", 2), ("2+3", 6)]
)
def test_every_loss_that_the_code_allows_is_made_up_for(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, protect: str, nodes: int, method: str
) -> None:
    monkeypatch.setenv("HOLDFAST_REBUILD", method)
    smps, run = protected(ground, protect, nodes)
    data, parity = run.layout.data, run.layout.parity
    lost = list(range(nodes))[-parity:]
    replace_nodes(run, smps, lost)
    fetched = assert_whole(run, restart(run), lost)
    own = sum(run.layout.shard_bytes(f"dp{2 * i + segment}") for i in lost for segment in range(2))
    if method == "chain":
        assert fetched == own
    else:
        assert own <= fetched <= data * (own + run.layout.unit_bytes * 2 * len(lost))


def test_one_more_than_the_code_allows_cannot_be_had_and_says_so(ground: Ground) -> None:
    smps, run = protected(ground, "2+2", 4)
    run.protect(2)
    replace_nodes(run, smps, [0, 1, 2])
    with pytest.raises(Unrecoverable, match="lost shards of node0, node1, node2"):
        restart(run)


def test_parity_whose_files_somebody_deletes_comes_back_with_the_next_snapshot(ground: Ground) -> None:
    smps, run = protected(ground, "2+1", 3)
    for path in smps[0].arena.glob("*.parity"):
        path.unlink()
    run.protect(2)
    smps[0].kill()
    begin(run, smps, [0])
    replace_nodes(run, smps, [1])
    assert_whole(run, restart(run), [1])


def test_a_node_that_got_the_files_of_another_is_told_what_helps(ground: Ground) -> None:
    smps, run = protected(ground, "2+1", 3)
    smps[0].kill()
    for path in filter(Path.is_file, smps[1].arena.iterdir()):
        shutil.copy2(path, smps[0].arena)
    with pytest.raises(ConfigError, match="move this arena away"):
        smps[0].launch().wait_ready()
    smps[0].arena.rename(ground.base / "aside")
    begin(run, smps, [0])
    assert_whole(run, restart(run), [0])


def test_a_helper_lost_in_the_middle_of_a_chain_is_done_without(ground: Ground) -> None:
    smps, run = protected(ground, "3+2", 5, rules={4: [("rebuild.middle", 1)]})
    replace_nodes(run, smps, [4])
    plan = restart(run)
    recovering = ground.meanwhile(run["dp8"].recover, plan)
    held = ground.points.wait("node4", "rebuild.middle", 1)
    smps[1].lose()
    held.go()
    assert recovering.result(60).view == run["dp8"].image(plan.snapshot)
    smps[1].launch().wait_ready()
    again = Trainer(smps[1], "dp2", SIZES[1])
    inventories = [t.client.inventory() for c, t in run.trainers.items() if c not in ("dp2", "dp3")]
    later = plan_restore([*inventories, again.client.inventory()], run.trainers)
    assert later is not None
    again.client.join(run.epoch)
    assert again.recover(later).view == again.image(plan.snapshot)


def test_a_chain_through_nonsense_is_refused(ground: Ground) -> None:
    smps, run = protected(ground, "2+1", 3)
    unit = {"op": "shard_unit", "coord": "dp0", "unit": 0}
    term = {"at": ["127.0.0.1", 1], "what": unit, "factor": 1}
    what = {"op": "partial", "length": 64, "position": 0, "terms": [term]}
    message = {"op": "fetch", "job": smps[0].job, "snapshot": run.protected, "what": what}
    spoilings: list[dict[str, Any]] = [
        {"terms": []},
        {"terms": [term | {"factor": 256}]},
        {"terms": [{"factor": 1}]},
        {"terms": [term, {"at": "here"}]},
        {"terms": [term | {"what": unit | {"unit": 99}}]},
        {"length": 1 << 40},
    ]
    for spoilt in spoilings:
        with closing(connect(smps[0].bulk)) as stream:
            assert call(stream, message)[1] == 64
            stream.receive_into(memoryview(bytearray(64)))
            with pytest.raises(HoldfastError):
                call(stream, message | {"what": what | spoilt})


@pytest.mark.parametrize("how", ["held", "fetched", "rebuilt"])
@pytest.mark.parametrize("check", [True, False])
def test_a_shard_comes_with_the_digests_it_was_sealed_with(ground: Ground, how: str, check: bool) -> None:
    smps, run = protected(ground, "2+1", 3)
    at = smps[1] if how == "fetched" else smps[0]
    if how == "rebuilt":
        replace_nodes(run, smps, [0])
    plan = restart(run)
    shard = Trainer(at, "dp0", SIZES[0]).client.recover(plan.sources, "dp0", check=check)
    image = memoryview(run["dp0"].image(plan.snapshot))
    assert (shard.how, shard.view) == (how, image)
    assert shard.bytes_fetched == (0 if how == "held" else image.nbytes)
    assert shard.unit_bytes == run.layout.unit_bytes < image.nbytes
    assert shard.digests == digest_units(image, shard.unit_bytes)


def test_an_unknown_backend_is_refused(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_BACKEND", "abacus")
    with pytest.raises(HoldfastError, match=r"abacus.*auto, isal, "):
        ground.smp()


@pytest.mark.parametrize("backend", ["isal", "numpy"])
def test_smps_of_different_backends_understand_each_other(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    smps = []
    for i, name in enumerate([backend, "isal", "numpy", backend]):
        monkeypatch.setenv("HOLDFAST_BACKEND", name)
        smps.append(ground.smp(f"node{i}"))
    run = run_on(smps, [[SIZES[i], 500 + i] for i in range(4)], protect="2+2")
    snapshot = run.protect(1)
    assert run.outcomes(snapshot) == {PROTECTED}
    replace_nodes(run, smps, [0, 2])
    assert_whole(run, restart(run), [0, 2])


def test_ranks_of_a_lost_node_that_go_on_at_survivors_are_protected_there(ground: Ground) -> None:
    smps, run = ground.job([[20_000 + i] for i in range(4)], protect="3+1")
    run.protect(1)
    run.protect(2)
    smps[3].lose()
    run.trainers["dp3"] = Trainer(smps[0], "dp3", 20_003)
    plan = restart(run)
    for trainer in run:
        assert trainer.recover(plan).view == trainer.image(plan.snapshot)
    run.start(run.epoch + 1)
    assert [len(node.shards) for node in run.layout.nodes] == [2, 1, 1]
    run.protect(3)
    run.protect(4)
    smps[0].lose().launch().wait_ready()
    for rank in (0, 3):
        run.trainers[f"dp{rank}"] = Trainer(smps[0], f"dp{rank}", 20_000 + rank)
    plan = restart(run)
    assert plan.snapshot.step == 4
    for trainer in run:
        assert trainer.recover(plan).view == trainer.image(plan.snapshot)
