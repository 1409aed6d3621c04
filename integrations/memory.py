"""What checkpoints in memory have in common: this rank, its SMP, and the others."""

from __future__ import annotations

from pathlib import Path

from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import connect, job_from_environment


class Memory:
    """One rank's way to the checkpoints of its job. To make one is a collective call.

    Attributes:
        coord: this rank's coordinate.
        ranks: how many there are.
    """

    def __init__(self, job: str | None, suffix: str, arena: Path | None, *, start: bool) -> None:
        """
        Args:
            job: whose memory it is; default that of the training run with `suffix` added, so that an
                `InMemorySnapshot` of the same run is not disturbed.
            arena, start: as for `holdfast.InMemorySnapshot`.
        """
        self.job = job or f"{job_from_environment()}{suffix}"
        self.agreement = default_agreement()
        self.coord = f"rank{self.agreement.rank}"
        self.ranks = len(self.agreement.gather(self.coord.encode()))
        self.client = connect(arena_path(self.job, arena), self.job, start=start)

    @property
    def is_first_of_node(self) -> bool:
        """Whether no lower rank lives on this node. A collective call."""
        nodes = self.agreement.gather(self.client.node.encode())
        return nodes.index(self.client.node.encode()) == self.agreement.rank

    def finish(self, epoch: int) -> None:
        """Give all checkpoints up; the SMPs end. A collective call."""
        if self.is_first_of_node:
            self.client.finish(epoch)

    def close(self) -> None:
        """Let go of the SMP, and of the process group."""
        self.client.close()
        self.agreement.close()
