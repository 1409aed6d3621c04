"""The SMP as a process: its sockets, each connection in a thread of its own, and the authentication of its peers.

Trainers of this node talk to it over a unix socket, other SMPs over gRPC (control) and TCP (raw bytes). The state of
snapshots is in `smp_daemon.storage.store`; this module only carries messages to it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from holdfast.smp_daemon.answers import PeerConversation, TrainerConversation, answer_control, checked_peer
from holdfast.smp_daemon.net.gate import Gate
from holdfast.smp_daemon.net.peers import PeerServer
from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.shared.addresses import LOOPBACK, parse_hosts
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.limits import MAX_CONNECTIONS, MAX_SOCKET_PATH_BYTES
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.paths import Owner, checked, known_owner, read_owner, socket_path
from holdfast.smp_daemon.shared.processes import await_end
from holdfast.smp_daemon.shared.settings import HOST
from holdfast.smp_daemon.shared.system import MACHINE, Network, System
from holdfast.smp_daemon.shared.transport import Message, Outbound, SocketStream
from holdfast.smp_daemon.shared.versions import RELEASE
from holdfast.smp_daemon.storage.arena import put_away

START_DEADLINE_S = 10.0
"""How long this SMP may take to answer itself over gRPC before it says that it serves, in seconds."""

OWNER_LOOK_S = 3600.0
"""How long one wait for the end of the owner lasts, in seconds; another follows, as `await_end` has no endless one."""

LOOK_EVERY_S = 1.0
"""Pause between two looks at the arena, and at who connects, in seconds; see `Smp.look`."""

LOOK_AGAIN_S = 0.1
"""Time to the next look after one that ended a connection: whoever floods a port comes back at once."""

ACCEPT_AGAIN_S = 0.5
"""Pause before another `accept` if one has failed, in seconds: a loop without one would take a whole core."""

log = get_log(__name__)

T = TypeVar("T")


class Conversation(Protocol):
    """What a listener does with one connection, in the connection's own thread."""

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Outbound, memoryview | None]:
        """The reply to one message; must consume its `payload` bytes. A `HoldfastError` becomes an error reply."""
        ...

    def ended(self) -> None:
        """The connection has ended."""
        ...


class SocketListener:
    """Accepts connections and runs a `Conversation` for each, one thread per connection, `MAX_CONNECTIONS` at most."""

    def __init__(
        self,
        sock: socket.socket,
        converse: Callable[[socket.socket], Conversation],
        admit: Callable[[socket.socket], socket.socket | None] | None = None,
        network: Network = MACHINE,
    ) -> None:
        """`admit`: see `Gate.admit`; None: all connections are let in. Whoever owns the gate closes it."""
        self._network = network
        self._sock = sock
        self._converse = converse
        self._gate = admit
        self._live: dict[SocketStream, None] = {}
        """In the order of arrival, so that `close` ends them in a fixed order."""
        # Guards `_live` together with `_closed`: a connection is either in `_live` when `close` looks, or sees
        # `_closed`. The thread of each connection takes it at its start and end. Under it, only the lock of a stream is
        # taken.
        self._lock = network.Lock()
        self._closed = network.Event()
        self._episodes = Episodes(log)
        self._thread = self._network.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port listened on."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening and end every connection."""
        with self._lock:
            self._closed.set()
            live = list(self._live)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes `accept`; without it the socket would go on listening
        except OSError:
            pass
        self._thread.join()
        self._sock.close()
        for stream in live:
            stream.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            sock = None
            try:
                sock, _ = self._sock.accept()
                if is_full := len(self._live) >= MAX_CONNECTIONS:
                    sock.close()
                else:
                    self._network.Thread(target=self._admit, args=(sock,), name="connection", daemon=True).start()
            except (OSError, RuntimeError) as error:  # usually out of files, memory or threads, which others may free
                if sock is not None:
                    sock.close()
                if not self._closed.is_set():
                    text = "a connection could not be accepted: %s"
                    self._episodes.begin("accept", text, error, level=logging.ERROR)
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            self._episodes.end("accept", "connections are accepted again")
            if is_full:
                text = "a connection was closed: there are %d already"
                self._episodes.begin("full", text, MAX_CONNECTIONS, level=logging.ERROR)
            else:
                self._episodes.end("full", "there is room for connections again")

    def _admit(self, sock: socket.socket) -> None:
        try:
            admitted = sock if self._gate is None else self._gate(sock)
        except OSError:  # the connection has ended already
            sock.close()
            return
        if admitted is not None:
            self._serve(admitted)

    def _serve(self, sock: socket.socket) -> None:
        stream = SocketStream(sock, None, self._network)
        with self._lock:
            self._live[stream] = None
            if self._closed.is_set():
                stream.close()
        conversation = None
        try:
            conversation = self._converse(sock)
            while (received := stream.receive()) is not None:
                reply: Outbound
                try:
                    reply, payload = conversation.answer(*received, stream)
                except HoldfastError as error:
                    reply, payload = {"error": type(error).__name__, "message": str(error)}, None
                stream.send(reply, payload)
        except (HoldfastError, OSError) as error:  # the socket may be closed under us at any moment
            if not self._closed.is_set():
                extra = about(error=type(error).__name__)
                self._episodes.begin("connection", "connection ended: %s", error, extra=extra)
        else:
            self._episodes.end("connection", "connections end well again")
        finally:
            with self._lock:
                self._live.pop(stream, None)
            stream.close()
            if conversation is not None:
                conversation.ended()


def bind_unix(path: Path, network: Network = MACHINE) -> socket.socket:
    """A unix socket listening at `path`, for this user only.

    Raises:
        ConfigError: the path is too long for a unix socket.
    """
    if len(os.fsencode(str(path))) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes a unix socket allows: "
            "choose a shorter HOLDFAST_ARENA or job id"
        )
    path.unlink(missing_ok=True)
    sock = network.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(128)
    return sock


def bind_tcp(host: str, port: int, network: Network = MACHINE) -> socket.socket:
    """A TCP socket listening on `host`; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or the address is not this machine's.
    """
    sock = network.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the SMP cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --bulk-port"
        ) from error
    return sock


def check_own(hosts: Sequence[str], network: Network) -> None:
    """Raises `ConfigError` if any of these addresses does not belong to this machine."""
    for host in hosts:
        sock = network.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, from {HOST.called} ({error.strerror}): use addresses of this machine, which "
                "`ip -brief addr` lists"
            ) from error
        finally:
            sock.close()


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
        environment: Mapping[str, str] | None = None,
        access: str = "loopback",
        system: System = MACHINE,
    ) -> None:
        """Take over the arena and start to serve.

        A port of 0 means the port that a predecessor in this arena had on the same host, or else any free port.

        Args:
            host: one or several addresses, see `addresses.parse_hosts`. Raw bytes are served on all of them, control
                on the first.
            environment: the variables with the settings; None: this process's.
            system: the machine.
            access: how peers are authenticated, for display; see `smp_daemon.shared.credentials.access_of`.

        Raises:
            ConfigError: the arena or a port is in use, an address is not available, or the name cannot be a node's.
            ConfigError: the arena belongs to another job or node, or a setting is wrong.
        """
        checked(node, "the name of a node")
        host, *others = parse_hosts(host)
        check_own((host, *others), system)
        try:
            super().__init__(job, node, arena, environment, 1 + len(others), access, system)
            self._open(host, others, port, bulk_port)
        except BaseException:
            if hasattr(self, "arena"):  # else it is not this SMP's
                self.arena.directory.unmake()
            raise

    def _open(self, host: str, others: Sequence[str], port: int, bulk_port: int) -> None:
        """Listen, and say where. Raises as the constructor."""
        job, node, arena, system = self.store.job, self.store.node, self.arena.path, self.system
        before = self._predecessor(job, node)
        known = (before.control_port, before.bulk_port) if before is not None and before.host == host else (0, 0)
        sockets = [_bound(partial(bind_tcp, host, network=system), bulk_port, known[1])]
        bulk_port = sockets[0].getsockname()[1]
        last = dict(before.more_bulk) if before is not None else {}
        sockets += [_bound(partial(bind_tcp, each, network=system), 0, last.get(each, bulk_port)) for each in others]
        self._gate = Gate(self.credentials, job, system)
        serve = partial(PeerServer, self._gate, partial(answer_control, self), host, network=system)
        self._control = _bound(serve, port, known[0])
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
        """End the SMP if its arena is gone, and connections to the gRPC port that only take up room. Write again what
        others and a successor find this SMP and its slots by. Returns in how many seconds to look again. Does not
        block, except for the file system. For one thread, until `close`.
        """
        if self.arena.directory.is_gone:
            log.critical("this SMP ends, as nothing can find it any more: %s was deleted or replaced", self.arena.path)
            self.stop()
        else:
            self._write_lost()
        try:
            ended = self._control.strangers.end()
        except OSError as error:
            text = "connections to the gRPC port cannot be looked at: %s"
            self._episodes.begin("strangers", text, error, level=logging.ERROR)
            return LOOK_EVERY_S
        self._episodes.end("strangers", "connections to the gRPC port can be looked at again")
        return LOOK_AGAIN_S if ended else LOOK_EVERY_S

    def _write_lost(self) -> None:
        try:
            if known_owner(self.arena.path, self.system) is None:
                path = self.arena.path / "smp.json"
                log.warning("%s was lost and is written again: others find this SMP by it", path)
                put_away(path, self.system)
                self.write_owner()
            self.store.write_lost()
        except HoldfastError as error:  # a full file system, for example
            self._episodes.begin("files", "what is lost cannot be written again: %s", error, level=logging.ERROR)
        else:
            self._episodes.end("files", "what was lost is written again")

    def close(self) -> None:
        """Stop serving. Removes the arena if the job has finished; otherwise the arena stays for a successor."""
        self.end()
        self._local.close()  # before the arena is removed: nobody is greeted whose board is about to go
        self._gate.close()
        for listener in self._bulk:
            listener.close()
        self._control.close()
        self.peers.close()
        if self.finished:
            failpoint("finish.closing")
            self.store.retire()


def _bound(bind: Callable[[int], T], asked: int, before: int) -> T:
    """What `bind` makes of the port that was asked for. If that is 0: of the one that the SMP before this one had, or
    of any if another process has that, or there was none."""
    if not asked and before:
        try:
            return bind(before)
        except ConfigError:
            text = "port %d is taken: nodes that know this SMP by it find it again from the job's next start on"
            log.warning(text, before)
    return bind(asked)


def finish_after(smp: Smp, owner_pid: int) -> None:
    """Make `smp` finish, and remove its arena, as soon as the process `owner_pid` has ended. Does not block.

    Raises:
        OSError: that process cannot be watched.
    """
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:  # it has ended before
        smp.stop(remove=True)
    else:
        threading.Thread(target=_finish_after, args=(smp, owner), name="owner", daemon=True).start()


def _finish_after(smp: Smp, owner: int) -> None:
    while not await_end(owner, OWNER_LOOK_S):
        pass
    smp.stop(remove=True)


def watch(smp: Smp) -> None:
    """Look after the SMP until it is told to stop. Blocks."""
    pause_s = LOOK_EVERY_S
    while not smp.stopped.wait(pause_s):
        pause_s = smp.look()
