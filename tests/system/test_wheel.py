"""A wheel in an empty environment: every installed command prints its help, and does one real thing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import wheels


@pytest.fixture
def folder() -> Iterator[Path]:
    """On shared memory, as the arena is in it, with a short name, as sockets are in the arena."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-wheel-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow  # the commands have their own tests; this one sees what a wheel lacks
@pytest.mark.skipif(shutil.which("cc") is None, reason="a wheel needs a C compiler")
def test_every_installed_command_works(folder: Path) -> None:
    own = wheels.installed_offline(wheels.build_offline(folder), folder / "env")
    home = folder / "home"
    home.mkdir()
    found = wheels.commands_work(own, home)
    assert not [name for name, works in found.items() if not works]
