"""Finding and rebuilding what was lost."""

__all__ = ["census", "fetch", "reading", "rebuild", "recoveries", "redundancy", "units"]
