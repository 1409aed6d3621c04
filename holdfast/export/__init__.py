"""Snapshots as files that other programs can read."""
