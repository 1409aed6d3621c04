"""``holdfast audit`` finds and names what a resume forgot, in real processes; and what a loop's code can reach."""

from __future__ import annotations

import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from holdfast import ConfigError, HoldfastError
from holdfast.audit import AuditPlan, AuditReport, Difference, Notes, compare, distinct, drift, run, show
from holdfast.smp_daemon.shared.paths import arena_base
from holdfast.snapshot.state.audit import reachable

ROOT = Path(__file__).parents[2]


def audit(module: str, *options: str, ranks: int = 1, **more: Any) -> AuditReport:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    command = (
        sys.executable,
        *launcher,
        "-m",
        module,
        *(f"--option={option}" for option in options),
    )
    return run(AuditPlan(command, deadline_s=60, **more), lambda name: None)


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_job_that_tracks_all_of_its_state_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_REPEATS", "1")  # the kills of an audit do not count
    report = audit("tests.proof.jobs.acp_sgd")
    assert report.exact, report.differences
    assert len(report.resumed) == 2
    assert report.compared > 100
    assert not list(arena_base().glob(f".audit-{os.getpid()}-*"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("job", "piece", "ranks", "name"),
    [
        ("acp_sgd", "turn", 1, "compressor.send_p"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("acp_sgd", "p", 1, "compressor.tensors['0.weight/p']"),
                ("acp_sgd", "q", 1, "compressor.tensors['0.weight/q']"),
                ("acp_sgd", "residual", 1, "compressor.tensors['0.weight/residual']"),
                ("eva", "vectors", 1, "eva.inputs[0]"),
                ("eva", "steps", 1, "eva.steps"),
                ("fed_impro", "statistics", 1, ".statistics['mean']"),
                ("fed_impro", "round", 1, "self.round"),
                ("pool", "lost", 3, "self.lost['up']"),
                ("shared_host", "rows", 1, "self.rows"),
            ]
        ),
    ],
)
@pytest.mark.proves("forgotten")
def test_what_was_forgotten_is_named(job: str, piece: str, ranks: int, name: str) -> None:
    report = audit(f"tests.proof.jobs.{job}", f"without={piece}", ranks=ranks)
    named = [each.name for each in report.differences if each.kind in ("not restored", "absent")]
    assert any(each.endswith(name) for each in named), named
    assert not report.exact


@pytest.mark.slow
@pytest.mark.parametrize(("job", "piece"), [("fed_impro", "clients"), ("pool", "order")])
def test_a_generator_in_a_variable_is_not_forgotten(job: str, piece: str) -> None:
    assert audit(f"tests.proof.jobs.{job}", f"without={piece}", ranks=1).exact


DRAWING_LOOP = """
import torch
from holdfast import InMemorySnapshot

def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(1)
    with InMemorySnapshot(model, optim) as snap:
        if snap.step:
            torch.randperm(10)
        for _ in range(snap.step, 10):
            x = torch.randn(8, 4) + 0.1 * torch.randn(8, 4, generator=own)
            model(x).square().mean().backward()
            optim.step()
            optim.zero_grad()

main()
"""


PLAIN_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from holdfast import InMemorySnapshot

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    data = TensorDataset(torch.randn(256, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    with InMemorySnapshot(model, optimizer, scheduler=scheduler) as snap:
        for epoch in range(snap.epoch, 4):
            sampler.set_epoch(epoch)
            for (x,) in snap.data(loader):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    dist.destroy_process_group()

main()
"""


@pytest.mark.cluster
def test_plain_ddp_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "train.py"
    script.write_text(PLAIN_DDP)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    report = run(AuditPlan((*launcher, str(script)), deadline_s=120), lambda name: None)
    assert report.exact, report.differences
    assert {name.rpartition(".")[2] for name in report.passing} >= {"_has_rebuilt_buckets", "_lazy_init_ran"}


@pytest.mark.cluster
def test_generators_that_drifted_are_named_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DRAWING_LOOP)
    report = run(AuditPlan((sys.executable, str(script)), deadline_s=60), lambda name: None)
    found = {each.name: drift(each) for each in distinct(report.differences) if each.kind == "not restored"}
    assert found.keys() == {"main.x", "random.torch"}  # `main.own` is restored
    console = Console(record=True, width=1000, file=io.StringIO())
    show(console, report)
    text = console.export_text()
    for fact in ("CPU generator", f"step after {report.resumed[0]} began", "snap.begin()"):
        assert fact in text
    assert found["main.x"] is None  # it only follows from the other two


@pytest.mark.cluster
@pytest.mark.slow  # `test_examples` also kills it
def test_a_loop_over_a_data_loader_with_workers_is_exact() -> None:
    report = audit("holdfast.examples.dataloader")
    assert report.exact, report.differences


@pytest.mark.cluster
def test_a_command_that_does_not_train_is_reported_with_what_it_said() -> None:
    with pytest.raises(HoldfastError, match=r"(?s)status 3.*such corpus"):
        run(AuditPlan((sys.executable, "-c", "import sys; print('no such corpus'); sys.exit(3)")), lambda name: None)
    with pytest.raises(HoldfastError, match="never entered InMemorySnapshot"):
        run(AuditPlan((sys.executable, "-c", "pass")), lambda name: None)
    with pytest.raises(ConfigError, match="/no/such/python cannot"):
        run(AuditPlan(("/no/such/python",)), lambda name: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ()}, "shall be audited"),
        ({"steps": 2}, "--steps 2"),
    ],
)
def test_an_impossible_audit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AuditPlan(**({"command": ("true",)} | arguments))


# ---------------------------------------------------------------------- the comparison


def notes(value: str = "1", computed: str = "a", first: int = 0, more: dict[str, str] | None = None) -> Notes:
    return Notes(
        {step: {"main.x": value, "main.job.y": "2", **(more or {})} for step in range(first, 4)},
        {step: {"gradient": computed} for step in range(first + 1, 4)},
    )


def kinds(report: AuditReport) -> set[tuple[str, str]]:
    return {(each.kind, each.name) for each in report.differences}


def test_what_is_the_same_is_exact() -> None:
    report = compare([notes()], [notes()], [notes(first=2)])
    assert (report.exact, report.resumed, report.compared) == (True, (2,), 3)


def test_a_value_that_is_not_restored_and_what_follows_from_it_are_told_apart() -> None:
    report = compare([notes()], [notes()], [notes("9", "b", first=2)])
    assert kinds(report) == {("not restored", "main.x"), ("computed", "gradient")}
    assert {(each.step, each.expected, each.found) for each in report.differences} == {(2, "1", "9"), (3, "a", "b")}


def test_what_differs_between_undisturbed_runs_is_no_fault_of_the_resume() -> None:
    assert compare([notes("1")], [notes("2")], [notes("3", first=2)]).exact
    report = compare([notes(computed="a")], [notes(computed="b")], [notes(computed="a", first=2)])
    assert kinds(report) == {("not deterministic", "gradient")}


def test_a_variable_that_is_not_set_yet_is_not_missed_but_part_of_an_object_is() -> None:
    first = notes(more={"main.loss": "5", "main.job.late": "6"})
    assert kinds(compare([first], [first], [notes(first=2)])) == {("absent", "main.job.late")}


def test_names_may_be_ignored() -> None:
    assert compare([notes()], [notes()], [notes("9", first=2)], [r"\.x$"]).exact


FLAGS = {0: "False", 1: "True", 2: "True", 3: "True"}
"""A library's flag by step; it is set on first use."""


def flagged(values: dict[int, str], **more: Any) -> Notes:
    made = notes(**more)
    for step, value in values.items():
        if step in made.values:
            made.values[step] = {**made.values[step], "main.ddp._has_rebuilt_buckets": value}
    return made


def resumed_with(values: dict[int, str], **more: Any) -> AuditReport:
    return compare([flagged(FLAGS)], [flagged(FLAGS)], [flagged(values, first=2, **more)])


def test_a_flag_that_is_set_on_first_use_is_no_state() -> None:
    report = resumed_with({2: "False", 3: "True"})
    assert report.exact and report.passing == {"main.ddp._has_rebuilt_buckets"}
    console = Console(record=True, width=300, file=io.StringIO())
    show(console, report)
    assert "main.ddp._has_rebuilt_buckets" in console.export_text()


def test_a_flag_is_told_from_what_was_forgotten_beside_it() -> None:
    report = resumed_with({2: "False", 3: "True"}, value="9")
    assert kinds(report) == {("not restored", "main.x")}
    assert report.passing == {"main.ddp._has_rebuilt_buckets"}


def test_a_process_that_did_not_live_until_it_was_gone_is_judged_by_one_that_did() -> None:
    short = [flagged({2: "False", 3: "False"}, first=2)]
    assert not compare([flagged(FLAGS)], [flagged(FLAGS)], short).exact
    harmless = resumed_with({2: "False", 3: "True"}).passing
    assert compare([flagged(FLAGS)], [flagged(FLAGS)], short, (), harmless.__contains__).exact


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({2: "False", 3: "False"}, {}),  # it stays different
        ({2: "Maybe", 3: "True"}, {}),  # no process begins with this value
        ({2: "False"}, {}),  # the next step was not seen
        ({2: "False", 3: "True"}, {"computed": "b"}),  # computed values differ as well
    ],
)
def test_a_difference_that_may_have_done_something_is_named(values: dict[int, str], more: dict[str, str]) -> None:
    report = resumed_with(values, **more)
    assert ("not restored", "main.ddp._has_rebuilt_buckets") in kinds(report)
    assert not report.passing


@pytest.mark.parametrize("resumed", [[notes(first=0)], [Notes()]])
def test_a_run_that_was_not_restored_is_no_audit(resumed: list[Notes]) -> None:
    with pytest.raises(HoldfastError, match=r"rank 0 .*not restored"):
        compare([notes()], [notes()], resumed)


def test_other_numbers_of_ranks_are_no_audit() -> None:
    with pytest.raises(HoldfastError, match=r"1 ranks .*1 again, 2 resumed"):
        compare([notes()], [notes()], [notes(first=2)] * 2)


def test_a_tensor_with_several_names_is_shown_once_and_a_name_at_its_first_step() -> None:
    def difference(step: int, name: str, found: str = "torch.a") -> Difference:
        return Difference("computed", 0, step, name, "torch.b", found)

    shown = distinct([difference(5, "long.name"), difference(4, "long.name"), difference(4, "name")])
    assert [(each.step, each.name) for each in shown] == [(4, "name")]


# ---------------------------------------------------------------------- what code can reach


class Thing:
    def __init__(self) -> None:
        self.number = 3
        self.itself = self
        self.module = torch.nn.Linear(1, 1)
        self.iterator = iter([1, 2, 3])
        next(self.iterator)


def test_all_that_hangs_on_local_variables_is_reached() -> None:
    thing, tensor, array = Thing(), torch.arange(3), np.arange(4)
    source, drawn, older = np.random.default_rng(1), random.Random(2), np.random.RandomState(3)
    words = {"a": [b"x", {3}], 7: None, "long": 10**5000}
    found = reachable()
    prefix = "test_all_that_hangs_on_local_variables_is_reached"
    names = {name.removeprefix(f"{prefix}.") for name in found if name.startswith(prefix)}
    assert {"thing.number", "thing.module._parameters['weight']", "thing.iterator.position"} <= names
    assert {"tensor", "array", "source", "drawn", "older", "words['a'][0]", "words['a'][1]{3}", "words[7]"} <= names
    before = dict(found)
    tensor += 1
    array[0] = 5
    source.random()
    drawn.random()
    older.random()
    next(thing.iterator)
    words["a"][0] = b"y"  # type: ignore[index]
    now = {name: text for name, text in reachable().items() if name.startswith(prefix)}
    changed = {name for name, text in now.items() if before.get(name) not in (None, text)}
    assert {name.removeprefix(f"{prefix}.") for name in changed} == {
        *("tensor", "array", "source", "drawn", "older", "thing.iterator.position", "words['a'][0]")
    }


def test_no_address_and_no_function_is_among_it() -> None:
    thing, other = Thing(), object()
    assert thing is not other
    found = {name: text for name, text in reachable().items() if name.startswith("test_no_address")}
    assert not any(" at 0x" in text for text in found.values())
    assert not any("itself.itself" in name or "__" in name or "other" in name for name in found)
