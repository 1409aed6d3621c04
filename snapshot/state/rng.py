"""The random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of every generator of this process. Copies: a few kilobytes.

    Python's 625 numbers are packed: one by one they would take a third of the time at a boundary.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array("I", numbers).tobytes(), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every generator back."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
