"""What an SMP knows of its job: the epoch, the start that began it, the layouts, and which snapshot was promised; and
what becomes of the snapshots of the epoch.

The layouts have files of their own, and outcomes are on the board, for trainers. The rest is in ``node.json`` for a
successor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.board import Board, SnapshotOutcome
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StaleEpoch, VersionMismatch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import Run, epoch_text
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_UNIT_BYTES
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import Count, Identifier, from_plain, to_plain
from holdfast.smp_daemon.shared.records import read_json, write_json
from holdfast.smp_daemon.shared.settings import ARENA, NODE
from holdfast.smp_daemon.shared.starts import WELL, Record, Start, TrainerEnd
from holdfast.smp_daemon.shared.system import Files
from holdfast.smp_daemon.shared.versions import ARENA_FORMAT, RELEASE
from holdfast.smp_daemon.storage.arena import Arena

NODE_FILE = "node.json"
log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class NodeFile:
    """The contents of ``node.json``: what an SMP remembers for a successor. Without it no slot of the arena counts."""

    job: str
    node: str
    epoch: Count
    protected: SnapshotId | None
    record: Record
    given_up: tuple[Identifier, ...] = ()
    format: Count = ARENA_FORMAT
    release: str = RELEASE


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
            f"on with what the arena holds, perhaps the only copy. If another host is {known.node!r}, and its files "
            f"were copied here, move this arena away or choose another with {ARENA.variable}: what was in it is "
            "rebuilt from the other nodes, where they protect it"
        )
    return known


class Predecessor(Enum):
    """What an SMP finds of the one before it in this arena."""

    KNOWN = auto()
    FORGOTTEN = auto()
    """``node.json`` is lost, but a layout names this job and node, so what is held counts."""
    NONE = auto()


class JobState:
    """The job as one node knows it. Thread-safe; `changed` is the store's lock, which guards all here.

    Attributes:
        epoch: the newest that has begun here; 0: none.
        protected: the newest snapshot of this node's run that the whole job knows to be protected.
        record: the newest start, and how this node's trainers of it ended.
        given_up: ids of the runs that are given up.
    """

    def __init__(self, arena: Arena, job: str, node: str, changed: threading.Condition) -> None:
        self._arena = arena
        self._job = job
        self._node = node
        self._changed = changed
        self.epoch = 0
        self.protected: SnapshotId | None = None
        self.record = Record()
        self.given_up: frozenset[str] = frozenset()

    @property
    def layout(self) -> Layout | None:
        """The layout of the current epoch as the trainers arranged it, once it is configured."""
        return self._arena.layouts.get((self.epoch, 0))

    def newest_layout(self) -> Layout | None:
        """The newest layout known: of the newest epoch, as its SMPs last regrouped it."""
        with self._changed:
            layouts = self._arena.layouts
            return layouts[max(layouts)] if layouts else None

    def keep_layout(self, layout: Layout) -> None:
        """Remember a layout that was not configured here, because this node is about to hold bytes coded in it."""
        with self._changed:
            if (layout.epoch, layout.revision) not in self._arena.layouts:
                self._arena.layouts.add(layout)

    def longest_unit(self) -> int:
        """The greatest length of a unit of this job, in bytes, as far as this node knows."""
        with self._changed:
            return max((layout.unit_bytes for layout in self._arena.layouts.values()), default=MAX_UNIT_BYTES)

    @property
    def run(self) -> Run | None:
        """The run that this node takes part in, or took part in last; None: none.

        An SMP that was told of no start, as it came later or has lost ``node.json``, knows it by its newest layout.
        """
        with self._changed:
            if self.record.start is not None:
                return self.record.start.run
            newest = self.newest_layout()
            return newest.run if newest is not None else None

    def check_epoch(self, epoch: int) -> None:
        """Raise `StaleEpoch` unless `epoch` is the current one."""
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch_text(epoch)} may not write: {self.where}")

    @property
    def where(self) -> str:
        """In which epoch the job is, in words."""
        return f"job {self._job!r} is in epoch {epoch_text(self.epoch)}"

    def configured(self, epoch: int) -> Layout:
        """The layout of `epoch`. Raises `StaleEpoch` if that is not the current one, `ProtocolError` if it has none."""
        self.check_epoch(epoch)
        if self.layout is None:
            raise ProtocolError(f"epoch {epoch_text(epoch)} is not configured yet")
        return self.layout

    def begin(self, epoch: int, start: Start | None) -> None:
        """A newer epoch has begun, by `start`; None: only the layout changes."""
        if start is None:
            self._note(epoch=epoch)
            return
        run = self.run
        of_another = run is not None and run.id != start.run.id  # what was promised of that says nothing of this one
        self._note(
            epoch=epoch,
            protected=None if of_another else self.protected,
            record=Record(start),
            given_up=tuple(sorted(self.given_up - {start.run.id})),  # somebody has chosen it again
        )

    def ended(self, epoch: int, coord: str, end: TrainerEnd) -> None:
        """Record how the trainer `coord` of this epoch ended; the first report counts. Raises `StaleEpoch`."""
        with self._changed:
            self.check_epoch(epoch)
            if self.record.start is None or coord in self.record.ends:
                return
            end = TrainerEnd(max(end.step, self.record.start.base), end.failure)
            self._note(record=self.record.ended(coord, end))
        if end.failure != WELL:
            text, extra = "%s ended at step %d: %s", {"coord": coord, "reason": end.failure}
            log.warning(text, coord, end.step, end.failure, extra=about(SnapshotId(epoch, end.step), **extra))

    def goes_on(self, epoch: int, coord: str) -> None:
        """Note that the trainer `coord` of this epoch lives: a record that it was killed is removed. Raises
        `StaleEpoch`."""
        with self._changed:
            self.check_epoch(epoch)
            record = self.record.goes_on(coord)
            if record != self.record:
                self._note(record=record)

    def note_protected(self, snapshot: SnapshotId | None) -> None:
        """The whole job knows that a snapshot is protected; None: it knows of none. The caller holds the lock."""
        if snapshot is not None and (self.protected is None or snapshot > self.protected):
            self._note(protected=snapshot, record=self.record.protected(snapshot))

    def note_given_up(self, runs: Collection[str]) -> None:
        """Every later start is to be told that these runs are over. The caller holds the lock."""
        if not set(runs) <= self.given_up:
            self._note(given_up=tuple(sorted(self.given_up.union(runs))))

    def write(self) -> None:
        """Write ``node.json``. Raises as `records.write`."""
        self._note()

    def _note(self, **changes: Any) -> None:
        """Write ``node.json`` with these changes of a `NodeFile`, and only then take them for known: whoever was told
        that the file cannot be written may try again."""
        known = replace(self._known(), **changes)
        write_json(self._arena.path / NODE_FILE, to_plain(known))
        self._take(known)

    def _take(self, known: NodeFile) -> None:
        self.epoch, self.protected, self.record = known.epoch, known.protected, known.record
        self.given_up = frozenset(known.given_up)

    def files(self) -> Iterator[tuple[Path, NodeFile]]:
        """``node.json``, and what is in it. The caller holds the lock."""
        if self.epoch:  # else nothing was noted yet
            yield self._arena.path / NODE_FILE, self._known()

    def _known(self) -> NodeFile:
        given_up = tuple(sorted(self.given_up))
        return NodeFile(self._job, self._node, self.epoch, self.protected, self.record, given_up)

    def adopt(self) -> Predecessor:
        """Take over what a predecessor knew. Raises as `read_node_file`, but for a damaged file."""
        try:
            known = read_node_file(self._arena.path, self._job, self._node, self._arena.files)
            damaged = known is None and NODE_FILE in self._arena.directory.lost
        except ProtocolError as error:
            path = self._arena.path / NODE_FILE
            log.warning("%s is lost, and is written anew: %s", path, error, extra=about(file=NODE_FILE))
            known, damaged = None, True
        if known is not None or damaged:
            self._arena.layouts.adopt(self._arena.directory.note_lost)
        if known is None:
            return Predecessor.FORGOTTEN if self._is_ours() else Predecessor.NONE
        self._take(known)
        return Predecessor.KNOWN

    def _is_ours(self) -> bool:
        """Whether a layout in the arena names this job and this node, as ``node.json`` would."""
        layouts = self._arena.layouts.values()
        return any(each.job == self._job and self._node in {node.name for node in each.nodes} for each in layouts)


@dataclass(slots=True)
class SnapshotProgress:
    """The progress of one snapshot of this epoch on this node."""

    sealed: set[str] = field(default_factory=set)
    outcome: SnapshotOutcome = SnapshotOutcome.PENDING


class Outcomes:
    """What becomes of the snapshots that this node takes part in: which shards of each are sealed, and whether it is
    protected, has failed, or is given up. Thread-safe; `changed` is the store's lock, which guards all here.

    Attributes:
        board: of the current epoch; see `enter`.
        failing: why the last snapshot failed, in words; empty once one is protected.
    """

    def __init__(
        self, changed: threading.Condition, board: Board, state: JobState, on_protected: Callable[[SnapshotId], None]
    ) -> None:
        """`on_protected`: called with the lock held once a snapshot is posted as protected."""
        self.board = board
        self._changed = changed
        self._state = state
        self._on_protected = on_protected
        self.failing = ""
        self._failures = Episodes(log)
        self._progress: dict[SnapshotId, SnapshotProgress] = {}
        self._unacknowledged: set[SnapshotId] = set()
        self._given_up: Callable[[SnapshotId], bool] = lambda snapshot: False  # whose parity is not wanted any more

    def adopt(self) -> None:
        """Go on with the board of a predecessor. What it had not finished has failed."""
        self.board.post_leaving(False)  # nobody has asked this SMP yet
        if self.board.epoch == self._state.epoch:
            self.board.fail_pending()
            self.board.post_repair(None)  # trainers order again what the predecessor had not done
        else:  # the predecessor wrote a new epoch to `node.json`, and died before the board
            self.board.reset(self._state.epoch)
        failpoint("adopt.board")

    def enter(self, held: Collection[SnapshotId], *, is_start: bool) -> None:
        """Begin the board of the current epoch. Whatever is pending in the one before is given up.

        Args:
            held: the snapshots of which something is held here.
            is_start: the job was started; else only its layout changes, and its trainers stay.
        """
        with self._changed:
            self._unacknowledged = self.unacknowledged(held)
            self._progress.clear()
            self._given_up = lambda snapshot: False
            self.board = self.board.succeeded(self._state.epoch)
            if is_start:
                self.board.post_leaving(False)  # that was said to the trainers before

    def say_leaving(self, start: Start | None, leaving: bool) -> None:
        """Ask the trainers of this start to end at a boundary, because this node is to be taken away, or withdraw that;
        not those of a later one."""
        with self._changed:
            if self._state.record.start == start:
                self.board.post_leaving(leaving)

    def unacknowledged(self, held: Collection[SnapshotId]) -> set[SnapshotId]:
        """Those of `held` that cannot have been reported to trainers as protected, because this node never posted that:
        of the board's epoch, and of the one before until they are restored."""
        with self._changed:
            current = {each for each in held if each.epoch == self.board.epoch and self._is_open(each)}
            return current | self._unacknowledged.intersection(held)

    def note_restored(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot is being restored: it will be reported as protected, and is not `unacknowledged` any
        more."""
        with self._changed:
            self._unacknowledged.discard(snapshot)

    def expect(self, snapshot: SnapshotId) -> None:
        """The trainers have handed over a shard of a snapshot: it is pending."""
        with self._changed:
            self._progress.setdefault(snapshot, SnapshotProgress())
            self.board.post(snapshot.step, SnapshotOutcome.PENDING)

    def note_sealed(self, snapshot: SnapshotId, coord: str) -> None:
        """A shard of a snapshot is sealed."""
        with self._changed:
            self._progress.setdefault(snapshot, SnapshotProgress()).sealed.add(coord)

    def is_sealed(self, snapshot: SnapshotId, coords: Collection[str]) -> bool:
        """Whether these shards of a snapshot are sealed, and no others."""
        with self._changed:
            progress = self._progress.get(snapshot)
            return progress is not None and progress.sealed == set(coords)

    def is_wanted(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot of this epoch may still become protected: it is pending and was not given up."""
        with self._changed:
            progress = self._progress.get(snapshot)
            pending = progress is not None and progress.outcome is SnapshotOutcome.PENDING
            return pending and snapshot.epoch == self._state.epoch

    def is_given_up(self, snapshot: SnapshotId) -> bool:
        """Whether the trainers of this epoch have said that a snapshot needs no parity any more."""
        with self._changed:
            return self._given_up(snapshot)

    def _is_open(self, snapshot: SnapshotId) -> bool:
        """Whether this node took part in a snapshot of this epoch, and has not posted it as protected."""
        progress = self._progress.get(snapshot)
        outcome = progress.outcome if progress is not None else self.board.posted(snapshot.step)
        return outcome is not None and outcome is not SnapshotOutcome.PROTECTED

    def protect(self, snapshot: SnapshotId) -> None:
        """Post that a pending snapshot is protected, as far as this node's group is concerned."""
        with self._changed:
            self._post(snapshot, SnapshotOutcome.PROTECTED)
            self.failing = ""
            failpoint("outcome.protected", snapshot.step)
            self._on_protected(snapshot)
            self._changed.notify_all()
            self._failures.end("snapshots", "snapshots are protected again: %s", snapshot, extra=about(snapshot))

    def fail(self, snapshot: SnapshotId, reason: str) -> None:
        """Post that `snapshot` will not be protected. The trainers will agree to give it up."""
        with self._changed:
            if not self.is_wanted(snapshot):
                return
            self._post(snapshot, SnapshotOutcome.FAILED)
            self.failing = f"{snapshot} failed: {reason}"
            failpoint("outcome.failed", snapshot.step)
            self._changed.notify_all()
        self._failures.begin("snapshots", "%s failed: %s", snapshot, reason, extra=about(snapshot, reason=reason))

    def forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Forget the snapshots for which `gone` is True: the trainers keep them no more."""
        with self._changed:
            self._progress = {k: v for k, v in self._progress.items() if not gone(k)}

    def give_up(self, given_up: Callable[[SnapshotId], bool]) -> None:
        """The trainers want no parity of the snapshots for which `given_up` is True: those that are pending fail."""
        with self._changed:
            self._given_up = given_up
            for snapshot, progress in self._progress.items():
                if given_up(snapshot) and progress.outcome is SnapshotOutcome.PENDING:
                    self._post(snapshot, SnapshotOutcome.FAILED)

    def _post(self, snapshot: SnapshotId, outcome: SnapshotOutcome) -> None:
        self._progress[snapshot].outcome = outcome
        self.board.post(snapshot.step, outcome)
