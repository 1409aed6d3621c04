"""How often a snapshot is taken, and what that is decided by."""
