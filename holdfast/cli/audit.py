"""``holdfast audit``: whether a job resumes exactly, and what it forgot."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.arguments import add_runs
from holdfast.cli.output import add_json, console_of, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    audit = commands.add_parser(
        "audit",
        help="run your job, kill it, resume it: is it exact, and if not, what was forgotten?",
        description="Runs a training command that uses InMemorySnapshot five times for a few steps, kills and "
        "resumes it, and names state that a resume forgets. Status 0 only if nothing differs.",
    )
    audit.add_argument("--steps", type=int, default=8, help="steps of each run; the kill is in the middle (default 8)")
    add_runs(audit)
    add_json(audit)
    audit.add_argument("command", nargs=argparse.REMAINDER, help="such as -- torchrun ... train.py")
    audit.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    console = console_of(parsed, soft_wrap=True)
    console.print("importing torch")
    from holdfast.audit import AuditPlan, run, show

    plan = AuditPlan(tuple(parsed.command), parsed.steps, tuple(parsed.ignore), parsed.deadline)
    report = run(plan, lambda name: console.print(f"{name} ..."))
    show(console, report)
    write_json(parsed.json, asdict(report))
    return 0 if report.exact else 1
