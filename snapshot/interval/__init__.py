"""How often a snapshot is taken, and what that is decided by."""

__all__ = [
    "cadence",
    "checks",
    "durations",
    "failures",
    "measured",
    "online",
    "periods",
    "profile",
    "profiles",
    "rates",
    "samples",
    "waste",
]
