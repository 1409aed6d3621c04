"""The arena of a node: slots, shards, parity."""

__all__ = ["arena", "codings", "directory", "holdings", "parity", "pool", "receiving", "store"]
