"""What a script keeps for itself: read from its variables, and from its source, without running any code of its own.

None of it takes part in a snapshot. In a job's first turns it finds the generators to capture, and what has to be named
at the start, as a restart would begin it anew. Start with `snapshot.script.carried`.
"""

__all__ = ["carried", "flow", "iterators", "shuffled", "syntax", "variables"]
