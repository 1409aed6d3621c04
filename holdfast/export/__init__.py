"""Snapshots as files that other programs can read."""

__all__ = ["dcp", "source", "tensors"]
