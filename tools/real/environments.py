"""Locates the frameworks: environments with packages from the package index, and checkouts below one folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "real"
CONSTRAINTS = ROOT / "constraints.txt"
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_S = 1800.0


class Absent(Exception):
    """Something that a run needs is missing; the message names it."""


def checkout(real: Path | None, name: str) -> Path:
    """The folder of a framework's checkout. Raises `Absent`."""
    if real is None:
        raise Absent(f"{name} is taken from a checkout: give the folder that it lies in as REAL=...")
    if not (real / name).is_dir():
        raise Absent(f"{name} is not in {real}")
    return real / name


def interpreter(name: str, given: Mapping[str, Path]) -> Path:
    """The Python of an environment: one that was given, or one in build/, which is made if it is missing or outdated.

    ``requirements/NAME.txt`` lists its packages, and ``NAME.alone.txt`` packages to install without their dependencies.
    The name ends with the version of Python.

    Raises:
        Absent: there is no such Python, or the packages cannot be installed.
    """
    if name in given:
        return given[name]
    home, requirements = WORK / f"env-{name}", REQUIREMENTS / f"{name}.txt"
    alone = requirements.with_suffix(".alone.txt")
    pins = hashlib.sha256(CONSTRAINTS.read_bytes() + requirements.read_bytes()).hexdigest()
    ready = home / "made-of"
    if ready.is_file() and ready.read_text() == pins:
        return home / "bin" / "python"
    version = name.rpartition("-")[2]
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0:
        raise Absent(f"there is no python{version} here")
    print(f"installing into {home.relative_to(ROOT)} (once)", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([python, "-m", "venv", home], check=True, timeout=INSTALL_S)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    wanted = [[torch], ["-e", str(ROOT), "-r", str(requirements)]]  # torch first, so that its CPU build is found
    for packages in [*wanted, ["--no-deps", "-r", str(alone)]] if alone.is_file() else wanted:
        done = subprocess.run(
            [*pip, *packages], cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode != 0:
            raise Absent(f"the packages of {name} cannot be installed: {done.stderr.strip()[-300:]}")
    ready.write_text(pins)
    return home / "bin" / "python"


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of an interpreter and of its packages. Raises `Absent`, which names a missing package."""
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'Python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: sys.exit(name + ' is not installed')\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise Absent(f"{done.stderr.strip()[-200:]} in {python}")
    return dict(json.loads(done.stdout))
