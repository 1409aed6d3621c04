"""PyTorch's distributed checkpoints (DCP), to and from memory: ``dcp.save(state, storage_writer=MemoryWriter())``.

Each rank's part of a checkpoint is a slot of its node's SMP, protected like any snapshot. `MemoryReader` hands DCP the
pieces that its planner asks for, so another number of ranks may load a checkpoint, also into another sharding.

The checkpoint's metadata is not stored as a separate file: every slot's record says what the slot contains, and the
reader combines these records. Nothing is pickled here; DCP's planner itself pickles objects that are not tensors.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError, failure_of
from holdfast.smp_daemon.shared.plan import RestorePlan, plan_restore
from holdfast.smp_daemon.shared.slotfile import SlotFormat, read_record
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.copy.tensors import leaf_tensor, local
from holdfast.snapshot.memory import Memory
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.state.values import decode_plain, encode

ALL_RANKS = (
    "a checkpoint in memory is saved and loaded by all ranks together: call dcp.save, dcp.async_save or dcp.load on "
    "all of them, without no_dist=True and without the process_group of a part"
)

CheckpointId = str | os.PathLike[str] | None


class MemoryWriter(StorageWriter):
    """A `StorageWriter` whose storage is the memory of the nodes. Each checkpoint replaces the one before.

    Create it once, on all ranks, after the process group. `dcp.save` and `dcp.async_save` (with a thread, not with a
    process) may then use it any number of times, one save at a time. All ranks take part in each save: with
    ``no_dist=True``, or a `process_group` of some ranks, it raises `ConfigError`.

    Args:
        job: the job whose memory is used; default: the id of the training run with ``.dcp`` added, so that an
            `InMemorySnapshot` of the same run is not disturbed.
        protect, arena, start: as for `holdfast.InMemorySnapshot`.
        deadline_s: how long a save waits until the checkpoint is protected, in seconds.

    Raises:
        ConfigError: an argument, or the set-up of the machine, is wrong.
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
        self._memory = Memory(job, ".dcp", arena, start=start, protect=protect, deadline_s=deadline_s)
        self._memory.begin()
        self._name = ""
        self._by_all = True

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._name = str(checkpoint_id or "")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set up every rank alike, coordinator or not. Raises `ConfigError` if DCP gives this rank another number."""
        self._by_all = bool(kwargs.get("use_collectives", True))
        rank = kwargs.get("rank", self._memory.agreement.rank)
        if rank != self._memory.agreement.rank:
            raise ConfigError(f"DCP numbers rank {self._memory.agreement.rank} of the job as rank {rank}: {ALL_RANKS}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises `ConfigError` unless every rank has a plan: the save would wait in vain for those without one."""
        if self._by_all and len(plans) != self._memory.ranks:
            raise ConfigError(f"DCP has the plans of {len(plans)} of {self._memory.ranks} ranks: {ALL_RANKS}")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part, and wait until every node's parts are protected. A collective call; blocks.

        Raises:
            HoldfastError: a rank failed; the checkpoint before this one is still there.
        """
        tensors: dict[str, torch.Tensor] = {}

        def find() -> tuple[dict[str, torch.Tensor], bytes]:
            tensors.update((f"{i}:{item.index.fqn}", _resolve(item, planner)) for i, item in enumerate(plan.items))
            items = [(leaf, *_described(item)) for leaf, item in zip(tensors, plan.items, strict=True)]
            record = encode((self._name, self._memory.coord, plan.planner_data or {}, items), "checkpoint", {})
            return tensors, json.dumps(record, separators=(",", ":")).encode()

        self._memory.write(find)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, tensor.nbytes, storage_data=None)
                for item, tensor in zip(plan.items, tensors.values(), strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the metadata follows from the records."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Accept any text, which is kept with the checkpoint."""
        return True

    def close(self, *, keep: bool = True) -> None:
        """Disconnect from the SMP. ``keep=False`` also gives up the checkpoint and ends the SMPs: a collective call."""
        self._memory.close(keep=keep)


class MemoryReader(StorageReader):
    """A `StorageReader` for what `MemoryWriter` saved: the newest checkpoint of which every byte can be recovered.

    Create it on all ranks. Every node that holds part of the checkpoint must run at least one rank; parity replaces
    what other nodes held.

    Args:
        job, arena: as for `MemoryWriter`.
        start: start an SMP on a node that has none yet, such as one that replaces a lost node.
    """

    def __init__(self, *, job: str | None = None, arena: str | Path | None = None, start: bool = True) -> None:
        super().__init__()
        self._memory = Memory(job, ".dcp", arena, start=start)
        self._name = ""
        self._plan: RestorePlan
        self._places: dict[MetadataIndex, tuple[str, str]] = {}
        self._shards: dict[str, tuple[RecoveredShard, SlotFormat]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load because nothing was saved. A collective call.

        Raises:
            Unrecoverable: a checkpoint was saved, but too much of it is lost.
        """
        return plan_restore(self._memory.find()[1], None) is None

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._name = str(checkpoint_id or "")
        self._shards.clear()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Find the newest checkpoint and its content. A collective call.

        Raises:
            ConfigError: there is no checkpoint, or it has another id than was asked for.
            AgreementLost: not every rank takes part.
            Unrecoverable: too much of the checkpoint is lost.
        """
        try:
            coords, inventories = self._memory.find()
        except AgreementLost as error:
            raise AgreementLost(f"not every rank came to load: {ALL_RANKS} ({error})") from error
        plan = plan_restore(inventories, None)
        if plan is None:
            raise ConfigError(f"job {self._memory.job!r} has no checkpoint in memory")
        self._plan = plan
        node_of = {inventory.bulk: inventory.node for inventory in inventories}
        first_on = {node: rank for rank, node in reversed(list(coords.items()))}
        mine = [
            coord
            for coord in plan.sources.layout.coords
            if first_on.get(node_of.get(plan.sources.shards.get(coord, ("", 0)), ""), "rank0") == self._memory.coord
        ]
        texts = json.dumps([read_record(s.view, form).decode() for s, form in map(self._shard, mine)]).encode()
        records = [_read_record(t) for part in self._memory.agreement.gather(texts) for t in json.loads(part)]
        if self._name and (others := {name for name, *_ in records} - {self._name}):
            raise ConfigError(f"the checkpoint in memory is {others.pop()!r}, not {self._name!r}")
        planner: dict[str, Any] = {}
        known: dict[str, Any] = {}
        for _, coord, flattened, items in sorted(records, key=lambda record: coordinate_key(record[1])):
            planner |= flattened
            for leaf, index, tensor in items:
                self._places[index] = coord, leaf
                if tensor is None:
                    known[index.fqn] = BytesStorageMetadata()
                    continue
                whole, offsets, sizes, dtype, requires_grad = tensor
                properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
                chunks = known.setdefault(index.fqn, TensorStorageMetadata(properties, whole, [])).chunks
                chunks.append(ChunkStorageMetadata(offsets, sizes))
        return Metadata(known, planner)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the coordinator has no special role."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the planner asks for; first fetch or compute shards of other nodes. A collective call;
        blocks.

        Raises:
            HoldfastError: a shard cannot be recovered, here or on another node.
        """
        self._fetch({self._places[item.storage_index][0] for item in plan.items})
        for item in plan.items:
            coord, name = self._places[item.storage_index]
            shard, form = self._shard(coord)
            offset, leaf = form.offsets[name]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(bytes(shard.view[offset : offset + leaf.bytes])))
                continue
            held = leaf_tensor(shard.view, offset, leaf)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                held = held.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(held)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Accept any text. If one is given, `read_metadata` compares it with the checkpoint's."""
        return True

    def close(self) -> None:
        """Disconnect from the SMP."""
        self._shards.clear()
        self._memory.close()

    def _fetch(self, coords: set[str]) -> None:
        """Have this node hold what its ranks need. Only its first rank asks: two would take each other's slot."""
        agreement, node = self._memory.agreement, self._memory.client.node
        requests = [json.loads(text) for text in agreement.gather(json.dumps([node, sorted(coords)]).encode())]
        here = [asked for name, asked in requests if name == node]
        problem = None
        if [name for name, _ in requests].index(node) == agreement.rank:
            wanted = sorted(set().union(*here))
            problem = failure_of(lambda: [self._shard(coord) for coord in wanted], HoldfastError)
        if not agreement.everywhere(problem is None):
            raise problem or HoldfastError(
                "another node could not get its part of the checkpoint; see its rank's error"
            )

    def _shard(self, coord: str) -> tuple[RecoveredShard, SlotFormat]:
        if coord not in self._shards:
            self._shards[coord] = self._memory.recover(self._plan, coord)
        return self._shards[coord]


def _described(item: WriteItem) -> tuple[Any, Any]:
    """The index of one of DCP's write items, and what it says of a tensor: the size of the whole, offset and size of
    this part, dtype, and whether it requires gradients; None: it is another object."""
    index, data = item.index, item.tensor_data
    at = index.fqn, index.offset, index.index
    if data is None:
        return at, None
    chunk, properties = data.chunk, data.properties
    return at, (data.size, chunk.offsets, chunk.sizes, properties.dtype, properties.requires_grad)


def _read_record(text: str) -> tuple[str, str, dict[str, Any], list[tuple[str, MetadataIndex, Any]]]:
    """What a slot's record says: the checkpoint's id, the coordinate whose part it is, how DCP's planner flattened the
    state, and each leaf, as `_described`. Raises `ProtocolError` if it is another record."""
    try:
        name, coord, planner, items = decode_plain(json.loads(text))
        return name, coord, planner, [(leaf, MetadataIndex(*at), tensor) for leaf, at, tensor in items]
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"this is not the record of a checkpoint: {error!r}") from error


def _resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The planner's data for an item as a plain dense tensor; the bytes of an object that is not a tensor."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        content = bytearray(data.getvalue())
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return local(data).detach().contiguous()
