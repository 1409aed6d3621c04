"""How often a snapshot is taken, and how that is decided."""

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
