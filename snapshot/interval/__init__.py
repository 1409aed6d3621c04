"""How often a snapshot is taken, and how that is decided."""

__all__ = ["control", "recording", "rule"]
