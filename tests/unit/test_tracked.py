"""State that is in no ``state_dict``: when it is captured, and that it is restored whole, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.snapshot.state.tracked import load, make, values
from tests.deadlines import DEADLINE_S

Model = torch.nn.Module
Optim = torch.optim.Optimizer


def test_a_small_tensor_comes_back_to_the_host_whatever_device_a_job_has_made_the_default() -> None:
    put: list[Any] = []
    tracked = {"seen": make("seen", lambda: [torch.arange(3)], put.extend, None, "step", "forward")}
    held = values(tracked, late=True)
    with torch.device("meta"):
        load(tracked, held)
    assert [(each.device.type, each.tolist()) for each in put] == [("cpu", [0, 1, 2])]


class Job:
    """A linear layer with other state around it."""

    def __init__(self, value: float = 0.0) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ema = torch.nn.Linear(3, 2)
        self.vectors = {"a": torch.full((5,), value), "b": torch.full((2, 2), value, dtype=torch.float64)}
        self.count = int(value)

    def hook(self) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.optim, strict=True)

    def train(self, snap: InMemorySnapshot, steps: int, after: Callable[[], None] = lambda: None) -> None:
        for _ in range(steps):
            self.model(torch.ones(1, 3)).sum().backward()
            snap.drain(60)
            self.optim.step()
            self.optim.zero_grad()
            after()


def stop(snap: InMemorySnapshot) -> None:
    """Exit as a crash does: everything is kept."""
    snap.__exit__(RuntimeError, RuntimeError("stop"), None)


def run(track: Callable[[Job, InMemorySnapshot], None], steps: int, after: Callable[[Job], None]) -> Job:
    """Train a job, drain its snapshots, and stop it as a crash would."""
    job = Job(1.0)
    snap = job.hook()
    track(job, snap)
    snap.__enter__()
    job.train(snap, steps, lambda: after(job))
    job.model(torch.ones(1, 3)).sum().backward()
    assert snap.drain(60)
    stop(snap)
    return job


def resumed(track: Callable[[Job, InMemorySnapshot], None], job: Job | None = None) -> tuple[Job, InMemorySnapshot]:
    job = job or Job()
    snap = job.hook()
    track(job, snap)
    return job, snap.__enter__()


def test_plain_values_are_those_of_the_next_forward_or_of_the_step(arena: Path) -> None:
    def track(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("late", lambda: {"count": job.count}, lambda state: setattr(job, "count", state["count"]))
        snap.track("early", lambda: job.count, lambda count: setattr(job, "early", count), when="step")

    def after(job: Job) -> None:
        job.count += 10

    run(track, 3, after)
    job, snap = resumed(track)
    assert snap.step == 3
    assert job.count == 31
    assert vars(job)["early"] == 21
    snap.close()


@pytest.mark.parametrize("changes", ["any", "after step"])
def test_tensors_that_change_after_the_step_are_captured_as_they_are_then(arena: Path, changes: Any) -> None:
    def track(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("ema", tensors=job.ema, changes=changes)
        snap.track("vectors", tensors=job.vectors, changes=changes)

    def after(job: Job) -> None:
        with torch.no_grad():
            for tensor in (*job.ema.parameters(), *job.vectors.values()):
                tensor += 1

    before = run(track, 4, after)
    job, snap = resumed(track)
    places = [tensor.data_ptr() for tensor in (*job.ema.parameters(), *job.vectors.values())]
    assert snap.step == 4
    for live, held in zip(job.ema.parameters(), before.ema.parameters(), strict=True):
        assert torch.equal(live, held)
    assert torch.equal(job.vectors["a"], torch.full((5,), 5.0))
    assert torch.equal(job.vectors["b"], torch.full((2, 2), 5.0, dtype=torch.float64))
    assert places == [tensor.data_ptr() for tensor in (*job.ema.parameters(), *job.vectors.values())]
    snap.close()


def test_what_a_forward_changes_does_not_get_into_a_snapshot(arena: Path) -> None:
    def track(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("vectors", tensors=job.vectors)

    job = Job(1.0)
    snap = job.hook()
    track(job, snap)
    snap.__enter__()

    def change(*_: object) -> None:
        job.vectors["a"] += 1

    job.model.register_forward_hook(change)
    job.train(snap, 3)
    job.model(torch.ones(1, 3)).sum().backward()  # the fourth forward; snapshot 3 is finalised before it
    assert snap.drain(60)
    stop(snap)
    job, snap = resumed(track)
    assert torch.equal(job.vectors["a"], torch.full((5,), 4.0))
    snap.close()


def test_tensors_may_be_replaced_and_appear_late(arena: Path) -> None:
    def track(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("vectors", tensors=job.vectors)

    def after(job: Job) -> None:
        job.vectors["a"] = job.vectors["a"] + 1
        job.vectors.setdefault("late", torch.zeros(7)).add_(2)

    run(track, 4, after)
    job, snap = resumed(track)
    assert torch.equal(job.vectors["a"], torch.full((5,), 5.0))
    assert torch.equal(job.vectors["late"], torch.full((7,), 8.0))
    snap.close()


def test_what_never_changes_is_restored_too(arena: Path) -> None:
    def track(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("vectors", tensors=job.vectors, changes="never")

    run(track, 3, lambda job: None)
    job, snap = resumed(track)
    assert torch.equal(job.vectors["a"], torch.full((5,), 1.0))
    snap.close()


@pytest.mark.parametrize(
    ("track", "message"),
    [
        (lambda job, snap: None, r"'count'. .*none in this job"),
        (
            lambda job, snap: snap.track("count", lambda: 1, print),
            r"tracked\.vectors\.a is not .*tracked\.vectors\.b is not",
        ),
    ],
)
def test_a_snapshot_with_other_pieces_does_not_fit(
    arena: Path, track: Callable[[Job, InMemorySnapshot], None], message: str
) -> None:
    def all_of_it(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("count", lambda: job.count, lambda count: setattr(job, "count", count))
        if message.startswith("tracked"):
            snap.track("vectors", tensors=job.vectors)

    def without_vectors(job: Job, snap: InMemorySnapshot) -> None:
        snap.track("count", lambda: job.count, lambda count: setattr(job, "count", count))

    run(without_vectors if "'count'" in message else all_of_it, 3, lambda job: None)
    fresh = Job()
    before = [parameter.clone() for parameter in fresh.model.parameters()]
    with pytest.raises(StateMismatch, match=message):
        resumed(track, fresh)
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters(), strict=True))


def test_nothing_is_tracked_once_the_state_is_restored(arena: Path) -> None:
    job = Job()
    with job.hook() as snap:
        with pytest.raises(ConfigError, match="on entering"):
            snap.track("late", lambda: 1, print)


def test_a_name_is_taken_once(arena: Path) -> None:
    snap = Job().hook()
    snap.track("one", lambda: 1, print)
    with pytest.raises(ConfigError, match="already"):
        snap.track("one", lambda: 1, print)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "no dot"),
        ({"name": "a.b"}, "no dot"),
        ({"set": None}, "set is missing"),
        ({"get": None}, "get is missing"),
        ({"get": None, "set": None}, "give get and set, or tensors"),
        ({"tensors": [torch.zeros(1)]}, "tensors is a list"),
        ({"changes": "often"}, "changes='often': .*'any'"),
        ({"when": "later"}, "when='later': .*'step'"),
    ],
)
def test_what_cannot_be_tracked_is_refused(arguments: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "name": "x",
        "get": lambda: 1,
        "set": print,
        "tensors": None,
        "changes": "any",
        "when": "forward",
    }
    with pytest.raises(ConfigError, match=message):
        make(**(usual | arguments))


def test_what_is_no_tensor_is_named() -> None:
    piece = make("x", None, None, {"a": torch.zeros(1), "b": 3}, "any", "forward")  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"'x': 'b' is a int"):
        list(piece.live())


def test_a_list_that_grows_in_every_step_loses_few_snapshots(arena: Path) -> None:
    """Its tensors are part of the record, whose room doubles."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[Any] = []
    snap = InMemorySnapshot(model, optim, every=1)
    snap.track("held", get=lambda: {"all": list(held), "last": held[-1:]}, set=held.append)
    with snap:
        for _ in snap.steps(60):
            held.append(torch.randn(8))
            model(torch.randn(1, 2)).sum().backward()
            snap.drain(DEADLINE_S)
            optim.step()
    assert snap.statistics.failed <= 4
