"""Megatron-LM's own rerun state machine, in a loop that is killed: it continues as if nothing had happened."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import rerun_state_machine as megatron

from holdfast import ConfigError
from holdfast.hook import InMemorySnapshot
from holdfast.integrations.megatron_data import Reruns
from holdfast.integrations.megatron_lm import protect
from tests import megatron_lm_loop as loop
from tests.frameworks.test_megatron_lm import Killed, telling

ITERATIONS = 16
RATE = 4
"""One result in this many is reported as wrong."""


Tell = Callable[..., None]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the machine asks of CUDA and of its process group, as there are neither."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(megatron.RerunStateMachine, "_reduce_any", lambda self, value: value)


@pytest.fixture
def start(no_device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Begins a process: its machine is new, and the loop's steps go through it."""

    def start(tell: Tell, mode: megatron.RerunMode, injected: str | None) -> None:
        megatron.destroy_rerun_state_machine()
        injector = megatron.RerunErrorInjector(
            RATE if injected else 0, megatron.RerunDiagnostic(injected or "transient_error")
        )
        megatron.initialize_rerun_state_machine(mode=mode, error_injector=injector)
        megatron.get_rerun_state_machine().current_iteration = 0  # as `train` does
        monkeypatch.setattr(loop, "train_step", partial(train_step, tell))

    monkeypatch.setattr(megatron.RerunStateMachine, "REPORTING_INTERVAL_ITERATIONS", 1000)  # reporting fails in 0.16.1
    monkeypatch.setattr(loop, "get_rerun_state_machine", megatron.get_rerun_state_machine, raising=False)
    yield start
    megatron.destroy_rerun_state_machine()


def train_step(
    tell: Tell,
    data: Iterator[torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    snap: InMemorySnapshot | None,
) -> str:
    """Like Megatron-LM's: the iteration is run, and run again when the machine says so."""
    machine = megatron.get_rerun_state_machine()
    batches = megatron.RerunDataIterator(data)
    while machine.should_run_forward_backward(batches):
        if machine.state is megatron.RerunState.RERUNNING_IN_PLACE:
            tell("rerun", machine.current_iteration)
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        large = partial(machine.is_unexpectedly_large, threshold=1.1, context="loss", num_samples=4)
        machine.validate_result(
            result=loss, rejection_func=large, message="loss", comparison_func=apart, tolerance=0.5, fatal=False
        )
    machine.should_checkpoint_and_exit()
    if snap is not None:
        snap.drain(60)
    optimizer.step()
    scheduler.step()
    return float(loss.item()).hex()


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """As if the device computed a different result each time."""
    return abs(first.item()) / 10


def run(
    start: Callable[..., None],
    mode: megatron.RerunMode,
    injected: str | None,
    *,
    kill: tuple[Any, ...] | None = None,
    protected: bool = True,
) -> tuple[list[Any], list[Any] | None]:
    """A process's reports and its final state, including that of its machine."""
    told, tell = telling(kill)
    snapshots: list[InMemorySnapshot] = []

    start(tell, mode, injected)
    hook = partial(protect, training=loop) if protected else None
    args = loop.arguments()
    try:
        end = loop.pretrain(args, ITERATIONS, hook, tell, snapshots=snapshots)
    except Killed as error:
        snapshots[0].__exit__(Killed, error, None)
        return told, None
    return told, [*end, known()]


def known() -> dict[str, Any]:
    """All state of this process's machine that a step does not create anew."""
    machine = megatron.get_rerun_state_machine()
    names = ("state", "first_iteration_complete", "failed_validation_call", "large_value_counts", "max_values")
    return {name: getattr(machine, name) for name in names} | {
        "initial": None if machine.initial_result is None else machine.initial_result.item(),
        "injected": machine.error_injector.injected_error_type,
        "stats": {caller: vars(stats) for caller, stats in machine.stats.items()},
    }


VALIDATE, REPORT = megatron.RerunMode.VALIDATE_RESULTS, megatron.RerunMode.REPORT_DETERMINISM_STATS


@pytest.mark.parametrize(
    ("mode", "injected", "at"),
    [
        (VALIDATE, None, "step"),
        (VALIDATE, "transient_error", "rerun"),
        (VALIDATE, "persistent_error", "step"),
        (VALIDATE, "persistent_error", "rerun"),
        (REPORT, None, "step"),
        (REPORT, None, "rerun"),
        (megatron.RerunMode.DISABLED, None, "step"),
    ],
)
@pytest.mark.proves("megatron-lm")
def test_a_killed_run_reruns_what_an_undisturbed_one_does(
    arena: Path, start: Callable[..., None], mode: megatron.RerunMode, injected: str | None, at: str
) -> None:
    everything, end = run(start, mode, injected, protected=False)
    kill = ("step", 9) if at == "step" else [what for what in everything if what[0] == "rerun"][-1]
    before, none = run(start, mode, injected, kill=kill)
    assert none is None
    after, ended = run(start, mode, injected)
    assert before == everything[: len(before)]
    assert after == everything[-len(after) :]
    assert len(after) < len(everything)
    assert ended == end


@pytest.mark.parametrize(("mode", "injected"), [(VALIDATE, "transient_error"), (REPORT, None)])
def test_without_it_the_machine_of_the_restart_knows_nothing(
    arena: Path,
    start: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    mode: megatron.RerunMode,
    injected: str | None,
) -> None:
    _, end = run(start, mode, injected, protected=False)
    run(start, mode, injected, kill=("step", 9))
    monkeypatch.setattr(Reruns, "set", lambda self, held, same_iteration: None)
    _, ended = run(start, mode, injected)
    assert ended is not None and end is not None
    assert ended[-1] != end[-1]


def machine_that_waits() -> Any:
    """The machine of a process that Megatron-LM has started to rerun an iteration on another device."""
    machine: Any = megatron.RerunStateMachine(mode=megatron.RerunMode.VALIDATE_RESULTS)
    machine.state = megatron.RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.failed_validation_call = megatron.Call(megatron.Caller("loss", 0), 1)
    machine.initial_result = torch.tensor(2.5, dtype=torch.bfloat16)
    machine.suspicious_node, machine.suspicious_device = "node7", 3
    return machine


@pytest.mark.parametrize("same", [True, False])
def test_a_pending_rerun_stays_if_it_is_of_the_iteration_that_the_job_goes_on_with(same: bool) -> None:
    before = Reruns(megatron.RerunStateMachine(mode=megatron.RerunMode.VALIDATE_RESULTS))
    loaded = machine_that_waits()
    now = Reruns(loaded)
    now.set(before.get(), same_iteration=same)
    assert (loaded.state is megatron.RerunState.WILL_RERUN_FROM_CHECKPOINT) is same
    assert (loaded.suspicious_node == "node7") is same


def test_a_pending_rerun_goes_on_in_a_process_that_loads_no_checkpoint() -> None:
    machine: Any = megatron.RerunStateMachine(mode=megatron.RerunMode.VALIDATE_RESULTS)
    waits, now = Reruns(machine_that_waits()), Reruns(machine)
    now.set(waits.get(), same_iteration=False)
    assert machine.state is megatron.RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert machine.failed_validation_call == megatron.Call(megatron.Caller("loss", 0), 1)
    assert machine.initial_result.dtype is torch.bfloat16
    assert machine.initial_result.item() == 2.5
    assert (machine.suspicious_node, machine.suspicious_device) == ("node7", 3)


def test_a_machine_of_a_version_that_is_not_known_is_named_with_all_that_it_lacks() -> None:
    machine: Any = megatron.RerunStateMachine()
    del machine.max_values, machine.stats
    with pytest.raises(ConfigError, match=r"RerunStateMachine\.max_values, RerunStateMachine\.stats"):
        Reruns(machine)


def test_rollouts_are_refused(arena: Path) -> None:
    model = torch.nn.Linear(2, 2)
    args = Namespace(iteration=0, perform_rl_step=True)
    with pytest.raises(ConfigError, match="--perform-rl-step"):
        protect(model, torch.optim.SGD(model.parameters()), None, args, training=loop)
