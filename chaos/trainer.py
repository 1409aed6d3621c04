"""A trainer's view of its virtual cluster: its identity, its process group, and where to report."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import TRAINER

ENV = TRAINER.variable
COLLECTIVE_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Trainer:
    """One rank of one generation.

    Attributes:
        generation: how often the job was restarted before.
        store: host and port of the process group's store, and the descriptor of its listening socket, for rank 0.
        events: path of the unix socket on which the cluster receives reports.
        args: the job's own arguments.
    """

    rank: int
    world: int
    generation: int
    store: tuple[str, int, int]
    events: str
    args: dict[str, Any]

    @classmethod
    def from_environment(cls) -> Trainer:
        """The trainer that this process is, as the cluster says. Raises `ConfigError` outside a virtual cluster."""
        if not (text := TRAINER.text()):
            raise ConfigError("this is not a trainer of a virtual cluster")
        data = json.loads(text)
        return cls(**{**data, "store": tuple(data["store"])})

    def init_process_group(self) -> None:
        """Join the job's process group. Blocks until every rank has joined.

        If there are GPUs, the rank takes one. Tensors on GPUs go through NCCL if each rank has its own GPU; otherwise
        through gloo, since NCCL refuses to share a GPU.
        """
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        host, port, listening = self.store
        store = TCPStore(
            host,
            port,
            self.world,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
            master_listen_fd=listening if self.rank == 0 else None,
        )
        backend = "gloo"
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            torch.cuda.set_device(self.rank % count)
            backend = "cpu:gloo,cuda:nccl" if self.world <= count else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
        )

    def report(self, kind: str, **what: Any) -> None:
        """Report an event to the cluster; blocks until it is sent."""
        clocks = {"at": time.monotonic(), "wall": time.time()}
        event = {"kind": kind, "rank": self.rank, "generation": self.generation, **clocks, **what}
        self._events.sendall(json.dumps(event).encode() + b"\n")

    @cached_property
    def _events(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(COLLECTIVE_DEADLINE_S)
        sock.connect(self.events)
        return sock


def rehearse() -> None:
    """Do once, alone and tiny, what every trainer does: resolve a name, join a process group, step an optimizer."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    socket.getaddrinfo("localhost", None)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    dist.destroy_process_group()
