"""Find this node's SMP, or start it; and what launchers say in the environment about the job and its hosts."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.smp_daemon.shared.addresses import LOOPBACK, parse_hosts
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.paths import arena_path, known_owner, socket_path
from holdfast.smp_daemon.shared.settings import HOST, JOB, NODE, OF_AN_SMP
from holdfast.smp_daemon.shared.spawn import START_DEADLINE_S, start_smp
from holdfast.smp_daemon.shared.system import MACHINE, System

TRIES = 3
"""How often a trainer looks for an SMP: one that served at the last look may have been that of a job at its end."""

SLOW_S = 5.0
"""After how many seconds without an answer a process says whom it waits for. A start takes half a second."""

log = get_log(__name__)


def connect(arena: Path, job: str, *, start: bool, coord: str | None = None, system: System = MACHINE) -> SmpClient:
    """Connect to the SMP that serves `arena`; if there is none, start it if `start` allows. Blocks.

    Args:
        coord: the trainer's coordinate, if the SMP is to watch the trainer.

    Raises:
        SmpUnavailable: there is none.
        ConfigError: it cannot be started, serves another job, or the other hosts of the job cannot reach it.
    """
    client = _reach(arena, job, TRIES if start else 1, coord, system)
    try:
        if spans := spanning(os.environ):
            host = client.inventory().host
            check_reachable(host, spans, f"SMP {client.pid} of this node, which `holdfast smp stop` ends, listens")
        if coord is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            _warn_of_settings(client)
    except BaseException:
        client.close()
        raise
    return client


def _warn_of_settings(client: SmpClient) -> None:
    """Warn of settings that have no effect: an SMP that served before this start keeps those that it was started with.
    One of a release that does not tell its settings is taken to have the same."""
    told = client.settings
    ignored = [
        each.variable
        for each in OF_AN_SMP
        if each.variable in os.environ and told.get(each.variable, each.text()) != each.text()
    ]
    if ignored:
        log.warning(
            "%s: the SMP of this node, process %d, was started with something else, which it keeps. To apply what is "
            "set now, end the job, run `holdfast smp stop` on each node, and start the job again",
            ", ".join(ignored),
            client.pid,
        )


def _reach(arena: Path, job: str, tries: int, coord: str | None, system: System) -> SmpClient:
    """Connect to the SMP, which is started up to `tries` - 1 times. Raises `SmpUnavailable`, and as `start_here`."""
    reached = system.Event()
    system.Thread(target=_say_if_slow, args=(arena, reached, system), name="holdfast-slow", daemon=True).start()
    try:
        for _ in range(tries - 1):
            with suppress(SmpUnavailable):
                return SmpClient(arena, job, coord, system)
            start_here(arena, job, system=system)
        return SmpClient(arena, job, coord, system)
    finally:
        reached.set()


def _say_if_slow(arena: Path, reached: threading.Event, system: System) -> None:
    """Say once whom this process waits for: it may be for minutes."""
    if not reached.wait(SLOW_S):
        smp = known_owner(arena, system) if socket_path(arena).exists() else None
        whom = f"SMP {smp.pid}, whose log is {arena / 'smp.log'}" if smp is not None else "one that is being started"
        log.warning("for %.0f s no SMP has let this process in at %s: waiting for %s", SLOW_S, arena, whom)


def start_here(
    arena: Path,
    job: str,
    spans: str = "",
    ports: tuple[int, int] = (0, 0),
    deadline_s: float = START_DEADLINE_S,
    system: System = MACHINE,
) -> None:
    """Start an SMP for this node, unless another rank is faster. Blocks until one serves.

    Args:
        spans: how the caller knows that the job spans several hosts, if the environment does not say so; see
            `spanning`.
        ports, deadline_s: see `start_smp`.

    Raises:
        ConfigError: it cannot be started, or the other hosts could not reach it.
        DeadlineExceeded: none serves in time.
    """
    node = node_from_environment()
    host = HOST.text()
    check_reachable(host, spans or spanning(os.environ))
    start_smp(job, node, arena, host=host, ports=ports, deadline_s=deadline_s, system=system)


def prefetch(*, job: str | None = None, arena: str | Path | None = None) -> threading.Thread:
    """Get this node's SMP ready while the job still imports and builds its model. Optional; returns at once.

    Starts an SMP if none serves, which checks and repairs what an earlier one left. Errors are logged here, and raised
    when `InMemorySnapshot` is entered.

    Args:
        job, arena: as for `InMemorySnapshot`.

    Returns:
        The thread that does it; there is no need to wait for it.

    Raises:
        ConfigError: the job has no id.
    """
    name = job or job_from_environment()
    path = arena_path(name, arena)

    def work() -> None:
        try:
            connect(path, name, start=True).close()
        except HoldfastError as error:
            log.warning("the SMP could not be prepared ahead of time: %s", error)

    thread = threading.Thread(target=work, name="holdfast-prefetch", daemon=True)
    thread.start()
    return thread


def job_from_environment() -> str:
    """The job id that the launcher gave: ``HOLDFAST_JOB``, torchrun's ``--rdzv-id``, or Slurm's job id.

    Raises:
        ConfigError: none is set.
    """
    job = JOB.value() or _rendezvous_id(os.environ) or os.environ.get("SLURM_JOB_ID")
    if not job:
        raise ConfigError(
            "this training run has no id: set HOLDFAST_JOB, the same for every rank and every restart of the run, "
            "or pass job="
        )
    return job


def _rendezvous_id(environment: Mapping[str, str]) -> str:
    """torchrun's run id; empty if there is none. On one node a UUID counts as none: ``torchrun --standalone`` draws
    another one at each start, and nothing tells that from one that was given."""
    found = environment.get("TORCHELASTIC_RUN_ID", "none")
    drawn = environment.get("GROUP_WORLD_SIZE") == "1" and re.fullmatch(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found
    )
    return "" if found == "none" or drawn else found


def warn_of_stale_store() -> None:
    """Warn if torchrun was started in a way that makes its own restarts of workers fail.

    By default its agents keep one TCPStore for all restarts, in which the next workers find the addresses of the dead
    ones (pytorch/pytorch#135712).
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0":
        log.warning(
            "torchrun may restart workers %s times, and restarted workers cannot connect, because its store keeps the "
            "addresses of dead ones: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d",
            restarts,
        )


def node_from_environment() -> str:
    """This node's name: ``HOLDFAST_NODE``, or the name of the host."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename)
    return NODE.value() or host.lstrip("._-")[:64] or "node"


NODE_COUNTS = ("PET_NNODES", "LWS_GROUP_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""Variables of Kubeflow's trainers, LeaderWorkerSets and Slurm; the first that is set counts. ``2:4`` is a range."""


def spanning(environment: Mapping[str, str]) -> str:
    """The variables by which the launcher says that the job spans several hosts; empty if it does not say so.

    What torchrun and Ray say about the workers counts before what is said about an allocation or a pod.
    """
    world, local = (_count(environment.get(name, "")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world and local:
        return f"WORLD_SIZE={world}, LOCAL_WORLD_SIZE={local}" if world > local else ""
    for name in NODE_COUNTS:
        if count := _count(environment.get(name, "").rpartition(":")[2]):
            return f"{name}={environment[name]}" if count > 1 else ""
    if _count(environment.get("JOB_COMPLETION_INDEX", "")):  # set for the pods of an indexed Job or a JobSet
        return f"JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']}"
    return ""


def check_reachable(hosts: str, spans: str, what: str = "the SMP of this node would listen") -> None:
    """Check that a job's other nodes can reach an SMP that listens on `hosts`, one address or several.

    A loopback address other than the usual one is accepted: the user then runs several nodes on this host.

    Args:
        spans: see `spanning`.

    Raises:
        ConfigError: they cannot, or these are no addresses.
    """
    if spans and parse_hosts(hosts)[0] == LOOPBACK:
        raise ConfigError(
            f"the job spans several hosts ({spans}), and {what} on {LOOPBACK}, where no other host reaches it. "
            "Set on every host, for trainers and SMP:\n"
            "    export HOLDFAST_HOST=$(hostname -I | cut -d' ' -f1)   # this host's address, as the others reach it\n"
            "    export HOLDFAST_TOKEN_FILE=$HOME/.holdfast-token      # the same secret everywhere, chmod 600\n"
            "(If all nodes are on this one host, give each a loopback address of its own: HOLDFAST_HOST=127.0.0.2, ...)"
        )


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
