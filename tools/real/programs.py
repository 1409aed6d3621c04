"""The output of programs of ``tools/real`` that start a framework and kill it themselves.

``PROGRAM --out DIR --ranks N [--bare] [--kills K --seed S]``; ``--bare`` means without holdfast. Rank r writes
``losses.r``: lines of a name, a step and a number in hex, repeated for repeated steps; ``state.r``: lines of a name and
a digest of the final state; and ``progress.r``: ``start`` and then the completed steps, for each process. Each kill is
a line of ``kills``.
"""

from __future__ import annotations

from pathlib import Path

from tools.real.comparison import Verdict

SHOWN = 3


def kills(folder: Path) -> list[str]:
    """Descriptions of the kills."""
    path = folder / "kills"
    return path.read_text().splitlines() if path.exists() else []


def steps(folder: Path) -> int:
    """The number of distinct steps that rank 0 completed."""
    return len(set((folder / "progress.0").read_text().split()) - {"start"})


def compare(plain: Path, killed: Path) -> Verdict:
    """Compare the output of a killed run with that of an undisturbed run."""
    found: list[str] = []
    counts = {"losses": 0, "state": 0}
    names = sorted(path.name for pattern in ("losses.*", "state.*") for path in plain.glob(pattern))
    if not any(name.startswith("state.") for name in names):
        found.append("the undisturbed run left no state")
    for name in names:
        one = _values(plain / name, found)
        other = _values(killed / name, found) if (killed / name).exists() else {}
        counts[name.partition(".")[0]] += len(one)
        found += [
            f"{name}: {key} differs" for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)
        ]
    starts = [part.split() for part in (killed / "progress.0").read_text().split("start\n")[1:]]
    done = [step for start in starts for step in start]
    resumed = [int(start[0]) - 1 for start in starts[1:] if start]
    if not found and not any(resumed):
        found.append("every restart began at the first step: nothing was restored")
    again = len(done) - len(set(done))
    return Verdict("; ".join(found[:SHOWN]), resumed, again, counts["losses"], counts["state"])


def _values(path: Path, found: list[str]) -> dict[str, str]:
    """Values by name and step. Values that are repeated with another result are added to `found`."""
    values: dict[str, str] = {}
    for line in path.read_text().splitlines():
        key, _, value = line.rpartition(" ")
        if values.setdefault(key, value) != value:
            found.append(f"{path.name}: {key} was done again with another result")
    return values
