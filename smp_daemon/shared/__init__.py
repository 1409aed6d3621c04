"""What both sides of the socket use: formats, limits, errors, paths, logs, and the client.

All of `smp_daemon` that trainers may import.
"""

__all__ = [
    "board",
    "budget",
    "client",
    "counters",
    "crash_loop",
    "credentials",
    "errors",
    "failpoints",
    "handshake",
    "inventory",
    "layout",
    "limits",
    "logs",
    "messages",
    "pacer",
    "paths",
    "pidfds",
    "plain",
    "plan",
    "populate",
    "priority",
    "records",
    "signatures",
    "slotfile",
    "sources",
    "spawn",
    "starts",
    "system",
    "transport",
    "uids",
    "versions",
]
