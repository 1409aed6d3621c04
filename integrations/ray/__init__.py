"""holdfast under Ray: SMPs that Ray cannot take down, and training actors of which only those that died are restarted.

::

    import ray, holdfast.integrations.ray

    ray.init("auto")
    holdfast.integrations.ray.start(job="run-7")                      # an SMP per node, also on nodes that join later
    with holdfast.integrations.ray.WorkerGroup(nodes=4, job="run-7") as workers:
        losses = workers.run(train, 10_000)                 # `train` enters InMemorySnapshot as usual

docs/ray.md lists which failures are survived, and how.
"""

from holdfast.integrations.ray.nodes import JobSmps, NodeSmp, start, status, stop
from holdfast.integrations.ray.worker_group import Seat, WorkerGroup

__all__ = ["JobSmps", "NodeSmp", "Seat", "WorkerGroup", "start", "status", "stop"]
