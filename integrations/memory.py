"""What all checkpoints in memory need: this rank, its SMP, the other ranks, and what they find and write."""

from __future__ import annotations

from pathlib import Path

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.smp_daemon.shared.plan import RestorePlan
from holdfast.smp_daemon.shared.slotfile import SlotFormat
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import connect, job_from_environment
from holdfast.snapshot.resume.arrange import parse_protect
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import find_own
from holdfast.snapshot.writer import SlotWriter


class Memory:
    """One rank's access to the checkpoints of its job. The constructor is a collective call.

    Attributes:
        coord: this rank's coordinate.
        ranks: number of ranks.
    """

    def __init__(
        self,
        job: str | None,
        suffix: str,
        arena: str | Path | None,
        *,
        start: bool,
        protect: str = "auto",
        deadline_s: float = 120.0,
    ) -> None:
        """
        Args:
            job: the job whose memory is used; default: the id of the training run with `suffix` added, so that an
                `InMemorySnapshot` of the same run is not disturbed.
            arena, start, protect: as for `holdfast.InMemorySnapshot`.
            deadline_s: how long a write waits until it is protected, in seconds.

        Raises:
            ConfigError: an argument, or the set-up of the machine, is wrong.
        """
        self._protection, self._deadline_s = parse_protect(protect), deadline_s
        self._writer: SlotWriter | None = None
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

    def find(self) -> tuple[dict[str, str], list[Inventory]]:
        """The node of every rank, in order, and what the SMPs hold of the job's run. A collective call. Raises as
        `find_own`."""
        entered, _, inventories = find_own(self.client, self.agreement, self.coord, StartOptions.of_run())
        return entered.coords, inventories

    def recover(self, plan: RestorePlan, coord: str) -> tuple[RecoveredShard, SlotFormat]:
        """Have this node hold a shard, and read its header. Blocks; raises `HoldfastError`."""
        shard = self.client.recover(plan.sources, coord)
        return shard, believe_slot(shard.view, Claim.of_shard(plan.snapshot, coord, plan.sources.layout))

    @property
    def writer(self) -> SlotWriter:
        """Writes this rank's part. Made when it is first asked for, by a collective call: see `SlotWriter`."""
        if self._writer is None:
            shared = self.client, self.agreement, self.job, self.coord
            self._writer = SlotWriter(*shared, self._protection, self._deadline_s)
        return self._writer

    def close(self, *, keep: bool = True) -> None:
        """Close the connections to the SMP and to the other ranks. ``keep=False`` also gives up all checkpoints and
        ends the SMPs: a collective call."""
        if not keep and self.is_first_of_node:
            self.client.finish(self.writer.epoch)
        if self._writer is not None:
            self._writer.close()
        self.client.close()
        self.agreement.close()
