"""Snapshots of the whole training state in memory, restored bit for bit after a failure.

::

    from holdfast import InMemorySnapshot

    with InMemorySnapshot(model, optim) as snap:
        for step in range(snap.step, n_steps):
            train_step(...)

Importing this package imports neither torch nor any framework.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    if name == "InMemorySnapshot":
        from holdfast.hook import InMemorySnapshot

        return InMemorySnapshot
    if name == "prefetch":
        from holdfast.snapshot.connect import prefetch

        return prefetch
    if name == "register":
        from holdfast.snapshot.state.hidden import register

        return register
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
