"""What a command prints first: something before any slow part, and one line at once if a package is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S
from tests.scripts import completed

SAID, SILENT = 76, 77

GUARDED = """
import os, sys
import holdfast.extras, holdfast.sessions
from holdfast.chaos.launcher import Launcher
from holdfast.cli.main import main

def leave(*_, **__):
    os._exit({said} if os.fstat(1).st_size else {silent})  # what was said is in that file, if it was flushed

class Frameworks:
    def find_spec(self, name, *_):
        if name in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        if name in ("torch", "megatron", "lightning", "transformers", "ray"):
            leave()

Launcher.__init__ = holdfast.sessions.run = leave
if not {absent}:
    holdfast.extras.has = lambda extra: True  # whatever is installed here
sys.meta_path.insert(0, Frameworks())
sys.exit(main(sys.argv[1:]))
"""
"""Runs the command until it would import a framework, start a process that does, or start the user's command."""


def run(words: list[str], folder: Path, *absent: str) -> tuple[int, str]:
    """The exit status and the output, as in a pipe. The status is `SAID` or `SILENT` if the slow part was reached."""
    code = GUARDED.format(said=SAID, silent=SILENT, absent=set(absent) or "()")
    printed = folder / "printed"
    with printed.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    return done.returncode, printed.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["chaos", "run", "--seed", "1", "--", "true"],
        ["audit", "--", "true"],
        ["profile", "--", "true"],
    ],
    ids=" ".join,
)
def test_something_is_said_before_what_takes_long(words: list[str], tmp_path: Path) -> None:
    status, said = run(words, tmp_path)
    assert (status, said != "") == (SAID, True), said


def test_the_package_is_run_as_the_command_is() -> None:
    command = [sys.executable, "-m", "holdfast", "--version"]
    done = completed(command)
    assert (done.returncode, done.stdout.split()[0]) == (0, "holdfast"), done.stderr


@pytest.mark.parametrize("words", [["demo"]], ids=" ".join)
def test_without_megatron_core_one_line_says_so_at_once_and_how_to_install_it(words: list[str], tmp_path: Path) -> None:
    status, said = run(words, tmp_path, "megatron")
    assert status not in (0, SAID, SILENT)
    assert said.count("\n") == 1 and "pip install 'holdfast-train[megatron]'" in said


def test_doctor_imports_no_framework(tmp_path: Path) -> None:
    status, said = run(["doctor"], tmp_path)
    assert status not in (SAID, SILENT) and "Python" in said
