"""One SMP, put together from its parts."""

__all__ = ["core"]
