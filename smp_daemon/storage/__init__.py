"""The arena of a node: slots, shards, parity."""

__all__ = ["arena", "codings", "holdings", "parity", "pool", "receiving", "store"]
