"""Networks and clocks between real processes, and what goes wrong with them."""

__all__ = ["clocks", "namespaces", "wire"]
