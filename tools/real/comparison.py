"""Whether a killed run equals the undisturbed run. Pure, except `read`.

A rank's notes consist of the notes of its successive processes. The notes of a killed process and its successor overlap
when steps are repeated; each must be a contiguous part of the undisturbed run's notes, without gaps between them. The
step at which a process began is found from its notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Note = tuple[str, Any]
Notes = Mapping[int, Sequence[Sequence[Note]]]
"""The notes of each process of a rank, in order, by rank."""

FINAL = "final"
LOSS = "loss"
STEP = "step"
NOT_FINITE = ("nan", "inf", "-inf")


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        difference: description of the first difference; empty if the runs are the same.
        resumed: number of completed steps at which each process of rank 0 after the first began.
        again: number of steps that rank 0 repeated.
        losses, final: number of losses, and of names of final state, that were compared, of all ranks.
    """

    difference: str
    resumed: list[int]
    again: int
    losses: int
    final: int


def read(folder: Path) -> dict[int, list[list[Note]]]:
    """Read the notes of all processes of a run."""
    found: dict[int, dict[int, list[Note]]] = {}
    for path in folder.glob("rank*-*.jsonl"):
        rank, number = map(int, path.stem.removeprefix("rank").split("-"))
        lines = path.read_text().splitlines()
        found.setdefault(rank, {})[number] = [(kind, value) for kind, value in map(json.loads, lines)]
    return {rank: [each[number] for number in sorted(each)] for rank, each in sorted(found.items())}


def compare(plain: Notes, killed: Notes, kills: int) -> Verdict:
    """Compare an undisturbed run, `plain`, with a run that was killed `kills` times."""
    losses = sum(kind == LOSS for processes in plain.values() for notes in processes for kind, _ in notes)
    final = sum(len(_final(processes) or ()) for processes in plain.values())
    starts: dict[int, list[int]] = {}
    difference = _shape(plain, killed, kills)
    for rank in plain if not difference else ():
        difference, starts[rank] = _along(rank, _without_final(plain[rank][0]), killed[rank])
        difference = difference or _ends(rank, _final(plain[rank]), _final(killed[rank]))
        if difference:
            break
    resumed, again = [], 0
    if not difference:
        first = min(plain)
        steps = _steps_before(_without_final(plain[first][0]))
        resumed = [steps[start] for start in starts[first][1:]]
        done = [sum(kind == STEP for kind, _ in notes) for notes in killed[first]]
        again = sum(done) - steps[-1]
        if kills and not any(resumed):
            difference = "every restart began at the first step: nothing was restored"
    return Verdict(difference, resumed, again, losses, final)


def _shape(plain: Notes, killed: Notes, kills: int) -> str:
    if not plain:
        return "the undisturbed run noted nothing"
    if plain.keys() != killed.keys():
        return f"ranks {sorted(plain)} were undisturbed, ranks {sorted(killed)} were killed"
    for rank, processes in plain.items():
        if len(processes) != 1:
            return f"rank {rank} of the undisturbed run was started {len(processes)} times"
        if not any(kind == STEP for kind, _ in processes[0]):
            return f"rank {rank} of the undisturbed run made no step"
        if _final(processes) is None:
            return f"rank {rank} of the undisturbed run did not end"
        if any(kind == LOSS and value in NOT_FINITE for kind, value in processes[0]):
            return f"rank {rank} of the undisturbed run had losses that are no numbers: they say nothing"
        if _final(killed[rank]) is None:
            return f"rank {rank} of the killed run did not end"
        if len(killed[rank]) != 1 + kills:
            return f"rank {rank} was started {len(killed[rank])} times, though there were {kills} kills"
    return ""


def _along(rank: int, whole: Sequence[Note], processes: Sequence[Sequence[Note]]) -> tuple[str, list[int]]:
    """The first difference, and the index in `whole` at which each process begins."""
    reached, starts = 0, list[int]()
    for number, process in enumerate(processes):
        notes = _without_final(process)
        fits = [at for at in range(reached + 1) if list(whole[at : at + len(notes)]) == list(notes)]
        if number == 0:
            fits = [at for at in fits if at == 0]
        if not fits:
            return f"rank {rank}, process {number + 1}: {_where(whole, notes, reached, number)}", starts
        starts.append(fits[-1])
        reached = max(reached, fits[-1] + len(notes))
    if reached < len(whole):
        return f"rank {rank} ended after {reached} of {len(whole)} notes", starts
    return "", starts


def _where(whole: Sequence[Note], notes: Sequence[Note], reached: int, number: int) -> str:
    """Describe where notes depart from `whole`, aligned at the place where most of them agree."""
    places = range(reached + 1) if number else range(1)

    def agree(at: int) -> int:
        rest = whole[at:]
        return next(
            (i for i, (a, b) in enumerate(zip(notes, rest, strict=False)) if a != b), min(len(notes), len(rest))
        )

    best = max(places, key=agree)
    same = agree(best)
    if best + same >= len(whole):
        return f"{len(notes) - same} notes too many, the first: {_said(notes[same])}"
    step = _steps_before(whole)[best + same] + 1
    have, was = notes[same], whole[best + same]
    if isinstance(have[1], dict) and isinstance(was[1], dict):
        return f"{have[0]} {step}: {_names(was[1], have[1])} differ, after {same} notes that are the same"
    return f"{_said(have)} in step {step}, was {_said(was)}, after {same} notes that are the same"


def _said(note: Note) -> str:
    return f"{note[0]} {note[1]}"


def _names(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Names whose values differ."""
    return ", ".join(name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name))


def _ends(rank: int, plain: Any, killed: Any) -> str:
    return f"rank {rank}: at the end {_names(plain, killed)} differ" if plain != killed else ""


def _steps_before(notes: Sequence[Note]) -> list[int]:
    """The number of steps before each note, and finally the number of all steps."""
    counts = [0]
    for kind, _ in notes:
        counts.append(counts[-1] + (kind == STEP))
    return counts


def _without_final(notes: Sequence[Note]) -> Sequence[Note]:
    return [note for note in notes if note[0] != FINAL]


def _final(processes: Sequence[Sequence[Note]]) -> Any:
    return next((value for notes in processes for kind, value in notes if kind == FINAL), None)
