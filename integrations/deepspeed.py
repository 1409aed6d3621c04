"""DeepSpeed's checkpoints in memory: ``engine.checkpoint_engine = MemoryCheckpointEngine()``.

``engine.save_checkpoint`` then copies every rank's part into a slot of its node's SMP, protected like any snapshot;
``engine.load_checkpoint`` reads it from there. DeepSpeed looks for its files by name, so a placeholder of a few bytes
takes the place of each; on a node that replaces a lost one the placeholders are written again. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from holdfast.smp_daemon.recovery.reading import RemoteShard
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.slotfile import read_record
from holdfast.smp_daemon.shared.sources import Address
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.memory import Memory
from holdfast.snapshot.resume.restore import repair_parity
from holdfast.snapshot.state.values import decode, encode


class MemoryCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """A `CheckpointEngine` whose storage is the memory of the nodes. Each checkpoint replaces the one before.

    Create it on all ranks after ``deepspeed.initialize`` and before ``engine.load_checkpoint``. The constructor is a
    collective call, and recomputes what a lost node held.

    Args:
        job: the job whose memory is used; default: the id of the training run with ``.deepspeed`` added.
        protect, arena, start: as for `holdfast.InMemorySnapshot`.
        deadline_s: how long a save waits until the checkpoint is protected, in seconds.

    Raises:
        ConfigError: an argument, or the set-up of the machine, is wrong.
        StateMismatch: another number of ranks saved the checkpoint in memory.
        Unrecoverable: too much of the checkpoint is lost.
    """

    def __init__(
        self,
        *,
        job: str | None = None,
        protect: str = "auto",
        arena: str | Path | None = None,
        start: bool = True,
        deadline_s: float = 120.0,
    ) -> None:
        super().__init__()
        self.name = "MemoryCheckpointEngine"
        self._memory = memory = Memory(job, ".deepspeed", arena, start=start, protect=protect, deadline_s=deadline_s)
        self._saving: dict[str, Any] = {}
        self._files: dict[str, tuple[str, Address]] = {}
        """By file: the coordinate that holds it, and the SMP that has its shard."""
        self._placeholders: list[Path] = []
        coords, inventories = memory.find()
        plan = plan_restore(inventories, coords)
        memory.begin()
        self._snapshot: SnapshotId | None = None
        if plan is not None:
            self._snapshot = plan.snapshot
            shard, form = memory.recover(plan, memory.coord)
            self._share(json.loads(read_record(shard.view, form)))
            repair_parity(memory.client, plan, coords, memory.coord)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a new checkpoint."""
        self._saving.clear()

    def save(self, state_dict: Any, path: str) -> None:
        """Note the state to keep under `path`. `commit` copies it, before training continues."""
        self._saving[os.path.normpath(path)] = state_dict

    def commit(self, info: CheckpointCommitInfo | None) -> bool:
        """Copy all states that were noted, and wait until every node's are protected. A collective call; blocks.

        Raises:
            StateMismatch: a state has something that cannot be kept exactly; the message names it.
            HoldfastError: a rank failed; the checkpoint before this one is still there.
        """
        record: dict[str, Any] = {"files": {}, "latest": None}
        if info is not None and info.save_latest:
            record["latest"] = [os.path.normpath(Path(info.save_dir, "latest")), str(info.tag)]

        def find() -> tuple[dict[str, torch.Tensor], bytes]:
            tensors: dict[str, torch.Tensor] = {}
            record["files"] = {path: encode(state, Path(path).name, tensors) for path, state in self._saving.items()}
            plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            return plain, json.dumps(record, separators=(",", ":")).encode()

        self._snapshot = self._memory.write(find)
        self._saving.clear()
        self._share(record)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what was saved under `path`, with tensors in host memory. Blocks while it is fetched.

        Raises:
            ConfigError: the checkpoint in memory has no such file.
            HoldfastError: it cannot be had; or a save has failed since, of which this rank has its part.
        """
        name = os.path.normpath(path)
        if name not in self._files:
            raise ConfigError(
                f"{path} is not in the checkpoint that job {self._memory.job!r} has in memory, which has "
                f"{sorted(self._files) or 'no files'}; only the newest is kept. To begin anew remove the file `latest`"
            )
        coord, address = self._files[name]
        with RemoteShard(address, self._memory.job, coord) as shard:
            if shard.snapshot != self._snapshot:  # other ranks may have none of it
                raise HoldfastError(f"a save has failed after {self._snapshot}: start the job again to load that")
            form = shard.read_format()
            shard.fetch_all()
            encoded = json.loads(read_record(shard.view, form))["files"][name]
            return decode(encoded, lambda leaf: read_leaf(shard.view, *form.offsets[leaf]))

    def preserves_storage_sharing(self) -> bool:
        """False: tensors are stored one by one, so DeepSpeed need not clone views before it saves them."""
        return False

    def close(self, *, keep: bool = True) -> None:
        """Disconnect from the SMP. ``keep=False`` also gives up the checkpoint, with the files that stand for it, and
        ends the SMPs: a collective call."""
        if not keep:
            for path in self._placeholders:
                path.unlink(missing_ok=True)
        self._memory.close(keep=keep)

    def _share(self, record: Mapping[str, Any]) -> None:
        """Exchange which rank holds which file, and write a placeholder for each. A collective call."""
        memory = self._memory
        mine = [memory.coord, memory.client.inventory().bulk, list(record["files"]), record["latest"]]
        everyone = [json.loads(text) for text in memory.agreement.gather(json.dumps(mine).encode())]
        self._files = {path: (coord, (host, port)) for coord, (host, port), paths, _ in everyone for path in paths}
        texts = dict.fromkeys(self._files, f"in memory, under holdfast's job {memory.job}\n")
        texts |= {latest[0]: latest[1] for _, _, _, latest in everyone if latest}
        if memory.is_first_of_node:
            self._placeholders = [Path(path) for path in texts]
            for path, text in texts.items():
                _put(Path(path), text)
        memory.agreement.everywhere()


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)
