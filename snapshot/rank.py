"""One rank of a job: how far it is, and its connections to the others and to its SMP."""

from __future__ import annotations

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.settings import LEAVE_ON
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import warn_of_stale_store
from holdfast.snapshot.copy.devices import DeviceEngines, numa_node
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.notice import Notice
from holdfast.snapshot.options import Options
from holdfast.snapshot.own_smp import OwnSmp
from holdfast.snapshot.progress import RankProgress
from holdfast.snapshot.resume.arrange import parse_domains
from holdfast.snapshot.state.adapter import Adapter


class Rank:
    """Making one is a collective call. It blocks until this node's SMP answers, and starts it if that is allowed.

    Attributes:
        coord: its coordinate. domains: the failure domains of its node. progress: how far it is.
        agreement: collectives with the other ranks. Used by the training thread; any thread may call results of
            `minimum`.
        smp: this node's SMP. engine: copies between live tensors and slots. system: threads, clock, files, sockets.

    Raises:
        ConfigError, SmpUnavailable: see `parse_domains`, `OwnSmp`.
    """

    def __init__(self, adapter: Adapter, options: Options, system: System = MACHINE) -> None:
        self.system = system
        self.progress = RankProgress()
        self.agreement = default_agreement()
        if self.agreement.rank == 0:
            warn_of_stale_store()
        self.coord = adapter.coordinate()
        self.domains = parse_domains(options.domains, self.coord)
        self.smp = OwnSmp(options.job_arena, options.job, self.coord, start=options.start, system=system)
        devices = {item.tensor.device for item in adapter.tensors()}
        self.engine: CopyEngine = DeviceEngines(devices)
        self.client.near = numa_node(devices)
        self._notice = Notice(LEAVE_ON.value())

    @property
    def client(self) -> SmpClient:
        """The connection to the SMP that the training thread uses, and the copy thread while a copy runs."""
        return self.smp.client

    @property
    def leaves(self) -> bool:
        """Whether this process or its SMP was told that this node is to be taken away."""
        return self._notice.given or self.client.board.leaving

    def heartbeat(self) -> None:
        """Tell the SMP that this process is alive, and where it is."""
        self.client.heartbeat(self.progress.phase, self.progress.step)

    def close(self) -> None:
        """Release everything. No collective call; the SMP stays.

        Raises:
            DeadlineExceeded: a device still writes to a slot. The SMP is not told, as it would give the slot to others.
        """
        self._notice.withdraw()
        self.engine.close()
        self.smp.close()
        self.agreement.close()
