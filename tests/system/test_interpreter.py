"""Processes of ours run no code that lies in the folder where they are started, and every one is started that way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared import processes
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.processes import HOME, own_command, own_environment
from holdfast.smp_daemon.shared.spawn import start_smp
from tests.deadlines import DEADLINE_S
from tests.scripts import completed, started
from tests.smp_kit import JOB, Ground, read_line
from tests.system.test_architecture import MODULES, ROOT, parsed

pytestmark = pytest.mark.smps(own_python=True)

DISTRIBUTION = "holdfast-train"
PLANTED = ("xxhash", "queue", "grpc", "sitecustomize")
"""Modules that an SMP imports, or Python itself, when it starts."""


@pytest.fixture
def trap(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files called like our modules; those that run leave a file there."""
    folder = ground.base / "users"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(folder)!r} + '/ran-{name}', 'w'); raise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def ran(trap: Path) -> list[str]:
    return sorted(path.name for path in trap.glob("ran-*"))


@pytest.mark.parametrize("entries", [None, "", ".", ":", "{cwd}", "{cwd}/../users"])
def test_an_smp_runs_nothing_from_the_folder_of_its_starter(
    ground: Ground, trap: Path, monkeypatch: pytest.MonkeyPatch, entries: str | None
) -> None:
    if entries is not None:
        monkeypatch.setenv("PYTHONPATH", entries.format(cwd=trap))
    arena = ground.base / "arenas" / JOB
    owner = start_smp(JOB, "node0", arena, host=ground.host())
    client = ground.keep(SmpClient(arena, JOB))
    assert client.pid == owner.pid
    client.stop(remove=True, force=False)
    assert ran(trap) == []


def test_an_smp_started_by_the_command_in_the_foreground_runs_nothing_from_there(ground: Ground, trap: Path) -> None:
    base = ground.base / "arenas"
    command = [sys.executable, "-P", "-m", "holdfast.cli", "smp", "start", "--job", JOB, "--arena", str(base)]
    command += ["--host", ground.host()]
    with started(command) as process:
        assert "ready" in read_line(process.stdout)
        assert ran(trap) == []


def run_in(folder: Path, environment: dict[str, str], code: str) -> str:
    """What a Python prints that runs `code` in `folder`, as a trainer does."""
    done = completed([sys.executable, "-S", "-c", code], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["here", ".", "..", "absolute"])
def test_holdfast_is_found_where_the_trainer_found_it(tmp_path: Path, how: str) -> None:
    """Installed in a folder of the job (``pip install --target``): the current directory, or one in ``PYTHONPATH``."""
    (tmp_path / "holdfast").symlink_to(ROOT / "holdfast")
    about = tmp_path / f"{DISTRIBUTION.replace('-', '_')}-{version(DISTRIBUTION)}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version(DISTRIBUTION)}\n")
    (tmp_path / "below").mkdir()
    folder = tmp_path / "below" if how in ("..", "absolute") else tmp_path
    environment = {} if how == "here" else {"PYTHONPATH": how if how != "absolute" else str(tmp_path)}
    code = (
        "from holdfast.smp_daemon.shared.processes import HOME, own_environment\n"
        "print(HOME, own_environment().get('PYTHONPATH'))"
    )
    home, path = run_in(folder, environment, code).split()
    assert Path(home).resolve() == tmp_path
    assert Path(path).is_absolute() and Path(path).resolve() == tmp_path


def test_streams_that_the_caller_has_closed_become_the_null_device(tmp_path: Path) -> None:
    """Otherwise the next file that is opened is standard output, and what is printed goes into it."""
    script = (
        "import os, sys; from holdfast.smp_daemon.shared.processes import open_standard_streams as work; work();"
        "print('lost'); print('lost', file=sys.stderr); file = open(sys.argv[1], 'w');"
        "file.write(' '.join(os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)))"
    )
    close = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    subprocess.run([*close, sys.executable, "-c", script, tmp_path / "seen"], cwd=ROOT, timeout=DEADLINE_S, check=True)
    assert (tmp_path / "seen").read_text().split() == 3 * [os.devnull]


class TestTheEnvironment:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if holdfast was installed in a place that no variable names."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(processes, "HOME", tmp_path / "lib")

    def test_keeps_what_names_other_places(self, tmp_path: Path) -> None:
        given = {"PYTHONPATH": "/opt/a:/opt/b", "PYTHONUSERBASE": "/home/a", "PATH": ".", "PYTHONHASHSEED": "7"}
        assert own_environment(given) == given

    def test_drops_what_depends_on_the_current_directory(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        entries = ["", ".", "src", "/opt/a", str(tmp_path), str(tmp_path / "link")]
        given = {"PYTHONPATH": ":".join(entries)} | dict.fromkeys(processes.FOLDERS, "here")
        assert own_environment(given) == {"PYTHONPATH": "/opt/a"}
        assert own_environment({"PYTHONPATH": "."}) == {}

    def test_is_made_in_a_folder_that_somebody_has_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A job goes on in one, and may need another SMP."""
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        assert own_environment({"PYTHONPATH": "src:/opt/a"}) == {"PYTHONPATH": "/opt/a"}

    def test_is_by_default_this_process_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "src")
        assert own_environment() == {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_folder_of_holdfast_is_known() -> None:
    assert HOME == ROOT
    assert own_command("some.module", "--option")[1:] == ["-P", "-m", "some.module", "--option"]


# ---------------------------------------------------------------------- every place

STARTERS = {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
NEVER = {"os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp", "subprocess.getoutput"} | {
    f"os.{kind}{form}" for kind in ("exec", "spawn") for form in ("l", "le", "lp", "lpe", "v", "vp", "vpe")
}
"""Calls with which `os.execve` and `subprocess` do all that is needed."""

OTHER_PROGRAMS = {
    "smp_daemon.watchdog.watchdog": "the user's shell command",
    "sessions": "the user's command",
    "bench.parts": "openssl",
}
"""Modules that start programs which are not Python processes of ours."""

INTERPRETERS = {
    "smp_daemon.shared.processes": "the one place",
    "bench.node": "another checkout's code, from its file; with -P",
    "cli.deploy": "starts nothing",
}
"""Modules that may name ``sys.executable``."""


def started_by(path: Path) -> Iterator[tuple[str, str]]:
    """The calls that start a process, and the expression of each one's environment."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in STARTERS:
            yield called, next((ast.unparse(each.value) for each in node.keywords if each.arg == "env"), "")
        elif called == "os.execve":
            yield called, ast.unparse(node.args[2])
        elif called in NEVER:
            yield called, ""


def is_ours(environment: str, path: Path) -> bool:
    """Whether an expression is a call of `own_environment`, or a name that the module gives the result of one."""
    if environment.startswith("own_environment("):
        return True
    return f"{environment} = own_environment(" in path.read_text()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - OTHER_PROGRAMS.keys()))
def test_every_process_of_ours_is_started_without_the_code_that_lies_about(module: str) -> None:
    path = MODULES[module]
    for called, environment in started_by(path):
        assert is_ours(environment, path), f"{module}: {called} without own_environment()"
    if module not in INTERPRETERS:
        assert "sys.executable" not in path.read_text(), f"{module} names sys.executable: use own_command()"


def test_the_lists_name_what_is_there() -> None:
    for module in OTHER_PROGRAMS:
        assert list(started_by(MODULES[module])), module
    for module in INTERPRETERS:
        assert "sys.executable" in MODULES[module].read_text(), module


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.Popen([python, '-m', 'x'])",
        "subprocess.run(command, env=os.environ)",
        "os.execv(command[0], command)",
        "os.execve(command[0], command, os.environ)",
        "os.system('x')",
    ],
)
def test_the_check_sees_what_it_is_for(tmp_path: Path, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert [is_ours(environment, path) for _, environment in started_by(path)] == [False]
