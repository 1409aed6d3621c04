"""Snapshots as files that other programs read."""
