"""Ends connections to the gRPC port whose peers authenticate no call.

gRPC accepts connections itself, and keeps those that only speak HTTP/2 for ever. So this module finds them among the
sockets of its process, and shuts them down; to gRPC that looks as if the peers had hung up.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from holdfast.smp_daemon.net.control import Guard, ipv4
from holdfast.smp_daemon.net.gate import PLACES
from holdfast.smp_daemon.shared.handshake import HANDSHAKE_DEADLINE_S
from holdfast.smp_daemon.shared.limits import MAX_CONNECTIONS
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.uids import SCARCE

ANY = "0.0.0.0"
OWN_FILES = Path("/proc/self/fd")
SHARE_OF_FILES = 4
"""gRPC may take one of so many of the descriptors that this process may have. The others are for trainers, raw bytes
and files."""


def most_connections() -> int:
    """How many connections the gRPC port takes at a time. gRPC closes others at once."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // SHARE_OF_FILES)


class Strangers:
    """The connections to one gRPC port that have not authenticated a call. Not thread-safe.

    One is ended if it is another user's, after `HANDSHAKE_DEADLINE_S`, or, the oldest first, if there are more than
    `PLACES`. A peer of the job that kept a connection unused for that long opens another with its next call.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._since: dict[int, float] = {}
        """When each stranger was first seen, by the inode of its socket. The oldest comes first."""
        self._others: set[int] = set()
        """Inodes of this process's other sockets, which are not looked at again."""

    def end(self) -> int:
        """End the connections that are due. Returns how many. Does not block.

        Raises:
            OSError: no descriptor is left to look with.
        """
        now_s, ended = time.monotonic(), 0
        here: set[int] = set()
        admitted, surplus = self._guard.newly_admitted(), set(list(self._since)[:-PLACES])
        for path in OWN_FILES.iterdir():
            sock = _copy(path, self._others, here)
            if sock is None:
                continue
            with sock:
                inode, peer = os.fstat(sock.fileno()).st_ino, self._caller(sock)
                if peer is None or peer in admitted:
                    self._others.add(inode)
                    continue
                since_s = self._since.setdefault(inode, now_s)
                if why := self._why(peer, now_s - since_s, inode in surplus):
                    self._guard.gate.complain(peer[0], why)
                    with suppress(OSError):  # it has hung up meanwhile
                        sock.shutdown(socket.SHUT_RDWR)
                    ended += 1
        self._others &= here
        self._since = {inode: since_s for inode, since_s in self._since.items() if inode in here - self._others}
        return ended

    def _caller(self, sock: socket.socket) -> Address | None:
        """Who has connected to the port through this socket; None if it is another kind of socket."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            ours, peer = (ipv4(*address[:2]) for address in (sock.getsockname(), sock.getpeername()))
        except OSError:  # it listens, or has been closed
            return None
        host, port = self._guard.listens_at
        return peer if ours[1] == port and host in (ours[0], ANY) else None

    def _why(self, peer: Address, waited_s: float, is_surplus: bool) -> str:
        """Why a stranger is ended now; empty if it is not."""
        if self._guard.gate.is_of_another_user(peer, self._guard.listens_at):
            return "it is another user's process"
        if is_surplus:
            return f"it has authenticated no call, and {PLACES} more have come since"
        late = waited_s >= HANDSHAKE_DEADLINE_S
        return f"it has authenticated no call within {HANDSHAKE_DEADLINE_S:.0f} s" if late else ""


def _copy(path: Path, known: set[int], here: set[int]) -> socket.socket | None:
    """A descriptor of our own of the socket at `path` in `OWN_FILES`, whose inode is added to `here`. It goes on to
    mean this socket if another thread closes the original. None if `path` is no socket, or one that is known.
    """
    try:
        status = path.stat()
        if not stat.S_ISSOCK(status.st_mode):
            return None
        here.add(status.st_ino)
        if status.st_ino in known:
            return None
        copy = os.dup(int(path.name))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None  # another thread has closed it
    try:
        return socket.socket(fileno=copy)
    except OSError:  # closed and opened again in between, as something else
        os.close(copy)
        return None
