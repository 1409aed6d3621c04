"""Types of options of several benchmarks."""

from __future__ import annotations

import argparse


def counts(text: str) -> tuple[int, ...]:
    """Positive numbers with commas, as the type of an option."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 1,2,4")
    return found
