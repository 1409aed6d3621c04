"""What came of a drawn loop: identical, refused, or silently another; from what its lives said."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

Event = Mapping[str, Any]

NAMED_AT_MOST = 4


class TrialOutcome(Enum):
    """In the order in which they are reported."""

    IDENTICAL = "identical"
    REFUSED = "refused"
    SILENT = "silent"
    UNPROTECTED = "unprotected"
    ERROR = "errors"


@dataclass(frozen=True)
class Result:
    """One seed. `features`: what its loop is made of. `log`: what its lives printed, unless all was well."""

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
        """What `write` gave."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("features", "said", "restored")}
        return cls(**{**data, **lists, "outcome": TrialOutcome(data["outcome"])})

    def write(self) -> str:
        """A line that `parse` reads."""
        return json.dumps(asdict(self) | {"outcome": self.outcome.value})

    @property
    def failed(self) -> bool:
        """Whether it is neither identical nor refused."""
        return self.outcome not in (TrialOutcome.IDENTICAL, TrialOutcome.REFUSED)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
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
    """What came of one seed.

    Attributes:
        why: in words: what differs, what was said, what failed.
        said: what holdfast logged or raised, each text once.
        named: whether one of them names what is to blame.
        restored: the step that each life began with; None: a cold start.
    """

    outcome: TrialOutcome
    why: str
    said: tuple[str, ...] = ()
    named: bool = False
    restored: tuple[int | None, ...] = ()
    took_s: dict[str, float] = field(default_factory=dict)


def judge(undisturbed: Sequence[Event], lives: Sequence[Sequence[Event]], words: str) -> Verdict:
    """Compare.

    Args:
        undisturbed: what the life without holdfast said.
        lives: what the lives with it said; only the last may have ended by itself.
        words: a regular expression that is found in what names the thing to blame.
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
        return verdict(TrialOutcome.ERROR, "the undisturbed loop did not end well")
    raised = [e for life in lives for e in life if e["kind"] == "error"]
    if raised:
        text = f"{raised[0]['type']}: {raised[0]['text']}"
        return verdict(
            TrialOutcome.REFUSED if named else TrialOutcome.ERROR, text if named else f"names nothing: {text}"
        )
    if not _finished(lives[-1]):
        return verdict(TrialOutcome.ERROR, f"the last life ended without a word: {lives[-1][-1:]}")
    differences = compare(undisturbed, lives)
    if differences and named:
        return verdict(TrialOutcome.REFUSED, next(t for t in said if names(t, words)))
    if len(lives) == 1 or any(step is None for step in restored[1:]):
        why = "nothing was ever protected, so it was not killed" if len(lives) == 1 else "it began anew"
        return verdict(TrialOutcome.REFUSED if named else TrialOutcome.UNPROTECTED, why)
    if differences:
        more = f"; and {len(differences) - NAMED_AT_MOST} more" if len(differences) > NAMED_AT_MOST else ""
        return verdict(TrialOutcome.SILENT, "; ".join(differences[:NAMED_AT_MOST]) + more)
    return verdict(TrialOutcome.IDENTICAL, f"restored {', '.join(str(step) for step in restored[1:])}")


def compare(undisturbed: Sequence[Event], lives: Sequence[Sequence[Event]]) -> list[str]:
    """What is not the same: losses of any life by step, then state at the end by name."""
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
    found += [f"step {step} was never made" for step in sorted(expected.keys() - seen)]
    want, have = _finished(undisturbed)[-1]["state"], _finished(lives[-1])[-1]["state"]
    found += [f"{name} differs at the end" for name in want if name in have and want[name] != have[name]]
    found += [f"{name} is missing at the end" for name in want if name not in have]
    found += [f"{name} is there at the end, undisturbed not" for name in have if name not in want]
    return found


ADVICE = re.compile(r"(, as something changed it| \(iter\(|: call `snap).*", re.DOTALL)
"""What holdfast says of ways out names much that is not to blame."""


def names(text: str, words: str) -> bool:
    """Whether a text names what is to blame."""
    return re.search(words, ADVICE.sub("", text), re.IGNORECASE) is not None


def _said(life: Sequence[Event]) -> list[str]:
    """Texts of holdfast's own."""
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
