"""A training job as Ray actors, of which only those that died are restarted.

Ray restarts actors and moves bundles of a placement group off dead nodes; a *worker group* uses both. In each *attempt*
every worker calls the same function, which is written as for torchrun and enters `InMemorySnapshot`. When a worker
dies, the collectives of the others fail, and their calls end; their processes stay. As soon as Ray has restarted the
dead worker, the next attempt begins, from the newest snapshot in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.integrations.survivors.attempts import JobAttempt
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, Repeated, StateMismatch, Unrecoverable
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.connect import job_from_environment, node_from_environment

GRACE_S = 5.0
"""How long workers may take to return after another one has failed, in seconds; then Ray restarts them, too."""

MUSTER_DEADLINE_S = 600.0
NOT_RETRIED = (ConfigError, Repeated, StateMismatch, Unrecoverable)
"""Errors that another attempt would only raise again."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker is in an attempt.

    Attributes:
        node: holdfast's name of the node.
        ray_node: Ray's id of the node.
        pid: the worker's process id.
        attempts: number of earlier attempts in which this process took part.
    """

    rank: int
    node: str
    ray_node: str
    pid: int
    attempts: int


class WorkerGroup:
    """Actors that train together, `per_node` on each of `nodes` distinct nodes.

    A context manager: leaving it ends the actors. It does not own the SMPs: see `integrations.ray.nodes.start`.

    Args:
        nodes: number of nodes, all distinct (``STRICT_SPREAD``), so that the nodes of a protection group are, too.
        per_node: workers on each node. Ranks go node by node, at first in the order of the nodes' names.
        resources: resources of one worker, by Ray's names; default: one CPU.
        job: id of the training run; default from the environment, as for `InMemorySnapshot`.
        environment: variables for the workers, besides those that torchrun would set; the environment of a node's
            raylet takes precedence.
        deadline_s: how long to wait for nodes, at the start and to replace a lost one, in seconds.
        grace_s: see `GRACE_S`.
        restarts: how many failed attempts are followed by another.
        reuse: whether surviving processes continue. If False, Ray restarts all of them, as is needed if a broken
            communicator spoils the process.
        options: further Ray options for each actor, such as a ``runtime_env``.

    Attributes:
        seats: the seats of all ranks, for every attempt so far.
    """

    def __init__(
        self,
        nodes: int,
        per_node: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        job: str | None = None,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = MUSTER_DEADLINE_S,
        grace_s: float = GRACE_S,
        restarts: int = 100,
        reuse: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if nodes < 1 or per_node < 1:
            raise ConfigError(f"a worker group of {nodes} x {per_node}: at least one worker on at least one node")
        self._nodes, self._per_node = nodes, per_node
        self._resources = dict(resources or {"CPU": 1})
        self._job = job or job_from_environment()
        self._environment = dict(environment or {})
        self._deadline_s, self._grace_s = deadline_s, grace_s
        self._restarts, self._reuse = restarts, reuse
        self._options = dict(options or {})
        self.seats: list[tuple[Seat, ...]] = []

    def __enter__(self) -> Self:
        """Ask Ray for the nodes and the actors; returns before they are there."""
        bundle = {name: amount * self._per_node for name, amount in self._resources.items()}
        self._group = placement_group([bundle] * self._nodes, strategy="STRICT_SPREAD")
        self._workers = [self._make(index) for index in range(self._nodes * self._per_node)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            ray.kill(worker)
        remove_placement_group(self._group)

    def _make(self, index: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, index // self._per_node)
        amounts = dict(self._resources)
        return (
            ray.remote(Worker)
            .options(
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=place,
                **self._options,
            )
            .remote(index % self._per_node, self._per_node, self._job, self._environment)
        )

    def run(self, train: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``train(*args)`` in every worker, in attempts, until all return. Returns their results by rank. Blocks.

        `train` makes its process group, model and optimizer anew each time, as a script under torchrun does. It may
        keep what is expensive to load in globals of a module.

        Raises:
            HoldfastError: one of `NOT_RETRIED`, which would only happen again.
            DeadlineExceeded: Ray had no node for a worker within the worker group's `deadline_s`.
            RayTaskError: `train` raised in two attempts in a row in which no worker died, or in the last attempt.
            RayActorError: a worker died in the last attempt.
        """
        raised = 0
        for number in range(self._restarts + 1):
            self._muster()
            results, error = self._attempt(number, train, args)
            if error is None:
                return results
            if isinstance(error, NOT_RETRIED):
                raise error
            raised = 0 if isinstance(error, RayActorError) else raised + 1
            if raised > 1 or number == self._restarts:
                raise error
            log.warning("attempt %d failed; starting another: %s", number, _first_line(error))
        raise AssertionError("an attempt either returns or raises")

    def _muster(self) -> None:
        """Wait until every worker runs, and note its seat. The first time, order workers by node."""
        limit = time.monotonic() + self._deadline_s
        waiting = [worker.sit.options(max_task_retries=-1).remote() for worker in self._workers]
        try:
            found = ray.get(waiting, timeout=max(0.0, limit - time.monotonic()))
            if not self.seats:
                order = by_node([node for node, *_ in found], self._per_node)
                self._workers = [self._workers[index] for index in order]
                found = [found[index] for index in order]
        except GetTimeoutError:
            _, missing = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            raise DeadlineExceeded(
                f"{len(missing)} of {len(waiting)} workers have no place within {self._deadline_s:.0f} s: the group "
                f"needs {self._nodes} distinct nodes with {self._resources} for each of {self._per_node} workers"
            ) from None
        self.seats.append(tuple(Seat(rank, *seat) for rank, seat in enumerate(found)))

    def _attempt(
        self, number: int, train: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[list[Any], Exception | None]:
        """Run one attempt. Returns the workers' results, and the error that says most, see `worse`, or None."""
        try:
            store = ray.get(self._workers[0].host.remote(), timeout=self._deadline_s)
        except RayActorError as error:
            return [], error
        world = len(self._workers)
        calls = {
            worker.call.remote(number, rank, world, store, train, args): rank
            for rank, worker in enumerate(self._workers)
        }
        results: list[Any] = [None] * world
        found: Exception | None = None
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=None if found is None else self._grace_s)
            if not done:
                log.warning("%d workers did not return; restarting them", len(waiting))
                for each in waiting:
                    ray.kill(self._workers[calls[each]], no_restart=False)
            for each in done:
                try:
                    results[calls[each]] = ray.get(each)
                except (RayActorError, RayTaskError) as error:
                    found = worse(found, error)
        if found is not None and not self._reuse:
            for worker in self._workers:
                ray.kill(worker, no_restart=False)
        return results, found


class Worker:
    """One process of a worker group. A Ray actor."""

    def __init__(self, local_rank: int, local_size: int, job: str, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._attempts = 0
        self._store: Any = None
        self._started = dict(os.environ)
        os.environ |= {
            "HOLDFAST_JOB": job,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
        }

    def sit(self) -> tuple[str, str, int, int]:
        """The fields of `Seat`, without the rank."""
        return node_from_environment(), ray.get_runtime_context().get_node_id(), os.getpid(), self._attempts

    def host(self) -> tuple[str, int]:
        """Host a store for one attempt, and return its address."""
        from torch._C._distributed_c10d import TCPStore

        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def call(
        self, number: int, rank: int, world: int, store: tuple[str, int], train: Callable[..., Any], args: Any
    ) -> Any:
        """Take part in an attempt, like a worker that torchrun started with its agent's store."""
        import torch.distributed as dist

        from holdfast.integrations.inprocess import abandon_process_groups, forget
        from holdfast.snapshot.hook import SnapshotHook
        from holdfast.snapshot.state.audit import StepsDone, raise_at_the_end

        raise_at_the_end()
        SnapshotHook.blocks.clear()
        self._attempts += 1
        os.environ |= JobAttempt(number, *store).environment(self._started)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        try:
            done = train(*args)
            if dist.is_initialized():
                dist.destroy_process_group()
            return done
        except StepsDone:
            abandon_process_groups()
            return None
        except BaseException as error:
            abandon_process_groups()
            forget(error)
            raise


def by_node(nodes: Sequence[str], per_node: int) -> list[int]:
    """The order in which workers take ranks, so that a group on the same nodes has the same ranks on them. Pure.

    Args:
        nodes: the node of each worker; `per_node` workers in a row are on the same node.
    """
    firsts = sorted(range(0, len(nodes), per_node), key=lambda first: (nodes[first], first))
    return [first + local for first in firsts for local in range(per_node)]


def worse(one: Exception | None, other: Exception) -> Exception:
    """The error that says more: one of `NOT_RETRIED`, else a worker's death, else the one that came first. Pure."""

    def rank(error: Exception) -> int:
        return 0 if isinstance(error, NOT_RETRIED) else 1 if isinstance(error, RayActorError) else 2

    return other if one is None or rank(other) < rank(one) else one


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


__all__ = ["Seat", "WorkerGroup"]
