"""How often a snapshot is taken, and what that is decided by."""

__all__ = [
    "checks",
    "failures",
    "measured",
    "overlap",
    "periods",
    "policy",
    "profile",
    "profiles",
    "waste",
]
