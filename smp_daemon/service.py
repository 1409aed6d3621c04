"""The SMP as a process: its sockets, its threads, and who may ask what.

Trainers of this node talk to it over a unix socket, other SMPs by gRPC (control) and TCP (raw bytes). All state
is in `smp_daemon.storage.store`; this module only carries messages to it.
"""

from __future__ import annotations

import os
import select
import threading
from functools import partial
from pathlib import Path

from holdfast.smp_daemon.local import TrainerConversation, checked_peer
from holdfast.smp_daemon.net.authenticator import Authenticator
from holdfast.smp_daemon.net.listener import SocketListener, bind_tcp, bind_unix
from holdfast.smp_daemon.net.peers import PeerServer
from holdfast.smp_daemon.node.core import Core, Settings
from holdfast.smp_daemon.remote import PeerConversation, answer_control
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.paths import LOOPBACK, Owner, read_owner, socket_path
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.versions import RELEASE

START_DEADLINE_S = 10.0


class Smp(Core):
    """One running SMP. Made by `smp_daemon.__main__`, and in threads by tests."""

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

        Ports of 0 mean: the ones a predecessor in this arena had, else any free ones.

        Args:
            system: what threads and clock it runs on.
            access: how friend is told from foe, for people; see `smp_daemon.shared.credentials.access_of`.

        Raises:
            ConfigError: the arena or a port is taken, or the address is not this machine's.
            ProtocolError: the arena belongs to another job or node.
        """
        super().__init__(job, node, arena, settings or Settings(), access, system)
        before = read_owner(arena, system)
        if before is not None and before.host == host:
            port, bulk_port = port or before.control_port, bulk_port or before.bulk_port
        bulk = bind_tcp(host, bulk_port, system)
        self._control = PeerServer(job, partial(answer_control, self), host, port, self.credentials, system)
        failpoint("start.bound")
        self.owner = Owner(
            os.getpid(),
            system.created_s(),
            job,
            node,
            host,
            self._control.port,
            bulk.getsockname()[1],
            before.http_port if before is not None else 0,
            before.http_host if before is not None else LOOPBACK,
            RELEASE,
        )
        authenticator = Authenticator(self.credentials, job, system)
        # Not before the owner is known: others may ask for it at once.
        self._bulk = SocketListener(bulk, lambda sock: PeerConversation(self), authenticator, system)
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
        """Stop serving. Removes the arena if the job has finished; else it stays for a successor."""
        self.end()
        for part in (self._bulk, self._control, self.peers):
            part.close()
        if self.finished:
            failpoint("finish.closing")
            self.store.retire()
        self._local.close()


def watch(smp: Smp, owner_pid: int | None) -> None:
    """Block until the job has finished or, if given, the process `owner_pid` is gone."""
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
