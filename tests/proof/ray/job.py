"""The driver of a job on a virtual Ray cluster, which is a separate process, and the code of its ranks:
``python -m tests.proof.ray.job JSON``.

JSON: ``nodes``, ``folder``, ``by`` (``worker group``, or ``train``: Ray Train), and ``args`` as `chaos.drill.train`
takes them. Ranks append their reports to files in that folder, so the reports of a killed process are kept.
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

from holdfast.smp_daemon.shared.errors import HoldfastError

COLLECTIVE_DEADLINE_S = 60.0
MAX_FAILURES = 5


def group_worker(folder: str, life: float, args: dict[str, Any]) -> None:
    """One worker of a worker group, in one attempt. `life`: when the driver started the group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S))
    follow(folder, args, life, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))


def worker(config: dict[str, Any]) -> None:
    """One worker of Ray Train, in one worker group. Such a group has no number, so its start time identifies it."""
    import torch.distributed as dist

    began = [time.time()]
    dist.broadcast_object_list(began)
    follow(config["folder"], config["args"], began[0], 0)


def follow(folder: str, args: dict[str, Any], life: float, generation: int) -> None:
    """Train one rank, after its process group has started, to the last step."""
    import torch

    from holdfast.chaos.drill import go_through
    from holdfast.snapshot.connect import node_from_environment

    rank, node = int(os.environ["RANK"]), node_from_environment()
    torch.set_num_threads(1)
    with (Path(folder) / f"rank{rank}.jsonl").open("a") as file:

        def report(kind: str, **what: Any) -> None:
            about = {"rank": rank, "node": node, "life": life, "generation": generation, "pid": os.getpid()}
            print(json.dumps({"kind": kind, **about, "wall": time.time(), **what}), file=file, flush=True)

        go_through(args, report)


def with_worker_group(plan: dict[str, Any]) -> None:
    """Train in a worker group, and write the seats of its workers to a file."""
    from holdfast.integrations.ray.worker_group import WorkerGroup

    with WorkerGroup(plan["nodes"]) as workers:
        workers.run(group_worker, plan["folder"], time.time(), plan["args"])
    seats = [[asdict(seat) for seat in seats] for seats in workers.seats]
    (Path(plan["folder"]) / "seats.json").write_text(json.dumps(seats))


def with_train(plan: dict[str, Any]) -> None:
    """Train in worker groups of Ray Train, and check that it stored nothing where it would store checkpoints."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from holdfast.integrations.ray.train import GiveUp

    storage = Path(plan["folder"]) / "storage"
    TorchTrainer(
        worker,
        train_loop_config={"folder": plan["folder"], "args": plan["args"]},
        torch_config=TorchConfig(backend="gloo", timeout_s=int(COLLECTIVE_DEADLINE_S)),
        scaling_config=ScalingConfig(num_workers=plan["nodes"], placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
            worker_runtime_env={"env_vars": {"HOLDFAST_JOB": os.environ["HOLDFAST_JOB"]}},
            callbacks=[GiveUp()],
        ),
    ).fit()
    if kept := [path for path in storage.rglob("*") if path.is_file() and path.stat().st_size]:
        raise HoldfastError(f"Ray Train stored {len(kept)} files where it keeps checkpoints, such as {kept[0]}")


def drive(plan: dict[str, Any]) -> None:
    """Start node agents on the cluster at ``RAY_ADDRESS``, train to the end, and stop the agents."""
    import ray

    from holdfast.integrations.ray.nodes import start, stop

    ray.init(log_to_driver=False)
    try:
        start()
        {"worker group": with_worker_group, "train": with_train}[plan["by"]](plan)
        stop(remove=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    from tests.proof.ray import job as ray_job

    ray_job.drive(json.loads(sys.argv[1]))
