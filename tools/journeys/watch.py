"""What a running job says of itself on every surface: `holdfast status`, its page, and its metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from tools.journeys.hosts import Failed, Shell
from tools.journeys.pages import Docs

WATCHING = "docs/watching.md"
PART = r'^holdfast_recovery_seconds\{.*part="([^"]+)".*\} (\S+)$'
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


def status(docs: Docs, shell: Shell) -> str:
    """What `holdfast status` says of a job that is well, on one line. Raises `Failed`."""
    return " ".join(shell.run(docs.command(WATCHING, "Status and metrics", "holdfast status", {})).split())


def jobs(docs: Docs, shell: Shell) -> list[dict[str, Any]]:
    """The same for programs, for each job. Raises `Failed`."""
    said = shell.run(docs.command(WATCHING, "Status and metrics", "--json -") + " 2>/dev/null")
    found: list[dict[str, Any]] = json.loads(said)
    return found


def until(shell: Shell, holds: Callable[[str], bool]) -> str:
    """Ask for the status until it `holds`; return it. Raises `Failed`."""
    limit = time.monotonic() + 60
    while True:
        said = " ".join(shell.run("holdfast status || true").split())
        if holds(said):
            return said
        if time.monotonic() > limit:
            raise Failed(f"the status does not become what it should: {said}")
        time.sleep(0.5)


def page(shell: Shell, said: str) -> str:
    """The address of the page that a status names. Raises `Failed`."""
    urls = re.findall(r"http://127\.0\.0\.1:\d+/", said)
    if len(urls) != 1:
        raise Failed(f"there is no page in: {said}")
    return str(urls[0])


def fetch(shell: Shell, url: str) -> str:
    """What a web server answers. Raises `Failed`."""
    return shell.run(f'python -c "{FETCH}" {url}')


def recovery(docs: Docs, shell: Shell, stopwatch_s: float, slack_s: float) -> str:
    """Check that status, page and metrics tell of the newest recovery what a stopwatch showed. Returns its parts.

    Raises:
        Failed: one of them tells another time, or no parts.
    """
    said = status(docs, shell)
    words = re.search(r"([\d,.]+) s from the first loss to the first new step \(\w+: ([^)]*)\)", said)
    if words is None:
        raise Failed(f"the status does not tell of a recovery: {said}")
    url = page(shell, said)
    [job] = jobs(docs, shell)
    metrics = re.findall(
        r'^holdfast_recovery_seconds\{.*part="([^"]+)".*\} (\S+)$', fetch(shell, f"{url}metrics"), re.M
    )
    [served] = [json.loads(fetch(shell, f"{url}status.json"))["recoveries"][0]]
    told = {
        "holdfast status": float(words[1].replace(",", "")),
        "holdfast status --json": job["recoveries"][0]["seconds"],
        "the page": served["seconds"],
        "the metrics": sum(float(seconds) for _, seconds in metrics),
    }
    wrong = {where: seconds for where, seconds in told.items() if abs(seconds - stopwatch_s) > slack_s}
    if wrong or {part for part, _ in metrics} != {"detect", "restart", "load", "first step"}:
        raise Failed(f"the stopwatch says {stopwatch_s:.1f} s, and {told} was told, of {metrics}")
    return words[2]
