"""Attempts at one training, and what the launcher says about this process's part in them. Pure.

An *attempt* begins with all ranks and ends when one of them dies. Attempts are numbered from 0 within one start by the
launcher. Each has a store of its own for `torch.distributed`, in which there is no address of a dead process.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from holdfast.smp_daemon.shared.errors import ProtocolError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables by which launchers other than torchrun tell a process that it is one of several."""

PLACE = (
    *NAMES,
    *("LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables by which launchers tell a process its part in the job. A standby gets those of the rank it replaces."""

ATTEMPTS = 101
"""Attempts where no torchrun sets a limit: as many as of a worker group under Ray."""


class JobAttempt(NamedTuple):
    """One attempt, and where its store is. An empty `host`: there is no launcher, and the job makes its own store."""

    number: int
    host: str
    port: int

    def environment(self, started: Mapping[str, str]) -> dict[str, str]:
        """What a trainer's environment says in this attempt, to be like that of a worker that torchrun has restarted.

        Args:
            started: the environment that the launcher gave.
        """
        said = {"TORCHELASTIC_RESTART_COUNT": str(int(started.get("TORCHELASTIC_RESTART_COUNT", "0")) + self.number)}
        if self.host:
            said |= {
                "MASTER_ADDR": self.host,
                "MASTER_PORT": str(self.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must not host a store
            }
        if started.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
            said["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"  # abort communicators, but do not end the process
        return said


def to_line(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent: JSON and a newline."""
    return json.dumps(message).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class JobPlace:
    """This process's part in the job.

    Attributes:
        host, port: where rank 0, or torchrun's agent if `agents_store`, is to be reached; empty without a launcher.
        start: the name of this start of the job by the launcher, the same on all ranks.
        limit: how many attempts there may be.
        told: all that the launcher has told this process about its part.
    """

    rank: int
    world: int
    host: str
    port: int
    agents_store: bool
    start: str
    limit: int
    told: dict[str, str]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """What the launcher said, of which `hindrance` has found nothing to be missing."""
        return cls(
            rank=int(environment.get("RANK", "0")),
            world=int(environment.get("WORLD_SIZE", "1")),
            host=environment.get("MASTER_ADDR", ""),
            port=int(environment.get("MASTER_PORT", "0")),
            agents_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            start=f"{environment.get('TORCHELASTIC_RUN_ID', '')} {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            limit=_attempts_left(environment),
            told={name: environment[name] for name in PLACE if name in environment},
        )


def hindrance(environment: Mapping[str, str], threads: list[str], uses_cuda: bool) -> str:
    """Why this process cannot become the supervisor of a trainer, and what to do about it; empty if it can.

    Args:
        threads: the names of other threads of Python in this process, which a fork would not take along.
        uses_cuda: whether this process has initialised CUDA, which a forked process could then not use.
    """
    missing = [name for name in NAMES if not environment.get(name)]
    tasks = next((f"{name}={environment[name]}" for name in TASK_COUNTS if environment.get(name, "1") != "1"), "")
    if missing and (tasks or len(missing) < len(NAMES)):
        return f"this is one of several processes, and {', '.join(missing)} are not set: set them as torchrun does"
    if _attempts_left(environment) < 2:
        return "torchrun may restart nothing: start it with --max-restarts=100"
    if uses_cuda:
        return (
            "CUDA is initialised already: move what asks for it, such as torch.cuda.is_available(), into the function, "
            "or set PYTORCH_NVML_BASED_CUDA_CHECK=1"
        )
    if threads:
        return f"threads run already ({', '.join(threads)}): start them in the function"
    return ""


def read_too_early(variables: Mapping[str, object]) -> list[str]:
    """The names of a script's variables that seem to hold what the launcher told a standby before it has a place.

    Args:
        variables: of the script's module, as it calls `survive`.
    """
    held = dict(variables)
    for name, value in variables.items():
        if isinstance(value, Namespace):
            held |= {f"{name}.{attribute}": each for attribute, each in vars(value).items()}
    ints = (name for name, value in held.items() if type(value) is int)
    return [name for name in ints if any(word in name.lower() for word in ("rank", "world"))]


def _attempts_left(environment: Mapping[str, str]) -> int:
    if "TORCHELASTIC_MAX_RESTARTS" not in environment:
        return ATTEMPTS
    restarts = int(environment["TORCHELASTIC_MAX_RESTARTS"]) - int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return 1 + restarts


@dataclass(slots=True)
class Attempts:
    """Which attempt all ranks are in, and who of them has finished it. What rank 0's supervisor has counted for all.

    Attributes:
        number: the attempt.
        is_over: no other attempt follows: there were `limit`, or a supervisor has ended.
        has_ended: all ranks have finished the same attempt.
    """

    world: int
    limit: int
    number: int = 0
    is_over: bool = False
    has_ended: bool = False
    _done: set[int] = field(default_factory=set)

    def lost(self, number: int) -> bool:
        """A trainer has died in attempt `number`. Returns whether another attempt begins with that.

        Ranks that died in one attempt are replaced together: the second is told of an attempt that has ended already.
        """
        if number != self.number or self.is_over or self.has_ended:
            return False
        if self.number + 1 == self.limit:
            self.is_over = True
            return False
        self.number += 1
        self._done.clear()
        return True

    def done(self, rank: int, number: int) -> None:
        """The trainer of `rank` has finished attempt `number`."""
        if number == self.number:
            self._done.add(rank)
            self.has_ended = len(self._done) == self.world

    def left(self) -> None:
        """A supervisor has ended: it has failed, or its node is lost, and the launcher decides what happens now."""
        self.is_over = self.is_over or not self.has_ended


def replacement(waiting: Iterable[str], ranks: int) -> str | None:
    """The node that takes the place of a lost one, which had so many ranks: it has as many standbys.

    Args:
        waiting: the node of each standby; whose first came first is taken first.
    """
    return next((node for node, count in Counter(waiting).items() if count == ranks), None)


def parse_lines(buffer: bytes, limit: int = 4096) -> tuple[list[dict[str, Any]], bytes]:
    """The messages in what was received, and the rest, which is part of a message.

    Raises:
        ProtocolError: it is not JSON objects in lines of at most `limit` bytes.
    """
    *lines, rest = buffer.split(b"\n")
    try:
        messages = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise ProtocolError("what was received is not JSON") from error
    if len(rest) > limit or not all(isinstance(message, dict) for message in messages):
        raise ProtocolError("what was received is no message of a supervisor")
    return messages, rest
