"""torchtitan 0.3: a checkpoint manager that also keeps training in memory. Name it in the configuration; no code is
edited: ``--override.imports holdfast.integrations.torchtitan.in_memory``, or `TitanCheckpointManager.Config` in a
function that makes a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torchtitan
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive, override

from holdfast.integrations.torchtitan_trainer import FromMemory, SnapshotOptions, TrainerSnapshots, check


class TitanCheckpointManager(FromMemory, CheckpointManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's checkpoint manager, but it resumes from memory if there is a snapshot, else from its folder.

    The parent class writes checkpoints to disk as configured: none, unless ``enable``. Snapshots of all that the
    trainer has are taken either way; see docs/fsdp2.md.

    Raises:
        ConfigError: the trainer, or this version of torchtitan, is not supported.
        HoldfastError: from ``load`` and the first step, whatever `holdfast.InMemorySnapshot` raises there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc, unused-ignore]
        snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)  # type: ignore[valid-type]
        """Options for snapshots in memory."""

    def __init__(self, config: Config, *, states: dict[str, Any], **parts: Any) -> None:
        check(torchtitan.__version__, states["train_state"])
        self._snapshots = TrainerSnapshots(states, parts, config.snapshots)
        super().__init__(config, states=states, **parts)


@override(target=CheckpointManager.Config, exact=True, description="snapshots in memory")  # type: ignore[misc, untyped-decorator, unused-ignore]
def in_memory(config: Any, **options: Any) -> Any:
    """For ``--override.imports holdfast.integrations.torchtitan.in_memory``; with options of `SnapshotOptions`:
    ``'holdfast.integrations.torchtitan.in_memory={"every": 5}'``."""
    return derive(config, TitanCheckpointManager.Config, snapshots=SnapshotOptions(**options))
