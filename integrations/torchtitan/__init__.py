"""torchtitan: a checkpoint manager that keeps training in memory too. A configuration names it, nothing is edited.

With 0.3: ``--override.imports holdfast.integrations.torchtitan.in_memory``, or `InMemoryCheckpointManager.Config` in a
config function. With 0.2: ``--job.custom_config_module holdfast.integrations.torchtitan``.

Start reading at `trainer`, which is what both have in common.
"""

from __future__ import annotations

from importlib.metadata import version

from holdfast.integrations.torchtitan.trainer import SnapshotOptions, release

__all__ = ["SnapshotOptions"]

if release(version("torchtitan")) < (0, 3):
    from holdfast.integrations.torchtitan.stand_in import JobConfig, stand_in

    stand_in()  # what torchtitan imports by name is there to change it
    __all__ += ["JobConfig"]
else:
    from holdfast.integrations.torchtitan.component import InMemoryCheckpointManager, in_memory

    __all__ += ["InMemoryCheckpointManager", "in_memory"]
