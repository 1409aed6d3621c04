"""Jobs that continue with fewer ranks, and then with more, on real processes: wholes are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.cluster import History, JobFailed, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.leftovers import find_leftovers, remove
from holdfast.scratch import Scratch
from tests.smp_kit import kill_smps

pytestmark = pytest.mark.cluster
SLOW = pytest.mark.slow


class Fleet:
    """Nodes whose SMPs outlive each run of the job; `run` starts one rank on each of the first `ranks` nodes."""

    def __init__(self, launcher: Launcher, base: Path, kind: str, **options: Any) -> None:
        base.mkdir()
        self._launcher = launcher
        self._base = base
        self._args = {"kind": kind, "options": options, "arena": str(base)}

    def run(
        self,
        ranks: int,
        steps: int,
        *,
        elastic: bool = True,
        faults: Callable[[VirtualCluster], None] | None = None,
        **others: Any,
    ) -> History:
        cluster = VirtualCluster(
            self._launcher,
            nodes=ranks,
            ranks_per_node=1,
            target="tests.elastic_jobs:train",
            args={**self._args, "steps": steps, "elastic": elastic, **others},
            job="elastic",
            smps=False,
            deadline_s=90,
        )
        if faults is not None:
            faults(cluster)
        return cluster.run()

    def lose(self, node: int) -> None:
        (lost,) = [left for left in find_leftovers(self._base) if left.path.parent.name == f"node{node}"]
        remove(lost)


@pytest.fixture
def fleet(launcher: Launcher) -> Iterator[Callable[..., Fleet]]:
    with Scratch("test") as scratch:
        yield lambda kind, name="job", **options: Fleet(launcher, scratch.path / name, kind, **options)
        kill_smps(scratch.path)


def one(events: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """The reports of all ranks as one: the parts that must be the same, and by rank those that are each rank's own."""
    by_rank = sorted(events, key=lambda event: event["rank"])
    assert [event["rank"] for event in by_rank] == list(range(ranks))
    assert all((e["whole"], e["alike"]) == (by_rank[0]["whole"], by_rank[0]["alike"]) for e in by_rank)
    return {"whole": by_rank[0]["whole"], "alike": by_rank[0]["alike"], "own": [event["own"] for event in by_rank]}


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=SLOW)])
@pytest.mark.proves("streams")
def test_a_job_goes_on_with_three_of_four_ranks_and_with_four_again(fleet: Callable[..., Fleet], kind: str) -> None:
    job = fleet(kind)
    first = job.run(4, 4)
    before = one(first.of("end"), 4)
    job.lose(3)
    three = job.run(3, 6)
    started = one(three.of("started"), 3)
    assert {event["how"] for event in three.of("started")} == {"resharded"}
    assert {event["step"] for event in three.of("started")} == {4}
    assert (started["whole"], started["alike"]) == (before["whole"], before["alike"])
    assert started["own"] == before["own"][:3], "who stays keeps its streams"
    after = one(three.of("end"), 3)
    four = job.run(4, 8)
    again = one(four.of("started"), 4)
    assert {event["step"] for event in four.of("started")} == {6}
    assert (again["whole"], again["alike"]) == (after["whole"], after["alike"])
    assert again["own"][:3] == after["own"]
    spent = {event["rank"]: event["spent"] for event in four.of("started")}
    assert [spent[rank]["count"] for rank in range(4)] == [6] * 4, "the account of time goes on, on a new rank, too"
    assert {each["since"] for each in spent.values()} <= {event["spent"]["since"] for event in first.of("started")}
    losses = [event["loss"] for run in (three, four) for event in run.of("step") if event["rank"] == 0]
    alone = [event["loss"] for event in fleet(kind, name="alone").run(4, 8).of("step") if event["rank"] == 0]
    assert losses == pytest.approx(alone[4:], rel=1e-5), "the same batches, added up in another order"


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=SLOW), "fsdp"])
@pytest.mark.proves("cut-and-back")
def test_without_a_step_in_between_all_is_as_if_it_had_never_been_cut(fleet: Callable[..., Fleet], kind: str) -> None:
    job = fleet(kind)
    before = one(job.run(4, 3).of("end"), 4)
    job.lose(1)
    three = one(job.run(3, 3).of("started"), 3)
    assert (three["whole"], three["alike"]) == (before["whole"], before["alike"])
    assert three["own"] == before["own"][:3]
    assert one(job.run(4, 3).of("started"), 4) == before


def test_whoever_is_killed_on_the_way_loses_nothing(fleet: Callable[..., Fleet]) -> None:
    """Ranks die in the middle of a reshard, and before the first snapshot of the new world is protected."""
    job = fleet("fsdp")
    before = one(job.run(4, 3).of("end"), 4)
    job.lose(0)

    def faults(cluster: VirtualCluster) -> None:
        cluster.kill_trainer(1, at="restore.middle", step=3)
        cluster.kill_trainer(2, at="copy.done", step=4)

    history = job.run(3, 6, faults=faults)
    assert len(history.restarts) == 2
    started = [event for event in history.of("started") if event["step"] == 3]
    assert len(started) >= 3
    assert {event["how"] for event in started} == {"resharded"}
    assert all((event["whole"], event["alike"]) == (before["whole"], before["alike"]) for event in started)
    last = [event["step"] for event in history.of("started")[-3:]]
    assert len(set(last)) == 1 and last[0] in (3, 4)
    assert one(job.run(3, 6).of("started"), 3) == one(history.of("end"), 3)


@pytest.mark.proves("streams")
def test_who_comes_back_to_a_single_rank_draws_its_own_numbers(fleet: Callable[..., Fleet]) -> None:
    job = fleet("ddp")
    before = one(job.run(2, 3).of("end"), 2)
    job.lose(1)
    after = one(job.run(1, 5).of("end"), 1)
    again = one(job.run(2, 6).of("started"), 2)
    assert again["own"] == [after["own"][0], before["own"][1]]


@SLOW
def test_a_rank_that_never_was_gets_streams_of_its_own(fleet: Callable[..., Fleet]) -> None:
    job = fleet("ddp")
    before = one(job.run(2, 3).of("end"), 2)
    started = one(job.run(3, 4).of("started"), 3)
    assert started["own"][:2] == before["own"]
    assert all(
        started["own"][2][name] not in (own[name] for own in before["own"]) for own in before["own"] for name in own
    )


def test_what_cannot_be_is_said(fleet: Callable[..., Fleet]) -> None:
    job = fleet("ddp")
    job.run(4, 3)
    with pytest.raises(JobFailed, match=r"StateMismatch: .*4 ranks .* has 3.*elastic=True"):
        job.run(3, 4, elastic=False)
    with pytest.raises(JobFailed, match=r"StateMismatch: optim .*other parameters"):
        job.run(3, 4, kind="fsdp")
    with pytest.raises(JobFailed, match=r"StateMismatch: .*taken of Sequential, .*given Residual"):
        job.run(3, 4, options={"residual": True})
    job.lose(1)
    job.lose(2)
    with pytest.raises(JobFailed, match=r"Unrecoverable: .*too much"):
        job.run(3, 4)


@SLOW
def test_optimizer_state_that_is_dealt_out_goes_where_its_parameter_goes(fleet: Callable[..., Fleet]) -> None:
    """ZeRO-1: each rank has the moments of other parameters, and three ranks divide them anew. Some ranks also have
    extras that others lack; a new rank takes each of these from one that had it."""
    job = fleet("zero")
    before = one(job.run(4, 4).of("end"), 4)
    job.lose(2)
    three = job.run(3, 6)
    started = one(three.of("started"), 3)
    assert (started["whole"], started["alike"]) == (before["whole"], before["alike"])
    after = one(three.of("end"), 3)
    four = job.run(4, 7)
    again = one(four.of("started"), 4)
    assert (again["whole"], again["alike"]) == (after["whole"], after["alike"])
    assert [[event["count"] for event in run.of("started")] for run in (three, four)] == [[4] * 3, [6] * 4]


@pytest.mark.parametrize(
    ("tensor", "dtype"), [(1, "bf16"), *(pytest.param(t, d, marks=SLOW) for t in (1, 2) for d in ("fp32", "fp16"))]
)
def test_megatrons_distributed_optimizer_is_cut_anew(fleet: Callable[..., Fleet], tensor: int, dtype: str) -> None:
    """Its ranks cut parameters at any element, and each numbers its parts on its own."""
    job = fleet("megatron", tensor=tensor, layers=1, dtype=dtype)
    four, three = 4 * tensor, 3 * tensor
    before = one(job.run(four, 3).of("end"), four)
    job.lose(three)
    fewer = job.run(three, 5)
    started = one(fewer.of("started"), three)
    assert (started["whole"], started["alike"]) == (before["whole"], before["alike"])
    assert started["own"] == before["own"][:three]
    after = one(fewer.of("end"), three)
    again = one(job.run(four, 6).of("started"), four)
    assert (again["whole"], again["alike"]) == (after["whole"], after["alike"])
    assert again["own"] == [*after["own"], *after["own"][:tensor]], "data-parallel ranks of Megatron have one stream"
