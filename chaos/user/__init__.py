"""Faults in a user's own command."""
