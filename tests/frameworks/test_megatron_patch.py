"""The patch that fills in Megatron-LM's ``in_memory``: it is well-formed, calls what exists, applies where it can."""

from __future__ import annotations

import ast
import os
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast import ConfigError
from holdfast.integrations.megatron_lm import InMemoryCheckpointManager
from holdfast.snapshot.options import Options
from tests import megatron_lm_loop as loop
from tests.frameworks.test_megatron_lm import Killed, telling, undisturbed
from tests.scripts import completed

PATCH = Path(__file__).parents[2] / "docs" / "megatron-lm-in-memory.patch"
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def hunks() -> list[list[str]]:
    """The hunks, each with its header line."""
    found: list[list[str]] = []
    for line in PATCH.read_text().splitlines():
        if line.startswith("@@"):
            found.append([line])
        elif line.startswith(("diff ", "--- ", "+++ ")):
            continue
        else:
            found[-1].append(line)
    return found


def test_each_hunk_has_as_many_lines_as_it_says() -> None:
    assert hunks()
    for first, *lines in hunks():
        match = HUNK.match(first)
        assert match is not None
        before, after = (int(number or 1) for number in match.groups())
        assert sum(not line.startswith("+") for line in lines) == before
        assert sum(not line.startswith("-") for line in lines) == after


def test_what_it_calls_is_there() -> None:
    added = "\n".join(line[1:] for hunk in hunks() for line in hunk if line.startswith("+"))
    called = set(re.findall(r"in_memory_checkpoint_manager(?:'\s*\])?\s*\.(\w+)\(", added))
    public = {name for name in vars(InMemoryCheckpointManager) if not name.startswith("_")}
    assert called == public
    assert "from holdfast.integrations.megatron_lm import InMemoryCheckpointManager" in added
    assert "every=" in added and "every" in Options.__dataclass_fields__


def run(kill: tuple[Any, ...] | None = None, **args: Any) -> tuple[list[Any], list[Any] | None]:
    """Run as a patched Megatron-LM does."""
    told, tell = telling(kill)
    manager: list[InMemoryCheckpointManager] = []

    def load(model: Any, optimizer: Any, scheduler: Any, given: Namespace) -> loop.Patched:
        manager.append(InMemoryCheckpointManager(given, every=1))
        manager[0].load(model, optimizer, scheduler)
        return loop.Patched(manager[0])

    try:
        end = loop.pretrain(loop.arguments(**args), 12, load, tell)
    except Killed as error:
        manager[0]._snap.__exit__(Killed, error, None)
        return told, None
    return told, end


@pytest.mark.parametrize("kind", ["single", "cyclic", "external"])
def test_a_loop_that_calls_it_goes_on_bit_for_bit(arena: Path, kind: str) -> None:
    everything, end = undisturbed(dataloader_type=kind)
    run(("step", 7), dataloader_type=kind)
    after, ended = run(dataloader_type=kind)
    assert after[0][:2] == ("step", 7)
    assert after == everything[-len(after) :]
    assert ended == end


def test_a_manager_that_has_loaded_nothing_says_so() -> None:
    manager = InMemoryCheckpointManager(loop.arguments())
    for call in (partial(manager.load_data, None, None), partial(manager.on_train_step_start, 0), manager.close):
        with pytest.raises(ConfigError, match="not called"):
            call()


@pytest.mark.skipif("REAL" not in os.environ, reason="REAL names no directory with a checkout of Megatron-LM 0.19")
def test_it_applies_and_what_it_makes_is_python(tmp_path: Path) -> None:
    checkout = Path(os.environ["REAL"]) / "Megatron-LM"
    if not checkout.is_dir():
        pytest.skip(f"{checkout} is not there")
    paths = re.findall(r"^\+\+\+ b/(.*)$", PATCH.read_text(), re.MULTILINE)
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((checkout / path).read_bytes())
    applied = completed(
        ["git", "apply", "--whitespace=error-all", str(PATCH)],
        cwd=tmp_path,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )
    assert applied.returncode == 0, applied.stderr
    for path in paths:
        text = (tmp_path / path).read_text()
        ast.parse(text)
        assert text != (checkout / path).read_text()
