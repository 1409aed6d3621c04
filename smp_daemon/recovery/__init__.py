"""Finds, fetches and rebuilds shards and parity that were lost."""

__all__ = ["fetch", "inventories", "reading", "rebuild", "reconcile", "reconciler", "recoveries", "redundancy"]
