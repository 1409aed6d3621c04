"""``python -m tools.optimizers``, or ``make optimizers``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from holdfast.bench.machine import describe, machine
from holdfast.cli.output import write_json
from tools.optimizers.lives import FIRST_TURNS, KILLS, STEPS, Lived, Lives, timed
from tools.optimizers.making import LIBRARIES, classes

GOOD = ("exact", "named")
OUTCOMES = (*GOOD, "refused late", "raw error", "silent", "not here")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one class.

    Attributes:
        outcome: one of `OUTCOMES`. "not here": its step fails without holdfast, too.
        why: what was said, or what differs.
    """

    library: str
    name: str
    outcome: str
    why: str
    seconds: float


def judge(lives: Sequence[Lived]) -> tuple[str, str]:
    """Outcome and reason. Pure."""
    alone, *others = lives
    if alone.error:
        return "not here", alone.error
    said = [text for life in others for step, text in life.said if step < FIRST_TURNS and names(text)]
    for number, life in enumerate(others):
        if life.error:
            ours = life.error.startswith(("ConfigError", "StateMismatch"))
            young = number == 0 or 0 in life.steps  # a life that begins anew is the job's first turns, too
            early = young and life.step_of_error < FIRST_TURNS
            return ("named" if ours and early else "refused late" if ours else "raw error"), life.error
    wrong = sorted(
        {step for life in others for step, value in life.steps.items() if alone.steps.get(step) != value}
        | (alone.steps.keys() - {step for life in others for step in life.steps})
    )
    began_anew = [life for life in others[1:] if 0 in life.steps]
    if not wrong and not began_anew:
        return "exact", ""
    if said:
        return "named", said[0]
    return "silent", "nothing was restored" if began_anew else f"step {wrong[0]} differs"


def names(text: str) -> bool:
    """Whether a warning is about state that is not captured."""
    return any(part in text for part in ("not captured", "is not restored", "no snapshot"))


def markdown(results: Sequence[Result], when: str) -> str:
    """The report to read. Pure but for the versions and the machine."""
    libraries = list(dict.fromkeys(result.library for result in results))
    counts = {
        library: Counter(result.outcome for result in results if result.library == library) for library in libraries
    }
    lines = [
        "# Optimizers of others, killed and compared to the last bit",
        "",
        f"{when}: {describe(machine())}. Each class trains {STEPS} steps without holdfast, and again with a snapshot "
        f"after every step, killed with SIGKILL in the middle of steps {' and '.join(str(k + 1) for k in KILLS)}. "
        "*Exact*: the loss and all weights are the same to the last bit in every step. *Named*: holdfast refused the "
        f"optimizer, or named what it does not capture, within the first {FIRST_TURNS} steps of the first process. "
        "*Not here*: it does not run on this machine, without holdfast either.",
        "",
        f"| library | version | {' | '.join(OUTCOMES)} |",
        "|---|---|" + "---:|" * len(OUTCOMES),
    ]
    for library in libraries:
        cells = " | ".join(str(counts[library][outcome] or "") for outcome in OUTCOMES)
        lines.append(f"| {library} | {version_of(library)} | {cells} |")
    lines += ["", "## All that are not exact", "", "| class | outcome | why |", "|---|---|---|"]
    for result in results:
        if result.outcome != "exact":
            why = " ".join(result.why.split()).replace("|", "\\|")[:300]
            lines.append(f"| {result.library}.{result.name} | {result.outcome} | {why} |")
    return "\n".join(lines) + "\n"


def version_of(library: str) -> str:
    """The version of the distribution that has a module."""
    top = library.partition(".")[0]
    try:
        return version(packages_distributions()[top][0])
    except (KeyError, PackageNotFoundError):
        return "?"


def main() -> int:
    """Run the chosen classes; return 0 only if every one that runs here is exact or named."""
    parser = argparse.ArgumentParser(prog="python -m tools.optimizers", description=__doc__)
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="where the libraries are installed")
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="run these classes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.packages:
        sys.path.append(str(asked.packages.resolve()))  # last: this environment's torch comes first
    warnings.filterwarnings("ignore")
    results: list[Result] = []
    lives = Lives()
    try:
        for library in asked.library:
            try:
                found = classes(library)
            except Exception as error:
                results.append(Result(library, "*", "not here", f"{type(error).__name__}: {error}", 0.0))
                print(f"{library}: not here: {error}", flush=True)
                continue
            for name, kind in found.items():
                if asked.only and name not in asked.only:
                    continue
                lived, seconds = timed(lives, kind)
                results.append(Result(library, name, *judge(lived), seconds))
                print(f"{library}.{name}: {results[-1].outcome} {results[-1].why[:400]} ({seconds:.0f} s)", flush=True)
    finally:
        lives.close()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    if asked.json:
        write_json(
            str(asked.json), {"when": when, "machine": describe(machine()), "results": list(map(asdict, results))}
        )
    if asked.markdown:
        asked.markdown.write_text(markdown(results, when))
    print(dict(Counter(result.outcome for result in results)))
    return 0 if all(result.outcome in (*GOOD, "not here") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
