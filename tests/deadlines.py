"""The timeout of tests."""

DEADLINE_S = 120.0
"""Timeout for any event that a test waits for, long enough for a busy machine. Passing tests never wait this long."""
