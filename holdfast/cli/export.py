"""``holdfast export``: write a snapshot, in memory or persisted, as plain safetensors or as a DCP checkpoint."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.arguments import add_arena, add_job
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.cli.smp import check_readable
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.paths import find_owners

if TYPE_CHECKING:
    from holdfast.export.source import Offers

FORMATS = ("safetensors", "dcp")
NOTHING = "there is nothing"


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    export = commands.add_parser(
        "export",
        help="turn a snapshot into plain safetensors or a DCP checkpoint",
        description="Exports the newest snapshot, or that of --step, from the memory of a job whose SMPs run, or, "
        "with --from, from where it was persisted. Tensors that data-parallel replicas divided among themselves are "
        "put together again.",
    )
    export.add_argument("folder", nargs="?", type=Path, help="a new directory for the result; not with --list")
    export.add_argument("--from", dest="place", metavar="URL", help="where snapshots are persisted; else from memory")
    add_job(export, "id of the training run (default HOLDFAST_JOB, or the only one there)")
    export.add_argument("--step", type=int, help="which snapshot (default the newest)")
    export.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="safetensors: a file of tensors for each coordinate, and all else as JSON beside it; dcp: what "
        "torch.distributed.checkpoint loads (default safetensors)",
    )
    export.add_argument("--list", action="store_true", help="only say what there is")
    add_arena(export)
    add_json(export)
    export.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """``holdfast export``; status 0 if something was exported, or listed."""
    console = console_of(parsed, soft_wrap=True)
    if parsed.list:
        return _list(parsed, console)
    if parsed.folder is None:
        raise ConfigError("say into which new directory to export, or --list")
    console.print(f"exporting {'from ' + parsed.place if parsed.place else 'from memory'} into {parsed.folder}")
    report = export(
        parsed.folder, parsed.format, place=parsed.place, job=parsed.job, step=parsed.step, arena=parsed.arena
    )
    console.print(f"step {report['step']} of job {report['job']}: {report['tensors']} tensors in {parsed.folder}")
    write_json(parsed.json, report)
    return 0


def export(
    folder: Path,
    kind: str = "safetensors",
    *,
    place: str | None = None,
    job: str | None = None,
    step: int | None = None,
    arena: Path | None = None,
) -> dict[str, Any]:
    """Write a snapshot into `folder`, which must not exist. Blocks; raises `HoldfastError`.

    Until it is done, the slots are files in a temporary directory beside `folder`, so it takes twice the room of the
    result but little memory. A DCP checkpoint takes memory for the tensors that are divided among ranks.

    Args:
        folder: a new directory for the result.
        kind: one of `FORMATS`.
        place: URL where snapshots are persisted; None: the memory of the job's nodes.
        job: its name; None: ``HOLDFAST_JOB``, or the only job there.
        step: step of the snapshot; None: the newest.
        arena: directory of arenas; None: the default.
    """
    from holdfast.export.source import one_job
    from holdfast.export.tensors import fetch

    if folder.exists():
        raise ConfigError(f"{folder} is there already: export into a new directory")
    with one_job(_offers(place, job, arena)).choose(step) as source:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            raw, result = made / "slots", made / "result"
            raw.mkdir()
            result.mkdir()
            slots = list(fetch(source, raw))
            if kind == "dcp":
                from holdfast.export.dcp import write_dcp

                count = write_dcp(result, slots)
            else:
                count = _write_safetensors(result, slots, source)
            result.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return {
            "job": source.layout.job,
            "epoch": source.snapshot.epoch,
            "step": source.snapshot.step,
            "format": kind,
            "tensors": count,
        }


def _offers(place: str | None, job: str | None, arena: Path | None) -> list[Offers]:
    """`export.source.offers`. Raises `SmpUnavailable`, too, if the arena that is meant is another user's."""
    from holdfast.export.source import offers

    if place is None and next(find_owners(arena, job), None) is None:
        check_readable(job, arena)
    return offers(place, job, arena)


def _write_safetensors(folder: Path, slots: Any, source: Any) -> int:
    from holdfast.export.tensors import whole_tensors, write_safetensors

    by_coord = {slot.coord: slot for slot in slots}
    count = 0
    for coord, tensors in whole_tensors(slots).items():
        notes = {"job": source.layout.job, "coord": coord, "epoch": epoch_text(source.snapshot.epoch)}
        notes |= {"step": str(source.snapshot.step), "format": "pt"}
        write_safetensors(folder / f"{coord}.safetensors", tensors, by_coord, notes)
        (folder / f"{coord}.json").write_text(json.dumps(by_coord[coord].record) + "\n")
        count += len(tensors)
    return count


def _list(parsed: argparse.Namespace, console: Any) -> int:
    found = [each for job in _offers(parsed.place, parsed.job, parsed.arena) for each in job.snapshots]
    rows = []
    for each in found:
        step, *sizes = (f"{n:,}" for n in (each.snapshot.step, each.shards, each.bytes))
        rows.append((each.job, each.why_not, step, each.run, epoch_text(each.snapshot.epoch), *sizes))
    say(console, Report(("job", "", "step", "run", "epoch", "shards", "bytes"), rows, left=2) if found else NOTHING)
    write_json(parsed.json, [asdict(each) for each in found])
    return 0 if found else 1
