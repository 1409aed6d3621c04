"""torchtitan 0.2: a checkpoint manager that stands in for its own, which its trainer makes by name.

``--job.custom_config_module holdfast.integrations.torchtitan_0_2``, or the same in a TOML file: importing this is what
changes it, as `stand_in` is called below.
"""

import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager

from holdfast.integrations.torchtitan_trainer import FromMemory, SnapshotOptions, TrainerSnapshots, check
from holdfast.smp_daemon.shared.errors import ConfigError

TRAINERS = ("torchtitan.train", "__main__")
"""Modules that make a checkpoint manager, if they are imported: by ``torchrun -m`` the first is called the second."""


@dataclass
class JobConfig:
    """Adds a section ``[snapshots]`` to torchtitan's, which merges the two. It wants types here, not their names."""

    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)


class TitanStandIn(FromMemory, CheckpointManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's own, which goes on from memory if there is a snapshot, and from its folder if there is none.

    Raises:
        ConfigError: the trainer, or torchtitan, is one that cannot be followed.
        HoldfastError: from ``load``, whatever entering `holdfast.InMemorySnapshot` raises, and at the first step.
    """

    def __init__(self, *, states: dict[str, Any], ft_manager: Any = None, **parts: Any) -> None:
        trainer = states["train_state"]
        check(version("torchtitan"), trainer)
        if ft_manager is not None and ft_manager.enabled:
            raise ConfigError("torchft restores a replica from another: use one of the two, see docs/torchft.md")
        self._snapshots = TrainerSnapshots(
            dict(states),  # the parent adds the parts to it
            parts["model_parts"],
            parts["optimizers"],
            parts["lr_schedulers"],
            parts["dataloader"],
            getattr(trainer.job_config, "snapshots", SnapshotOptions()),
        )
        super().__init__(states=states, **parts)


def stand_in() -> None:
    """From now on trainers make an `TitanStandIn`."""
    for name in TRAINERS:
        module: Any = sys.modules.get(name)
        if module is not None and getattr(module, "CheckpointManager", None) is CheckpointManager:
            module.CheckpointManager = TitanStandIn


stand_in()
