"""``node.json``: what an SMP remembers of its node, for a successor. Without it no slot of the arena counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, VersionMismatch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import Count, Identifier, from_plain, to_plain
from holdfast.smp_daemon.shared.records import read_json, write_json
from holdfast.smp_daemon.shared.settings import ARENA, NODE
from holdfast.smp_daemon.shared.starts import Record
from holdfast.smp_daemon.shared.system import Files
from holdfast.smp_daemon.shared.versions import ARENA_FORMAT, RELEASE

NODE_FILE = "node.json"


@dataclass(frozen=True, slots=True)
class NodeFile:
    """The contents of ``node.json``."""

    job: str
    node: str
    epoch: Count
    protected: SnapshotId | None
    record: Record
    given_up: tuple[Identifier, ...] = ()
    format: Count = ARENA_FORMAT
    release: str = RELEASE

    def write(self, arena: Path) -> None:
        """Write it to the arena. Raises as `records.write`."""
        write_json(arena / NODE_FILE, to_plain(self))


def read_node_file(arena: Path, job: str, node: str, files: Files) -> NodeFile | None:
    """What a predecessor knew; None if there was none, or it had begun to remove the arena.

    Raises:
        VersionMismatch: it wrote the arena in another format.
        ConfigError: the arena is another job's or node's.
        ProtocolError: the file is damaged.
    """
    data = read_json(arena / NODE_FILE, files)
    if data is None:
        return None
    if isinstance(data, dict) and (written := data.get("format", ARENA_FORMAT)) != ARENA_FORMAT:
        raise VersionMismatch(
            f"the arena {arena} was written by holdfast {data.get('release')} in format {written}, and "
            f"holdfast {RELEASE} reads format {ARENA_FORMAT}: start the SMP of that version. Only if other nodes "
            "protect this one may the arena be deleted, with `holdfast gc`, and rebuilt from their parity "
            "(docs/operating.md)"
        )
    known = from_plain(NodeFile, data, "what an SMP has written of its node")
    if known.job != job:
        raise ConfigError(
            f"the arena {arena} belongs to job {known.job!r} on node {known.node!r}, not to job {job!r}: choose another"
        )
    if known.node != node:
        raise ConfigError(
            f"the arena {arena} belongs to job {known.job!r} on node {known.node!r}, and this node is called {node!r}. "
            f"If its name has changed, as that of a container does, set {NODE.variable}={known.node}, and the job goes "
            "on with what the arena holds, perhaps the only copy; otherwise choose another with "
            f"{ARENA.variable}"
        )
    return known
