"""What operators and their tools see of an SMP: status, metrics, the page."""

__all__ = ["overview", "status", "web"]
