"""The driver of a job on a virtual Ray cluster, a process of its own, and what its members do: ``python -m
chaos.ray_job JSON``.

JSON: ``nodes``, ``folder``, ``crew`` (options of `Crew`), and ``args`` as `chaos.drill.train` takes them. Members add
what they report to files of that folder, so that what a killed process had reported is still there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

COLLECTIVE_DEADLINE_S = 60.0


def train(folder: str, life: float, args: dict[str, Any]) -> None:
    """One member, one round; `life`: of the driver."""
    import torch
    import torch.distributed as dist

    from chaos.drill import go_through

    rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S))
    with (Path(folder) / f"rank{rank}.jsonl").open("a") as file:

        def report(kind: str, **what: Any) -> None:
            about = {"rank": rank, "life": life, "generation": generation, "pid": os.getpid(), "wall": time.time()}
            print(json.dumps({"kind": kind, **about, **what}), file=file, flush=True)

        go_through(args, report)


def drive(plan: dict[str, Any]) -> None:
    """Start shepherds and a crew on the cluster of ``RAY_ADDRESS``, and wait until all have trained."""
    import ray

    from integrations.ray import start, stop
    from integrations.ray_crew import Crew

    ray.init(log_to_driver=False)
    try:
        start()
        with Crew(plan["nodes"], **plan.get("crew", {})) as crew:
            crew.run(train, plan["folder"], time.time(), plan["args"])
        (Path(plan["folder"]) / "seats.json").write_text(
            json.dumps([[asdict(seat) for seat in seats] for seats in crew.seats])
        )
        stop(remove=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    from chaos import ray_job  # the module that members know, not __main__

    ray_job.drive(json.loads(sys.argv[1]))
