"""How often a snapshot is taken, and what that is decided by."""

__all__ = [
    "checks",
    "durations",
    "failures",
    "measured",
    "online",
    "periods",
    "policy",
    "profile",
    "profiles",
    "rates",
    "samples",
    "waste",
]
