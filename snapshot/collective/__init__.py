"""What ranks agree upon."""

__all__ = ["agreement", "mesh", "routes"]
