"""Determines the outcome of a drawn loop (identical, refused, silently different, ...) from the events of its lives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from holdfast.snapshot.step.turns import FIRST_TURNS

Event = Mapping[str, Any]

NAMED_AT_MOST = 4


class TrialOutcome(Enum):
    """How a seed ended, in the order of the report."""

    IDENTICAL = "identical"
    REFUSED = "refused"
    SILENT = "silent"
    UNPROTECTED = "unprotected"
    ERROR = "errors"


@dataclass(frozen=True)
class Result:
    """One seed. `features` are those of its loop; `log` is the end of what its lives and SMP printed."""

    seed: int
    outcome: TrialOutcome
    why: str
    history: str
    features: tuple[str, ...]
    said: tuple[str, ...]
    restored: tuple[int | None, ...]
    took_s: float
    log: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a line that `write` made."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("features", "said", "restored")}
        return cls(**{**data, **lists, "outcome": TrialOutcome(data["outcome"])})

    def write(self) -> str:
        """Encode as a line that `parse` reads."""
        return json.dumps(asdict(self) | {"outcome": self.outcome.value})

    @property
    def failed(self) -> bool:
        """Whether the outcome is neither identical nor refused."""
        return self.outcome not in (TrialOutcome.IDENTICAL, TrialOutcome.REFUSED)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON data, with the log only if it failed."""
        return {
            "seed": self.seed,
            "outcome": self.outcome.value,
            "why": self.why,
            "said": list(self.said),
            "restored": list(self.restored),
            "history": self.history,
            **({"log": self.log} if self.failed else {}),
        }


@dataclass(frozen=True)
class Verdict:
    """The outcome of one seed.

    Attributes:
        why: the reason, in words: a difference, a message of holdfast, or a failure.
        said: warnings and errors of holdfast, each text once.
        named: whether one of these names the cause.
        restored: the step that each life was restored at; None: a cold start.
        took_s: how long each part of the trial took.
    """

    outcome: TrialOutcome
    why: str
    said: tuple[str, ...] = ()
    named: bool = False
    restored: tuple[int | None, ...] = ()
    took_s: dict[str, float] = field(default_factory=dict)


def judge(undisturbed: Sequence[Event], lives: Sequence[Sequence[Event]], words: str) -> Verdict:
    """Compare the lives of a seed and determine its outcome.

    Args:
        undisturbed: events of the life without holdfast.
        lives: events of the lives with holdfast; all but the last were killed or raised.
        words: a regular expression that matches texts that name the cause.
    """
    said = tuple(dict.fromkeys(text for life in lives for text in _said(life)))
    named = any(names(text, words) for text in said)
    restored = tuple(e["step"] for life in lives for e in life if e["kind"] == "entered")

    def verdict(outcome: TrialOutcome, why: str) -> Verdict:
        return Verdict(outcome, why, said, named, restored)

    for life in (undisturbed, *lives):
        for event in life:
            if event["kind"] == "error" and not event["own"]:
                return verdict(TrialOutcome.ERROR, f"{event['type']}: {event['text']}")
    if not _finished(undisturbed):
        return verdict(TrialOutcome.ERROR, "the undisturbed run did not finish")
    raised = [e for life in lives for e in life if e["kind"] == "error"]
    if raised and _is_told_at_once(raised[0], lives):
        return verdict(TrialOutcome.REFUSED, f"{raised[0]['type']}: {raised[0]['text']}")
    if raised:
        text = f"{raised[0]['type']}: {raised[0]['text']}"
        return verdict(
            TrialOutcome.REFUSED if named else TrialOutcome.ERROR, text if named else f"does not name the cause: {text}"
        )
    if not _finished(lives[-1]):
        return verdict(TrialOutcome.ERROR, f"the last life ended without a result, after {lives[-1][-1:]}")
    differences = compare(undisturbed, lives)
    if differences and named:
        return verdict(TrialOutcome.REFUSED, next(t for t in said if names(t, words)))
    if len(lives) == 1 or any(step is None for step in restored[1:]):
        why = (
            "no snapshot was ever protected, so it was not killed" if len(lives) == 1 else "a restart was a cold start"
        )
        return verdict(TrialOutcome.REFUSED if named else TrialOutcome.UNPROTECTED, why)
    if differences:
        more = f"; and {len(differences) - NAMED_AT_MOST} more" if len(differences) > NAMED_AT_MOST else ""
        return verdict(TrialOutcome.SILENT, "; ".join(differences[:NAMED_AT_MOST]) + more)
    return verdict(TrialOutcome.IDENTICAL, f"restored {', '.join(str(step) for step in restored[1:])}")


def _is_told_at_once(error: Event, lives: Sequence[Sequence[Event]]) -> bool:
    """Whether the loop was refused in its first turns, with the line to add, before it was killed."""
    first = error["type"] == "ConfigError" and "snap.begin()" in error["text"] and error in lives[0]
    return first and len({e["step"] for e in lives[0] if e["kind"] == "note"}) <= FIRST_TURNS


def compare(undisturbed: Sequence[Event], lives: Sequence[Sequence[Event]]) -> list[str]:
    """List the differences: losses of any life by step, then state at the end by name."""
    found = []
    expected = _losses(undisturbed)
    seen: set[int] = set()
    for number, life in enumerate(lives, 1):
        for step, losses in _losses(life).items():
            seen.add(step)
            wanted = expected.get(step, [])
            if losses != wanted[: len(losses)]:
                pair = next(((a, b) for a, b in zip(losses, wanted, strict=False) if a != b), (losses[-1], "none"))
                found.append(f"loss of step {step} in life {number} is {pair[0]}, undisturbed {pair[1]}")
    found += [f"step {step} was never run" for step in sorted(expected.keys() - seen)]
    want, have = _finished(undisturbed)[-1]["state"], _finished(lives[-1])[-1]["state"]
    found += [f"{name} differs at the end" for name in want if name in have and want[name] != have[name]]
    found += [f"{name} is missing at the end" for name in want if name not in have]
    found += [f"{name} exists at the end only with holdfast" for name in have if name not in want]
    return found


ADVICE = re.compile(r"(, as something changed it| \(iter\(|: call `snap).*", re.DOTALL)
"""The parts of holdfast's messages that advise a fix. They name things that are not the cause."""


def names(text: str, words: str) -> bool:
    """Whether a text names the cause."""
    return re.search(words, ADVICE.sub("", text), re.IGNORECASE) is not None


def _said(life: Sequence[Event]) -> list[str]:
    """The errors and warnings of holdfast itself."""
    errors = [e["text"] for e in life if e["kind"] == "error" and e["own"]]
    return [*errors, *(e["text"] for e in life if e["kind"] == "warning")]


def _losses(life: Sequence[Event]) -> dict[int, list[str]]:
    losses: dict[int, list[str]] = {}
    for event in life:
        if event["kind"] == "note":
            losses.setdefault(event["step"], []).append(event["loss"])
    return losses


def _finished(life: Sequence[Event]) -> list[Event]:
    return [e for e in life if e["kind"] == "finished"]
