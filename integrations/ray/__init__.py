"""holdfast under Ray: SMPs that Ray cannot take down, and training actors of which only what died is made again.

::

    import ray, holdfast.integrations.ray

    ray.init("auto")
    holdfast.integrations.ray.start(job="run-7")                      # an SMP per node, nodes that join later included
    with holdfast.integrations.ray.Crew(nodes=4, job="run-7") as crew:
        losses = crew.run(train, 10_000)                 # `train` enters InMemorySnapshot as ever

docs/ray.md says what survives what.
"""

from holdfast.integrations.ray.crew import Crew, Seat
from holdfast.integrations.ray.nodes import JobSmps, NodeSmp, start, status, stop

__all__ = ["Crew", "JobSmps", "NodeSmp", "Seat", "start", "status", "stop"]
