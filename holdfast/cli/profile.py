"""``holdfast profile``: measures what snapshots cost *your* job, for ``holdfast plan --profile``.

The command runs for a few dozen steps. A snapshot is taken after each step during which no snapshot was in progress, so
steps with and without one alternate, and anything else that slows the machine slows both. Then the job ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast import sessions
from holdfast.cli.arguments import deadline, output_file
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.leftovers import find_leftovers, remove
from holdfast.planner import recorder
from holdfast.planner.measured import Measured
from holdfast.scratch import Scratch
from holdfast.sessions import tail
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.quantities import amount, duration
from holdfast.snapshot.interval.recording import RecordingOrders


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to profile.

    Attributes:
        command: the training command, as started by hand; it enters `InMemorySnapshot`.
        output: file for the profile.
        steps: number of steps to record, after the warm-up.
        deadline_s: timeout for the whole run.
    """

    command: tuple[str, ...]
    output: Path
    steps: int = 40
    deadline_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no command given: holdfast profile -- torchrun ... train.py")
        if self.steps < 4:
            raise ConfigError(f"--steps {self.steps}: record 4 or more, two of each kind")


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    profile = commands.add_parser(
        "profile",
        help="run your job for a few dozen steps, and measure what snapshots cost it: for holdfast plan",
        description="Runs a training command that uses InMemorySnapshot for some steps, from nothing, in memory of "
        "its own, and takes a snapshot after each step in which none was worked on. Writes what they cost and their "
        "sizes: the FILE of holdfast plan --profile. Rank 0 writes it, so on several hosts it must be on a common "
        "file system.",
    )
    profile.add_argument(
        "--output",
        "-o",
        type=output_file,
        default="profile.json",
        metavar="FILE",
        help="where to write the profile (default profile.json)",
    )
    profile.add_argument("--steps", type=int, default=40, help="steps to record after the warm-up (default 40)")
    profile.add_argument(
        "--deadline", type=deadline, default="30min", metavar="TIME", help="timeout for the whole run (default 30min)"
    )
    add_json(profile)
    profile.add_argument("command", nargs=argparse.REMAINDER, help="such as -- torchrun ... train.py")
    profile.set_defaults(run=_command)


def run(plan: ProfilePlan) -> Measured:
    """Run the command until it has recorded enough. Blocks; leaves nothing behind but the profile.

    Raises:
        HoldfastError: the command did not do what it should; the message ends with its output.
    """
    output = plan.output.resolve()
    written = output.with_name(f".{output.name}.{os.getpid()}")
    with Scratch("profile") as scratch:
        folder = scratch.path
        log = folder / "log"
        environment = sessions.trial_environment() | RecordingOrders(str(written), plan.steps).to_environment()
        environment |= {ARENA_ENV: str(folder / "arena"), "HOLDFAST_JOB": "profile"}
        try:
            status = sessions.run(plan.command, environment, log, plan.deadline_s, "command")
            if status != 0:
                raise HoldfastError(f"the command ended with status {status}\n{tail(log)}")
            if not written.exists():
                raise HoldfastError(
                    f"the command ended before {plan.steps} steps were recorded, or never entered InMemorySnapshot: "
                    f"let it train longer, or give fewer --steps\n{tail(log)}"
                )
            measured = recorder.read(written.read_bytes())
            output.write_text(json.dumps(measured.to_json(), indent=2) + "\n")
        finally:
            written.unlink(missing_ok=True)
            for leftover in find_leftovers(folder):
                remove(leftover)
    return measured


def show(console: Console, measured: Measured) -> None:
    """Print what was measured."""
    error_s = measured.visible_error_s() or 0.0
    code = f"{measured.data}+{measured.parity}" if measured.parity else "none"
    console.print(
        f"a step takes {duration(measured.step_s)} ({measured.quiet_steps}), with a snapshot beside it "
        f"{duration(measured.snapshot_step_s)} ({measured.busy_steps})",
        soft_wrap=True,
    )
    console.print(
        f"one snapshot costs {duration(measured.visible_s())} ± {duration(error_s)} of training, {measured.snapshots} "
        f"taken; it holds up the loop for {duration(measured.stall_s)}",
        soft_wrap=True,
    )
    console.print(
        f"copied in {duration(measured.copy_s)}, sealed in {duration(measured.seal_s)}, encoded in "
        f"{duration(measured.encode_s)}; {amount(measured.state_bytes)} a node on {measured.nodes} nodes, "
        f"protect {code}",
        soft_wrap=True,
    )
    if measured.interference is not None:
        console.print(
            f"while that lasts training loses {measured.interference:.1%}, which is --interference where there is no "
            "profile",
            soft_wrap=True,
        )


def _command(parsed: argparse.Namespace) -> int:
    command = tuple(parsed.command)
    plan = ProfilePlan(command, parsed.output, parsed.steps, parsed.deadline)
    console = console_of(parsed)
    console.print(f"running the command until it has recorded {plan.steps} steps", soft_wrap=True)
    measured = run(plan)
    show(console, measured)
    console.print(f"{parsed.output}: give it to holdfast plan --profile", soft_wrap=True)
    write_json(parsed.json, measured.to_json())
    return 0
