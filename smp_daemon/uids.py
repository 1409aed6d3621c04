"""Whose process is at the other end of a connection, as the kernel says it."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Every TCP socket of this network namespace, with the uid of whoever made it."""

MAPPED = "0000000000000000FFFF0000"
"""How an IPv4 address begins as one of IPv6; gRPC makes such sockets."""

READS = 3
"""The table is not read in one piece: a line may be missed while others come and go."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) at the other end of a unix socket, as it was when that was connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether a TCP connection comes from this user (or root) or from another machine. Loopback alone keeps nobody of
    this machine out.
    """
    return may_come(sock.getpeername()[:2], sock.getsockname()[1])


def may_come(peer: tuple[str, int], port: int) -> bool:
    """As `is_of_this_user`, of the connection from `peer` to our `port`."""
    if not ipaddress.ip_address(peer[0]).is_loopback:
        return True
    return uid_of(peer, port) in (os.getuid(), 0)


def uid_of(peer: tuple[str, int], port: int) -> int | None:
    """Who made the socket at `peer`, an IPv4 address of this machine, that is connected to `port`.

    None if it is closed, or the kernel does not tell: nobody must be let in then.
    """
    local = f"{struct.unpack('=I', socket.inet_aton(peer[0]))[0]:08X}:{peer[1]:04X}"
    for table in TCP_TABLES * READS:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue  # a kernel without IPv6
        for line in lines:
            fields = line.split()
            # Who closes a socket is forgotten: its uid is then 0, and its inode too.
            found = fields[1].removeprefix(MAPPED) == local and fields[2].endswith(f":{port:04X}") and fields[9] != "0"
            if found:
                return int(fields[7])
    return None
