"""What a restart would begin anew, or be refused for, is told in a loop's first turns. With the line that the message
gives, the loop is exact."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast import ConfigError, StateMismatch
from tests.system.test_public_loops import Job, Life, check, live, loss_of, net, table
from tests.unit.test_beginning import warnings_of

Parts = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]


def parts() -> Parts:
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(table(24), batch_size=8, shuffle=True)


def train(life: Life, optim: torch.optim.Optimizer, key: object, loss: torch.Tensor) -> None:
    optim.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    life.lose(key, loss)
    optim.step()


def passes(life: Life, snap: Any, made: Parts) -> Iterator[int]:
    """Two passes over the data. Gives the number of each as it ends."""
    model, optim, loader = made
    for epoch in range(snap.epoch, 2):
        batches = snap.data(loader)
        for x, y in batches:
            train(life, optim, (epoch, batches.position - 1), loss_of(model, x, y))
        yield epoch


# ---------------------------------------------------------------------- what is told


def initialised_inside(life: Life) -> None:
    made = parts()
    with life.snapshot(*made[:2]) as snap:
        for parameter in made[0].parameters():
            nn.init.normal_(parameter, std=0.1)
        list(passes(life, snap, made))


def counted_from_zero(life: Life) -> None:
    model, optim, loader = parts()
    with life.snapshot(model, optim) as snap:
        for epoch in range(2):
            batches = snap.data(loader)
            for x, y in batches:
                train(life, optim, (epoch, batches.position - 1), loss_of(model, x, y))


def several_trainings(life: Life) -> None:
    for _ in range(2):
        made = parts()
        with life.snapshot(*made[:2]) as snap:
            list(passes(life, snap, made))


def listed_anew(life: Life) -> None:
    model, optim, _ = parts()
    inputs, labels = table(24).tensors
    with life.snapshot(model, optim) as snap:
        for epoch in range(snap.epoch, 2):
            batches = snap.data(list(torch.randperm(24).view(3, 8)))
            for which in batches:
                loss = loss_of(model, inputs[which], labels[which])
                train(life, optim, (epoch, batches.position - 1), loss)


def noise_after_steps(life: Life) -> None:
    model, optim, _ = parts()
    with life.snapshot(model, optim) as snap:
        for step in range(snap.step, 6):
            train(life, optim, (step,), loss_of(model, torch.randn(8, 16)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))


def averaged_after_passes(life: Life) -> None:
    made = parts()
    average = torch.optim.swa_utils.AveragedModel(made[0])
    with life.snapshot(*made[:2]) as snap:
        model, optim, loader = made
        for epoch in range(snap.epoch, 2):
            batches = snap.data(loader)
            for x, y in batches:
                train(life, optim, (epoch, batches.position - 1), loss_of(model, x, y))
            average.update_parameters(model)


@pytest.mark.parametrize(
    ("job", "dies", "words"),
    [
        (initialised_inside, (0, 2), "if snap.step == 0"),
        (counted_from_zero, (0, 2), "range(snap.epoch"),
        (listed_anew, (0, 2), "snap.data(lambda"),
        (averaged_after_passes, (0, 2), 'snap.track("average", tensors=average)'),
        (several_trainings, None, "training 2 of one process"),  # as the second is entered
        (noise_after_steps, (3,), "after optim.step()"),
    ],
)
def test_what_a_restart_would_not_find_again_is_told(
    arena: Path, job: Job, dies: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    live(job, dies=dies)
    assert [line for line in warnings_of(caplog) if words in line]


def test_passes_that_nobody_counts_are_refused(arena: Path) -> None:
    def job(life: Life) -> None:
        model, optim, _ = parts()
        inputs, order = torch.randn(24, 16), list(range(24))
        with life.snapshot(model, optim) as snap:
            for epoch in range(snap.epoch, 2):
                random.shuffle(order)
                for first in range(0, 24, 8):
                    snap.begin()
                    train(life, optim, (epoch, first), loss_of(model, inputs[order[first : first + 8]]))

    with pytest.raises(ConfigError, match=r"snap\.epoch"):
        live(job)


def read_within_turns(life: Life, *, begins: bool = False, ahead: bool = True) -> None:
    """Two micro-batches a turn, with the next one read while one is trained on; or a count at the top of turns."""
    model, optim, loader = parts()
    kept: dict[str, Any] = {"step": 0, "first": None}
    snap = life.snapshot(model, optim)
    snap.track("kept", get=lambda: dict(kept), set=kept.update)
    with snap:
        batches = iter(snap.data(lambda: itertools.chain.from_iterable(itertools.repeat(list(loader)))))
        if ahead and kept["first"] is None:
            kept["first"] = next(batches)
        while kept["step"] < 6:
            if begins:
                snap.begin()
            kept["step"] += not ahead
            for part in range(2):
                x, y = kept["first"] if ahead else next(batches)
                loss = loss_of(model, x, y)
                if ahead:
                    kept["first"] = next(batches)
                if part == 0:
                    loss.backward()
            train(life, optim, kept["step"], loss)
            kept["step"] += ahead
        life.close(model, optim)


def test_a_turn_whose_step_begins_in_its_middle_is_refused_and_again_after_a_restart(arena: Path) -> None:
    for _ in range(2):  # the first step may have a snapshot
        with pytest.raises(ConfigError, match=r"middle of a turn.*snap\.begin\(\)"):
            live(read_within_turns)


def counted_twice(life: Life, *, goes_on: bool = True) -> None:
    model, optim, _ = parts()
    x, y = table(8).tensors
    with life.snapshot(model, optim) as snap:
        for phase in range(2):
            for step in snap.steps(4 * (phase + 1) if goes_on else 4):
                if step >= 4 * phase:  # without the hook it begins at 0 again
                    train(life, optim, step, loss_of(model, x + phase, y))
        life.close(model, optim)


def test_a_second_count_to_the_same_number_is_refused_at_every_start(arena: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no turn.*snap\.steps\(\(epoch \+ 1\) \* 4\)"):
            live(partial(counted_twice, goes_on=False))


@pytest.mark.parametrize("dies", [2, 6])
def test_a_second_count_that_goes_on_is_exact(arena: Path, dies: int, caplog: pytest.LogCaptureFixture) -> None:
    check(counted_twice, dies)
    assert not warnings_of(caplog)


def with_a_group_from_the_third_step_on(life: Life) -> None:
    model = net()
    first, *_, last = model.children()
    optim = torch.optim.AdamW(last.parameters(), lr=1e-2)
    x, y = table(8).tensors
    with life.snapshot(model, optim) as snap:
        for step in range(snap.step, 5):
            if step == 2:
                optim.add_param_group({"params": list(first.parameters())})
            loss = loss_of(model, x, y)
            model.zero_grad()
            loss.backward()
            life.lose(step, loss)
            optim.step()
        life.close(model, optim)


def test_what_happens_after_the_first_turns_is_refused_after_a_restart_no_more_than_without_one(arena: Path) -> None:
    check(with_a_group_from_the_third_step_on, 1)


def zeroing(life: Life, *, every: int = 2, to_none: bool = True) -> None:
    """Zeroes gradients at the top of every n-th turn."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = table(8).tensors
    with life.snapshot(model, optim) as snap:
        for step in snap.steps(6):
            if step % every == every - 1:
                optim.zero_grad(set_to_none=to_none)
            loss = loss_of(model, x, y)
            loss.backward()
            life.lose(step, loss)
            optim.step()


@pytest.mark.parametrize(("every", "to_none", "told"), [(2, True, 1), (1, True, 0), (1, False, 0)])
def test_gradients_that_a_restart_forgets_are_told_of_by_it(
    arena: Path, every: int, to_none: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process ends before it has made a step with gradients of the one before."""
    job = partial(zeroing, every=every, to_none=to_none)
    live(job, dies=2)
    assert not warnings_of(caplog)
    live(job, dies=2)
    assert sum("not zeroed between two steps" in line for line in warnings_of(caplog)) == told


def test_with_the_beginning_at_its_top_it_is_exact(arena: Path) -> None:
    check(partial(read_within_turns, begins=True), 3)


def test_a_snapshot_of_steps_that_began_with_a_batch_does_not_go_on_at_the_top_of_a_turn(arena: Path) -> None:
    """Though the error of a count that was moved before the batch says that steps should begin there."""
    live(partial(read_within_turns, ahead=False), dies=4)
    for begins, words in [(False, "kept"), (True, "now steps begin earlier")]:
        with pytest.raises(StateMismatch, match=words):
            live(partial(read_within_turns, begins=begins, ahead=False))


# ---------------------------------------------------------------------- what is exact


def noise_made_inside(life: Life) -> None:
    model, optim, loader = parts()
    with life.snapshot(model, optim) as snap:
        fixed = torch.randn(8, 16)
        for epoch in range(snap.epoch, 2):
            batches = snap.data(loader)
            for x, y in batches:
                loss = loss_of(model, x, y) + 0.1 * model(fixed).square().mean()
                train(life, optim, (epoch, batches.position - 1), loss)
        life.close(model, optim)


def stopped_early(life: Life) -> None:
    """With the dict that the message advises."""
    model, optim, loader = parts()
    kept: dict[str, Any] = {"best": float("inf"), "weights": None, "waited": 0}
    snap = life.snapshot(model, optim)
    snap.track("kept", get=lambda: dict(kept), set=kept.update)
    with snap:
        for epoch in range(snap.epoch, 4):
            batches = snap.data(loader)
            for x, y in batches:
                train(life, optim, (epoch, batches.position - 1), loss_of(model, x, y))
            score = sum(float(parameter.detach().square().sum()) for parameter in model.parameters())
            if score < kept["best"]:
                kept.update(best=score, weights=copy.deepcopy(model.state_dict()), waited=0)
            else:
                kept["waited"] += 1
                if kept["waited"] == 3:
                    break
        model.load_state_dict(kept["weights"])
        life.close(model)


class Training:
    """A trainer that holds everything, with the line that the message advises."""

    def __init__(self) -> None:
        self.model, self.optim, self.loader = parts()
        self.done = 0

    def fit(self, life: Life) -> None:
        snap = life.snapshot(self.model, self.optim)
        snap.track("done", get=lambda: self.done, set=lambda value: setattr(self, "done", value))
        with snap:
            for epoch in range(snap.epoch, 2):
                self.pass_over(life, snap.data(self.loader), epoch)
            life.close(self.model, self.optim)

    def pass_over(self, life: Life, batches: Any, epoch: int) -> None:
        for x, y in batches:
            for group in self.optim.param_groups:
                group["lr"] = 1e-2 / (1 + self.done)
            train(life, self.optim, (epoch, batches.position - 1), loss_of(self.model, x, y))
            self.done += 1


def annealed_in_a_class(life: Life) -> None:
    Training().fit(life)


@pytest.mark.parametrize(
    ("job", "dies"), [(noise_made_inside, (1, 1)), (stopped_early, (2, 1)), (annealed_in_a_class, (1, 1))]
)
def test_a_loop_with_the_line_that_it_needs_is_exact_and_told_nothing(
    arena: Path, job: Job, dies: object, caplog: pytest.LogCaptureFixture
) -> None:
    check(job, dies)
    assert not [line for line in warnings_of(caplog) if "carries from turn to turn" in line]


def logged_only(life: Life) -> None:
    model, optim, loader = parts()
    best, seen, mean, history = float("inf"), 0, None, []
    with life.snapshot(model, optim) as snap:
        for epoch in range(snap.epoch, 2):
            total, batches = 0.0, snap.data(loader)
            for number, (x, y) in enumerate(batches):
                loss = loss_of(model, x, y)
                train(life, optim, (epoch, batches.position - 1), loss)
                total += loss.item()
                seen += len(x)
                mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
                if number % 2 == 0:
                    logging.getLogger("training").info("%d samples, %.3f, %.3f", seen, total / (number + 1), mean)
            loss = total / len(loader)
            history.append(loss)
            if loss < best:
                best = loss
                logging.getLogger("training").info("best so far: %.3f", best)
        life.close(model, optim)


def test_numbers_that_are_only_logged_are_no_news(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(logged_only, (1, 1))
    assert not warnings_of(caplog)
