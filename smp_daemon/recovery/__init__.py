"""Finding and rebuilding what was lost."""

__all__ = ["census", "fetch", "lending", "load", "reading", "rebuild", "recoveries", "standing"]
