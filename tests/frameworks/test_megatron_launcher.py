"""``python -m holdfast.megatron_lm`` with a checkout that looks like Megatron-LM: run, killed and refused."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from holdfast import ConfigError
from holdfast.leftovers import find_leftovers, remove
from holdfast.megatron_lm import NEEDED, check, launch, main
from tests.scripts import completed

ROOT = Path(__file__).parents[2]

TRAINING = """
import os, signal, sys
from argparse import Namespace
import torch

ARGS = Namespace(
    iteration=0, consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0,
    num_floating_point_operations_so_far=0, iterations_to_skip=[], do_valid=False, dataloader_type="single",
)

def get_args():
    return ARGS

def setup_model_and_optimizer(*ignored):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)

def build_train_valid_test_data_loaders(provider):
    raise NotImplementedError("rows are drawn from the generator")

def get_rerun_state_machine():
    return None

def train_step(model, optimizer, scheduler):
    loss = torch.nn.functional.dropout(model(torch.randn(4, 8)), 0.2).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item()

def checkpoint_and_decide_exit(iteration, num_floating_point_operations_so_far):
    return iteration == int(os.environ.get("LEAVE", -1))

def train(model, optimizer, scheduler):
    done = ARGS.num_floating_point_operations_so_far
    for iteration in range(ARGS.iteration, 20):
        ARGS.curr_iteration = iteration
        loss = train_step(model, optimizer, scheduler)
        ARGS.consumed_train_samples += 4
        done += 7
        print(iteration + 1, loss.hex(), ARGS.consumed_train_samples, done, flush=True)
        if iteration + 1 == int(os.environ.get("KILL", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpoint_and_decide_exit(iteration + 1, done):
            sys.exit(3)

def pretrain(*given):
    train(*setup_model_and_optimizer())
    print("ended with", *sys.argv[1:])
"""

SCRIPT = """
if __name__ == "__main__":
    from megatron.training import pretrain
    import beside

    pretrain(beside.PROVIDER)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """`pretrain_gpt.py` in its checkout."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "training.py").write_text(TRAINING)
    (package / "__init__.py").write_text("from .training import pretrain\n")
    (tmp_path / "beside.py").write_text("PROVIDER = 1\n")
    (tmp_path / "pretrain_gpt.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path / "pretrain_gpt.py"


def run(script: Path, arena: Path, *options: str, **variables: str) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, and stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOLDFAST_ARENA": str(arena)} | variables
    command = [sys.executable, "-m", "holdfast.megatron_lm", *options, str(script), "--num-layers", "2"]
    done = completed(command, cwd=arena.parent, env=environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def place(shm: Path) -> Path:
    """An arena. The test ends SMPs that are left in it."""
    return shm / "arena"


@pytest.mark.parametrize("how", [{"KILL": "15"}, {"LEAVE": "15"}])
def test_a_script_that_nobody_edited_goes_on_where_it_was(script: Path, place: Path, how: dict[str, str]) -> None:
    try:
        whole = run(script, place, HOLDFAST_JOB="whole")
        first = run(script, place, "--every", "1", HOLDFAST_JOB="cut", **how)
        again = run(script, place, HOLDFAST_JOB="cut")
    finally:
        for leftover in find_leftovers(place.parent):
            remove(leftover)
    assert whole[0] == again[0] == 0, whole[2] + again[2]
    assert first[0] == (-9 if "KILL" in how else 3)
    assert first[1] == whole[1][:15]
    assert whole[1][-len(again[1]) :] == again[1], again[2]
    assert 6 <= len(again[1]) < len(whole[1])  # steps take almost no time, so some have no snapshot
    assert whole[1][-1] == "ended with --num-layers 2"


def test_an_unknown_version_is_named_with_all_that_it_lacks() -> None:
    training = ModuleType("megatron.training.training")
    training.__file__ = "/x/training.py"
    for name in NEEDED:
        setattr(training, name, lambda num_floating_point_operations_so_far: None)
    check(training)
    training.checkpoint_and_decide_exit = lambda iteration: None  # type: ignore[attr-defined]
    del training.train_step
    with pytest.raises(ConfigError, match=r"train_step, num_floating_\w+ of checkpoint_and_decide_exit: "):
        check(training)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slots", "1"], "slots=1: .* 2 to 16"),
        (["--protect-every", "0"], "protect_every=0"),
        (["--slots", "16", "--generations", "2"], "slots=16 and 2 generations"),
        (["--every", "0"], "every=0"),
        (["--every", "often"], "number of steps"),
        (["--protect", "6+"], "6\\+"),
        (["--deadline", "0"], "deadline_s=0"),
        (["--overhead-budget", "2"], "OVERHEAD_BUDGET: '2'"),
        (["--job", "a/b"], "a/b"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_the_script_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setenv("HOLDFAST_JOB", "refused")
    with pytest.raises(SystemExit) as ended:
        main([*options, "nowhere.py"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert "nowhere" not in error


@pytest.mark.parametrize(
    "given", [["--non-persistent-ckpt-type", "in_memory"], ["--non-persistent-ckpt-type=in_memory"]]
)
def test_a_job_is_protected_once(script: Path, given: list[str]) -> None:
    with pytest.raises(ConfigError, match="Megatron-LM itself"):
        launch(script, ["--num-layers", "2", *given], job="twice")


def test_a_script_that_is_not_there_or_not_in_a_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py: .*such script"):
        launch(tmp_path / "nowhere.py", [], job="nowhere")
    alone = tmp_path / "alone.py"
    alone.write_text("")
    status = completed(
        [sys.executable, "-m", "holdfast.megatron_lm", "--job", "alone", str(alone)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert status.returncode == 2
    assert "No module named 'megatron.training'" in status.stderr
