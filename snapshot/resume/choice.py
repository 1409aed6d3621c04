"""Chooses the snapshot that a start goes back to, from what was requested, how earlier starts ended and what each tier
holds. Decisions are pure, and the same on every rank.

The tiers, best first: ``local``: every node still holds its own shards; ``group``: other nodes hold them, or parity
yields them; ``previous``: an older snapshot in memory, never older than one that was protected; ``persisted``: storage,
if that tier is on. The first two lose no step. The last is used only if memory holds nothing that may be restored, for
then steps are lost that were protected; switching the tier on accepts that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.crash_loop import crash_loop_of, newest_start
from holdfast.smp_daemon.shared.errors import ConfigError, PlaceError, Repeated, Unrecoverable
from holdfast.smp_daemon.shared.identity import ID_DIGITS, UNNAMED, first_after, is_run_id
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted, PersistedRun
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_GENERATIONS
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.plan import RestorePlan, candidates, whole_snapshots
from holdfast.smp_daemon.shared.runs import GIVE_UP_ENV, RUN_ENV
from holdfast.smp_daemon.shared.settings import GENERATIONS, GIVE_UP, MAX_REPEATS, REQUIRE, RESTORE_STEP, RUN
from holdfast.smp_daemon.shared.starts import Choice, CrashLoop
from holdfast.snapshot.step.ledger import ProtectEvery

MAX_REPEATS_ENV = MAX_REPEATS.variable
RESTORE_STEP_ENV = RESTORE_STEP.variable
REQUIRE_ENV = REQUIRE.variable
GENERATIONS_ENV = GENERATIONS.variable

ATTEMPTS = 4
"""Number of failures after which memory is given up, and likewise all persisted snapshots."""

ENOUGH_FAILURES = 2
"""Number of failures after which a snapshot is not tried again if it is persisted, or if it is in memory and was never
promised. A persisted snapshot that is seen to be damaged is not tried again at all."""

PERSISTED = "persisted"


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How the person who starts the job wants snapshots of earlier starts to be used; the same on every rank.

    Attributes:
        max_repeats: how many starts in a row may end at the same step in the same way before the next is refused;
            0: no limit.
        generations: how many protected snapshots are kept, besides those in progress.
        restore_step: the step to go back to; None: the newest.
        require: the oldest step that it may go back to; 1: it must not begin from nothing; 0: it may.
        run: id of the run to go on with; empty: the one that was begun last, see `shared.runs`.
        give_up: ids of runs that are over: none of their snapshots is used.
        block: number of the block of the script that is entered.
        protect_every: which snapshots are protected.
    """

    max_repeats: int = MAX_REPEATS.value({})
    generations: int = GENERATIONS.value({})
    restore_step: int | None = None
    require: int = 0
    run: str = ""
    give_up: tuple[str, ...] = ()
    block: int = 1
    protect_every: ProtectEvery = 1

    @classmethod
    def of_run(cls) -> StartOptions:
        """Only what the environment says about runs."""
        return cls(run=RUN.value(), give_up=GIVE_UP.value())

    def __post_init__(self) -> None:
        if self.max_repeats < 0:
            raise ConfigError(f"{MAX_REPEATS_ENV}={self.max_repeats}: give a number of starts, or 0 for no limit")
        if not 1 <= self.generations <= MAX_GENERATIONS:
            raise ConfigError(f"{GENERATIONS_ENV}={self.generations}: keep 1 to {MAX_GENERATIONS} protected snapshots")
        if self.restore_step is not None and self.restore_step < 1:
            raise ConfigError(f"{RESTORE_STEP_ENV}={self.restore_step}: give the step of a snapshot, 1 or more")
        if not isinstance(self.require, int) or self.require < 0:
            raise ConfigError(f"require={self.require!r}: say 'snapshot', or the oldest step to go back to, 1 or more")
        for variable, ids in ((RUN_ENV, (self.run,) if self.run else ()), (GIVE_UP_ENV, self.give_up)):
            for each in ids:
                if not is_run_id(each):
                    raise ConfigError(
                        f"{variable}: {each!r} is not the id of a run, which has {ID_DIGITS} of 0-9 a-f; "
                        "`holdfast status` names those in reach"
                    )
        if self.run in self.give_up:
            raise ConfigError(f"{RUN_ENV}={self.run} is also in {GIVE_UP_ENV}: unset one of them")


def agree(everyones: Sequence[StartOptions]) -> StartOptions:
    """The start options that all ranks share. Raises `ConfigError`, on every rank, if they differ."""
    if len(set(everyones)) > 1:
        others = next(rank for rank, options in enumerate(everyones) if options != everyones[0])
        raise ConfigError(
            f"ranks enter different blocks of the script, or were started with different {MAX_REPEATS_ENV}, "
            f"{GENERATIONS_ENV}, {RESTORE_STEP_ENV}, {REQUIRE_ENV}, {RUN_ENV}, {GIVE_UP_ENV} or protect_every= "
            f"(rank 0: {everyones[0]}; rank {others}: {everyones[others]}): set the same values on all ranks"
        )
    return everyones[0]


def choose(inventories: Sequence[Inventory], options: StartOptions) -> Choice | None:
    """The snapshot to go back to; None: the newest.

    If the newest start made the same choice already, that choice stays in force, and the job continues from snapshots
    taken since: a launcher that restarts a job passes the same options again.

    Raises:
        ConfigError: there is no whole snapshot of that step.
    """
    if options.restore_step is None:
        return None
    start = newest_start(inventories)
    if start is not None and start.choice is not None and start.choice.snapshot.step == options.restore_step:
        return start.choice
    held = whole_snapshots(inventories)
    for snapshot in held:
        if snapshot.step == options.restore_step:
            return Choice(snapshot, first_after(max(inventory.epoch for inventory in inventories)))
    raise ConfigError(
        f"{RESTORE_STEP_ENV}={options.restore_step}: memory holds no whole snapshot of that step; it holds "
        f"{steps_in_words(held)}. Choose one of them, or start without it; {GENERATIONS_ENV} keeps more"
    )


def check_required(
    plan: RestorePlan | None, options: StartOptions, nodes: Collection[str], passed_over: Sequence[str]
) -> None:
    """Raise unless what a start is going to restore, or nothing, is as much as its options require.

    Args:
        nodes: those whose SMPs have answered.
        passed_over: why better snapshots were not used.

    Raises:
        Unrecoverable: it is not.
    """
    step = plan.snapshot.step if plan is not None else 0
    if step >= options.require:
        return
    where = PERSISTED if plan is not None and plan.sources.persisted else "in memory"
    newest = f"the newest to go back to is step {step:,}, {where}"
    found = newest if plan is not None else "there is nothing to go back to"
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    way = f"with {REQUIRE_ENV}={step}" if plan is not None else "without it"
    raise Unrecoverable(
        f"this start was told (require=, {REQUIRE_ENV}) to go on from step {options.require:,} or a later one: {found}"
        f"{why}; nodes that answered: {', '.join(sorted(nodes)) or 'none'}. Bring lost nodes or files back, and look "
        f"whether job, arena and storage are those of the start before. If that is meant, start once {way}"
    )


def steps_in_words(snapshots: Sequence[SnapshotId]) -> str:
    """``steps 12, 10, 8``, in the given order."""
    steps = some(list(dict.fromkeys(str(snapshot.step) for snapshot in snapshots)), between=", ")
    return f"steps {steps}" if steps else "none"


def check_repeats(inventories: Sequence[Inventory], options: StartOptions) -> CrashLoop | None:
    """How the starts before this one ended; None if there is nothing to report, or if this start was told to go back to
    another step than they did.

    Raises:
        Repeated: too many of them ended at the same step, in the same way.
    """
    streak, start = crash_loop_of(inventories), newest_start(inventories)
    before = start.choice.snapshot.step if start is not None and start.choice is not None else None
    if options.restore_step is not None and options.restore_step != before:
        return None
    if streak is not None and 0 < options.max_repeats <= streak.times:
        raise Repeated(
            f"the job is not started again: {streak}. It would restore the same step and end there once more. Fix the "
            f"cause; then start once with {MAX_REPEATS_ENV}=0, or with a number above {streak.times}. "
            + _way_back(whole_snapshots(inventories))
        )
    return streak


def _way_back(held: Sequence[SnapshotId]) -> str:
    if len(held) < 2:
        return f"No older snapshot is held; {GENERATIONS_ENV}=2 would keep one from then on"
    return (
        f"Or go back further: {RESTORE_STEP_ENV}={held[1].step} takes the snapshot before the newest; held are "
        f"{steps_in_words(held)}"
    )


@dataclass(slots=True)
class RestoreAttempts:
    """What a restore has tried so far.

    Attributes:
        failures, persisted_failures: failed attempts by snapshot, in memory and in storage.
        passed_over: why each snapshot and each tier that was tried was not used, in order.
        incomplete: why snapshots in memory are not tried again on any account: they lack state, and so does every copy.
        given_up: why memory is not tried any more; empty while it is.
    """

    failures: Counter[SnapshotId] = field(default_factory=Counter)
    persisted_failures: Counter[SnapshotId] = field(default_factory=Counter)
    passed_over: list[str] = field(default_factory=list)
    incomplete: dict[SnapshotId, str] = field(default_factory=dict)
    given_up: str = ""

    def hopeless(self, unacknowledged: Collection[SnapshotId]) -> set[SnapshotId]:
        """The snapshots in memory that are not tried again: they failed too often, and were never promised."""
        return {snapshot for snapshot, count in self.failures.items() if count >= ENOUGH_FAILURES} & set(unacknowledged)

    def failed(self, plan: RestorePlan, reason: str, *, damaged: bool, complete: bool = True) -> None:
        """Note a failed attempt.

        Args:
            damaged: a rank has seen that the bytes are not those that were written, or that they lack something.
            complete: no rank has seen that they lack something.
        """
        if plan.sources.persisted:
            self.persisted_failures[plan.snapshot] += ENOUGH_FAILURES if damaged else 1
        elif not complete:
            self.incomplete[plan.snapshot] = reason
        else:
            self.failures[plan.snapshot] += 1
            if self.failures.total() == ATTEMPTS:
                self.given_up = f"recovery failed {ATTEMPTS} times; last: {reason}"
        where = PERSISTED if plan.sources.persisted else "in memory"
        self.note(f"{plan.snapshot}, {where}: {reason}")

    def passed(self, snapshot: SnapshotId, reason: str) -> None:
        """Note that a persisted snapshot cannot be read."""
        self.persisted_failures[snapshot] += 1
        self.note(f"{snapshot}, {PERSISTED}: {reason}")

    def note(self, reason: str) -> None:
        """Note why something was passed over. Each reason is noted once."""
        if reason not in self.passed_over:
            self.passed_over.append(reason)

    def choose_persisted(self, answers: Sequence[Persisted], run: str) -> SnapshotId | None:
        """The newest persisted snapshot of that run that every rank's SMP sees whole and that has not failed too often;
        None if there is none, or the tier is off.

        Raises:
            ConfigError: the tier is on for only some of the SMPs, or at different places.
            PlaceError: an SMP cannot see what is persisted.
        """
        if problems := sorted({answer.problem for answer in answers if answer.problem}):
            raise PlaceError(
                f"memory holds nothing to go back to, and what is persisted cannot be seen: {problems[0]}. "
                "Bring the storage back, or start without HOLDFAST_PERSIST"
            )
        places = {answer.place for answer in answers}
        if places == {""}:
            return None
        if len(places) > 1:
            named = ", ".join(sorted(place or "nowhere" for place in places))
            raise ConfigError(
                f"the SMPs of this job persist at different places ({named}): set the same HOLDFAST_PERSIST on all"
            )
        held = [answer.of(run) or PersistedRun(UNNAMED) for answer in answers]
        for reason in sorted({reason for each in held for reason in (*each.others, *each.unfinished)}):
            self.note(f"{reason} ({PERSISTED})")
        if self.persisted_failures.total() >= ATTEMPTS:
            return None
        seen = frozenset.intersection(*(each.snapshots for each in held))
        tried = {snapshot for snapshot, count in self.persisted_failures.items() if count >= ENOUGH_FAILURES}
        return max(seen - tried, default=None)


def tier_of(plan: RestorePlan, inventories: Sequence[Inventory], coords: Mapping[str, str]) -> str:
    """The tier of a plan, for the job as a whole. `coords`: the current node of every coordinate."""
    if plan.sources.persisted:
        return PERSISTED
    held = {
        (inventory.node, coord) for inventory in inventories for of, coord in inventory.shards if of == plan.snapshot
    }
    if plan.snapshot != candidates(inventories, None)[0]:
        return "previous"
    if set(coords) != set(plan.sources.layout.coords):
        return "group"  # cut anew for another number of ranks
    return "local" if all((node, coord) in held for coord, node in coords.items()) else "group"
