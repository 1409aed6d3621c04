"""Memory for snapshots, laid out by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.arrange import Protection, RankInfo, arrange, shortfalls

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
) -> Layout:
    """Agree on the layout of `epoch`, in which the caller is `coord` and needs slots of `slot_bytes`, and have every
    SMP reserve its memory. A collective call; blocks.

    Raises:
        SmpUnavailable: an SMP is away; so on every rank.
        HoldfastError: it cannot be reserved, here or for another rank; so on every rank.
    """
    mine: list[RankInfo] = []

    def ask() -> None:
        client.join(epoch)
        mine.append(RankInfo.of(coord, client.inventory(), slot_bytes, tuple(domains)))

    _together(agreement, ask)
    everyone = [decode_json(RankInfo, t, "a rank's description") for t in agreement.gather(encode_json(mine[0]))]
    layout = arrange(job, epoch, everyone, protection, slots)
    _together(agreement, lambda: client.configure(layout))
    if layout.coords[0] == coord:
        for shortfall in shortfalls(layout):
            log.warning("%s", shortfall)
    return layout
