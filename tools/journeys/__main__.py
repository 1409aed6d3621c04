"""``python -m tools.journeys``: ends with status 0 only if every newcomer completed the journey."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast import HoldfastError
from tools.journeys import engineer, keeper, operator, student
from tools.journeys.hosts import Failed, why_no_hosts
from tools.journeys.newcomer import activated
from tools.journeys.pages import Stale
from tools.pythons import pin

JOURNEYS = {"engineer": engineer.walk, "keeper": keeper.walk, "operator": operator.walk, "student": student.walk}
NEED_HOSTS = {"operator", "student"}


def main() -> int:
    """Run the requested journeys."""
    parser = argparse.ArgumentParser(prog="python -m tools.journeys", description=__doc__)
    parser.add_argument("who", nargs="*", metavar="NEWCOMER", help=f"of {', '.join(JOURNEYS)} (default: all)")
    parser.add_argument("--python", default="python3.11", help="such as python3.12")
    parser.add_argument("--torch", default=pin("torch"), help="what to install, or a folder of packages that has it")
    asked = parser.parse_args()
    if unknown := set(asked.who) - JOURNEYS.keys():
        parser.error(f"there is no newcomer {sorted(unknown)[0]!r}")
    python = shutil.which(asked.python)
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0:
        print(f"{asked.python} is not here: no journeys with it")
        return 0
    arrived = [_walk(who, python, asked.torch) for who in asked.who or JOURNEYS]
    return 0 if all(arrived) else 1


def _walk(who: str, python: str, torch: str) -> bool:
    if who in NEED_HOSTS and (why := why_no_hosts()):
        print(f"{who}: not walked, there can be no hosts: {why}")
        return True
    began = time.monotonic()
    print(f"{who}, {Path(python).name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-journey-") as folder:
        try:
            JOURNEYS[who](activated(python, who, torch), Path(folder))
        except (Failed, Stale, HoldfastError, subprocess.SubprocessError) as error:
            print(f"✗ {who}: {type(error).__name__}: {error}")
            return False
    print(f"✓ {who}: came to the end in {time.monotonic() - began:.0f} s")
    return True


if __name__ == "__main__":
    sys.exit(main())
