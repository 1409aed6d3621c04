"""Which run of the job a start goes on with, of all that the SMPs in reach hold something of. Pure.

The rule: a start goes on with the run that was begun last. `Run.begun_s` tells which that is: a run is begun later than
all runs that were in reach when it began, and runs that never met are compared by the clocks of their rank 0. Runs that
never met and were begun within `SAME_TIME_S` of each other are ambiguous if both hold a snapshot: the start is refused,
and ``HOLDFAST_RUN`` chooses. ``HOLDFAST_GIVE_UP`` takes runs out of the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.identity import MAX_FOLLOWED, Run
from holdfast.smp_daemon.shared.inventory import Inventory, PersistedRun
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.settings import GIVE_UP, RUN
from holdfast.smp_daemon.shared.starts import Record

RUN_ENV = RUN.variable
GIVE_UP_ENV = GIVE_UP.variable

MOST_ASKED = 32
"""Most SMPs that are asked whether they are at work for a run that storage has something of. One that is lost takes
seconds, and one answer is enough."""

SAME_TIME_S = 2
"""Runs that never met and began within this time of each other cannot be put in order: clocks of hosts differ."""


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run of which something is in reach.

    Attributes:
        nodes: the nodes whose SMPs hold some of it, or took part in it last.
        snapshots: the snapshots that any of these holds a part of, the newest first.
        protected: the newest that any of these was told is protected.
        persisted: whether storage has something of it.
    """

    run: Run
    nodes: tuple[str, ...] = ()
    snapshots: tuple[SnapshotId, ...] = ()
    protected: SnapshotId | None = None
    persisted: bool = False

    @property
    def has_state(self) -> bool:
        """Whether any byte of a snapshot of it is in reach, or was promised to be."""
        return bool(self.snapshots) or self.protected is not None or self.persisted

    @property
    def is_promised(self) -> bool:
        """Whether a snapshot of it is known to have been protected, or is persisted."""
        return self.protected is not None or self.persisted

    def __str__(self) -> str:
        where = ", ".join(self.nodes[:4]) + (" and others" if len(self.nodes) > 4 else "")
        held = f"step {self.snapshots[0].step:,}" if self.snapshots else "no snapshot"
        places = " and ".join(filter(None, [where, "storage" if self.persisted else ""]))
        return f"run {self.run.id} (newest in reach: {held}; on {places or 'no node'})"


def runs_in_reach(inventories: Sequence[Inventory], persisted: Collection[PersistedRun] = ()) -> list[SeenRun]:
    """Every run that these SMPs hold something of or took part in last, or that storage knows of; the newest first."""
    epochs = epochs_of(inventories)
    stored = {each.run.id for each in persisted if each.has_state}
    told = [layout.run for each in inventories for layout in each.layouts.values()]
    told += [run for run in [*(each.run for each in inventories), *(each.run for each in persisted)] if run is not None]
    newest: dict[str, Run] = {}
    for run in sorted(told, key=lambda run: run.begun_s, reverse=True):
        newest.setdefault(run.id, run)
    found = []
    for run in newest.values():
        ours = (of_run(each, run.id, epochs) for each in inventories)
        own = [each for each in ours if each.run is not None or each.shards or each.parities]
        snapshots = {s for each in own for s, _ in each.shards} | {s for each in own for s, _, _ in each.parities}
        protected = max((each.protected for each in own if each.protected is not None), default=None)
        nodes = tuple(sorted(each.node for each in own))
        found.append(SeenRun(run, nodes, tuple(sorted(snapshots, reverse=True)), protected, run.id in stored))
    return sorted(found, key=lambda seen: (seen.run.begun_s, seen.run.id), reverse=True)


def epochs_of(inventories: Iterable[Inventory]) -> dict[int, str]:
    """By epoch, the id of the run that it belongs to, as far as the SMPs know layouts."""
    return {layout.epoch: layout.run.id for inventory in inventories for layout in inventory.layouts.values()}


def of_run(inventory: Inventory, run: str, epochs: Mapping[int, str]) -> Inventory:
    """What an SMP holds and knows of one run. `epochs`: see `epochs_of`.

    The newest epoch that it has seen stays, of whatever run: a start must fence that one, too.
    """
    took_part = inventory.run is not None and inventory.run.id == run

    def is_ours(epoch: int) -> bool:
        return epochs.get(epoch) == run

    return replace(
        inventory,
        run=inventory.run if took_part else None,
        protected=inventory.protected if took_part else None,
        layouts={key: layout for key, layout in inventory.layouts.items() if layout.run.id == run},
        shards=frozenset(each for each in inventory.shards if is_ours(each[0].epoch)),
        parities=frozenset(each for each in inventory.parities if is_ours(each[0].epoch)),
        never_acknowledged=frozenset(each for each in inventory.never_acknowledged if is_ours(each.epoch)),
        record=inventory.record if took_part else Record(),
    )


def own_inventories(inventories: Sequence[Inventory], run: Run | None) -> list[Inventory]:
    """What all SMPs hold and know of `run`; None: of no run."""
    epochs = epochs_of(inventories)
    return [of_run(inventory, run.id if run is not None else "", epochs) for inventory in inventories]


def given_up(inventories: Iterable[Inventory], seen: Sequence[SeenRun]) -> set[str]:
    """The ids of the runs that the SMPs were told are given up, or that were when one of `seen` began, and that nobody
    has chosen again since."""
    told = {each for inventory in inventories for each in inventory.given_up}
    runs = {each.run.id: each.run for each in seen}
    over = {gone for run in runs.values() for gone in run.over if gone not in runs or not _is_later(runs[gone], run)}
    return told | over


def at_work(inventories: Iterable[Inventory], run: str) -> list[str]:
    """Names of the nodes that have trainers of the run with that id."""
    return sorted(each.node for each in inventories if each.trainers and each.run is not None and each.run.id == run)


def own_run(seen: Sequence[SeenRun], wanted: str = "", gone: Collection[str] = ()) -> SeenRun | None:
    """The run that a start goes on with; None: there is none, and it begins one.

    Args:
        seen: `runs_in_reach`.
        wanted: the id that the user chose; empty: the run begun last.
        gone: ids of runs that were given up.

    Raises:
        ConfigError: the chosen run is not in reach, or was given up; or it is ambiguous which run was begun last.
    """
    choices = [each for each in seen if each.run.id not in gone]
    if wanted:
        for each in choices:
            if each.run.id == wanted:
                return each
        raise ConfigError(
            f"{RUN_ENV}={wanted}: no node that answers holds anything of that run; in reach: "
            f"{named(choices) or 'none'}. Start the nodes that hold it, or unset {RUN_ENV}"
        )
    if not choices:
        return None
    near = [each for each in choices if choices[0].run.begun_s - each.run.begun_s < SAME_TIME_S]
    together = [each for each in near if not any(_is_later(other.run, each.run) for other in near)]
    rivals = [each for each in together if each.has_state]
    if len(rivals) > 1:
        raise ConfigError(
            "runs of this job were begun at about the same time, on nodes that did not know of each other, and all are "
            f"in reach: {named(rivals)}. Choose the one to go on with by {RUN_ENV}=ID, or give others up by "
            f"{GIVE_UP_ENV}=ID"
        )
    return (rivals or together or choices)[0]


def _is_later(one: Run, other: Run) -> bool:
    """Whether `one` says that it took the place of `other`, and was not left for it since. Then the clocks do not
    matter: `other` may have been given up while it was out of reach."""
    return other.id in one.follows and (one.id not in other.follows or one.begun_s > other.begun_s)


def others_with_state(seen: Sequence[SeenRun], own: SeenRun | None, gone: Collection[str] = ()) -> list[SeenRun]:
    """Runs with state in reach that the start does not go on with, and that nobody has given up.

    What the own run had seen of an older one as it began, without having been told to give it up, was promised to
    nobody. It is missed if nodes have come back that know of a promise.
    """
    followed = own.run.follows if own is not None else ()
    others = [each for each in seen if each is not own and each.run.id not in gone]
    return [each for each in others if each.has_state and (each.is_promised or each.run.id not in followed)]


def taken_up(run: Run, seen: Sequence[SeenRun], gone: Collection[str], now_s: float) -> Run:
    """`run` as a start that goes on with it knows it. If others were begun later, it was chosen: it becomes the newest,
    and follows them."""
    later = [each.run for each in seen if each.run.begun_s >= run.begun_s and each.run.id != run.id]
    over = sorted(set(gone) - {run.id})
    run = replace(run, follows=_all(run.follows, (each.id for each in later), over), over=_all(run.over, over))
    if not any(each.id not in gone for each in later):
        return run
    return replace(run, begun_s=max(int(now_s), *(each.begun_s + 1 for each in later)))


def new_run(identity: str, seen: Sequence[SeenRun], gone: Collection[str], now_s: float) -> Run:
    """A run that begins now. `identity`: its id."""
    runs = [each.run for each in seen]
    over = _all(*(run.over for run in runs), sorted(gone))
    follows = _all(*(run.follows for run in runs), (run.id for run in runs), over)
    return Run(identity, max([int(now_s), *(run.begun_s + 1 for run in runs)]), follows, over)


def _all(*ids: Iterable[str]) -> tuple[str, ...]:
    """These ids without repeats, the last ones if they are too many."""
    return tuple(dict.fromkeys(each for some in ids for each in some))[-MAX_FOLLOWED:]


def named(seen: Sequence[SeenRun]) -> str:
    """These runs in words."""
    return "; ".join(map(str, seen))
