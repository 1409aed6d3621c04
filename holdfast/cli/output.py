"""What the results of all commands have in common."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_json(command: argparse.ArgumentParser) -> None:
    """Give a command ``--json``."""
    command.add_argument("--json", metavar="FILE", help="also write the result as JSON; - is standard output")


def write_json(target: str | None, data: Any) -> None:
    """Write a command's result where ``--json`` says, if it says so."""
    if target is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
