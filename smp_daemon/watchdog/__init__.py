"""Watches whether trainers are alive."""

__all__ = ["liveness", "watchdog"]
