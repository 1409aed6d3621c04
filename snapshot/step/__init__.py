"""Where a step begins and ends, what is captured there, and the threads that copy and seal it."""

__all__ = [
    "boundary",
    "capture",
    "copier",
    "data",
    "gradients",
    "ledger",
    "orders",
    "own_time",
    "position",
    "source",
    "turns",
    "unstepped",
]
