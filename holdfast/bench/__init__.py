"""What `holdfast bench` measures."""

__all__ = ["ec", "stall"]
