"""Whether trainers live."""

__all__ = ["liveness", "on_hang", "watchdog"]
