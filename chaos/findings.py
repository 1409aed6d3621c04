"""What a trial of a job checks, and what its checks found."""

from __future__ import annotations

from collections import Counter


class Findings:
    """How often each check was made, and what the checks found."""

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.breaches: list[tuple[str, str]] = []

    def look(self, check: str, *breaches: str) -> None:
        """Record that a check looked at something, and what it found. An empty text: all is well."""
        self.checks[check] += 1
        self.breaches += [(check, breach) for breach in breaches if breach]
