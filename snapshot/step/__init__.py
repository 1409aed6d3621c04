"""Where a step begins and ends, what is captured there, and the thread that copies it."""

__all__ = ["beginning", "boundary", "capture", "copier", "data", "gradients", "ledger", "position"]
