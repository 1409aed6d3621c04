"""The outcome of a drill: whether two runs of a job differ, and what the kills cost. Pure, and without torch."""

from __future__ import annotations

from holdfast.chaos.cluster import History
from holdfast.chaos.runner import Event


def compare(undisturbed: History, disturbed: History) -> str:
    """The first difference between two runs in any rank's losses or final state; empty if there is none.

    A step that was done twice must have had the same loss both times.
    """
    expected = {(e["rank"], e["step"]): e["loss"] for e in undisturbed.of("step")}
    seen = set()
    for event in disturbed.of("step"):
        key = (event["rank"], event["step"])
        seen.add(key)
        if event["loss"] != expected.get(key):
            return f"loss of rank {key[0]} at step {key[1]}: {event['loss']}, undisturbed {expected.get(key)}"
    if seen != expected.keys():
        return f"{len(expected.keys() - seen)} losses are missing"
    ends = {e["rank"]: e["digests"] for e in undisturbed.of("end")}
    for event in disturbed.of("end"):
        if difference := _difference(ends.pop(event["rank"], {}), event):
            return difference
    return f"no final state of ranks {sorted(ends)}" if ends else ""


def _difference(expected: dict[str, str], end: Event) -> str:
    found: dict[str, str] = end["digests"]
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not names:
        return ""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the final state of rank {end['rank']} differs: {', '.join(names[:4])}{more}"


def steps_done_again(history: History, generation: int) -> int:
    """The number of steps that were finished before a restart and had to be done again after it."""
    before = history.of("step", generation=generation - 1) or history.of("started", generation=generation - 1)
    done = max((event["step"] for event in before), default=0)
    started = history.of("started", generation=generation)
    return max(0, done - started[0]["step"]) if started else 0


def longest_interval(history: History) -> int:
    """The longest interval between snapshots that a rank reported, in steps; 0 if none did."""
    return max((event.get("interval") or 0 for event in history.of("step")), default=0)


def most_held_up(history: History) -> float | None:
    """The fraction of the last start's time for which the hook held up the loop, on the rank where it was largest;
    None if no rank reached the end."""
    return max((event["held_up"] for event in history.of("end") if event.get("held_up") is not None), default=None)
