"""Where supervisors meet: a process beside rank 0's supervisor counts attempts, and hosts the store of each.

Supervisors send lines of JSON: ``{"start", "rank", "node", "told"}`` first, then ``{"lost": number}`` or ``{"done":
number}`` of their trainer, and ``{"leaves": true}`` as they end. They are sent ``{"attempt": [number, host, port]}``
when they come and whenever an attempt begins, ``{"end": true}`` when all have finished, and ``{"over": true}`` when no
other attempt will follow. Whoever reads the end of the stream knows that, too.

A node is lost when one of its supervisors is gone that has not said that it leaves. A *standby* is a supervisor without
a rank. It sends ``{"standby": node, "local"}``, and ``{"place": told}`` makes it the supervisor of a lost rank: *told*
is what the launcher told that one. Standbys take the place of a whole node, or none.

A store is closed as its attempt ends, so that whoever waits in it goes on.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any

from torch._C._distributed_c10d import TCPStore

from holdfast.integrations.survivors.attempts import Attempts, JobAttempt, JobPlace, parse_lines, replacement, to_line
from holdfast.integrations.survivors.supervisor import die_with
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, ProtocolError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import Address

JOIN_DEADLINE_S = 600.0
"""How long the other ranks may take with their imports."""

CONNECT_S = 10.0
RETRY_S = 0.05
SILENT_S = 10
"""How long a host may answer nothing before its connections are closed: TCP says nothing of a host without power."""

Told = dict[str, str]

log = get_log(__name__)


def join(place: JobPlace, node: str, port: int = 0) -> socket.socket:
    """Meet the other supervisors; returns the connection. Blocks until rank 0's can be reached.

    Args:
        node: what this process is lost together with.
        port: where rank 0 listens; 0: at the launcher's port, or at any that torchrun's store then names.

    Raises:
        OSError: rank 0 cannot listen where the launcher said.
        DeadlineExceeded: rank 0 was not there within `JOIN_DEADLINE_S`.
    """
    address = _host(place, port) if place.rank == 0 else (place.host, port or place.port)
    key, store = f"holdfast survivors {place.start}", None
    if place.agents_store:  # a client of it starts no thread
        store = TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=JOIN_DEADLINE_S))
        if place.rank == 0:
            store.set(key, json.dumps(address))
    connection = _connect(lambda: address if store is None else tuple(json.loads(store.get(key))))
    connection.sendall(to_line({"start": place.start, "rank": place.rank, "node": node, "told": place.told}))
    return connection


def await_place(address: Address, node: str, local: int) -> tuple[socket.socket, Told] | None:
    """Wait, as a standby, for the place of a lost rank; returns the connection of its supervisor and what the launcher
    told that rank, or None once the job has finished. Blocks for as long as the job runs, and while it is restarted.

    Args:
        address: where rank 0 listens. node: what this process is lost together with.
        local: its place among the standbys of the node, which take lost ranks in this order.

    Raises:
        DeadlineExceeded: rank 0 was not there for `JOIN_DEADLINE_S`.
        ProtocolError: something else listens there.
    """
    while True:
        connection = _connect(lambda: address)
        with suppress(OSError):  # as at the end of the stream, the launcher may start the job again
            connection.sendall(to_line({"standby": node, "local": local}))
            with connection.makefile("rb", buffering=0) as lines:  # what follows a place is left to the supervisor
                while line := lines.readline(4096):
                    for message in parse_lines(line)[0]:
                        if "place" in message:
                            return connection, message["place"]
                        if "end" in message:
                            return None
        connection.close()


def _connect(find: Callable[[], Address]) -> socket.socket:
    """A connection to rank 0's supervisor. `find`: its address, as far as it is known; it may still be that of an
    earlier start. Raises `DeadlineExceeded` after `JOIN_DEADLINE_S`."""
    deadline = time.monotonic() + JOIN_DEADLINE_S
    while True:
        host, port = find()
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
            if connection.getsockname() == connection.getpeername():  # by chance it came from the port that it is for
                connection.close()  # now rank 0 can listen there
                raise ConnectionRefusedError
        except OSError as error:  # rank 0 still imports
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank 0's supervisor cannot be reached at {host}:{port}") from error
            time.sleep(RETRY_S)
            continue
        connection.settimeout(None)
        _watch(connection)
        return connection


def _watch(connection: socket.socket) -> None:
    """Send at once, and close the connection if the other host answers nothing for `SILENT_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, SILENT_S // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, SILENT_S // 2),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _own_host(place: JobPlace) -> str:
    """This host's address as other hosts reach it. The store of torchrun's agents may be on another host."""
    try:
        with socket.create_server((place.host, 0)):
            return place.host
    except OSError:
        with socket.create_connection((place.host, place.port)) as connection:
            return str(connection.getsockname()[0])


def _host(place: JobPlace, port: int) -> Address:
    """Listen, and fork the process that serves. Returns its address."""
    if not place.host:
        listening = socket.create_server(("127.0.0.1", 0))
    else:  # without an agent's store this port is rank 0's
        both = socket.has_dualstack_ipv6()
        listening = socket.create_server(
            ("", port or (0 if place.agents_store else place.port)),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=min(place.world, 4096),
        )
    host = _own_host(place) if place.agents_store else place.host
    own = host or "127.0.0.1", listening.getsockname()[1]
    parent = os.getpid()
    if os.fork():
        listening.close()
        return own
    try:
        die_with(parent)
        with suppress(OSError, ValueError):  # each rank has a connection here, and one to the store
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # sent to the whole group; it ends with the supervisor
        rendezvous = Rendezvous(listening, host, place)
        while True:  # until rank 0's supervisor ends, and this process with it
            rendezvous.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


@dataclass(slots=True)
class _Caller:
    """A connection; of a supervisor once it has a rank, and of a standby if it has a node and none."""

    socket: socket.socket
    rank: int | None = None
    node: str = ""
    told: Told = field(default_factory=dict)
    local: int = 0
    leaves: bool = False
    buffer: bytes = b""


class Rendezvous:
    """What the process that serves does. One thread, besides the store's."""

    def __init__(self, listening: socket.socket, host: str, place: JobPlace) -> None:
        self._listening, self._host, self._start = listening, host, place.start
        self._ranks = range(place.world)
        self._attempts = Attempts(place.world, place.limit)
        self._members: dict[int, _Caller] = {}
        self._standbys: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._begin()

    def _begin(self) -> None:
        """Begin an attempt, with a new store, and tell all members; whoever waits in the old store gets an error."""
        self._store: Any = None
        port = 0
        if self._host:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self._attempt = JobAttempt(self._attempts.number, self._host, port)
        self._send(self._members.values(), to_line({"attempt": self._attempt}))

    def serve(self) -> None:
        """Answer all who have said something; blocks until somebody does."""
        for key, _ in self._selector.select():
            if key.data is None:
                accepted, _ = self._listening.accept()
                _watch(accepted)
                self._selector.register(accepted, selectors.EVENT_READ, _Caller(accepted))
            elif key.data.socket.fileno() >= 0:  # else one before it in this list took its connection along
                self._hear(key.data)

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.socket.recv(4096)
            messages, caller.buffer = parse_lines(caller.buffer + data)
            for message in messages:
                self._take(caller, message)
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._lose(caller)

    def _lose(self, caller: _Caller) -> None:
        self._part(caller)
        if caller.rank is not None:
            if caller.leaves or not self._replace(caller.rank, caller.node, caller.told):
                self._attempts.left()
            self._tell_of_end()

    def _part(self, caller: _Caller) -> None:
        self._selector.unregister(caller.socket)
        caller.socket.close()
        if caller.rank is not None:
            del self._members[caller.rank]
        elif caller in self._standbys:
            self._standbys.remove(caller)

    def _replace(self, lost: int, node: str, told: Told) -> bool:
        """Give the places of a lost node, one of whose ranks is `lost`, to a standby node that has a process for each,
        and begin an attempt. Returns whether there is one."""
        others = {rank: member for rank, member in self._members.items() if member.node == node}
        places = {lost: told} | {rank: other.told for rank, other in others.items()}
        new = replacement((standby.node for standby in self._standbys), len(places))
        if new is None or not self._attempts.lost(self._attempts.number):
            return False
        for other in others.values():
            self._part(other)  # it is lost with the node, though that may not be seen yet
        taken = sorted((standby for standby in self._standbys if standby.node == new), key=attrgetter("local"))
        for rank, standby in zip(sorted(places), taken, strict=True):
            self._standbys.remove(standby)
            self._members[rank] = standby
            standby.rank, standby.told = rank, places[rank]
            self._send([standby], to_line({"place": places[rank]}))
        log.warning("node %s is lost, and standby %s takes its place", node, new)
        self._begin()
        return True

    def _take(self, caller: _Caller, message: dict[str, Any]) -> None:
        if caller.rank is None and "standby" in message:
            local: Any = message.get("local")
            if not isinstance(local, int):
                raise ProtocolError("no standby of ours")
            caller.node, caller.local = str(message["standby"]), local
            self._standbys.append(caller)
        elif caller.rank is None:
            rank: Any = message.get("rank")
            if message.get("start") != self._start or rank not in self._ranks or rank in self._members:
                raise ProtocolError("no supervisor of this start")
            caller.rank, caller.node, caller.told = rank, str(message.get("node")), message.get("told", {})
            self._members[rank] = caller
            self._send([caller], to_line({"attempt": self._attempt}))
        elif "leaves" in message:
            caller.leaves = True
        elif "lost" in message:
            if self._attempts.lost(message["lost"]):
                self._begin()
        elif "done" in message:
            self._attempts.done(caller.rank, message["done"])
        self._tell_of_end()

    def _tell_of_end(self) -> None:
        if self._attempts.has_ended:
            self._send([*self._members.values(), *self._standbys], to_line({"end": True}))
        elif self._attempts.is_over:
            self._send(self._members.values(), to_line({"over": True}))

    def _send(self, members: Iterable[_Caller], line: bytes) -> None:
        for member in members:
            with suppress(OSError):  # it has left, which the next read of its connection says
                member.socket.sendall(line)
