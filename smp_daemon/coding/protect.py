"""Encoding: each SMP sends its data units to the nodes that hold the parity of their stripe.

Each SMP starts on its own as soon as its shards are sealed; there is no coordinator. Units go straight from the arena
to the socket (`smp_daemon.coding.sending`).

Before each unit the SMP waits if it would exceed a bandwidth cap, or while trainers of this node communicate
(`Board.pause`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from holdfast.smp_daemon.coding.sending import Sender
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.errors import HoldfastError, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.pacer import Pacer, Patience
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.storage.store import Store

REREAD_S = 0.002
"""Interval between reads of the board during a pause, since no event tells that a trainer has resumed."""

log = get_log(__name__)
_episodes = Episodes(log)


class Protector:
    """The encoding thread, and the sending threads that it starts.

    `protect`, `announce` and `hang_up` may be called from any thread, and return at once.

    Args:
        pacer: caps the bytes sent per second.
        links: connections to each peer, for each network card of this node.
        priority: see `smp_daemon.shared.priority`.
    """

    def __init__(
        self,
        peers: PeerClient,
        pacer: Pacer,
        links: int = 1,
        priority: str = "normal",
        threads: Threads = MACHINE,
    ) -> None:
        self._threads = threads
        self._peers = peers
        self._pacer = pacer
        self._links = links
        self._priority = priority
        self._queue: SimpleQueue[SnapshotId | None] = threads.SimpleQueue()
        self._store: Store
        self._closed = threads.Event()
        self._sender: Sender | None = None  # the encoding thread's; other threads only call its `interrupt`

    def start(self, store: Store) -> None:
        """Begin to work for `store`."""
        self._store = store
        self._threads.Thread(target=self._run, name="protect", daemon=True).start()

    def protect(self, snapshot: SnapshotId) -> None:
        """All shards of this node are sealed: send them to the group's parity."""
        self._queue.put(snapshot)

    def announce(self, epoch: int, snapshot: SnapshotId, layout: Layout) -> None:
        """This node's own parity in `layout` was committed in that epoch: tell the group."""
        self._peers.tell_parity_done(
            layout,
            self._store.node,
            epoch,
            snapshot,
            lambda reason: self._store.outcomes.fail(snapshot, reason),
        )
        failpoint("parity.announced", snapshot.step)

    def hang_up(self) -> None:
        """A newer epoch has begun: drop the connections of the old one. A node that lost power would never answer."""
        if self._sender is not None:
            self._sender.interrupt()

    def close(self) -> None:
        """Stop after the current unit."""
        self._closed.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._queue.put(None)

    def _run(self) -> None:
        make_background(self._priority)
        epoch = None
        with Sender(self._store, self._links, partial(make_background, self._priority)) as sender:
            self._sender = sender
            while (snapshot := self._queue.get()) is not None:
                if snapshot.epoch != epoch:
                    sender.close()  # `hang_up` may have broken its connections
                    epoch = snapshot.epoch
                layout = self._store.state.layout
                if layout is None or layout.epoch != snapshot.epoch or not self._store.outcomes.is_wanted(snapshot):
                    continue
                try:
                    self._encode(sender, snapshot, layout)
                    _episodes.end("encode", "snapshots are encoded again: %s", snapshot, extra=about(snapshot))
                except (StaleEpoch, ProtocolError) as error:
                    text, extra = "encoding of %s ended early: %s", about(snapshot)
                    _episodes.begin("encode", text, snapshot, error, level=logging.INFO, extra=extra)
                    sender.close()
                except HoldfastError as error:
                    sender.close()
                    self._store.outcomes.fail(snapshot, str(error))

    def _encode(self, sender: Sender, snapshot: SnapshotId, layout: Layout) -> None:
        patience = Patience(MAX_PAUSE_S)

        def over() -> bool:
            return self._closed.is_set() or not self._store.outcomes.is_wanted(snapshot)

        def check() -> None:
            if over():
                raise StaleEpoch(f"{snapshot} was given up")

        def pace(count: int) -> None:
            self._wait(self._pacer.wait_s(count, self._threads.monotonic()), over)
            self._make_way(patience, over)

        failpoint("encode.before", snapshot.step)
        sender.send(snapshot, layout, check, pace)
        failpoint("encode.done", snapshot.step)

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        """Wait for `seconds`, or until `over` returns True; it is called again whenever the store has changed."""
        if seconds > 0:
            with self._store.changed:
                self._store.changed.wait_for(over, seconds)

    def _make_way(self, patience: Patience, over: Callable[[], bool]) -> None:
        """Wait while a trainer of this node asks for a pause."""

        def asked_s() -> float:
            now = self._threads.monotonic()
            return patience.wait_s(self._store.outcomes.board.paused_for(now), now)

        if asked_s() > 0:
            self._store.counters.add(pauses=1)
        while (wait_s := asked_s()) > 0 and not over():
            self._wait(min(wait_s, REREAD_S), over)
