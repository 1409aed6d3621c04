"""Resuming from a snapshot: planning, loading, resharding, and comparing the first step with the original one."""
