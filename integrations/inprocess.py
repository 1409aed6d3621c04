"""Recovery in processes that stay alive: giving up the process groups of a job that has lost a rank.

Leave the block by the exception of the failed collective, `abandon_process_groups`, ``init_process_group`` again, wrap
the model again if it was in DDP, and enter a new `holdfast.InMemorySnapshot` with the same model and optimizer: they
are rolled back in place, in a new epoch. docs/in-process.md has the loop.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.collective.mesh import AgreementLost

RANK_LOST = (RuntimeError, AgreementLost)
"""What is raised where another rank is gone: by torch's collectives, and by holdfast's own. Errors of the device and of
the model are `RuntimeError`, too; a job that goes round in a circle by those is stopped by ``HOLDFAST_MAX_REPEATS``."""

log = get_log(__name__)


def abandon_process_groups() -> None:
    """Give up every process group of this process, so that ``init_process_group`` can be called again.

    Not a collective call, and does not wait for ranks that are gone: communicators of NCCL are aborted first, which
    ends kernels that wait for them. Ranks that still wait for this one see that it has left. Harmless where there is
    none. Let go of whatever uses the groups before, such as DDP.
    """
    if not dist.is_initialized():
        return
    backends = {str(dist.get_backend(group)) for group in distributed_c10d._world.pg_map}
    try:
        if "nccl" in backends:
            distributed_c10d._abort_process_group()
    except RuntimeError as error:
        log.warning("a process group could not be aborted and is destroyed as it is: %s", error)
    if dist.is_initialized():
        dist.destroy_process_group()
