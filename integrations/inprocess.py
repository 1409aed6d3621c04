"""Recovery in processes that stay alive: giving up the process groups of a job that has lost a rank.

Let the failed collective's exception leave the block. Call `abandon_process_groups` and ``init_process_group``, wrap
the model in DDP again if it was, and enter a new `holdfast.InMemorySnapshot` with the same model and optimizer: it
rolls them back in place, in a new epoch. docs/restarts.md has the loop.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.collective.mesh import AgreementLost

RANK_LOST = (RuntimeError, AgreementLost)
"""What torch's collectives and holdfast's own raise when another rank is gone. Errors of the device and of the model
are `RuntimeError`, too; ``HOLDFAST_MAX_REPEATS`` stops a job that such an error restarts again and again."""

log = get_log(__name__)


def abandon_process_groups() -> None:
    """Give up every process group of this process, so that ``init_process_group`` can be called again.

    Not a collective call. Does not wait for ranks that are gone: NCCL communicators are aborted first, which ends
    kernels that wait for such ranks. Ranks that still wait for this one see that it has left. Does nothing if there are
    no groups. First release whatever uses the groups, such as DDP.
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
