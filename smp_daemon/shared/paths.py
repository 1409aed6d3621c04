"""Where an SMP's arena lies and what stands in it for others to find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.limits import is_identifier
from holdfast.smp_daemon.shared.plain import Address, from_plain
from holdfast.smp_daemon.shared.records import read_json
from holdfast.smp_daemon.shared.system import MACHINE, System

ARENA_ENV = "HOLDFAST_ARENA"
LOOPBACK = "127.0.0.1"


def arena_base() -> Path:
    """The directory that holds this user's arenas: ``HOLDFAST_ARENA``, or ``/dev/shm/holdfast-<uid>``."""
    return Path(os.environ.get(ARENA_ENV) or f"/dev/shm/holdfast-{os.getuid()}")


def arena_path(job: str, base: Path | None = None) -> Path:
    """The arena of `job` on this node.

    Raises:
        ConfigError: the job id cannot be a name.
    """
    if not is_identifier(job):
        raise ConfigError(f"{job!r} cannot be a job id: use 1-64 of A-Z a-z 0-9 . _ -, starting with a letter or digit")
    return (base or arena_base()) / job


def socket_path(arena: Path) -> Path:
    """The unix socket on which the arena's SMP talks to its trainers."""
    return arena / "smp.sock"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns an arena, as its ``smp.json`` says.

    Attributes:
        host, control_port, bulk_port: where it listens.
        more_bulk: where else it serves raw bytes, if this node has several network cards.
        created: start time of the process in seconds since 1970, so that a reused pid is not taken for it.
        http_host, http_port: where it shows itself; port 0: nowhere.
        version: of holdfast, that it is.
    """

    pid: int
    created: float
    job: str
    node: str
    host: str
    control_port: int
    bulk_port: int
    http_port: int = 0
    http_host: str = LOOPBACK
    version: str = ""
    more_bulk: tuple[Address, ...] = ()

    @property
    def control(self) -> tuple[str, int]:
        """Where it answers what is small, and what names it."""
        return (self.host, self.control_port)

    @property
    def bulk_addresses(self) -> tuple[Address, ...]:
        """Where it serves raw bytes, one address for each network card."""
        return ((self.host, self.bulk_port), *self.more_bulk)

    @property
    def url(self) -> str:
        """Of its page, as this machine reaches it."""
        return f"http://{LOOPBACK if self.http_host == '0.0.0.0' else self.http_host}:{self.http_port}/"


def read_owner(arena: Path, system: System = MACHINE) -> Owner | None:
    """Who owns `arena`, or None if nobody ever did. Raises `ProtocolError` if ``smp.json`` is not readable."""
    data = read_json(arena / "smp.json", system)
    return from_plain(Owner, data, f"an owner, in {arena / 'smp.json'}") if data else None


def find_owners(base: Path | None = None, job: str | None = None) -> Iterator[Owner]:
    """Who owns the arenas below `base`, of `job` or of any, in order of their paths; other files are passed over."""
    for path in sorted((base or arena_base()).glob("**/smp.json")):
        try:
            owner = read_owner(path.parent)
        except HoldfastError:
            continue  # it is no arena
        if owner is not None and (job is None or owner.job == job):
            yield owner
