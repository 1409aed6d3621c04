"""Memory for snapshots, laid out by all ranks together."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.arrange import Protection, RankInfo, arrange, shortfalls
from holdfast.snapshot.step.ledger import ProtectEvery

TURN_DEADLINE_S = 10.0
"""Each of what takes turns takes a tenth of a second."""

TURN_POLL_S = 2e-3

_REFUSED, _AWAY, _DONE = range(3)

log = get_log(__name__)


def _together(agreement: Agreement, work: Callable[[], None]) -> None:
    """Do `work` on every rank; raises on every rank, with the same meaning, if it failed on any. A collective call."""
    problem: HoldfastError | None = None
    verdict = _DONE
    try:
        work()
    except (SmpUnavailable, DeadlineExceeded) as error:
        problem, verdict = SmpUnavailable(str(error)), _AWAY
    except HoldfastError as error:
        problem, verdict = error, _REFUSED
    [worst] = agreement.minimum([verdict])()
    if worst == _AWAY:
        raise problem or SmpUnavailable("the SMP of another rank's node is away")
    if worst == _REFUSED:
        if problem is None or verdict == _AWAY:
            raise ConfigError("another rank's SMP could not reserve its memory; see that rank's error") from problem
        raise problem


def reserve(
    client: SmpClient,
    agreement: Agreement,
    job: str,
    epoch: int,
    coord: str,
    slot_bytes: int,
    protection: Protection,
    slots: int,
    domains: Sequence[str] = (),
    *,
    parity_slots: int | None = None,
    protect_every: ProtectEvery = 1,
    prepare: Callable[[list[memoryview]], None],
) -> Layout:
    """Agree on the layout of `epoch`, in which the caller is `coord` and needs slots of `slot_bytes`, and have every
    SMP reserve its memory. A collective call; blocks.

    Args:
        parity_slots: see `Layout`. protect_every: which snapshots are protected; the same on every rank.
        prepare: called with the caller's slots, mapped.

    Raises:
        SmpUnavailable: an SMP is away; so on every rank.
        HoldfastError: it cannot be reserved, here or for another rank; so on every rank.
    """
    mine: list[RankInfo] = []

    def ask() -> None:
        client.join(epoch)
        mine.append(RankInfo.of(coord, client.inventory(), slot_bytes, tuple(domains), protect_every))

    _together(agreement, ask)
    everyone = [decode_json(RankInfo, t, "a rank's description") for t in agreement.gather(encode_json(mine[0]))]
    layout = arrange(job, epoch, everyone, protection, slots, parity_slots)

    speaks = layout.node(client.node).shards[0].coord == coord  # the layout goes to each SMP once

    def have_reserved() -> None:
        if speaks:
            client.configure(layout)

    _together(agreement, have_reserved)
    _together(agreement, lambda: prepare(client.slots(epoch, coord)))
    if layout.coords[0] == coord:
        for shortfall in shortfalls(layout):
            log.warning("%s", shortfall)
    return layout


@contextmanager
def node_turn(client: SmpClient) -> Iterator[None]:
    """A block that one trainer of this node runs at a time. Blocks until it is the caller's turn; but not for ever, as
    a process may stand still in it: what is done there may be done by several at once, if need be."""
    limit = time.monotonic() + TURN_DEADLINE_S
    with (client.arena / "turn").open("a") as file:
        while time.monotonic() < limit:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TURN_POLL_S)
        yield
