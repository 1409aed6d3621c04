"""What ranks tell each other on entering, and the run of the job that they go on with; see `smp_daemon.shared.runs`.

They tell the node of each rank, what each node holds, and each layout once.

A layout grows with the job, and as a rule every node has the same ones. So the first rank of each node speaks for it
and names layouts by their digests. A layout is sent only if some rank does not have it from its own SMP.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.smp_daemon.shared.client import PLACE_DEADLINE_S, SmpClient
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    PlaceError,
    ProtocolError,
    StateMismatch,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.identity import ID_DIGITS, Run, run_id
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted, PersistedRun
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import Count, decode_json, encode_json, pack, to_plain, unpack
from holdfast.smp_daemon.shared.runs import (
    GIVE_UP_ENV,
    MOST_ASKED,
    RUN_ENV,
    SeenRun,
    at_work,
    given_up,
    named,
    new_run,
    others_with_state,
    own_run,
    runs_in_reach,
    taken_up,
)
from holdfast.smp_daemon.shared.sources import Address
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.choice import PERSISTED, StartOptions, agree


@dataclass(frozen=True, slots=True)
class Entering:
    """A rank's description of itself.

    Attributes:
        smp: the address of its node's SMP.
        drawn: random bits. Those of rank 0 name what the start begins: its epoch, and a new run.
        now_s: the time by its clock, in seconds since 1970.
    """

    coord: str
    node: str
    smp: Address
    options: StartOptions
    drawn: Count
    now_s: float


@dataclass(frozen=True, slots=True)
class Entered:
    """What all ranks know once they have told each other; the same on every rank.

    Attributes:
        inventories: one of each node's SMP.
        coords: the node of every coordinate.
        options: the start options, the same on each rank.
        drawn, now_s: those of rank 0.
    """

    inventories: list[Inventory]
    coords: dict[str, str]
    options: StartOptions
    drawn: int
    now_s: float


@contextmanager
def _uncollected() -> Iterator[None]:
    """In this block the garbage collector rests. While a hundred thousand lasting objects are made it would scan the
    whole process again and again: with 16,384 ranks, for twice as long as it takes to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def exchange(client: SmpClient, agreement: Agreement, coord: str, options: StartOptions | None = None) -> Entered:
    """Tell the other ranks about this one and its node, and hear the same from them. A collective call.

    Raises:
        StateMismatch: two ranks have the same coordinate; raised on every rank.
        ConfigError: two SMPs have the same node name, or see `agree`; raised on every rank.
    """
    own = client.inventory()
    system = client.system
    drawn = system.randbits(4 * ID_DIGITS)
    mine = Entering(coord, own.node, own.control, options or StartOptions(), drawn, system.time())
    texts = agreement.gather(encode_json(mine))
    everyone = [decode_json(Entering, text, "what a rank says on entering") for text in texts]
    coords = {told.coord: told.node for told in everyone}
    if len(coords) < len(everyone):
        [(twice, _)] = Counter(told.coord for told in everyone).most_common(1)
        raise StateMismatch(f"two ranks have the coordinate {twice!r}")
    agreed = agree([told.options for told in everyone])
    speaker = first_ranks(everyone)
    layouts = {layout.digest: layout for layout in own.layouts.values()}
    speaks = speaker[own.node] == agreement.rank
    texts = agreement.gather(encode_json(own.to_plain(layouts.keys())) if speaks else b"")
    told = {node: decode_json(dict[str, object], texts[rank], "an inventory") for node, rank in speaker.items()}
    layouts |= _sent(agreement, layouts, {speaker[node]: _digests(plain) for node, plain in told.items()})
    inventories = [Inventory.read(plain, layouts) for plain in told.values()]
    first = everyone[0]
    return Entered(inventories, coords, agreed, first.drawn, first.now_s)


def first_ranks(everyone: Sequence[Entering]) -> dict[str, int]:
    """By node, the rank that speaks for it. Raises `ConfigError` if two SMPs use the same node name."""
    speaker: dict[str, int] = {}
    for rank, told in enumerate(everyone):
        first = everyone[speaker.setdefault(told.node, rank)]
        if first.smp != told.smp:
            raise ConfigError(
                f"two SMPs call their node {told.node!r}, at {first.smp[0]}:{first.smp[1]} and "
                f"{told.smp[0]}:{told.smp[1]}: give each host its own HOLDFAST_NODE"
            )
    return speaker


def _digests(plain: Mapping[str, object]) -> list[str]:
    named = plain.get("layouts")
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def _sent(agreement: Agreement, known: Mapping[str, Layout], named: Mapping[int, Sequence[str]]) -> dict[str, Layout]:
    """The layouts that not all ranks know, by digest, from the first rank that named each. A collective call.

    Args:
        named: by rank, digests of the layouts that it can send.
    """
    senders: dict[str, int] = {}
    for rank, digests in sorted(named.items()):
        for digest in digests:
            senders.setdefault(digest, rank)
    ordered = sorted(senders)
    found: dict[str, Layout] = {}
    if not ordered:
        return found
    for digest, everywhere in zip(ordered, agreement.minimum([int(d in known) for d in ordered])(), strict=True):
        if not everywhere:
            sends = senders[digest] == agreement.rank
            text = agreement.tell(pack(to_plain(known[digest])) if sends else b"", senders[digest])
            found[digest] = Layout.read(unpack(dict[str, object], text, "a layout"))
            if found[digest].digest != digest:
                raise ProtocolError(f"rank {senders[digest]} sent another layout than it had named")
    return found


LOOK_DEADLINE_S = 15.0
"""How long storage may take to say which runs it has something of. Memory is restored without that if need be."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """The runs in reach of a start.

    Attributes:
        seen: all of them, the newest first.
        own: the one that the start goes on with; None: it begins one.
        gone: ids of runs that were given up.
        others: runs with state that it does not go on with, and that nobody has said to be over.
    """

    seen: tuple[SeenRun, ...]
    own: SeenRun | None
    gone: frozenset[str]
    others: tuple[SeenRun, ...]

    @property
    def run(self) -> Run | None:
        """The run that the start goes on with."""
        return self.own.run if self.own is not None else None

    def continued(self, now_s: float) -> Run:
        """The run that it goes on with, as it is known from now on."""
        assert self.own is not None  # a snapshot of it was found
        return taken_up(self.own.run, self.seen, self.gone, now_s)

    def begun(self, drawn: int, now_s: float) -> Run:
        """A run that begins with this start. `drawn`: random bits."""
        return new_run(run_id(drawn), self.seen, self.gone, now_s)

    def say_others(self) -> None:
        """Name the runs that are not used."""
        for each in self.others:
            log.warning(
                "%s is not used, as %s was begun later; %s=%s would go on with it, %s=%s says that it is over",
                *(each, self.own.run if self.own is not None else "none", RUN_ENV, each.run, GIVE_UP_ENV, each.run),
            )


def reach_of(inventories: Sequence[Inventory], persisted: Collection[PersistedRun], options: StartOptions) -> Reach:
    """The runs in reach, and which of them a start goes on with. Pure. Raises `ConfigError`, see `own_run`."""
    seen = runs_in_reach(inventories, persisted)
    # Whoever chooses a run that was given up before takes that back.
    gone = frozenset({*(given_up(inventories, seen) - {options.run}), *options.give_up})
    own = own_run(seen, options.run, gone)
    return Reach(tuple(seen), own, gone, tuple(others_with_state(seen, own, gone)))


def check_nothing_is_left(reach: Reach, passed_over: Sequence[str], *, promised: bool = False) -> None:
    """Raise unless a start may begin from nothing: nothing was promised or persisted that nobody has given up.

    Args:
        passed_over: why what was found cannot be used.
        promised: whether memory had a snapshot that was protected.

    Raises:
        Unrecoverable: the run had a snapshot, and no place gives a whole one.
        ConfigError: the newest run never had a snapshot, and another has.
    """
    own = reach.own
    if own is not None and (own.persisted or promised):
        raise Unrecoverable(f"{own} cannot be restored: {'; '.join(passed_over)}. {ways_out(reach)}")
    if reach.others:
        newest = f"run {own.run} was begun last and has no snapshot" if own is not None else "no run goes on"
        raise ConfigError(
            f"{newest}, but there is state of {named(reach.others)}. Go on with that by {RUN_ENV}="
            f"{reach.others[0].run}, or begin anew by {GIVE_UP_ENV}={','.join(each.run.id for each in reach.others)}"
        )
    if own is not None and own.snapshots:
        why = "; ".join(passed_over) or "no snapshot was ever sealed on all nodes"
        log.warning("the job begins at step 0, and %s is not used: %s", own, why)


def ways_out(reach: Reach) -> str:
    """What can be done if the own run cannot be restored, in words."""
    assert reach.own is not None  # there is something that cannot be restored
    ids = ",".join(each.run.id for each in (reach.own, *reach.others))
    also = f"; or go on with {named(reach.others)} by {RUN_ENV}=ID" if reach.others else ""
    return (
        f"Bring the lost nodes or files back{also}; or give the run up by {GIVE_UP_ENV}={ids} for the next start, "
        "which then begins anew, from a checkpoint if there is one. Nothing is lost by that if the run had ended, and "
        "this is what a node that was away has kept"
    )


def ask_persisted_runs(client: SmpClient, agreement: Agreement) -> Persisted:
    """What is persisted, as rank 0's SMP sees it. A collective call.

    Storage that cannot be read has a `problem`. That matters only where memory has nothing: see `choose_persisted`.
    """
    told = Persisted("")
    if agreement.rank == 0:
        told = what_is_persisted(client, LOOK_DEADLINE_S)
        if told.problem:
            log.warning("storage does not say whether it has something of a newer run: %s", told.problem)
    return decode_json(Persisted, agreement.tell(encode_json(told), 0), "what is persisted")


def what_is_persisted(client: SmpClient, deadline_s: float = PLACE_DEADLINE_S) -> Persisted:
    """What is persisted, as this node's SMP sees it; with a `problem` if it cannot be seen. Blocks."""
    try:
        return client.persisted(deadline_s)
    except (PlaceError, DeadlineExceeded) as error:
        if isinstance(error, DeadlineExceeded):
            client.reconnect()  # the answer may still come, and would be taken for that of another call
        return Persisted(PERSISTED, problem=str(error))


def check_not_at_work(client: SmpClient, agreement: Agreement, persisted: Persisted, reach: Reach) -> None:
    """Raise `ConfigError` on every rank if a run that only storage has something of is at work on other nodes: two runs
    of one id would share the place. A collective call."""
    here = {each.run.id for each in reach.seen if each.nodes}
    away = [each for each in persisted.runs if each.run.id not in here | reach.gone and each.at]
    if not away:
        return
    problem = ""
    if agreement.rank == 0:
        for each in away:
            answers = client.inventories(each.at[:MOST_ASKED])
            nodes = at_work(answers, each.run.id)
            if nodes:
                problem = (
                    f"run {each.run} of this job is at work on {', '.join(nodes[:4])}, and persists at "
                    f"{persisted.place}: end it first, or give this one another HOLDFAST_JOB"
                )
    if told := agreement.tell(problem.encode(), 0).decode():
        raise ConfigError(told)
