"""The phases of a recovery."""

from __future__ import annotations

from holdfast.chaos.cluster import History, Restart


def phases(history: History, generation: int, restart: Restart) -> dict[str, float]:
    """Seconds of each phase of the recovery that began `generation`, in order, from the kill to the first new step.
    Empty if the job was killed again before it trained."""
    started = history.of("started", generation=generation)
    if not started:
        return {}
    first_steps = [e["at"] for e in history.of("step", generation=generation, step=started[0]["step"] + 1)]
    if not first_steps:
        return {}

    def latest(name: str) -> float:
        return float(max(event["clock"][name] for event in started))

    marks = [
        ("detect", restart.noticed_at),
        ("restart", latest("enter")),
        ("plan", latest("plan")),
        ("fetch", latest("fetch")),
        ("load", latest("load")),
        ("first_step", max(first_steps)),
    ]
    found, before = {}, restart.killed_at
    for name, at in marks:
        found[name] = round(max(0.0, at - before), 4)
        before = max(before, at)
    return found
