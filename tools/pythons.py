"""The Pythons of this machine, and virtual environments for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

VERSIONS = ("3.11", "3.12", "3.13")
"""Supported versions."""

INSTALL_S = 900.0


def find(version: str) -> Path | None:
    """A working interpreter of a version, on the path or in pyenv, whose shims on the path may not work."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(root.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    return next((each for each in candidates if _runs(each, version)), None)


def environment(python: Path, home: Path, *packages: str, also: Path | None = None) -> Path:
    """The interpreter of a new virtual environment in `home`, which is removed first if it exists.

    Args:
        packages: requirements, as for pip.
        also: a folder of more packages that this Python can import.
    """
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([python, "-m", "venv", home], check=True, timeout=INSTALL_S)
    own = home / "bin" / "python"
    if also is not None:
        [site] = (home / "lib").glob("python*/site-packages")
        (site / "zz-also.pth").write_text(f"{also}\n")
    if packages:
        run(own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *packages)
    return own


def run(python: Path, *arguments: str, cwd: Path | None = None, **variables: str) -> str:
    """Run a command of an environment; return its output. Raises `SystemExit` with its last output if it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=clean | variables, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def needed() -> list[str]:
    """The package's requirements except torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need for need in project["dependencies"] if not need.startswith("torch")]


def pin(name: str) -> str:
    """The requirement with the version of a package that this project is built and tested with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{name}==")), name)


def _runs(python: Path, version: str) -> bool:
    try:
        said = subprocess.run([python, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except OSError:
        return False
    return said.startswith(f"Python {version}.")
