"""Shared by all tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.smp_kit import Ground, kill_smps, launch_by_fork, playground

os.environ["OMP_NUM_THREADS"] = "1"
"""Two workers share two cores, and threads that OpenMP keeps spinning take them from processes that have work."""

os.environ["HOLDFAST_OVERHEAD_BUDGET"] = "0"
"""Steps of tests take no time, so any snapshot would be over any budget."""


class Absent(MetaPathFinder):
    """The last finder that is asked: what imports one of these packages, which nobody has found, is skipped."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: object) -> None:
        """Raises the exception that skips a test, or a module while it is collected."""
        if name in self._packages:
            raise pytest.skip.Exception(f"{name} is not installed", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tests.other_python` says: on purpose some packages are not there, and not every case is run."""
    parser.addoption(
        "--without", default="", metavar="PACKAGES", help="skip, and count, what imports one of these, with commas"
    )
    parser.addoption("--cases", type=int, default=0, metavar="N", help="at most so many of each test function")


def pytest_configure(config: pytest.Config) -> None:
    """Tests look the same on every machine: only ``pytest -m gpu`` sees its GPUs."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if without := frozenset(filter(None, config.getoption("without").split(","))):
        sys.meta_path.append(Absent(without))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose processes need a package that is not there on purpose is skipped as one that imports it."""
    needed = {name for marker in item.iter_markers("needs") for name in marker.args}
    needed |= (
        {"torch"} if item.get_closest_marker("cluster") or "launcher" in getattr(item, "fixturenames", ()) else set()
    )
    for name in sorted(needed):
        find_spec(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--cases``: so many of each test function, of all its parameters alike."""
    most = config.getoption("cases")
    if not most:
        return
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(cases[len(cases) * i // most]) for cases in functions.values() for i in range(most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Which modules ``--without`` left out, by name."""
    if not config.getoption("without"):
        return
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if "is not installed" in str(each.longrepr)]
    modules = sorted({each.nodeid for each in skipped if "::" not in each.nodeid})
    tests = Counter(each.nodeid.partition("::")[0] for each in skipped if "::" in each.nodeid)
    terminalreporter.section(f"without {config.getoption('without')}")
    terminalreporter.write_line(f"{len(modules)} modules are skipped: {', '.join(modules)}")
    told = ", ".join(f"{name} ({count})" for name, count in sorted(tests.items()))
    terminalreporter.write_line(f"{sum(tests.values())} tests of other modules are: {told}")


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Who leaves a hook of torch behind, which every optimizer of the tests after it would call, is named."""
    yield
    if "torch" not in sys.modules:
        return
    from torch.optim import optimizer

    left = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()
    assert not left


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Imports torch, megatron-core and the jobs once; every virtual cluster forks from it."""
    from holdfast.chaos.demo import PRELOAD

    with Launcher(["tests.jobs", "tests.elastic_jobs", "tests.layout_jobs", *PRELOAD]) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory on shared memory."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ground() -> Iterator[Ground]:
    """Where a test's SMPs run."""
    with playground() as made:
        yield made


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a job of this process keeps its snapshots; what is left of it at the end is removed."""
    base = Path(f"/dev/shm/holdfast-test-{os.getpid()}")
    monkeypatch.setenv(ARENA_ENV, str(base))
    monkeypatch.setenv("HOLDFAST_JOB", "test")
    monkeypatch.setattr("holdfast.smp_daemon.shared.spawn.launch", launch_by_fork)
    yield base
    kill_smps(base)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def compiling() -> Iterator[None]:
    """Leaves nothing compiled behind."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
