"""A snapshot includes the state in Megatron-LM's arguments and loop, and iterations begin where Megatron-LM's do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import StateMismatch
from holdfast.hook import InMemorySnapshot
from holdfast.integrations.megatron_lm import protect
from tests import megatron_lm_loop as loop

BATCH = 16
ITERATIONS = 12


class Killed(Exception):
    """Stands for the end of the process: none of its objects may be used again."""


def telling(kill: tuple[Any, ...] | None) -> tuple[list[Any], Callable[..., None]]:
    """The reports of a process, and a function that adds one, and ends the process once it begins as `kill` does."""
    told: list[Any] = []

    def tell(*what: Any) -> None:
        told.append(what)
        if kill is not None and what[: len(kill)] == kill:
            raise Killed

    return told, tell


def run(kill: tuple[Any, ...] | None = None, iteration: int = 0, **args: Any) -> tuple[list[Any], list[Any] | None]:
    """A protected run, killed once it reports `kill`. Returns its reports, and its final state unless it was killed."""
    told, tell = telling(kill)
    snapshots: list[InMemorySnapshot] = []
    given = loop.arguments(iteration=iteration, **args)
    try:
        end = loop.pretrain(given, ITERATIONS, partial(protect, training=loop), tell, snapshots=snapshots)
    except BaseException as error:
        for snapshot in snapshots:
            snapshot.__exit__(type(error), error, None)
        if not isinstance(error, Killed):
            raise
        return told, None
    return told, end


def undisturbed(**args: Any) -> tuple[list[Any], list[Any]]:
    """An unprotected run."""
    told: list[Any] = []
    end = loop.pretrain(loop.arguments(**args), ITERATIONS, None, lambda *what: told.append(what))
    return told, end


def goes_on(kill: tuple[Any, ...], **args: Any) -> list[Any]:
    """A run that is killed ends as an undisturbed one; returns what its second process reported."""
    everything, end = undisturbed(**args)
    run(kill, **args)
    after, ended = run(**args)
    assert after == everything[-len(after) :]
    assert len(after) < len(everything)
    assert ended == end
    return after


@pytest.mark.parametrize(
    ("kill", "again"),
    [
        (("step", 8), 8),  # between two evaluations
        (("evaluation", 6, 0), 6),  # an evaluation that was interrupted is repeated, with the iteration before it
        (("evaluation", 6, 1), 6),
        (("step", 7), 7),  # right after an evaluation
    ],
)
@pytest.mark.proves("megatron-lm")
def test_a_killed_run_goes_on_bit_for_bit(arena: Path, kill: tuple[Any, ...], again: int) -> None:
    everything, end = undisturbed()
    before, none = run(kill)
    assert none is None
    after, ended = run()
    assert after[0][:2] == ("step", again)
    repeated = next(i for i, what in enumerate(before) if what[:2] == ("step", again))
    assert before[:repeated] + after == everything
    assert before == everything[: len(before)]
    assert ended == end
    assert not (arena / "test").exists()


@pytest.mark.parametrize("samples", [410, 26])  # passes end after 102 iterations, or after 6
@pytest.mark.parametrize("kill", [("step", 4), ("step", 6), ("step", 8)])
def test_an_iterator_that_is_made_with_its_first_batch_draws_no_more_than_it_did(
    arena: Path, monkeypatch: pytest.MonkeyPatch, samples: int, kill: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(loop, "SAMPLES", samples)
    assert goes_on(kill, dataloader_type="cyclic")[0][:2] == kill


def test_iterations_without_a_step_belong_to_the_one_after_them(arena: Path) -> None:
    skipped: dict[str, Any] = {"iterations_to_skip": [5, 6, 9]}
    everything, end = undisturbed(**skipped)
    before, _ = run(("step", 7), **skipped)
    after, ended = run(**skipped)
    assert after[0][:2] == ("step", 7)
    assert before[:-1] + after == everything
    assert ended == end


def test_iterators_that_draw_as_they_are_made_are_no_reason_to_warn(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(("step", 4))
    assert "drew from" not in caplog.text


def test_a_count_that_megatron_guesses_is_put_back(arena: Path) -> None:
    _, end = undisturbed(do_valid=False)
    run(("step", 8), do_valid=False)
    _, ended = run(do_valid=False)
    assert ended == end


def test_a_checkpoint_on_disk_is_older_by_nature(arena: Path) -> None:
    everything, end = undisturbed()
    run(("step", 8))
    after, ended = run(iteration=3, consumed_train_samples=3 * loop.BATCH)
    assert after == everything[-len(after) :]
    assert ended == end


def test_a_loop_that_goes_on_elsewhere_is_refused(arena: Path) -> None:
    run(("step", 8))
    args = loop.arguments()
    entered: list[InMemorySnapshot] = []

    def moved(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, args: Namespace) -> Any:
        snap = protect(model, optimizer, scheduler, args, training=loop)
        args.iteration += 1
        return snap

    with pytest.raises(StateMismatch, match="iteration") as refused:
        loop.pretrain(args, ITERATIONS, moved, lambda *_: None, snapshots=entered)
    entered[0].__exit__(refused.type, refused.value, None)


def test_functions_of_the_loop_are_put_back(arena: Path) -> None:
    before = loop.train_step, loop.checkpoint_and_decide_exit
    run(("step", 4))
    run()
    assert (loop.train_step, loop.checkpoint_and_decide_exit) == before


def test_a_run_that_was_given_up_in_this_process_is_not_listened_to(arena: Path) -> None:
    before = loop.train_step
    _, end = undisturbed()
    args = loop.arguments()
    model = torch.nn.Linear(3, 1)
    given_up = protect(model, torch.optim.SGD(model.parameters()), None, args, training=loop)
    began = given_up.step
    _, ended = run()
    assert ended == end
    assert given_up.step == began
    given_up.__exit__(Killed, Killed(), None)
    assert loop.train_step is before


def start(iteration: int = 0) -> tuple[Namespace, torch.nn.Module, torch.optim.Optimizer]:
    """The objects that a script has after ``setup_model_and_optimizer``."""
    args = Namespace(iteration=iteration, consumed_train_samples=iteration * BATCH, skipped_train_samples=0)
    model = torch.nn.Linear(3, 2)
    return args, model, torch.optim.Adam(model.parameters())


def train(
    snap: InMemorySnapshot, args: Namespace, model: torch.nn.Module, optim: torch.optim.Optimizer, until: int
) -> None:
    """A loop whose module holdfast does not know."""
    for iteration in range(args.iteration, until):
        args.curr_iteration = iteration
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        snap.drain(60)
        optim.step()
        args.consumed_train_samples += BATCH


def test_without_megatrons_module_an_iteration_begins_with_the_first_forward(arena: Path) -> None:
    args, model, optim = start(iteration=100)
    snap = protect(model, optim, None, args, strict=True)
    assert (snap.step, args.iteration) == (0, 100)
    train(snap, args, model, optim, until=105)
    torch.autograd.backward(model(torch.ones(1, 3)).sum())
    assert snap.drain(60)
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)

    args, model, optim = start(iteration=90)  # from a checkpoint on disk, which is older
    snap = protect(model, optim, None, args, strict=True)
    assert (snap.step, args.iteration) == (5, 105)
    assert args.consumed_train_samples == 105 * BATCH
    assert args.skipped_train_samples == 0
    train(snap, args, model, optim, until=107)
    snap.close()
    assert args.consumed_train_samples == 107 * BATCH
    assert not (arena / "test").exists()
