"""Wall clocks of virtual nodes that can be set without touching this machine's: libfaketime, told by a file per node.

Only the wall clock jumps; monotonic clocks go on, as they do when somebody sets a machine's time.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from smp_daemon.errors import ConfigError

FILE_ENV = "FAKETIME_TIMESTAMP_FILE"


def library() -> Path | None:
    """libfaketime's shared object, if its package is installed; the package itself is not imported."""
    spec = importlib.util.find_spec("libfaketime")
    for place in (spec.submodule_search_locations if spec else None) or []:
        found = Path(place) / "vendor/libfaketime/src/libfaketime.so.1"
        if found.exists():
            return found
    return None


def unavailable() -> str:
    """Why clocks cannot be set here, or an empty text."""
    return "" if library() else "needs libfaketime: pip install libfaketime"


def preloading() -> dict[str, str]:
    """The environment in which a process is started whose clock, or that of its forks, may jump.

    Raises:
        ConfigError: libfaketime is not installed.
    """
    found = library()
    if found is None:
        raise ConfigError(f"clocks cannot be set here: {unavailable()}")
    before = os.environ.get("LD_PRELOAD")
    return {
        "LD_PRELOAD": f"{found}:{before}" if before else str(found),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def following(clock: Path) -> dict[str, str]:
    """The environment in which a process follows the clock that `clock` sets; as of its start, or of a fork."""
    return {FILE_ENV: str(clock)}


def set_clock(clock: Path, ahead_s: int) -> None:
    """Those who follow `clock` are so far ahead of this machine from now on; behind, if it is negative."""
    fresh = clock.with_suffix(".new")
    fresh.write_text(f"{ahead_s:+d}\n")
    fresh.replace(clock)  # whoever reads finds a whole line
