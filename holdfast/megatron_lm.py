"""``python -m holdfast.megatron_lm [options] pretrain_gpt.py [its options]``: Megatron-LM's own scripts, unchanged.

Under torchrun: ``torchrun ... -m holdfast.megatron_lm pretrain_gpt.py --num-layers ...``. While the script runs, the
functions of ``megatron.training.training`` that set up the job and take its steps are replaced. `NEEDED` lists what a
version of Megatron-LM must have for that.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.integrations.megatron_data import BUILD, GET
from holdfast.integrations.megatron_lm import MODULE, OPERATIONS, protect
from holdfast.smp_daemon.shared import settings
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import (
    ARENA,
    DOMAINS,
    ELASTIC,
    GENERATIONS,
    JOB,
    MAX_REPEATS,
    OVERHEAD_BUDGET,
    RESTORE_STEP,
)
from holdfast.snapshot.options import Options

NEEDED = {
    "get_args": (),
    "pretrain": (),
    "setup_model_and_optimizer": (),
    BUILD: (),
    GET: (),
    "train_step": (),
    "checkpoint_and_decide_exit": (OPERATIONS,),
}
"""Functions that ``megatron.training.training`` must have, and arguments that they must take."""

SETTINGS = (JOB, DOMAINS, ARENA, OVERHEAD_BUDGET, MAX_REPEATS, GENERATIONS, RESTORE_STEP, ELASTIC)
"""Options of `InMemorySnapshot` that the environment can set, too."""

IN_MEMORY = "in_memory"
"""The checkpoint type with which a patched Megatron-LM protects the job itself; see docs/megatron-lm.md."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script. Ends the process with status 2 if the script cannot be protected."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.megatron_lm", description=__doc__.splitlines()[0])
    given = parser.add_argument
    given("--every", type=_every, help="steps from one snapshot to the next (default HOLDFAST_EVERY, or auto)")
    given("--protect-every", type=_every, default=1, help="protect one of every N snapshots, or auto (default 1)")
    given("--protect", default="auto", help="k+m such as 6+2, copies:r, auto or none (default auto)")
    given("--slots", type=int, default=3, help="snapshots that fit in memory at once (default 3)")
    given("--deadline", type=float, default=60.0, dest="deadline_s", help="seconds that a copy may take (default 60)")
    settings.add_options(parser, SETTINGS)
    given("--keep", action="store_true", help="leave the last snapshot in memory when the script ends well")
    given("--strict", action="store_true", help="end the job if snapshots cannot be taken any more")
    given("script", type=Path, help="such as pretrain_gpt.py, in a checkout of Megatron-LM")
    given("rest", nargs=argparse.REMAINDER, metavar="...", help="the script's own options")
    parsed = parser.parse_args(arguments)
    asked = {name: value for name, value in vars(parsed).items() if name not in ("script", "rest")}
    script, rest = parsed.script, parsed.rest
    try:
        said = settings.given(parsed, SETTINGS)
        asked |= {each.name: each.value(said) if each.variable in said else None for each in SETTINGS}
        launch(script, rest, **asked)
    except ConfigError as error:
        parser.exit(2, f"holdfast: {error}\n")


def launch(script: Path, arguments: Sequence[str], **options: Any) -> None:
    """Run a training script of Megatron-LM with `InMemorySnapshot`'s options. Ends as the script does.

    Raises:
        ConfigError: an option is invalid, the script does not exist, or its version of Megatron-LM is not supported.
            The script has not begun.
        HoldfastError: as when entering `InMemorySnapshot`.
    """
    Options.given(**options)
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    if IN_MEMORY in _values(arguments, "--non-persistent-ckpt-type"):
        raise ConfigError(
            f"--non-persistent-ckpt-type {IN_MEMORY} has Megatron-LM itself protect the job, where it can: leave that "
            "out, or run the script without holdfast.megatron_lm"
        )
    sys.path.insert(0, str(script.resolve().parent))  # as Python does for a script
    try:
        training = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{script}: {error}; it is to lie in a checkout of Megatron-LM, or that is to be on PYTHONPATH"
        ) from error
    check(training)
    with protecting(training, options):
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")


def check(training: ModuleType) -> None:
    """Raises `ConfigError`, naming everything that this version of Megatron-LM lacks."""
    missing = []
    for name, needed in NEEDED.items():
        function = getattr(training, name, None)
        if function is None:
            missing.append(name)
        else:
            known = inspect.signature(function).parameters
            missing += [f"{each} of {name}" for each in needed if each not in known]
    if missing:
        raise ConfigError(
            f"{training.__file__} has no {', '.join(missing)}: this version of Megatron-LM is not known; protect it "
            "with three lines, as docs/megatron-lm.md says"
        )


@contextmanager
def protecting(training: ModuleType, options: dict[str, Any]) -> Iterator[None]:
    """While the block runs, ``pretrain`` protects the job that it sets up, from its set-up until it returns."""
    job, protected = ExitStack(), False
    set_up, pretrain = training.setup_model_and_optimizer, training.pretrain

    @functools.wraps(set_up)
    def setting_up(*arguments: Any, **named: Any) -> Any:
        nonlocal protected
        found = set_up(*arguments, **named)
        model, optimizer, scheduler = found
        if optimizer is not None and not protected:
            job.push(protect(model, optimizer, scheduler, training.get_args(), training=training, **options))
            protected = True
        return found

    @functools.wraps(pretrain)
    def pretraining(*arguments: Any, **named: Any) -> Any:
        nonlocal protected
        protected = False
        with job:  # ends the job, unless an exception leaves its snapshots for the restart
            return pretrain(*arguments, **named)

    with (
        _standing_in(training, "setup_model_and_optimizer", setting_up),
        _standing_in(training, "pretrain", pretraining),
    ):
        yield


@contextmanager
def _standing_in(training: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, `function` replaces `name` in the module, and in its package if scripts import it there."""
    original = getattr(training, name)
    package = sys.modules[training.__name__.rpartition(".")[0]]
    places = [place for place in (training, package) if getattr(place, name, None) is original]
    for place in places:
        setattr(place, name, function)
    try:
        yield
    finally:
        for place in places:
            setattr(place, name, original)


def _values(arguments: Sequence[str], option: str) -> list[str]:
    """Every value given for an option of the script."""
    return [
        value.partition("=")[2] if value.startswith(f"{option}=") else following
        for value, following in zip(arguments, [*arguments[1:], ""], strict=False)
        if value == option or value.startswith(f"{option}=")
    ]


def _every(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor auto") from None


if __name__ == "__main__":
    main()
