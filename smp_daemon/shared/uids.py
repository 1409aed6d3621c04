"""Which user's process is at the other end of a connection, according to the kernel."""

from __future__ import annotations

import errno
import re
import socket
import struct
from pathlib import Path

from holdfast.smp_daemon.shared.plain import Address

TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Every TCP socket of this network namespace, with the uid of the process that made it. For a closed socket the uid and
the inode are 0."""

MAPPED = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address that is mapped to IPv6; gRPC makes such sockets."""

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
DIAG_UID_OFFSET = 16 + 4 + 48 + 12
"""Offset of the uid in the answer: after ``nlmsghdr`` and the head, id, timer and queues of ``inet_diag_msg``. The
inode follows the uid."""

ASK_DEADLINE_S = 1.0
"""Timeout for the kernel's answer about one socket, which comes at once: a connection waits for it."""
SCARCE = (errno.EMFILE, errno.ENFILE)
"""Errors that say that no descriptor was left for the query, and nothing about the peer."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket, as of when it connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


def uid_of(peer: Address, ours: Address) -> int | None:
    """The uid of the process that made the socket at `peer`, an IPv4 address of this machine, connected to `ours`.

    The host of `ours` may be ``0.0.0.0`` if it is not known. None if the socket is closed, or the kernel does not tell:
    the caller must then refuse the connection. Raises `OSError` if no descriptor is left for the query.
    """
    host = peer[0] if ours[0] == "0.0.0.0" else ours[0]
    uid = _asked(peer, (host, ours[1]))
    return _looked_up(peer, ours[1]) if uid is None else uid


def _asked(peer: Address, ours: Address) -> int | None:
    """The uid from a kernel query for this one connection (``sock_diag(7)``), or None."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as asked:
            asked.settimeout(ASK_DEADLINE_S)
            request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
            request += struct.pack(">HH4s12x4s12x", peer[1], ours[1], *map(socket.inet_aton, (peer[0], ours[0])))
            request += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
            asked.send(struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request)
            reply = asked.recv(4096)
        (kind,) = struct.unpack_from("=H", reply, 4)
        uid, inode = struct.unpack_from("=II", reply, DIAG_UID_OFFSET) if kind == SOCK_DIAG_BY_FAMILY else (0, 0)
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None
    except struct.error:
        return None
    return uid if inode else None


def _looked_up(peer: Address, port: int) -> int | None:
    """The uid from the table of all connections, or None. The kernel takes milliseconds to write that table."""
    local = f"{struct.unpack('=I', socket.inet_aton(peer[0]))[0]:08X}:{peer[1]:04X}"
    # Local and remote address, four fields, uid, timeout, inode.
    wanted = re.compile(rf" (?:{MAPPED})?{local} [0-9A-F]+:{port:04X} (?:\S+ +){{4}}(\d+) +\d+ [1-9]")
    for table in TCP_TABLES:
        try:
            line = wanted.search(table.read_text())
        except OSError as error:
            if error.errno in SCARCE:
                raise
            continue  # a kernel without IPv6
        if line is not None:
            return int(line[1])
    return None
