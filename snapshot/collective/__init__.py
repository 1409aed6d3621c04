"""Collective calls for agreement between ranks."""
