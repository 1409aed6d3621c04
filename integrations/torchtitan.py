"""torchtitan 0.3: a checkpoint manager that keeps training in memory too. A configuration names it, nothing is edited:
``--override.imports holdfast.integrations.torchtitan.in_memory``, or `TitanCheckpointManager.Config` in a function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torchtitan
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive, override

from holdfast.integrations.torchtitan_trainer import FromMemory, SnapshotOptions, TrainerSnapshots, check


class TitanCheckpointManager(FromMemory, CheckpointManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's own, which goes on from memory if there is a snapshot, and from its folder if there is none.

    Checkpoints on disk are its parent's, and as they are configured: none, unless ``enable``. Snapshots are taken
    either way, of all that the trainer has; see docs/torchtitan.md.

    Raises:
        ConfigError: the trainer, or torchtitan, is one that cannot be followed.
        HoldfastError: from ``load``, whatever entering `holdfast.InMemorySnapshot` raises, and at the first step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc, unused-ignore]
        snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)
        """Of snapshots in memory."""

    def __init__(self, config: Config, *, states: dict[str, Any], **parts: Any) -> None:
        check(torchtitan.__version__, states["train_state"])
        self._snapshots = TrainerSnapshots(
            dict(states),  # the parent adds the parts to it
            parts["model_parts"],
            parts["optimizers"],
            parts["lr_schedulers"],
            parts["dataloader"],
            config.snapshots,
        )
        super().__init__(config, states=states, **parts)


@override(target=CheckpointManager.Config, exact=True, description="snapshots in memory")  # type: ignore[misc, untyped-decorator, unused-ignore]
def in_memory(config: Any, **options: Any) -> Any:
    """``--override.imports holdfast.integrations.torchtitan.in_memory``, or with options
    ``'holdfast.integrations.torchtitan.in_memory={"every": 5}'``, those of `SnapshotOptions`."""
    return derive(config, TitanCheckpointManager.Config, snapshots=SnapshotOptions(**options))
