"""The report of the checks on a GPU: one Markdown file with a table, and the same figures for programs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]

FENCE = "```"


class Written:
    """The report at `path`. Results of earlier parts stay in it if they are of a machine with the same `facts`."""

    def __init__(self, path: Path, facts: Figures) -> None:
        self.path = path
        self._facts = dict(facts)
        known = read(path) if path.exists() else {}
        self._checks: dict[str, Figures] = known["checks"] if known.get("facts") == self._facts else {}

    def add(self, name: str, result: Figures) -> None:
        """Print a line for a check, and write the report with it."""
        print(f"{_mark(result)} {name:4} {result['seconds']:5.1f} s  {_words(result)}", flush=True)
        self._checks[name] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self._text())

    def _text(self) -> str:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        rows = [
            f"| {name} | {_mark(result)} | {_words(result).replace('|', '¦')} | {result['seconds']} s |"
            for name, result in self._checks.items()
        ]
        figures = json.dumps({"facts": self._facts, "checks": self._checks}, indent=1)
        return "\n".join(
            [
                f"{today}: {_words(self._facts)}",
                "",
                "| check | | figures | took |",
                "|---|---|---|---|",
                *rows,
                "",
                f"{FENCE}json",
                figures.replace(FENCE, "'''"),
                FENCE,
                "",
            ]
        )


def read(path: Path) -> dict[str, Any]:
    """The facts and checks of a report, by name."""
    _, _, rest = path.read_text().partition(f"{FENCE}json\n")
    found: dict[str, Any] = json.loads(rest.partition(f"\n{FENCE}")[0])
    return found


def _mark(result: Figures) -> str:
    return "✓" if result["passes"] else "✗"


def _words(result: Figures) -> str:
    said = {name: value for name, value in result.items() if name not in ("passes", "seconds")}
    pairs = (f"{name} ({_words(v)})" if isinstance(v, dict) else f"{name} {v}" for name, v in said.items())
    return " ".join(", ".join(pairs).split())
