"""Encoding: one thread per SMP sends its data units to whoever holds the parity of their stripe.

Each SMP pushes on its own as soon as its shards are sealed; nobody coordinates. A unit is acknowledged once it is
folded in, so at most one unit is on its way from this node at any time, and a broken connection is repaired by
sending that unit again.
"""

from __future__ import annotations

import logging
import queue
import threading

from ec import Stripes
from smp_daemon.errors import HoldfastError, ProtocolError, SmpUnavailable, StaleEpoch
from smp_daemon.layout import Layout, SnapshotId
from smp_daemon.peers import PeerClient
from smp_daemon.points import reach
from smp_daemon.store import Store
from smp_daemon.transport import SocketStream, call, connect

ATTEMPTS = 2

log = logging.getLogger(__name__)


class Protector:
    """The thread that encodes. `protect` and `announce` may be called from any thread and return at once."""

    def __init__(self, peers: PeerClient) -> None:
        self._peers = peers
        self._queue: queue.SimpleQueue[SnapshotId | None] = queue.SimpleQueue()
        self._streams: dict[tuple[str, int], SocketStream] = {}
        self._thread: threading.Thread | None = None
        self._store: Store

    def start(self, store: Store) -> None:
        """Begin to work for `store`."""
        self._store = store
        self._thread = threading.Thread(target=self._run, name="protect", daemon=True)
        self._thread.start()

    def protect(self, snapshot: SnapshotId) -> None:
        """All shards of this node are sealed: send them to the group's parity."""
        self._queue.put(snapshot)

    def announce(self, snapshot: SnapshotId) -> None:
        """This node's own parity is committed: tell the group."""
        layout = self._store.layout
        if layout is not None:
            self._peers.tell_parity_done(
                layout, self._store.node, snapshot, lambda reason: self._store.fail(snapshot, reason)
            )

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            layout = self._store.layout
            if layout is None or layout.epoch != snapshot.epoch:
                continue
            try:
                self._send(snapshot, layout)
            except (StaleEpoch, ProtocolError) as error:
                log.info("encoding of %s ended early: %s", snapshot, error)
            except HoldfastError as error:
                self._store.fail(snapshot, str(error))

    def _send(self, snapshot: SnapshotId, layout: Layout) -> None:
        group, position = layout.place(self._store.node)
        stripes = layout.stripes(group)
        members = layout.members(group)
        mine = [r for r in range(stripes.count) if not stripes.is_parity(position, r)]
        for done, stripe in enumerate(mine):
            if done == len(mine) // 2:
                reach("encode.middle", snapshot.step)
            unit = self._unit(snapshot, layout, stripes, position, stripe)
            if unit is None:
                continue
            view, unit_digest = unit
            message = {
                "op": "fold",
                "job": layout.job,
                "snapshot": snapshot,
                "stripe": stripe,
                "position": position,
                "digest": unit_digest,
            }
            for owner in stripes.parity_positions(stripe):
                self._call(members[owner].bulk, message, view)

    def _unit(
        self, snapshot: SnapshotId, layout: Layout, stripes: Stripes, position: int, stripe: int
    ) -> tuple[memoryview, int] | None:
        unit = stripes.unit_of(position, stripe)
        piece = stripes.piece(position, unit)
        if piece is None:
            return None
        coord = layout.node(self._store.node).shards[piece.segment].coord
        view, record = self._store.shard(snapshot, coord)
        first = stripes.first_unit(position, piece.segment)
        return view[piece.offset : piece.offset + piece.length], record.digests[unit - first]

    def _call(self, address: tuple[str, int], message: dict[str, object], payload: memoryview) -> None:
        for attempt in range(ATTEMPTS):
            try:
                if address not in self._streams:
                    self._streams[address] = connect(address)
                call(self._streams[address], message, payload)
                return
            except SmpUnavailable:
                broken = self._streams.pop(address, None)
                if broken is not None:
                    broken.close()
                if attempt + 1 == ATTEMPTS:
                    raise
