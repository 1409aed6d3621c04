"""One rank of a job, with its ways to the others."""

from __future__ import annotations

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import warn_of_stale_store
from holdfast.snapshot.copy.devices import DeviceEngines, numa_node
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.options import Options
from holdfast.snapshot.own_smp import OwnSmp
from holdfast.snapshot.resume.arrange import parse_domains
from holdfast.snapshot.state.adapter import Adapter


class Rank:
    """To make one is a collective call; blocks until this node's SMP answers, which is started if that is allowed.

    Attributes:
        coord: its coordinate. domains: what its node fails together with.
        agreement: collectives with the other ranks. The training thread's; results of `minimum` are any thread's.
        smp: this node's SMP. engine: copies between live tensors and slots. system: threads, clock, files, sockets.

    Raises:
        ConfigError, SmpUnavailable: see `parse_domains`, `OwnSmp`.
    """

    def __init__(self, adapter: Adapter, options: Options, system: System = MACHINE) -> None:
        self.system = system
        self.agreement = default_agreement()
        if self.agreement.rank == 0:
            warn_of_stale_store()
        self.coord = adapter.coordinate()
        self.domains = parse_domains(options.domains, self.coord)
        self.smp = OwnSmp(options.job_arena, options.job, self.coord, start=options.start, system=system)
        devices = {item.tensor.device for item in adapter.tensors()}
        self.engine: CopyEngine = DeviceEngines(devices)
        self.client.near = numa_node(devices)

    @property
    def client(self) -> SmpClient:
        """The training thread's connection to the SMP, and while a copy is under way the copy thread's."""
        return self.smp.client

    def close(self) -> None:
        """Give all of it back. No collective call; the SMP stays.

        Raises:
            DeadlineExceeded: a device still writes to a slot. The SMP is not told, which would give the slot to others.
        """
        self.engine.close()
        self.smp.close()
        self.agreement.close()
