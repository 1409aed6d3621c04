"""The parts of one SMP together, and its eye on the nodes around it."""

__all__ = ["core"]
