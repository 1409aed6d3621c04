"""What a loop trains may be copied, saved, sent to another process and compiled inside the block, as outside."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from holdfast import InMemorySnapshot
from holdfast.snapshot.step.boundary import Boundary
from tests.deadlines import DEADLINE_S
from tests.scripts import python
from tests.unit.test_beginning import STEPS, Dropping, Job, Loop, looping, trial
from tests.unit.test_boundary import Recorder

Deed = Callable[[Job], object]


def save(job: Job) -> None:
    torch.save((job.model, job.optim), io.BytesIO())


def pickled(job: Job) -> None:
    through_pickle(job.model)


def deepcopied(job: Job) -> None:
    """The copy is trained, as a teacher or the fast weights of MAML are; that begins no step of the job."""
    random = torch.get_rng_state()
    model, optim = copy.deepcopy((job.model, job.optim))
    for _ in range(2):
        model(job.held_out).sum().backward()
        optim.step()
    torch.set_rng_state(random)


def scripted(job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        torch.jit.script(job.model)


def traced(job: Job) -> None:
    random = torch.get_rng_state()
    job.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(job.model, job.held_out)  # type: ignore[no-untyped-call]
    job.model.train()
    torch.set_rng_state(random)


def through_pickle(made: Any) -> Any:
    return pickle.loads(pickle.dumps(made))  # noqa: S301 - it was made on this line


DEEDS = [save, pickled, deepcopied, scripted, traced]


def doing(deed: Deed, *, declared: bool) -> Loop:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in snap.steps(STEPS) if declared else range(snap.step, STEPS):
            job.backward()
            yield
            job.step()
            if step in (1, 4):
                deed(job)

    return loop


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_trained_may_be_copied_inside_the_block(deed: Deed, declared: bool) -> None:
    assert trial(doing(deed, declared=declared), Dropping).statistics.failed == 0


class Scripted(Job):
    """The model that is trained is a compiled one."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = torch.jit.script(self.model)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("declared", [False, True])
def test_a_scripted_model_is_trained_like_any_other_and_told_of(
    declared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert trial(looping(declared=declared), Scripted).statistics.failed == 0
    assert "PYTORCH_JIT=0" in caplog.text


def watched() -> tuple[torch.nn.Module, torch.optim.Optimizer, GradScaler, Recorder, Boundary]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    recorder = Recorder()
    return model, optim, scaler, recorder, Boundary([optim], [model], recorder, [scaler])


def test_a_copy_tells_of_nothing_and_the_original_goes_on_telling() -> None:
    model, _, _, recorder, boundary = watched()
    copies = [copy.deepcopy(model), through_pickle(model)]
    before = list(recorder.events)
    for each in copies:
        each(torch.ones(1, 2)).sum().backward()
    assert recorder.events == before
    model(torch.ones(1, 2)).sum().backward()
    assert len(recorder.events) > len(before)
    boundary.remove()


def test_a_copied_scaler_steps_by_itself() -> None:
    _, _, scaler, _, boundary = watched()
    for made in (copy.deepcopy(scaler), through_pickle(scaler)):
        assert cast(Any, made.step).__self__ is made
    boundary.remove()
    assert "step" not in vars(scaler)


def test_hooks_are_back_after_a_model_was_scripted() -> None:
    model, _, _, recorder, boundary = watched()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model)
    model(torch.ones(1, 2)).sum().backward()
    assert recorder.events
    boundary.remove()
    assert not model._forward_hooks and not model._forward_pre_hooks


LOADS = """
import sys
sys.modules["holdfast"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(1, 2)).sum().item())
"""


def test_a_saved_model_is_loaded_where_there_is_no_holdfast(tmp_path: Path) -> None:
    model, _, _, _, boundary = watched()
    torch.save(model, tmp_path / "model.pt")
    boundary.remove()
    done = python(LOADS, tmp_path / "model.pt")
    assert float(done.stdout) == model(torch.ones(1, 2)).sum().item()


def test_a_saved_model_is_loaded_as_weights_only(tmp_path: Path) -> None:
    """As PyTorch's word_language_model does at its end, with a list of the model's classes."""
    model, _, _, _, boundary = watched()
    torch.save(model, tmp_path / "model.pt")
    boundary.remove()
    classes = {type(each) for each in model.modules()}
    with torch.serialization.safe_globals(list(classes)):
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert not loaded._forward_hooks and not loaded._forward_pre_hooks


def run_it(model: Any, results: Any) -> None:
    results.put(model(torch.ones(1, 2)).sum().item())


def test_a_model_is_sent_to_a_process_that_is_spawned() -> None:
    model, _, _, _, boundary = watched()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=run_it, args=(model, results))
    child.start()
    try:
        assert results.get(timeout=DEADLINE_S) == model(torch.ones(1, 2)).sum().item()
    finally:
        child.join(DEADLINE_S)
        boundary.remove()
