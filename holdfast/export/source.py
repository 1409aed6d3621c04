"""What can be exported: the snapshots in the memory of a job's nodes, or at the place where they were persisted. Both
are offered, chosen and refused alike, and give units through the same interface (`UnitSource`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast.smp_daemon.net.refusals import Refused
from holdfast.smp_daemon.persist.place import PersistPlace, open_place
from holdfast.smp_daemon.persist.reading import StoredShards, find_runs, runs_at
from holdfast.smp_daemon.recovery.fetch import Fetcher, UnitSource
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, NotFound, SmpUnavailable, Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.paths import find_owners
from holdfast.smp_daemon.shared.plan import candidates, choose_sources, undecodable
from holdfast.smp_daemon.shared.runs import SeenRun, given_up, own_inventories, own_run, runs_in_reach
from holdfast.smp_daemon.shared.settings import JOB, RUN
from holdfast.smp_daemon.shared.sources import Address

Open = Callable[[], UnitSource]

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Offered:
    """A snapshot of a job, in a listing.

    Attributes:
        run: id of its run.
        shards, bytes: 0 if its layout is not known.
        why_not: why it cannot be exported; empty if it can.
    """

    job: str
    run: str
    snapshot: SnapshotId
    shards: int = 0
    bytes: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Offers:
    """What there is of one job in one place.

    Attributes:
        place: in words.
        snapshots: of all its runs: the newest run first, and of each the newest snapshot first.
        runs: the same runs. `gone`: the ids of those that were given up.
        open: how to read each snapshot that can be exported, by run and snapshot.
    """

    job: str
    place: str
    runs: Sequence[SeenRun] = ()
    gone: Collection[str] = ()
    snapshots: tuple[Offered, ...] = ()
    open: Mapping[tuple[str, SnapshotId], Open] = field(default_factory=dict)

    def choose(self, step: int | None) -> UnitSource:
        """The snapshot of `step`, or the newest, of the run that a start would go on with. In memory that is not older
        than what was protected.

        Raises:
            ConfigError: there is none; or it is ambiguous which run is meant, see `own_run`.
            Unrecoverable: it cannot be read whole; the message says why.
        """
        own = own_run(self.runs, RUN.value(), self.gone)
        run, floor = (own.run.id, own.protected) if own is not None else ("", None)
        of_run = [each for each in self.snapshots if each.run == run]
        asked = [each for each in of_run if step in (None, each.snapshot.step)]
        for each in asked:
            if not each.why_not and (step is not None or floor is None or each.snapshot >= floor):
                return self.open[run, each.snapshot]()
            log.warning(
                "%s is passed over: %s", each.snapshot, each.why_not or f"{floor}, which is newer, was protected"
            )
        if asked:
            reasons = "; ".join(f"{each.snapshot}: {each.why_not or 'it is older'}" for each in asked)
            raise Unrecoverable(f"no snapshot of job {self.job!r} in {self.place} can be read whole. {reasons}")
        wanted = "a snapshot" if step is None else f"step {step}"
        held = ", ".join(str(each.snapshot.step) for each in of_run) or "none"
        raise ConfigError(f"{wanted} of job {self.job!r} (run {run or 'none'}) is not in {self.place}: there is {held}")


def offers(url: str | None, job: str | None, arena: Path | None) -> list[Offers]:
    """What can be exported of a job. Blocks.

    Args:
        url: where snapshots are persisted; None: the memory of the job's nodes.
        job: its name; None: ``HOLDFAST_JOB``, or all jobs there.
        arena: directory of this machine's arenas; None: the default.

    Raises:
        NotFound: nothing of that job is there.
        SmpUnavailable: no SMP of a job answers. Refused: one does not let this process in.
        ConfigError, PlaceError: the place cannot be used.
    """
    wanted = job or JOB.value()
    if url is None:
        jobs, of_job = sorted({owner.job for owner in find_owners(arena)}), partial(_of_memory, arena=arena)
        nothing = f"no SMP of job {wanted!r} has an arena on this machine: `holdfast status` names those that do"
    else:
        place = open_place(url)
        jobs, of_job = sorted({of for of, _ in runs_at(place)}), partial(_of_storage, place=place)
        nothing = f"nothing of job {wanted!r} is persisted at {place.name}, but of: {', '.join(jobs) or 'none'}"
    if wanted and wanted not in jobs:
        raise NotFound(nothing)
    return [of_job(each) for each in ([wanted] if wanted else jobs)]


def one_job(found: Sequence[Offers]) -> Offers:
    """The only job of these. Raises `ConfigError` if there are several, `NotFound` if there is none."""
    if not found:
        raise NotFound("no job has snapshots there: say where with --arena, or with --from")
    if len(found) > 1:
        jobs = ", ".join(each.job for each in found)
        raise ConfigError(f"say of which job, with --job or HOLDFAST_JOB: there are {jobs}")
    return found[0]


def _of_storage(job: str, place: PersistPlace) -> Offers:
    runs = find_runs(place, job)
    snapshots: list[Offered] = []
    ways: dict[tuple[str, SnapshotId], Open] = {}
    for run in runs:
        for found in run.snapshots:
            if found.manifest is None:
                snapshots.append(Offered(job, run.run.id, found.snapshot, why_not=found.reason))
                continue
            layout = found.manifest.layout
            snapshots.append(_offered(layout, found.snapshot, ""))
            ways[run.run.id, found.snapshot] = partial(StoredShards, place, found.snapshot, layout)
    seen = runs_in_reach((), [run.told() for run in runs])
    return Offers(job, place.name, seen, given_up((), seen), tuple(snapshots), ways)


def _of_memory(job: str, arena: Path | None) -> Offers:
    everyone = _inventories(job, arena)
    seen = runs_in_reach(everyone)
    snapshots: list[Offered] = []
    ways: dict[tuple[str, SnapshotId], Open] = {}
    for run in seen:
        inventories = own_inventories(everyone, run.run)
        for snapshot in candidates(inventories, None):
            sources = choose_sources(inventories, snapshot)
            if sources is None:
                reason = "no SMP knows the layout of its epoch"
                snapshots.append(Offered(job, run.run.id, snapshot, why_not=reason))
                continue
            snapshots.append(_offered(sources.layout, snapshot, "; ".join(undecodable(sources))))
            ways[run.run.id, snapshot] = partial(Fetcher, sources, Counters())
    return Offers(job, "memory", seen, given_up(everyone, seen), tuple(snapshots), ways)


def _offered(layout: Layout, snapshot: SnapshotId, why_not: str) -> Offered:
    shards = [shard.bytes for node in layout.nodes for shard in node.shards]
    return Offered(layout.job, layout.run.id, snapshot, len(shards), sum(shards), why_not)


def _inventories(job: str, arena: Path | None) -> list[Inventory]:
    """What the job's SMPs hold: those on this machine, and all that these know of. Raises `SmpUnavailable` if none of
    this machine answers: `Refused` if one does not let this process in."""
    owners, failures = [owner.control for owner in find_owners(arena, job)], dict[Address, HoldfastError]()
    here = gather_inventories(job, owners, failures=failures)
    if not here:
        refused = next((error for error in failures.values() if isinstance(error, Refused)), None)
        raise refused or SmpUnavailable(
            f"no SMP of job {job!r} answers on this machine: where it has ended, `holdfast smp start --job {job} "
            "--detach` starts another, which takes over what it held"
        )
    others = addresses_of([layout for inventory in here for layout in inventory.layouts.values()])
    known = {inventory.node: inventory for inventory in gather_inventories(job, sorted({*others} - {*owners}))}
    return list((known | {inventory.node: inventory for inventory in here}).values())
