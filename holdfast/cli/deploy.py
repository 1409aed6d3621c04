"""``holdfast deploy slurm | kubernetes | systemd | prometheus``: write out the files for a supervisor or monitoring."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import some_time
from holdfast.cli.output import add_json, write_json
from holdfast.smp_daemon.shared.errors import ConfigError

KINDS = {
    "slurm": "a job script; or prolog, task prolog and epilog",
    "kubernetes": "a DaemonSet or a sidecar, pods that train, a PodMonitor",
    "systemd": "a system unit and a user unit",
    "prometheus": "alerting rules, and a dashboard for Grafana",
}
MONITORING = ("alerts.yml", "grafana.json")
ALERTS = {
    "old": ("> 900", "> {:g}", "15min", "least age of a safe snapshot that HoldfastSnapshotOld tells of"),
    "idle": ("> 600", "> {:g}", "10min", "how long no trainer may be connected before HoldfastNoTrainer"),
    "scraped_as": ('job="holdfast"', "job={}", "holdfast", "the name under which Prometheus scrapes SMPs"),
}
"""What ``deploy prometheus`` fills into alerts.yml, by option: what stands there, and the form of what replaces it."""

BIN = "/opt/train/bin"
"""The directory that the files name; `templates` replaces it with the one where holdfast is installed."""


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    deploy = commands.add_parser(
        "deploy",
        help="write out the files that start SMPs under Slurm, Kubernetes or systemd, or watch them",
        description="Writes templates: read the comments at their top, and put in what is yours. Scripts and units "
        "get the directory that this command runs from. If a file is there and differs, nothing is written, and the "
        "status is 2.",
        epilog="; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
    )
    deploy.add_argument("kind", choices=KINDS, help="which files to write")
    deploy.add_argument(
        "--to", type=Path, default=Path(), metavar="DIR", help="directory to write to (default: the current one)"
    )
    deploy.add_argument("--force", action="store_true", help="overwrite files that are there")
    for name, (_, form, default, what) in ALERTS.items():
        kind, metavar = (some_time, "TIME") if ":g" in form else (json.dumps, "NAME")  # a string in quotes
        option = f"--{name.replace('_', '-')}"
        deploy.add_argument(option, type=kind, metavar=metavar, help=f"prometheus: {what} (default {default})")
    deploy.set_defaults(run=_deploy)
    add_json(deploy)


def _deploy(parsed: argparse.Namespace) -> int:
    files = {parsed.to / path: text for path, text in templates(parsed.kind).items()}
    for name, (there, form, _, _) in ALERTS.items():
        value = getattr(parsed, name)
        if value is not None and parsed.kind != "prometheus":
            raise ConfigError(f"--{name.replace('_', '-')} is an option of `holdfast deploy prometheus`: leave it out")
        if value is not None:
            rules = parsed.to / "alerts.yml"
            files[rules] = files[rules].replace(there, form.format(value))
    try:
        others = [path for path, text in files.items() if path.exists() and path.read_bytes() != text.encode()]
        if others and not parsed.force:
            raise ConfigError(
                f"{', '.join(map(str, others))}: there already, and different; say --force to overwrite, or choose "
                "another directory with --to"
            )
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}; choose another with --to") from error
    for path in files:
        print(path, file=sys.stderr if parsed.json == "-" else sys.stdout)
    write_json(parsed.json, [str(path) for path in files])
    return 0


def templates(kind: str) -> dict[str, str]:
    """The files of one of `KINDS`, by path, with the directory of this installation filled in."""
    root = resources.files("holdfast.deploy")
    if kind == "prometheus":
        return {name: root.joinpath(name).read_text() for name in MONITORING}
    here = str(Path(sys.executable).parent)
    return {path: file.read_text().replace(BIN, here) for path, file in sorted(_below(root.joinpath(kind)))}


def _below(folder: Traversable, inside: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _below(entry, f"{inside}{entry.name}/")
        else:
            yield inside + entry.name, entry
