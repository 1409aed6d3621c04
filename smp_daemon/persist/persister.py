"""The thread that persists snapshots: when one is due, on the trainers' order, and without delaying anybody.

All nodes must write the same snapshots, and there is no coordinator. So an SMP only posts on its board that a snapshot
is due to be persisted. The trainers take the minimum of that over all ranks, together with what they agree on at every
boundary. If it is due everywhere, they order their SMPs to persist the newest snapshot that they know to be protected.
Each SMP holds its shards of that snapshot in a spare slot reserved for this, so that new snapshots do not lack a slot.

Storage may hang for ever. Writing to it runs in a thread that is given up after `STUCK_S` without progress: the slot is
released, the failure is counted and shown, and no other snapshot is begun until that thread has returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import SNAPSHOT, NodePart, PersistManifest, RunFile
from holdfast.smp_daemon.persist.place import PersistPlace, caution, open_place, place_name
from holdfast.smp_daemon.persist.reading import StoredShards, find, find_runs, look, run_files
from holdfast.smp_daemon.recovery.inventories import gather_inventories
from holdfast.smp_daemon.recovery.rebuild import hold_shard
from holdfast.smp_daemon.shared.deadlines import STUCK_S, Progress
from holdfast.smp_daemon.shared.errors import ConfigError, DamagedSnapshot, HoldfastError, PlaceError, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.inventory import Persisted
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import Recovered
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.plain import encode_digested, to_plain
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.records import digest, record_name
from holdfast.smp_daemon.shared.runs import MOST_ASKED, at_work
from holdfast.smp_daemon.shared.settings import PERSIST, PERSIST_BANDWIDTH, PERSIST_EVERY, PERSIST_KEEP, PRIORITY
from holdfast.smp_daemon.storage.holdings import Holdings, ShardKey
from holdfast.smp_daemon.storage.store import Store

LOOK_FIRST_S, LOOK_MOST_S = 0.05, 5.0
"""How long to wait before looking for the other nodes' parts again, in seconds: the first time, doubling up to the
most."""

Pace = Callable[[int], None]
"""Called with the length of each unit before it is read: waits for the rate limit, raises if the work is given up."""

log = get_log(__name__)


def write_node(
    place: PersistPlace, holdings: Holdings, layout: Layout, node: str, snapshot: SnapshotId, pace: Pace
) -> int:
    """Write all shards of `node` in `layout`, read them back, and then write the node's file. Blocks; holds a few units
    in memory.

    What was read back from the storage once is what older snapshots are removed for; see `tidy`.

    Returns the length of all its shards.

    Raises:
        PlaceError: the storage fails.
        DamagedSnapshot: a unit does not match its digest, in memory or as the storage gives it back.
        ProtocolError: the snapshot was released meanwhile.
    """
    index = [each.name for each in layout.nodes].index(node)
    folder = manifest.folder(layout.job, layout.run.id, snapshot)
    stored = StoredShards(place, snapshot, layout)
    coords = [shard.coord for shard in layout.nodes[index].shards]
    for coord in coords:
        _write_shard(place, holdings, f"{folder}/{manifest.shard_name(coord)}", ShardKey(snapshot, coord), pace)
        unit = memoryview(bytearray(layout.unit_bytes))
        for number, start in enumerate(range(0, layout.shard_bytes(coord), layout.unit_bytes)):
            out = unit[: layout.shard_bytes(coord) - start]
            pace(out.nbytes)
            stored.one(stored.shard_unit(coord, number, out))
    place.write(
        f"{folder}/{manifest.node_name(index)}", [encode_digested(to_plain(NodePart.of(snapshot, layout, index)))]
    )
    return sum(map(layout.shard_bytes, coords))


def _write_shard(place: PersistPlace, holdings: Holdings, path: str, key: ShardKey, pace: Pace) -> None:
    """Write a slot file, and then its commit record, without which it does not count."""
    view, record = holdings.open(key)

    def units() -> Iterator[bytes]:
        for number, sealed in enumerate(record.digests):
            if number == len(record.digests) // 2:
                failpoint("persist.middle", key.snapshot.step)
            offset, count = record.unit(number)
            pace(count)
            unit = bytes(view[offset : offset + count])
            if digest(memoryview(unit)) != sealed:  # of the copy, which is what is written
                holdings.checked_unit(key, number)  # raises if the slot is damaged too, and notes it for the scrub
                raise DamagedSnapshot(f"unit {number} of {key} was damaged while it was read")
            yield unit

    place.write(path, units())
    place.write(record_name(path), [encode_digested(to_plain(record))])


def publish(place: PersistPlace, layout: Layout, snapshot: SnapshotId) -> list[str]:
    """Write the manifest that makes the snapshot count, if every node has written its part. Returns the nodes that have
    not; none if the snapshot counts.

    Raises:
        PlaceError: the storage fails.
        DamagedSnapshot: some of it is not there.
    """
    folder = manifest.folder(layout.job, layout.run.id, snapshot)
    files = place.files(folder)
    if SNAPSHOT in files:
        return []
    missing = manifest.missing_nodes(layout, files)
    if missing:
        return missing
    whole = PersistManifest(snapshot, layout)  # all have written it in this layout: an epoch has one revision 0
    if gone := whole.missing(files):
        raise DamagedSnapshot(f"{snapshot} is not whole at {place.name}: {'; '.join(gone[:4])}")
    place.write(f"{folder}/{SNAPSHOT}", [encode_digested(whole.to_json())])
    return []


def tidy(place: PersistPlace, job: str, run: str, keep: int) -> Sequence[SnapshotId]:
    """Remove snapshots of a run that are not needed any more, and return them. Those that cannot be removed are logged,
    and returned too. Other runs' snapshots stay.

    Call this only after this start of the run has published a snapshot, every shard of which was read back: what a
    start that could restore nothing finds there is not removed. Raises `PlaceError` if the storage cannot be listed or
    read.
    """
    found = find(place, job, run)
    whole = [each.snapshot for each in found if each.manifest is not None]
    others = [each.snapshot for each in found if each.manifest is None]
    gone = manifest.expendable(whole, others, keep)
    for snapshot in gone:
        folder = manifest.folder(job, run, snapshot)
        try:
            place.remove(f"{folder}/{SNAPSHOT}")  # first: without it the rest does not count
            place.remove(folder)
        except PlaceError as error:
            log.warning("%s could not be removed from %s: %s", snapshot, place.name, error)
    return gone


@dataclass(frozen=True, slots=True)
class TierState:
    """The state of the persist tier on one node, as shown to operators.

    Attributes:
        place: where snapshots are persisted; without passwords.
        every_s: shortest time between two snapshots. `keep`: how many stay.
        state: ``waiting``, ``due``, ``writing`` or ``stuck``.
        persisted: the newest snapshot that this node knows to be whole there. `at_s`: when it learnt that, in seconds
            since 1970.
        problem: why the last snapshot was not persisted; empty if it was.
        caution: why nothing can be persisted there, or may be lost with this node; empty if nothing is known against
            the place. Seen when the SMP started, and again when a snapshot was persisted.
    """

    place: str
    every_s: float
    keep: int
    state: str = "waiting"
    persisted: SnapshotId | None = None
    at_s: float = 0.0
    problem: str = ""
    caution: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """A snapshot to write. The persisting thread watches `progress`, and sets `cancelled` to give the work up."""

    snapshot: SnapshotId
    layout: Layout
    progress: Progress
    cancelled: threading.Event


class Persister:
    """The persist tier on one node. Every method is thread-safe; only those documented to block touch the storage."""

    def __init__(self, store: Store, environment: Mapping[str, str] | None) -> None:
        """`environment`: the variables with the settings; None: this process's. Without a place the tier is off."""
        self._store = store
        self.network = network = store.network
        self._url = PERSIST.value(environment)
        self._every_s, self._keep = PERSIST_EVERY.value(environment), PERSIST_KEEP.value(environment)
        self._priority = PRIORITY.value(environment)
        self._place: PersistPlace | None = None
        self._pacer = Pacer(PERSIST_BANDWIDTH.value(environment))
        # Guards the order, the accepted snapshot, the layout to note and the state. Trainers' connection threads take
        # it in `order` with the store's lock held, so a thread that holds it must not take the store's lock. The
        # persisting thread and the one that notes runs wait on it, and the writing thread takes it to report. Storage
        # is never touched while it is held. `_place` is not guarded: if two threads open it at the same time, either
        # result serves.
        self._changed = network.Condition()
        self._closed = network.Event()
        self._order: tuple[SnapshotId, Layout] | None = None
        self._accepted: SnapshotId | None = None
        self._noted: Layout | None = None  # a layout whose run is still to be noted at the place
        self._episodes = Episodes(log)
        self._state = TierState(place_name(self._url), self._every_s, self._keep) if self._url else None
        store.outcomes.board.post_due(False)
        if self._url:
            network.Thread(target=self._run, name="persist", daemon=True).start()

    @property
    def state(self) -> TierState | None:
        """The state of the tier on this node; None if it is off."""
        with self._changed:
            return self._state

    def close(self) -> None:
        """Give up the current work. Returns at once."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def configured(self, layout: Layout) -> None:
        """A layout begins: one node notes its run at the place, so that no other run shares the place. Returns at
        once."""
        with self._changed:
            if self._url and self._store.node == _first(layout):
                self._noted = layout
                self._changed.notify_all()

    def order(self, snapshot: SnapshotId) -> bool:
        """Accept the order to persist `snapshot`, which the trainers have agreed on. Returns at once; False if this
        node declines."""
        with self._store.changed, self._changed:  # in this order everywhere, or two threads could deadlock
            if snapshot == self._accepted:
                return True  # another rank of this node was faster
            layout = self._store.state.layout
            due = self._state is not None and self._state.state == "due"
            if not due or layout is None or layout.epoch != snapshot.epoch or not self._store.hold(snapshot):
                log.info("this node does not persist %s: none is due, or not all of its shards are held", snapshot)
                return False
            self._store.outcomes.board.post_due(False)
            self._accepted, self._order = snapshot, (snapshot, layout)
            self._changed.notify_all()
            return True

    # ------------------------------------------------------------------ reading

    def look(self) -> Persisted:
        """The snapshots at the place. Blocks for as long as the storage takes. Raises `PlaceError`."""
        if not self._url:
            return Persisted("")
        place = self._its_place
        runs = find_runs(place, self._store.job)
        return Persisted(
            place.name,
            max((each.snapshot.epoch for run in runs for each in run.snapshots), default=0),
            tuple(run.told() for run in runs),
        )

    def layout_of(self, run: str, snapshot: SnapshotId) -> Layout:
        """The layout of a persisted snapshot of the run with that id. Blocks. Raises `PlaceError`; `DamagedSnapshot` if
        it is not whole."""
        found = look(self._its_place, self._store.job, run, snapshot)
        if found.manifest is None:
            raise DamagedSnapshot(f"{snapshot} at {self._its_place.name} is not whole: {found.reason}")
        return found.manifest.layout

    def recover(self, snapshot: SnapshotId, layout: Layout, coord: str, check: bool) -> Recovered:
        """Make sure that this node holds a shard of a persisted snapshot. Blocks; see `hold_shard`.

        Args:
            layout: the snapshot's, from `layout_of`.

        Raises:
            DamagedSnapshot: the files are not what was written.
            PlaceError: the storage fails.
        """
        return hold_shard(self._store, StoredShards(self._its_place, snapshot, layout, self.network), coord, check)

    @property
    def _its_place(self) -> PersistPlace:
        """The place. Opened when it is first needed, and tried again if that fails, with `PlaceError`. Blocks: some
        storages connect. Raises `ConfigError` if the tier is off."""
        if not self._url:
            raise ConfigError("this node has no persist tier: set HOLDFAST_PERSIST on all nodes")
        if self._place is None:
            try:
                self._place = open_place(self._url)
            except ConfigError as error:  # the tier is optional: only work that needs the place fails
                raise PlaceError(str(error)) from error
        return self._place

    # ------------------------------------------------------------------ writing

    def _run(self) -> None:
        self.network.Thread(target=self._note_runs, name="persist-run", daemon=True).start()
        due_s = self.network.monotonic()  # due at once: otherwise each replaced node would delay all nodes
        while (order := self._await_order(due_s)) is not None:
            due_s = self.network.monotonic() + self._every_s
            progress, cancelled = Progress(self.network.monotonic, STUCK_S), self.network.Event()
            self._watch(_Work(*order, progress, cancelled))

    def _note_runs(self) -> None:
        """Note each run that begins. In a thread of its own, as storage may hang."""
        if why := caution(self._url):
            log.warning("snapshots on storage: %s", why)
            self._say(caution=why)
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._noted is not None or self._closed.is_set())
                layout, self._noted = self._noted, None
            if layout is None:
                return
            try:
                said = RunFile(layout.run, tuple(node.control for node in layout.nodes))
                path = manifest.run_file(layout.job, layout.run.id)
                self._its_place.write(path, [encode_digested(to_plain(said))])
                self._check_alone(layout)
                self._episodes.end("run", "the run is noted at %s, and alone there", self._its_place.name)
            except HoldfastError as error:
                text = "run %s may share its place on storage with another run: %s"
                self._episodes.begin("run", text, layout.run, error, level=logging.ERROR)
                self._say(problem=str(error))

    def _check_alone(self, layout: Layout) -> None:
        """Raise `PlaceError` if another run of this job is at work and persists at the place. Of two that began at the
        same time, and did not see each other as they did, at least one sees the other here."""
        for other in run_files(self._its_place, layout.job):
            if other.run.id == layout.run.id:
                continue
            answers = gather_inventories(layout.job, other.at[:MOST_ASKED], network=self.network)
            nodes = at_work(answers, other.run.id)
            if nodes:
                raise PlaceError(
                    f"run {other.run} of this job is at work on {', '.join(nodes[:4])} and persists there, too: end "
                    "one of them, or give it another HOLDFAST_JOB"
                )

    def _await_order(self, due_s: float) -> tuple[SnapshotId, Layout] | None:
        """Block until a snapshot is due, post that, and block until one is ordered; None: the SMP ends."""
        while not self._closed.is_set():
            # A new epoch replaces the board with the store's lock held, and takes over what is posted on the old one.
            with self._store.changed, self._changed:
                wait_s = due_s - self.network.monotonic()
                if wait_s <= 0 and self._order is None and self._state is not None and self._state.state != "due":
                    self._say(state="due")
                    self._store.outcomes.board.post_due(True)
            with self._changed:
                if self._order is not None:
                    order, self._order = self._order, None
                    self._say(state="writing")
                    return order
                if not self._closed.is_set():
                    self._changed.wait(wait_s if wait_s > 0 else None)
        return None

    def _watch(self, work: _Work) -> None:
        """Write a snapshot in a thread of its own, and give it up if the storage hangs. Returns once that thread has
        ended."""
        thread = self.network.Thread(target=self._write, args=(work,), name="persist-write", daemon=True)
        thread.start()
        while thread.is_alive() and not self._closed.is_set():
            thread.join(work.progress.left_s)
            if thread.is_alive() and work.progress.is_stuck:
                work.cancelled.set()
                self._store.holdings.let_go(work.snapshot)
                silent = f"the storage has not answered for {STUCK_S:.0f} s"
                if (state := self.state) is not None and state.persisted == work.snapshot:
                    self._say(state="stuck")
                    log.warning("older snapshots are not removed yet: %s", silent)
                else:
                    self._fail(work.snapshot, silent, state="stuck")
                thread.join()
        if not self._closed.is_set():
            self._say(state="waiting")

    def _write(self, work: _Work) -> None:
        store, snapshot, layout = self._store, work.snapshot, work.layout
        make_background(self._priority)
        try:
            try:
                place = self._its_place
                stored = write_node(place, store.holdings, layout, store.node, snapshot, partial(self._pace, work))
            finally:
                store.holdings.let_go(snapshot)
            failpoint("persist.written", snapshot.step)
            self._await_others(work)
            self._done(snapshot, stored)
            failpoint("persist.done", snapshot.step)
            if store.node == _first(layout):  # if that fails, the next snapshot's turn tries again
                try:
                    tidy(place, layout.job, layout.run.id, self._keep)
                except PlaceError as error:
                    log.warning("older snapshots are not removed: %s", error)
        except HoldfastError as error:
            if not work.cancelled.is_set():
                self._fail(snapshot, str(error))
        except Exception as error:  # a bug, here or in a storage, must not end the tier
            log.exception("%s is not persisted", snapshot)
            self._fail(snapshot, f"{type(error).__name__}: {error}")

    def _await_others(self, work: _Work) -> None:
        """Wait until the snapshot is whole, or raise `PlaceError`. Giving up loses nothing: the last node to write its
        part publishes it."""
        monotonic, wait_s = self.network.monotonic, LOOK_FIRST_S
        limit = monotonic() + max(self._every_s, STUCK_S + slowest_s(work.layout.moved_bytes))
        while missing := publish(self._its_place, work.layout, work.snapshot):
            work.progress.moved()
            if monotonic() > limit:
                raise PlaceError(f"{', '.join(missing[:8])} have not written their part")
            self._wait(work, wait_s)
            wait_s = min(2 * wait_s, LOOK_MOST_S)

    def _pace(self, work: _Work, count: int) -> None:
        wait_s = self._pacer.wait_s(count, self.network.monotonic())
        while wait_s > 0:  # waiting for the rate limit counts as progress: the storage is not slow
            work.progress.moved()
            self._wait(work, min(wait_s, STUCK_S / 2))
            wait_s -= STUCK_S / 2
        self._wait(work, 0)
        work.progress.moved()

    def _wait(self, work: _Work, seconds: float) -> None:
        if self._closed.wait(seconds) or work.cancelled.is_set():
            raise ProtocolError("it was given up")

    def _done(self, snapshot: SnapshotId, stored: int) -> None:
        self._say(persisted=snapshot, at_s=self.network.time(), problem="", caution=caution(self._url))
        log.info("%s is persisted; this node wrote %d bytes", snapshot, stored)
        self._episodes.end("persist", "snapshots are persisted again: %s", snapshot, extra=about(snapshot))
        # Last, as in `_fail`: whoever sees the count sees the rest.
        self._store.counters.add(snapshots_persisted=1, bytes_persisted=stored)

    def _fail(self, snapshot: SnapshotId, problem: str, state: str = "waiting") -> None:
        if self._closed.is_set():
            return
        self._say(problem=f"{snapshot}: {problem}", state=state)
        text, extra = "%s is not persisted: %s", about(snapshot)
        self._episodes.begin("persist", text, snapshot, problem, level=logging.ERROR, extra=extra)
        self._store.counters.add(persist_failures=1)

    def _say(self, **changes: Any) -> None:
        with self._changed:
            if self._state is not None:
                self._state = replace(self._state, **changes)


def _first(layout: Layout) -> str:
    """The node that does what only one node of the layout does."""
    return next(node.name for node in layout.nodes if node.shards)
