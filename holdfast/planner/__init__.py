"""How often to take snapshots, and how safe that is: pure functions, without torch."""

__all__ = ["codes", "costs", "curves", "reasons", "recommend", "sizing", "slots"]
