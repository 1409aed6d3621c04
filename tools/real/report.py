"""The results of all runs, as plain values and as a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.bench.machine import describe, machine
from tools.real.running import KILLS, Result


def report(results: Sequence[Result], when: str, seed: int, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The report as plain values; docs/support.md is made of these. Keeps results of `earlier` that were not rerun."""
    names = {result.name for result in results}
    kept = [run for run in (earlier or {}).get("runs", ()) if run["name"] not in names]
    return {
        "when": when,
        "machine": describe(machine()),
        "seed": seed,
        "runs": [*kept, *map(asdict, results)],
    }


def markdown(said: dict[str, Any]) -> str:
    """The report in Markdown."""
    done = [run for run in said["runs"] if run["outcome"] != "skipped"]
    skipped = [run for run in said["runs"] if run["outcome"] == "skipped"]
    exact = sum(run["outcome"] == "exact" for run in done)
    lines = [
        "# Scripts of others, killed and compared to the last bit",
        "",
        f"{said['when']}: {said['machine']}. Seed {said['seed']}. {exact} of {len(done)} are exact. Each script ran "
        f"undisturbed and without holdfast, and again with the lines of ours below while {KILLS} trainers were killed "
        "with SIGKILL, one after the other, at drawn instants; where it evaluates, the last right after an evaluation. "
        "*Exact*: everything that was differentiated, in hexadecimal; digests of parameters, optimizer state and "
        "generators after every step; every evaluation; and all weights, optimizer state, schedules and generators at "
        "the end are the same on every rank.",
        "",
        "| run | what | ranks | steps | exact | losses compared | went on after | done again | seconds |",
        "|---|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for run in done:
        exactly = "yes" if run["outcome"] == "exact" else "**no**"
        went_on = ", ".join(map(str, run["resumed"]))
        lines.append(
            f"| {run['name']} | {run['framework']}: {run['what']} | {run['ranks']} | {run['steps']} | {exactly} "
            f"| {run['losses']} | {went_on} | {run['again']} | {run['seconds']:.0f} |"
        )
    for run in done:
        lines += ["", f"## {run['name']}", "", f"[{run['page']}](../../{run['page']}). {_versions(run)}.", ""]
        lines += [f"* killed: {each}" for each in run["kills"]]
        if run["said"]:
            lines += ["", "```text", run["said"], "```"]
        for title, text in (("Our lines", run["lines"]), ("Made small, in both runs", run["fits"])):
            if text:
                lines += ["", f"{title}:", "", "```diff", text, "```"]
        lines += ["", "```console", f"$ {run['command']}", "```"]
    if skipped:
        lines += ["", "## Skipped", "", *(f"* {run['name']}: {run['said']}" for run in skipped)]
    return "\n".join(lines) + "\n"


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in run["versions"].items())
