"""The SMP as a process: its sockets, their threads, and the authentication of its peers.

Trainers of this node talk to it over a unix socket, other SMPs over gRPC (control) and TCP (raw bytes). The state of
snapshots is in `smp_daemon.storage.store`; this module only carries messages to it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from functools import partial
from pathlib import Path

from holdfast.smp_daemon.local import TrainerConversation, checked_peer
from holdfast.smp_daemon.net.authenticator import Authenticator
from holdfast.smp_daemon.net.listener import SocketListener, bind_tcp, bind_unix
from holdfast.smp_daemon.net.peers import PeerServer
from holdfast.smp_daemon.node.core import Core, Settings
from holdfast.smp_daemon.remote import PeerConversation, answer_control
from holdfast.smp_daemon.shared.addresses import check_own, parse_hosts
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.paths import LOOPBACK, Owner, read_owner, socket_path
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.versions import RELEASE

START_DEADLINE_S = 10.0


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
            system: provides threads, clock, sockets and files.
            access: how peers are authenticated, for display; see `smp_daemon.shared.credentials.access_of`.

        Raises:
            ConfigError: the arena or a port is in use, or an address is not available.
            ProtocolError: the arena belongs to another job or node.
        """
        host, *others = parse_hosts(host)
        check_own((host, *others), system)
        super().__init__(job, node, arena, settings or Settings(), 1 + len(others), access, system)
        before = read_owner(arena, system)
        if before is not None and before.host == host:
            port, bulk_port = port or before.control_port, bulk_port or before.bulk_port
        sockets = [bind_tcp(host, bulk_port, system)]
        bulk_port = sockets[0].getsockname()[1]
        last = dict(before.more_bulk) if before is not None else {}
        sockets += [_bind_if_free(each, last.get(each, bulk_port), system) for each in others]
        self._control = PeerServer(job, partial(answer_control, self), host, port, self.credentials, system)
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
            SocketListener(
                sock, lambda sock: PeerConversation(self), Authenticator(self.credentials, job, system), system
            )
            for sock in sockets
        ]
        self.peers.ping((host, self._control.port), START_DEADLINE_S, starting=True)
        self.write_owner()
        self._local = SocketListener(
            bind_unix(socket_path(arena), system),
            lambda sock: TrainerConversation(self, checked_peer(sock)),
            system=system,
        )
        failpoint("start.serving")
        self.rejoiner.start(self.store)

    def close(self) -> None:
        """Stop serving. Removes the arena if the job has finished; otherwise the arena stays for a successor."""
        self.end()
        for listener in self._bulk:
            listener.close()
        self._control.close()
        self.peers.close()
        if self.finished:
            failpoint("finish.closing")
            self.store.retire()
        self._local.close()


def _bind_if_free(host: str, port: int, system: System) -> socket.socket:
    """Listen on `port`, or on any free port if that one is taken. Peers learn the port from `Owner.more_bulk`."""
    try:
        return bind_tcp(host, port, system)
    except ConfigError:
        return bind_tcp(host, 0, system)


def watch(smp: Smp, owner_pid: int | None) -> None:
    """Block until the SMP is told to stop or, if `owner_pid` is given, until that process ends."""
    if owner_pid is None:
        smp.stopped.wait()
        return
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        smp.finish()
        return
    woken, wake = os.pipe()
    threading.Thread(target=lambda: (smp.stopped.wait(), os.write(wake, b".")), daemon=True).start()
    ready, _, _ = select.select([owner, woken], [], [])
    if owner in ready:
        smp.finish()
