"""Finding and rebuilding what was lost."""

__all__ = ["fetch", "inventories", "reading", "rebuild", "recoveries", "redundancy", "repairs", "units"]
