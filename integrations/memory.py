"""What all checkpoints in memory need: this rank, its SMP, and the other ranks."""

from __future__ import annotations

from pathlib import Path

from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import connect, job_from_environment


class Memory:
    """One rank's access to the checkpoints of its job. The constructor is a collective call.

    Attributes:
        coord: this rank's coordinate.
        ranks: number of ranks.
    """

    def __init__(self, job: str | None, suffix: str, arena: Path | None, *, start: bool) -> None:
        """
        Args:
            job: the job whose memory is used; default: the id of the training run with `suffix` added, so that an
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
        """Whether this is the lowest rank on its node. A collective call."""
        nodes = self.agreement.gather(self.client.node.encode())
        return nodes.index(self.client.node.encode()) == self.agreement.rank

    def finish(self, epoch: int) -> None:
        """Give up all checkpoints, and end the SMPs. A collective call."""
        if self.is_first_of_node:
            self.client.finish(epoch)

    def close(self) -> None:
        """Close the connections to the SMP and to the other ranks."""
        self.client.close()
        self.agreement.close()
