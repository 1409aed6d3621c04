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
    "fields",
    "handshake",
    "inventory",
    "layout",
    "limits",
    "logs",
    "pacer",
    "paths",
    "pidfds",
    "plan",
    "points",
    "priority",
    "records",
    "slotfile",
    "sources",
    "spawn",
    "starts",
    "system",
    "transport",
    "uids",
]
