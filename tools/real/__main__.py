"""``python -m tools.real``, or ``make real``."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from holdfast.cli.output import write_json
from tools.real.registry import RUNS
from tools.real.report import markdown, report
from tools.real.running import Result, execute


def main() -> int:
    """Run the chosen scripts; return 0 only if every run that is not skipped is exact."""
    parser = argparse.ArgumentParser(prog="python -m tools.real", description=__doc__)
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="where checkouts of frameworks lie")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these, and those whose name begins like it")
    parser.add_argument(
        "--python", action="append", default=[], metavar="VERSION=PATH", help="an interpreter that has the packages"
    )
    parser.add_argument("--seed", type=int, default=1656, help="of who is killed when (default 1656)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report; what is in it and is not run again stays"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report to read")
    asked = parser.parse_args()
    real = asked.real.resolve() if asked.real else None
    pythons = {version: Path(path) for version, _, path in (each.partition("=") for each in asked.python)}
    chosen = [run for run in RUNS if not asked.only or any(run.name.startswith(name) for name in asked.only)]
    if not chosen:
        parser.error(f"there is none of {', '.join(asked.only)}; there are {', '.join(run.name for run in RUNS)}")
    earlier = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else None
    results = []
    for run in chosen:
        results.append(execute(run, real, pythons, asked.seed))
        tell(results[-1])
        said = report(results, datetime.now(UTC).isoformat(timespec="seconds"), asked.seed, earlier)
        if asked.json:
            write_json(str(asked.json), said)
        if asked.markdown:
            asked.markdown.write_text(markdown(said))
    return 1 if any(result.outcome == "differs" for result in results) else 0


def tell(result: Result) -> None:
    """Print one line about a result."""
    said = f": {result.said}" if result.said else f", went on after {', '.join(map(str, result.resumed))} steps"
    print(f"{result.name}: {result.outcome}{said} ({result.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
