"""The arena of a node: slots, shards, parity."""
