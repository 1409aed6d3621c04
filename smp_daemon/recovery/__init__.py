"""Finding and rebuilding what was lost."""
