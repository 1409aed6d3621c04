"""torchtitan 0.2: a checkpoint manager that replaces torchtitan's own, which the trainer looks up by name.

Set ``--job.custom_config_module holdfast.integrations.torchtitan_0_2``, or the same in a TOML file. Importing this
module is enough, because it calls `stand_in`.
"""

import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager

from holdfast.integrations.torchtitan_trainer import FromMemory, SnapshotOptions, TrainerSnapshots, check
from holdfast.smp_daemon.shared.errors import ConfigError

TRAINERS = ("torchtitan.train", "__main__")
"""Modules that create the checkpoint manager, if imported: under ``torchrun -m`` the first is named like the second."""


@dataclass
class JobConfig:
    """Torchtitan merges this into its own, as section ``[snapshots]``. Annotations must be types here, not strings."""

    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)  # type: ignore[valid-type]


class TitanStandIn(FromMemory, CheckpointManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's checkpoint manager, but it resumes from memory if there is a snapshot, else from its folder.

    Raises:
        ConfigError: the trainer, or this version of torchtitan, is not supported.
        HoldfastError: from ``load`` and the first step, whatever `holdfast.InMemorySnapshot` raises there.
    """

    def __init__(self, *, states: dict[str, Any], ft_manager: Any = None, **parts: Any) -> None:
        trainer = states["train_state"]
        check(version("torchtitan"), trainer)
        if ft_manager is not None and ft_manager.enabled:
            raise ConfigError(
                "torchft is enabled, and restores replicas itself: disable torchft, or do not load this module; see "
                "docs/checkpoints.md"
            )
        options = getattr(trainer.job_config, "snapshots", SnapshotOptions())
        self._snapshots = TrainerSnapshots(states, parts, options)
        super().__init__(states=states, **parts)


def stand_in() -> None:
    """Make trainers create a `TitanStandIn` from now on."""
    for name in TRAINERS:
        module: Any = sys.modules.get(name)
        if module is not None and getattr(module, "CheckpointManager", None) is CheckpointManager:
            module.CheckpointManager = TitanStandIn


stand_in()
