"""Watches whether trainers are alive."""

__all__ = ["liveness", "on_hang", "watchdog"]
