"""What launchers say about a job in its processes' environment: its id, and whether it spans several hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.smp_daemon.shared.addresses import LOOPBACK, parse_hosts
from holdfast.smp_daemon.shared.errors import ConfigError

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
