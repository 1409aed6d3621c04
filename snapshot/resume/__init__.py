"""Back from a snapshot: planning, loading, resharding, and comparing what the first steps do with what they did."""

__all__ = ["arrange", "choice", "comparison", "elastic", "entering", "loading", "reserve", "restore"]
