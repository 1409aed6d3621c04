"""The SMP as a process: its sockets, their threads, and the authentication of its peers.

Trainers of this node talk to it over a unix socket, other SMPs over gRPC (control) and TCP (raw bytes). The state of
snapshots is in `smp_daemon.storage.store`; this module only carries messages to it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from holdfast.smp_daemon.local import TrainerConversation, checked_peer
from holdfast.smp_daemon.net.gate import Gate
from holdfast.smp_daemon.net.listener import SocketListener, bind_tcp, bind_unix, check_own
from holdfast.smp_daemon.net.peers import PeerServer
from holdfast.smp_daemon.node.core import Core, Settings
from holdfast.smp_daemon.remote import PeerConversation, answer_control
from holdfast.smp_daemon.shared.addresses import LOOPBACK, parse_hosts
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.paths import Owner, checked, known_owner, read_owner, socket_path
from holdfast.smp_daemon.shared.pidfds import await_end
from holdfast.smp_daemon.shared.system import MACHINE, Network, System
from holdfast.smp_daemon.shared.versions import RELEASE
from holdfast.smp_daemon.storage.directory import put_away

START_DEADLINE_S = 10.0
"""How long this SMP may take to answer itself over gRPC before it says that it serves, in seconds."""
OWNER_LOOK_S = 3600.0
"""How long one wait for the end of the owner lasts, in seconds; another follows, as `await_end` has no endless one."""
LOOK_EVERY_S = 1.0
"""Pause between two looks at the arena, and at who connects, in seconds; see `Smp.look`."""
LOOK_AGAIN_S = 0.1
"""Time to the next look after one that ended a connection: whoever floods a port comes back at once."""

log = get_log(__name__)


class Smp(Core):
    """One running SMP. Created by `smp_daemon.__main__`, and inside the test process by tests."""

    def __init__(
        self,
        job: str,
        node: str,
        arena: Path,
        host: str,
        port: int = 0,
        bulk_port: int = 0,
        settings: Settings | None = None,
        access: str = "loopback",
        system: System = MACHINE,
    ) -> None:
        """Take over the arena and start to serve.

        A port of 0 means the port that a predecessor in this arena had on the same host, or else any free port.

        Args:
            host: one or several addresses, see `addresses.parse_hosts`. Raw bytes are served on all of them, control
                on the first.
            system: the machine.
            access: how peers are authenticated, for display; see `smp_daemon.shared.credentials.access_of`.

        Raises:
            ConfigError: the arena or a port is in use, an address is not available, or the name cannot be a node's.
            ConfigError: the arena belongs to another job or node.
        """
        checked(node, "the name of a node")
        host, *others = parse_hosts(host)
        check_own((host, *others), system)
        try:
            super().__init__(job, node, arena, settings or Settings(), 1 + len(others), access, system)
            self._open(host, others, port, bulk_port)
        except BaseException:
            if hasattr(self, "arena"):  # else it is not this SMP's
                self.arena.directory.unmake()
            raise

    def _open(self, host: str, others: Sequence[str], port: int, bulk_port: int) -> None:
        """Listen, and say where. Raises as the constructor."""
        job, node, arena, system = self.store.job, self.store.node, self.arena.path, self.system
        before = self._predecessor(job, node)
        if before is not None and before.host == host:
            port, bulk_port = port or before.control_port, bulk_port or before.bulk_port
        sockets = [bind_tcp(host, bulk_port, system)]
        bulk_port = sockets[0].getsockname()[1]
        last = dict(before.more_bulk) if before is not None else {}
        sockets += [_bind_if_free(each, last.get(each, bulk_port), system) for each in others]
        self._gate = Gate(self.credentials, job, system)
        self._control = PeerServer(self._gate, partial(answer_control, self), host, port, system)
        failpoint("start.bound")
        self.owner = Owner(
            os.getpid(),
            system.start_ticks(),
            job,
            node,
            host,
            self._control.port,
            bulk_port,
            before.http_port if before is not None else 0,
            before.http_host if before is not None else LOOPBACK,
            RELEASE,
            tuple((each, sock.getsockname()[1]) for each, sock in zip(others, sockets[1:], strict=True)),
        )
        # Serve only now that the owner is known, since peers may ask for it at once.
        self._control.start()
        self._bulk = [
            SocketListener(sock, lambda sock: PeerConversation(self), self._gate.admit, system) for sock in sockets
        ]
        self.peers.ping((host, self._control.port), START_DEADLINE_S, starting=True)
        self.write_owner()
        self._local = SocketListener(
            bind_unix(socket_path(arena), system),
            lambda sock: TrainerConversation(self, checked_peer(sock)),
            network=system,
        )
        self._episodes = Episodes(log)
        failpoint("start.serving")
        self.reconciler.rejoin()

    def _predecessor(self, job: str, node: str) -> Owner | None:
        """The SMP that served the arena before. If ``smp.json`` is lost, the layout still says where other nodes look
        for it: on other ports this node would not be protected until the next start."""
        try:
            before = read_owner(self.arena.path, self.system)
        except ProtocolError as error:
            log.warning("%s; the ports are taken from the layout", error)
            before = None
        layout = self.store.state.newest_layout()
        known = {each.name: each for each in layout.nodes}.get(node) if layout is not None else None
        if before is not None or known is None:
            return before
        return Owner(0, 0, job, node, known.host, known.control_port, known.bulk_port, more_bulk=known.more_bulk)

    def look(self) -> float:
        """End the SMP if its arena is gone, and connections to the gRPC port that only take up room. Returns in how
        many seconds to look again. Does not block, except for the file system. For one thread, until `close`.
        """
        if self.arena.directory.is_gone:
            log.critical("this SMP ends, as nothing can find it any more: %s was deleted or replaced", self.arena.path)
            self.stop()
        elif known_owner(self.arena.path, self.system) is None:
            path = self.arena.path / "smp.json"
            log.warning("%s was lost and is written again: others find this SMP by it", path)
            put_away(path, self.system)
            self.write_owner()
        try:
            ended = self._control.end_strangers()
        except OSError as error:
            text = "connections to the gRPC port cannot be looked at: %s"
            self._episodes.begin("strangers", text, error, level=logging.ERROR)
            return LOOK_EVERY_S
        self._episodes.end("strangers", "connections to the gRPC port can be looked at again")
        return LOOK_AGAIN_S if ended else LOOK_EVERY_S

    def close(self) -> None:
        """Stop serving. Removes the arena if the job has finished; otherwise the arena stays for a successor."""
        self.end()
        self._gate.close()
        for listener in self._bulk:
            listener.close()
        self._control.close()
        self.peers.close()
        if self.finished:
            failpoint("finish.closing")
            self.store.retire()
        self._local.close()


def _bind_if_free(host: str, port: int, network: Network) -> socket.socket:
    """Listen on `port`, or on any free port if that one is taken. Peers learn the port from `Owner.more_bulk`."""
    try:
        return bind_tcp(host, port, network)
    except ConfigError:
        return bind_tcp(host, 0, network)


def watch(smp: Smp, owner_pid: int | None) -> None:
    """Look after the SMP until it is told to stop or, if `owner_pid` is given, until that process ends. Blocks."""
    if owner_pid is not None:
        threading.Thread(target=_finish_after, args=(smp, owner_pid), name="owner", daemon=True).start()
    pause_s = LOOK_EVERY_S
    while not smp.stopped.wait(pause_s):
        pause_s = smp.look()


def _finish_after(smp: Smp, owner_pid: int) -> None:
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        smp.finish()
        return
    while not await_end(owner, OWNER_LOOK_S):
        pass
    smp.finish()
