"""Settings, options and fixtures shared by all tests."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.chaos.launcher import Launcher
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.sampling import register_profiles
from tests.smp_kit import Ground, kill_smps, launch_by_fork, playground

register_profiles()

os.environ["OMP_NUM_THREADS"] = "1"
"""Two workers share two cores, and OpenMP's spinning threads would take them from processes that have work."""

os.environ["HOLDFAST_EVERY"] = "1"
"""A snapshot after every step, unless a test says otherwise."""


class Absent(MetaPathFinder):
    """The last finder on `sys.meta_path`: skips tests and modules that import one of these absent packages."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: object) -> None:
        """Raise the exception that skips a test, or a module during collection."""
        if name in self._packages:
            raise pytest.skip.Exception(f"{name} is not installed", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for `tools.other_python`: some packages are absent on purpose, and not every case is run."""
    parser.addoption(
        "--without", default="", metavar="PACKAGES", help="skip, and count, what imports one of these, with commas"
    )
    parser.addoption("--cases", type=int, default=0, metavar="N", help="at most so many of each test function")


def pytest_configure(config: pytest.Config) -> None:
    """Make tests behave the same on every machine: only ``pytest -m gpu`` sees GPUs."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if without := frozenset(filter(None, config.getoption("without").split(","))):
        sys.meta_path.append(Absent(without))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Also skip a test whose processes need a package that is absent on purpose."""
    needed = {name for marker in item.iter_markers("needs") for name in marker.args}
    needed |= (
        {"torch"} if item.get_closest_marker("cluster") or "launcher" in getattr(item, "fixturenames", ()) else set()
    )
    for name in sorted(needed):
        find_spec(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Implement ``--cases``: keep N cases of each test function, spread evenly over its parameters."""
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
    """List the modules that ``--without`` skipped."""
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
    """Fail a test that leaves a global optimizer hook of torch behind, which optimizers of later tests would call."""
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
    """A process that imports torch, megatron-core and the jobs once; every virtual cluster forks from it."""
    from holdfast.chaos.demo import PRELOAD

    with Launcher(["tests.jobs", "tests.elastic_jobs", "tests.layout_jobs", *PRELOAD]) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory on shared memory."""
    with Scratch("test") as scratch:
        yield scratch.path


@pytest.fixture
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """A `Ground` for a test's SMPs, which start as its marker ``smps`` says."""
    marker = request.node.get_closest_marker("smps")
    settings = dict(marker.kwargs) if marker is not None else {}
    own_python = settings.pop("own_python", False)
    with pytest.MonkeyPatch.context() as patched, playground(own_python=own_python) as made:
        for name, value in settings.items():
            patched.setenv(name, value)
        yield made


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The arena base for a job of this process; whatever is left in it is removed at the end. Each test has its own: a
    process counts the trainings that it has finished in each."""
    with Scratch("test") as scratch:
        monkeypatch.setenv(ARENA_ENV, str(scratch.path))
        monkeypatch.setenv("HOLDFAST_JOB", "test")
        monkeypatch.setattr("holdfast.smp_daemon.shared.spawn.launch", launch_by_fork)
        yield scratch.path
        kill_smps(scratch.path)


@pytest.fixture
def compiling() -> Iterator[None]:
    """Discard compiled code before and after the test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
