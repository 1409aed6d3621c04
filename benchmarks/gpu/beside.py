"""Part C: the cost compared with other checkpointers, all in the same loop with state on the device.

The loop is that of ``benchmarks.stall``. DCP comes with torch; torch_checkpointing is included only if it is
installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.stall import StallBenchmark, choose, measure

Figures = dict[str, Any]

PEERS = {"C4": "dcp-thread", "C5": "dcp-process", "C6": "torch_checkpointing"}
SYSTEMS = {"C1": "none", "C2": "copy", "C3": "holdfast", **PEERS}

PACKAGES = {"torch_checkpointing": "torch_checkpointing==0.1.1"}
"""Checkpointers that are not part of torch, with their pip requirements."""

SHOWN = ("stall_p50_ms", "lost_ratio", "inflation", "survives_kill_s", "restore_s")

STALL = 0.1
LOST = 0.25
"""Upper limits for a snapshot's stall (`STALL`) and lost time (`LOST`), as fractions of the best other system's."""


def beside(key: str, machine: Machine) -> Figures:
    """Measure one system on 4 GB of state, with a snapshot every step and every 6 steps: others write 0.8 GB/s."""
    if key in PACKAGES and importlib.util.find_spec(key) is None:
        return {"skipped": f"not installed: pip install {PACKAGES[key]}", "passes": True}
    small: dict[str, Any] = {"layers": 2, "every": (1,), "rounds": 1, "block": 4, "batch": 8}
    large: dict[str, Any] = {"layers": 125, "every": (1, 6), "rounds": 1, "block": 6, "batch": 4096, "device": "cuda"}
    plan = StallBenchmark(choose(key), (1,), **(small if machine.dry else large))
    found: Figures = {"passes": True}
    for row in measure(plan.systems[0], sys.executable, 1, plan):
        figures = {name: None if row[name] is None else round(row[name], 4) for name in SHOWN}
        figures["memory"] = round(row["extra_bytes"] / row["state_bytes"], 2)
        figures["device_memory"] = round(row["device_extra_bytes"] / row["state_bytes"], 3)
        found[f"every {row['every']}"] = figures
        found["passes"] &= row["restored"] or key == "none"
    return found


CHECKS: dict[str, Callable[[Machine], Figures]] = {name: partial(beside, key) for name, key in SYSTEMS.items()}


def compare(machine: Machine, results: Mapping[str, Figures]) -> Figures:
    """Compare holdfast with the best other system, for a snapshot every step."""
    rows = {SYSTEMS[name]: result["every 1"] for name, result in results.items() if "every 1" in result}
    others = [rows[key] for key in PEERS.values() if key in rows]
    if "holdfast" not in rows or not others:
        return {"failure": "there is nothing to compare", "passes": False}
    stall, lost = (rows["holdfast"][name] / min(row[name] for row in others) for name in ("stall_p50_ms", "lost_ratio"))
    return {
        "stall_of_the_best_others": round(stall, 3),
        "lost_of_the_best_others": round(lost, 3),
        "passes": machine.dry or (stall <= STALL and lost <= LOST),
    }
