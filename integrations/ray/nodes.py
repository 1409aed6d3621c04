"""SMPs on a Ray cluster: one per node, out of Ray's reach, looked after by a *node agent*, a Ray actor.

Whatever Ray starts dies with the raylet that started it. So the SMP is a process of its own, in a session of its own.
The agent only starts it, adopts one that already runs, and starts another if it dies while its arena exists. A *head
agent* watches which nodes there are. All agents are detached, named, and reserve no CPU. No recovery depends on them: a
trainer that finds no SMP on its node starts one itself.

An arena belongs to the host, not to Ray: a raylet that comes back as another Ray node finds the SMP that it left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.paths import arena_path, checked
from holdfast.smp_daemon.shared.spawn import running_owner
from holdfast.snapshot.connect import job_from_environment, node_from_environment, start_here

NAMESPACE = "holdfast"
"""The Ray namespace of the agents' names."""

START_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 10.0
LOOK_EVERY_S = 1.0
REFUSED_AGAIN_S = 0.2
PREFIX = "HOLDFAST_"
SUBREAPER_ENV = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class NodeSmp:
    """The SMP of one Ray node.

    Attributes:
        ray_node: Ray's id of the node.
        node: holdfast's name of the node; empty if its agent did not answer.
        pid: process id of the SMP; 0 if none runs.
        trouble: why there is no SMP or no answer; empty if all is well.
    """

    ray_node: str
    node: str = ""
    pid: int = 0
    host: str = ""
    bulk_port: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class JobSmps:
    """The result of `status`.

    Attributes:
        sentence: which step of the job is safe against which losses, as in ``holdfast status``; empty if no SMP runs.
    """

    job: str
    smps: tuple[NodeSmp, ...]
    sentence: str = ""


def start(
    job: str | None = None,
    *,
    on: str = "",
    environment: Mapping[str, str] | None = None,
    deadline_s: float = START_DEADLINE_S,
) -> JobSmps:
    """Start an SMP on every node of the cluster that this process is connected to, and on nodes that join later.

    Blocks until each node has one. SMPs that already run are left as they are, whatever `environment` says.

    Args:
        job: id of the training run; default from the environment, as for `InMemorySnapshot`.
        on: only use nodes that have this Ray resource, such as ``"GPU"``.
        environment: ``HOLDFAST_...`` variables for the SMPs; the environment of a node's raylet takes precedence.
        deadline_s: how long to wait for the SMPs, in seconds.

    Raises:
        ConfigError: an argument is wrong, or a node's set-up is; then the message is the SMP's.
        DeadlineExceeded: not all nodes had an SMP within `deadline_s`; those that have one keep it.
    """
    name, given = _job(job), dict(environment or {})
    if wrong := sorted(key for key in given if not key.startswith(PREFIX)):
        raise ConfigError(f"environment has {wrong[0]!r}: only {PREFIX}... is for SMPs; set others in a runtime_env")
    limit = time.monotonic() + deadline_s
    head = ray.remote(HeadAgent).options(**_options(_head_name(name)), max_concurrency=4).remote(name, on, given)
    while True:
        _answer(head.tend.remote(again=True), limit)
        found = [_ask(name, node, limit, begin=True) for node in nodes(on)]
        broken = [smp for smp in found if not smp.pid]
        if not broken:
            return status(name, on=on)
        if time.monotonic() > limit:
            said = "; ".join(f"{smp.node or smp.ray_node}: {smp.trouble}" for smp in broken)
            raise DeadlineExceeded(f"no SMP on {len(broken)} nodes within {deadline_s:.0f} s: {said}")


def status(job: str | None = None, *, on: str = "") -> JobSmps:
    """The state of a job's SMPs, node by node. Waits at most `ANSWER_DEADLINE_S` for each answer."""
    name = _job(job)
    smps = tuple(_ask(name, node, time.monotonic() + ANSWER_DEADLINE_S) for node in nodes(on))
    first = next((smp for smp in smps if smp.pid), None)
    sentence = ""
    if first is not None:
        agent = _find(_name(name, first.ray_node))
        try:
            sentence = _answer(agent.overview.remote(), time.monotonic() + ANSWER_DEADLINE_S) if agent else ""
        except (RayActorError, HoldfastError) as error:
            sentence = f"not known: {error}"
    return JobSmps(name, smps, sentence)


def stop(job: str | None = None, *, remove: bool = False, force: bool = False) -> JobSmps:
    """End a job's node agents and SMPs.

    Args:
        remove: also free the memory; without it, what the SMPs hold stays there.
        force: end SMPs even while trainers are connected, which then start other SMPs.

    Raises:
        HoldfastError: an SMP refused; this SMP, its agent and those of the nodes after it are still there.
    """
    name = _job(job)
    found = tuple(_ask(name, node, time.monotonic() + ANSWER_DEADLINE_S) for node in nodes())
    head = _find(_head_name(name))
    if head is not None:
        ray.kill(head)
    for node in nodes():
        agent = _find(_name(name, node))
        if agent is not None:
            _end(agent, remove, force)
            ray.kill(agent)
    return JobSmps(name, found)


def nodes(on: str = "") -> list[str]:
    """Ray's ids of the nodes that Ray considers alive; with `on`, only of those that have this resource."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and (not on or on in node["Resources"]))


# ---------------------------------------------------------------------- the actors


class NodeAgent:
    """Looks after the SMP of its node. A Ray actor."""

    def __init__(self, job: str, environment: Mapping[str, str]) -> None:
        """Start or adopt the SMP. Raises `HoldfastError`."""
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._job, self._arena = job, arena_path(job)
        self._over = threading.Event()
        # Held while an SMP is started or ended, by the watching thread and by Ray's threads that answer calls. So if
        # several of them see a death, only one SMP is started, and none is started after `stop`.
        self._lock = threading.Lock()
        self._episodes = Episodes(log)
        if os.environ.get(SUBREAPER_ENV, "").lower() in ("1", "true"):
            log.warning("%s is set: raylets kill whatever their workers leave, SMPs too: unset it", SUBREAPER_ENV)
        self.report(begin=True)
        threading.Thread(target=self._watch, name="node-agent", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                self._tend()
                self._episodes.end("smp", "the SMP runs")
            except (HoldfastError, RayError) as error:
                self._episodes.begin("smp", "the SMP is gone, and none could be started: %s", error)

    def _tend(self) -> None:
        """Start an SMP if the one here died. A job that has ended leaves no arena, so nothing is started for it."""
        with self._lock:
            if os.path.lexists(self._arena / "smp.json") and not self._over.is_set():
                self._begin()

    def _begin(self) -> None:
        if running_owner(self._arena) is None:
            hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
            start_here(self._arena, self._job, f"Ray has {len(hosts)} of them" if len(hosts) > 1 else "")

    def report(self, begin: bool = False) -> dict[str, Any]:
        """The fields of `NodeSmp` that are known here. `begin`: start an SMP if none runs. Raises `HoldfastError`."""
        if begin:
            with self._lock:
                self._begin()
        owner = running_owner(self._arena)
        if owner is None:
            return {"node": node_from_environment(), "trouble": "none runs: its job has ended, or has not begun"}
        return {"node": owner.node, "pid": owner.pid, "host": owner.host, "bulk_port": owner.bulk_port}

    def overview(self) -> str:
        """Which step is safe against which losses. Blocks for some seconds."""
        owner = running_owner(self._arena)
        return look(self._job, owner.control).sentence() if owner else ""

    def stop(self, remove: bool, force: bool) -> None:
        """End the SMP. Raises `HoldfastError` if it refuses; then this agent looks after it as before."""
        with self._lock:
            if running_owner(self._arena) is not None:
                client = SmpClient(self._arena, self._job)
                try:
                    client.stop(remove=remove, force=force)
                finally:
                    client.close()
            self._over.set()


class HeadAgent:
    """Gives every node a node agent. A Ray actor, one per job, on any node."""

    def __init__(self, job: str, on: str, environment: Mapping[str, str]) -> None:
        self._job, self._on = job, on
        self._environment = dict(environment)
        # Guards `_agents`. The watching thread and Ray's threads that answer `tend` take it. A thread that holds it
        # never waits for a node agent, because an agent that starts an SMP takes minutes.
        self._lock = threading.Lock()
        self._agents: dict[str, Any] = {}
        threading.Thread(target=self._watch, name="head-agent", daemon=True).start()

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(LOOK_EVERY_S):
            try:
                self.tend()
            except RayError as error:
                log.warning("the nodes could not be looked at, or an agent not be created; trying again: %s", error)

    def tend(self, again: bool = False) -> None:
        """Create node agents on new nodes.

        Args:
            again: also on nodes whose agent is dead for good; and wait for all agents that are created.

        Raises:
            ConfigError: an agent that was waited for could not start an SMP; the message is the SMP's.
        """
        made = {}
        with self._lock:
            alive = nodes(self._on)
            self._agents = {node: actor for node, actor in self._agents.items() if node in alive}
            for node in alive:
                if node not in self._agents or (again and _find(_name(self._job, node)) is None):
                    made[node] = self._agents[node] = self._make(node)
        for node, agent in made.items() if again else ():
            try:
                ray.get(agent.report.remote())
            except RayActorError as error:
                if error.actor_init_failed:
                    raise ConfigError(f"the node agent of {node} could not start an SMP: {error}") from error
                log.warning("the node agent of %s has died again: %s", node, error)

    def _make(self, node: str) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        options = _options(_name(self._job, node))
        actor = ray.remote(NodeAgent).options(**options, max_concurrency=4, scheduling_strategy=pinned)
        return actor.remote(self._job, self._environment)


def _options(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
    }


def _name(job: str, node: str) -> str:
    return f"node-agent-{job}-{node}"


def _head_name(job: str) -> str:
    return f"head-agent-{job}"


def _job(job: str | None) -> str:
    return checked(job or job_from_environment(), "a job id")


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _ask(job: str, node: str, limit: float, *, begin: bool = False) -> NodeSmp:
    """The report of a node's agent. With `begin`, the agent starts an SMP first if none runs."""
    agent = _find(_name(job, node))
    if agent is None:
        return NodeSmp(node, trouble="it has no node agent")
    try:
        return NodeSmp(node, **_answer(agent.report.remote(begin), limit))
    except (RayActorError, DeadlineExceeded) as error:
        return NodeSmp(node, trouble=f"its node agent does not answer: {error}")
    except HoldfastError as error:
        if begin:
            raise
        return NodeSmp(node, trouble=str(error))


def _end(agent: Any, remove: bool, force: bool) -> None:
    """Have a node agent end its SMP. Retries for `ANSWER_DEADLINE_S`, because trainers may still be ending."""
    limit = time.monotonic() + ANSWER_DEADLINE_S
    while True:
        try:
            _answer(agent.stop.remote(remove, force), limit)
            return
        except ConfigError:
            if time.monotonic() > limit:
                raise
            time.sleep(REFUSED_AGAIN_S)


def _answer(reference: Any, limit: float) -> Any:
    """The answer of an actor. Raises the `HoldfastError` that the actor raised, or `DeadlineExceeded`."""
    try:
        return ray.get(reference, timeout=max(0.0, limit - time.monotonic()))
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"no answer in time: {error}") from error
    except RayTaskError as error:
        if isinstance(error.cause, HoldfastError):
            raise error.cause from error
        raise


__all__ = ["JobSmps", "NodeSmp", "nodes", "start", "status", "stop"]
