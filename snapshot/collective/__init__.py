"""Collective calls for agreement between ranks."""

__all__ = ["agreement", "mesh", "reports"]
