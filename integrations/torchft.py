"""torchft's checkpoints through memory: ``Manager(..., checkpoint_transport=MemoryTransport())``.

A replica that joins or returns receives the state of a healthy one. The healthy replica only copies its state into the
memory of its node's SMP and trains on. The receiver reads it there and checks each unit, even if the sending process
has died in the meantime. Nothing is pickled: states consist of numbers, strings, bytes, arrays and tensors, and lists,
tuples, sets, deques and dicts of them.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torchft.checkpointing.transport import CheckpointTransport

from holdfast.smp_daemon.recovery.reading import RemoteShard
from holdfast.smp_daemon.shared.errors import (
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    StateMismatch,
)
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.slotfile import SlotFormat, read_record
from holdfast.smp_daemon.shared.sources import Address
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.connect import job_from_environment
from holdfast.snapshot.copy.tensors import leaf_tensor, local
from holdfast.snapshot.memory import Memory
from holdfast.snapshot.state.values import decode, encode

T = TypeVar("T")

COORD = "rank0"
AGAIN_S = 0.02
"""How long a receiver waits before it asks again for a checkpoint that is not there yet, in seconds."""


class MemoryTransport(CheckpointTransport[T]):  # type: ignore[misc, unused-ignore]
    """A `CheckpointTransport` whose storage is the memory of the sender's node.

    Every process has an arena of its own, so that replicas are independent of each other. An arena has room for three
    states. On several hosts the SMP must listen where the others can reach it: see ``HOLDFAST_HOST``.

    Args:
        job: the job whose memory is used; default: the id of the training run with the numbers of the replica and of
            the rank added.
        arena, start: as for `holdfast.InMemorySnapshot`.
        like: returns this rank's own state. Needed if the state contains `DTensor`s: received tensors are sharded in
            the same way.

    Raises:
        ConfigError: an argument, or the set-up of the machine, is wrong.
    """

    def __init__(
        self,
        *,
        job: str | None = None,
        arena: str | Path | None = None,
        start: bool = True,
        like: Callable[[], T] | None = None,
    ) -> None:
        self._job = job or _own_job()
        self._mark = secrets.token_hex(8)  # this process may find what an earlier run of the job has sent, of any step
        self._like = like
        self._arena, self._start = arena, start
        self._memory = self._connect()
        self._over = False

    def metadata(self) -> str:
        """The job and the address from which this rank's checkpoints can be read, and what marks them, as JSON."""
        return json.dumps({"job": self._job, "address": self._inventory().bulk, "mark": self._mark})

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copy the state into memory for the receivers. Blocks for the copy and its digests, not for the receivers.

        Raises:
            StateMismatch, ConfigError: the state has something that cannot be kept exactly; the message names it.
        """
        self._inventory()
        tensors: dict[str, torch.Tensor] = {}
        state = encode(state_dict, "state", tensors)
        sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
        record = {"mark": self._mark, "step": step, "state": state, "sharded": sharded}
        plain = {name: local(tensor).detach().contiguous() for name, tensor in tensors.items()}
        self._memory.write(lambda: (plain, json.dumps(record, separators=(",", ":")).encode()))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state that was sent for `step`, with new tensors in host memory. Blocks until it is there.

        Raises:
            DeadlineExceeded: the state was not sent in time, or cannot be read.
            StateMismatch: the state is not sharded as `like` says.
        """
        job, address, mark = _parse(metadata)
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                with RemoteShard(address, job, COORD, timeout.total_seconds()) as shard:
                    form = shard.read_format()
                    shard.fetch(*form.record)
                    record = json.loads(read_record(shard.view, form))
                    is_theirs = record.get("mark") == mark
                    if is_theirs and record["step"] == step:
                        shard.fetch_all()
                        return self._decode(record, shard.view, form)
                    by = "" if is_theirs else ", by an earlier process"
                    reason = f"the newest there is of step {record['step']}{by}"
            except StateMismatch:
                raise
            except HoldfastError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no checkpoint of step {step} came from rank {src_rank}: {reason}")
            time.sleep(AGAIN_S)  # the sender has no call that would wake us up

    def disallow_checkpoint(self) -> None:
        """Do nothing: what was sent is already a copy."""

    def shutdown(self, wait: bool = True) -> None:
        """Free the memory: end the SMP. Receivers that are still reading from it fail. Idempotent."""
        if not self._over:
            self._over = True
            self._memory.close(keep=False)

    def _connect(self) -> Memory:
        return Memory(self._job, "", self._arena, start=self._start, protect="none", agreement=Agreement())

    def _inventory(self) -> Inventory:
        """What this node's SMP holds. If the SMP is gone, connect to a new one first."""
        try:
            return self._memory.client.inventory()
        except SmpUnavailable:
            self._memory.close()
            self._memory = self._connect()
            return self._memory.client.inventory()

    def _decode(self, record: dict[str, Any], slot: memoryview, form: SlotFormat) -> T:
        """The state, with tensors that use the memory of `slot`. Raises `StateMismatch` as `recv_checkpoint` does."""
        known: dict[str, torch.Tensor] = {}
        if self._like is not None:
            encode(self._like(), "state", known)

        def tensor(name: str) -> torch.Tensor:
            held = leaf_tensor(slot, *form.offsets[name])
            if name not in record["sharded"]:
                return held
            like = known.get(name)
            if not isinstance(like, DTensor):
                raise StateMismatch(
                    f"{name} is sharded: give MemoryTransport(like=...) a function that returns this rank's state, in "
                    "which the tensor of that name is sharded, too"
                )
            return sharded_as(like, held)

        return cast(T, decode(record["state"], tensor))


def sharded_as(like: DTensor, part: torch.Tensor) -> DTensor:
    """A tensor sharded like `like`, with `part` as this rank's. Raises `StateMismatch` if shape or dtype differ."""
    own = like.to_local()
    if own.shape != part.shape or own.dtype != part.dtype:
        raise StateMismatch(
            f"a part of {part.dtype}{list(part.shape)} was sent, and this rank's is {own.dtype}{list(own.shape)}: "
            "replicas have to be of the same size"
        )
    return DTensor.from_local(
        part.to(own.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _own_job() -> str:
    """A job id for this process alone: replicas share nothing but the training run."""
    replica, rank = os.environ.get("REPLICA_GROUP_ID", "0"), os.environ.get("RANK", "0")
    return f"{job_from_environment()}.replica{replica}.rank{rank}"


def _parse(metadata: str) -> tuple[str, Address, str]:
    try:
        data = json.loads(metadata)
        host, port = data["address"]
        return str(data["job"]), (str(host), int(port)), str(data["mark"])
    except (ValueError, LookupError, TypeError) as error:
        raise ProtocolError(f"{metadata[:80]!r} is not the metadata of a `MemoryTransport`: {error!r}") from error
