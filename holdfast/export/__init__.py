"""Snapshots as files that other programs read."""

__all__ = ["dcp", "source", "tensors"]
