"""What people and their tools see of an SMP: status, metrics, pages, draining."""

__all__ = ["overview", "status", "web"]
