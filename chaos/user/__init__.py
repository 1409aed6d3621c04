"""Faults in a user's own command."""

__all__ = ["command", "run"]
