"""Whether trainers live."""

__all__ = ["attendance", "liveness", "on_hang"]
