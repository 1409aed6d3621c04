"""The fast tests on a second Python: ``make test-other``.

As torch would take gigabytes, everything else is installed, and tests that import torch are skipped and listed. If that
Python has torch, or ``--also`` names a folder with torch, those tests run as well. Of each parametrized test only one
case runs, and tests that do not depend on the Python are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools import pythons

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "other-python"

CASES = 1
"""Number of cases to run of each test function."""

TOOLS = ("greenlet", "hypothesis", "matplotlib", "pytest", "pytest-xdist", "pyyaml", "safetensors", "setuptools")
FRAMEWORKS = ("torch", "megatron", "lightning", "transformers", "accelerate", "torchft", "deepspeed", "ray", "mkdocs")

LEFT_OUT = {
    "tests/system/test_ec_guard.py": "compiled code, the same for all",
    "tests/unit/test_tuning_rehearsal.py": "months of arithmetic",
    "tests/unit/test_every_test_can_fail.py": "what the tests look like",
}


def main() -> int:
    """Run the tests; return pytest's status. If there is no second Python, print that and return 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.other_python", description=__doc__)
    parser.add_argument("--python", choices=pythons.VERSIONS[1:], help="(default: the newest that is here)")
    parser.add_argument("--also", type=Path, metavar="FOLDER", help="site-packages of that Python with torch")
    asked = parser.parse_args()
    wanted = [asked.python] if asked.python else pythons.VERSIONS[:0:-1]
    python = next((found for version in wanted if (found := pythons.find(version))), None)
    if python is None:
        print(f"skipped: there is no Python {' or '.join(wanted)} here")
        return 0
    own = environment(python, asked.also)
    absent = [name for name in FRAMEWORKS if not has(own, name)]
    command: list[str | Path] = [
        own,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        f"--cases={CASES}",
    ]
    command += [f"--without={','.join(absent)}", *(f"--ignore={path}" for path in LEFT_OUT)]
    print(f"left out: {', '.join(f'{path} ({why})' for path, why in LEFT_OUT.items())}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=clean(), check=False).returncode


def environment(python: Path, also: Path | None) -> Path:
    """The interpreter of an environment with this checkout and all its requirements except torch.

    The existing environment is reused if nothing has changed.
    """
    needed = pythons.needed()
    made_of = f"{python} {also} {needed} {TOOLS}\n{(ROOT / 'constraints.txt').read_text()}"
    stamp, own = HOME / "made-of", HOME / "bin" / "python"
    if stamp.exists() and stamp.read_text() == made_of:
        return own
    print(f"setting up {HOME.relative_to(ROOT)} for {python} (once)", flush=True)
    constraints = ("-c", str(ROOT / "constraints.txt"))
    own = pythons.environment(python, HOME, *constraints, *needed, *TOOLS, also=also or packages_with_torch(python))
    pythons.run(own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "-e", str(ROOT))
    stamp.write_text(made_of)
    return own


def packages_with_torch(python: Path) -> Path | None:
    """The site-packages folder in which a Python has torch; None if it has no torch."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return Path(found).parent.parent if found else None


def has(python: Path, package: str) -> bool:
    """Whether an environment has a package. Does not import the package."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"
    return subprocess.run([python, "-c", code], env=clean(), cwd=HOME, check=False, timeout=60).returncode == 0


def clean() -> dict[str, str]:
    """The environment variables without `PYTHONPATH`, which would give that Python other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
