"""One SMP, put together from its parts, and its monitor of the nodes around it."""

__all__ = ["core"]
