"""Snapshots of the whole training state in memory, restored bit for bit after a failure.

::

    from holdfast import InMemorySnapshot

    with InMemorySnapshot(model, optim) as snap:
        for step in range(snap.step, n_steps):
            train_step(...)

Importing this package imports neither torch nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from holdfast.smp_daemon.shared.errors import (
    ArenaTooSmall,
    ConfigError,
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    NodeLeaves,
    NoFreeSlot,
    ProtocolError,
    Repeated,
    SmpUnavailable,
    StaleEpoch,
    StateMismatch,
    Unrecoverable,
)

if TYPE_CHECKING:
    from holdfast.hook import InMemorySnapshot
    from holdfast.snapshot.connect import prefetch
    from holdfast.snapshot.state.hidden import register

__version__ = version("holdfast-train")

__all__ = [
    "ArenaTooSmall",
    "ConfigError",
    "DamagedSnapshot",
    "DeadlineExceeded",
    "HoldfastError",
    "InMemorySnapshot",
    "NoFreeSlot",
    "NodeLeaves",
    "ProtocolError",
    "Repeated",
    "SmpUnavailable",
    "StaleEpoch",
    "StateMismatch",
    "Unrecoverable",
    "prefetch",
    "register",
]


_LATER = {"InMemorySnapshot": "hook", "prefetch": "snapshot.connect", "register": "snapshot.state.hidden"}
"""What is imported when it is first asked for, and the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.{_LATER[name]}"), name)
