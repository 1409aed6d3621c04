"""Sources of an export: the memory of a job's nodes, or the place where a snapshot was persisted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.smp_daemon.persist.manifest import PersistManifest
from holdfast.smp_daemon.persist.place import PersistPlace
from holdfast.smp_daemon.persist.reading import find_runs, read_shard, runs_at
from holdfast.smp_daemon.recovery.fetch import Fetcher
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ConfigError, NotFound, Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.paths import find_owners
from holdfast.smp_daemon.shared.plan import candidates, choose_sources, plan_restore, undecodable
from holdfast.smp_daemon.shared.runs import given_up, own_inventories, own_run, runs_in_reach
from holdfast.smp_daemon.shared.settings import RUN
from holdfast.smp_daemon.shared.sources import Sources


class ShardSource(Protocol):
    """The shards of one snapshot. Every call blocks."""

    snapshot: SnapshotId
    layout: Layout

    def fill(self, coord: str, out: memoryview) -> None:
        """Fill `out`, which is as long as the shard, with its verified bytes. Raises `HoldfastError` if it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot in a listing, and its size. `why_not`: why it cannot be exported; empty if it can."""

    job: str
    snapshot: SnapshotId
    shards: int
    bytes: int
    stored_bytes: int
    why_not: str = ""


# ---------------------------------------------------------------------- memory


class MemorySource:
    """A snapshot in the memory of a job's SMPs. Lost shards are computed from parity."""

    def __init__(self, sources: Sources, fetcher: Fetcher) -> None:
        self.snapshot = sources.snapshot
        self.layout = sources.layout
        self._fetcher = fetcher

    def fill(self, coord: str, out: memoryview) -> None:
        self._fetcher.all(self._fetcher.shard(coord, out), -(-out.nbytes // self.layout.unit_bytes))


@contextmanager
def from_memory(job: str, arena: Path | None, step: int | None) -> Iterator[MemorySource]:
    """The newest snapshot that a restart would go back to, or the one of `step`.

    Raises:
        NotFound: no SMP of the job has an arena on this machine.
        ConfigError: the job has no snapshot in memory, or none of `step`.
        Unrecoverable: too much of the snapshot is lost.
    """
    inventories = _inventories(job, arena)
    sources = _choose(job, inventories, step)
    with Fetcher(sources, Counters()) as fetcher:
        yield MemorySource(sources, fetcher)


def list_memory(job: str, arena: Path | None) -> list[Listed]:
    """Every snapshot of which nodes hold a part, the newest first. Raises `NotFound`."""
    inventories = _inventories(job, arena)
    found = []
    for snapshot in candidates(inventories, None):
        sources = choose_sources(inventories, snapshot)
        if sources is None:
            continue
        shards = [shard.bytes for node in sources.layout.nodes for shard in node.shards]
        why_not = "; ".join(undecodable(sources))
        found.append(Listed(job, snapshot, len(shards), sum(shards), sum(shards), why_not))
    return found


def _inventories(job: str, arena: Path | None) -> list[Inventory]:
    """What the job's SMPs hold of the run that a start would go on with: those on this machine, and all that these know
    of. Raises `NotFound`; `ConfigError` as `own_run`."""
    owners = [owner.control for owner in find_owners(arena, job)]
    if not owners:
        raise NotFound(f"no SMP of job {job!r} has an arena on this machine: `holdfast status` names those that do")
    here = gather_inventories(job, owners)
    others = addresses_of([layout for inventory in here for layout in inventory.layouts.values()])
    known = {inventory.node: inventory for inventory in gather_inventories(job, sorted({*others} - {*owners}))}
    everyone = list((known | {inventory.node: inventory for inventory in here}).values())
    seen = runs_in_reach(everyone)
    own = own_run(seen, RUN.value(), given_up(everyone, seen))
    return own_inventories(everyone, own.run if own is not None else None)


def _choose(job: str, inventories: Sequence[Inventory], step: int | None) -> Sources:
    if step is None:
        plan = plan_restore(inventories, None)
        if plan is None:
            raise ConfigError(f"job {job!r} has no snapshot in memory")
        return plan.sources
    for snapshot in candidates(inventories, None):
        sources = choose_sources(inventories, snapshot)
        if snapshot.step != step or sources is None:
            continue
        if missing := undecodable(sources):
            raise Unrecoverable(f"{snapshot}: {'; '.join(missing)}")
        return sources
    held = ", ".join(str(snapshot.step) for snapshot in candidates(inventories, None)) or "none"
    raise ConfigError(f"step {step} is not in the memory of job {job!r}: there are {held}")


# ---------------------------------------------------------------------- a place


class PersistedSource:
    """A snapshot in the place where it was persisted."""

    def __init__(self, place: PersistPlace, whole: PersistManifest) -> None:
        self.snapshot = whole.snapshot
        self.layout = whole.layout
        self._place = place
        self._whole = whole

    def fill(self, coord: str, out: memoryview) -> None:
        read_shard(self._place, self._whole, coord, out)


def from_place(place: PersistPlace, job: str | None, step: int | None) -> PersistedSource:
    """The newest whole snapshot at a place, of the run that was begun last, or the one of `step`. Raises `ConfigError`
    if there is none."""
    name = job or _only_job(place)
    runs = find_runs(place, name)
    found = [each.manifest for each in runs[0].snapshots if each.manifest is not None] if runs else []
    for whole in found:
        if step is None or whole.snapshot.step == step:
            return PersistedSource(place, whole)
    held = ", ".join(str(whole.snapshot.step) for whole in found) or "none"
    wanted = "a snapshot" if step is None else f"step {step}"
    run = f" (run {runs[0].run})" if runs else ""
    raise ConfigError(f"{wanted} of job {name!r}{run} is not persisted at {place.name}: there are {held}")


def list_place(place: PersistPlace, job: str | None) -> list[Listed]:
    """Every snapshot at a place, by job, the newest first."""
    found = []
    for name in [job] if job else sorted({of for of, _ in runs_at(place)}):
        for each in (found_ for run in find_runs(place, name) for found_ in run.snapshots):
            whole = each.manifest
            if whole is None:
                found.append(Listed(name, each.snapshot, 0, 0, 0, each.reason))
            else:
                found.append(Listed(name, each.snapshot, len(whole.stored), whole.bytes, whole.stored_bytes))
    return found


def _only_job(place: PersistPlace) -> str:
    jobs = sorted({of for of, _ in runs_at(place)})
    if len(jobs) != 1:
        raise ConfigError(f"{place.name} has snapshots of {jobs or 'no job'}: say which with --job")
    return jobs[0]
