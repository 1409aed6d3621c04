"""``holdfast doctor``: what this machine has and lacks."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.output import add_json, console_of, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has and what is wrong with it",
        description="Looks at packages, erasure code backends, shared memory and the kernel, and says how to fix what "
        "is wrong. Status 1 if there is a problem; notes are about speed.",
    )
    add_json(doctor)
    doctor.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from holdfast.checks import examine
    from holdfast.doctor import gather, show

    findings = examine(gather())
    show(console_of(parsed), findings)
    write_json(parsed.json, [finding.to_json() for finding in findings])
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0
