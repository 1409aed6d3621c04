"""Resuming from a snapshot: planning, loading, resharding, and comparing the first step with the original one."""

__all__ = ["arrange", "blocks", "choice", "comparison", "entering", "regions", "reserve", "restore"]
