"""A whole job as operators see it: its nodes, its groups, and which step is safe against which losses."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from holdfast.smp_daemon.net.refusals import Refusal, refusal_of
from holdfast.smp_daemon.ops.status import Status, take_statuses, troubles
from holdfast.smp_daemon.recovery.inventories import addresses_of
from holdfast.smp_daemon.recovery.recoveries import summarise
from holdfast.smp_daemon.recovery.redundancy import Redundancy, redundancies, safest
from holdfast.smp_daemon.shared.crash_loop import current_crash_loop
from holdfast.smp_daemon.shared.errors import HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.goodput import UNTOLD, Spent
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import LogEvent
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.plan import newest_whole, whole_snapshots
from holdfast.smp_daemon.shared.runs import SeenRun, given_up, own_inventories, runs_in_reach
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.stragglers import stragglers

EVENTS_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a job, put together from what its SMPs say.

    Attributes:
        statuses: of the SMPs that answer, sorted by node.
        silent: nodes of the newest layout whose SMP does not answer.
        lost: nodes of this epoch that do not answer and that the others have regrouped without.
        snapshots: every snapshot that a restart might go back to, the newest first.
        runs: the runs of the job that these SMPs hold something of, the newest first. A restart goes on with the first,
            and everything else here is of that one.
        refused: SMPs that run and do not let this process in, and what it lacks: by node, which is silent, too, or by
            address if no SMP says which node it is.
    """

    job: str
    statuses: tuple[Status, ...]
    silent: tuple[str, ...]
    snapshots: tuple[Redundancy, ...]
    lost: tuple[str, ...] = ()
    runs: tuple[SeenRun, ...] = ()
    refused: dict[str, Refusal] = field(default_factory=dict)

    @property
    def run(self) -> Run | None:
        """The run that a restart goes on with; None: there is none yet."""
        return self.runs[0].run if self.runs else None

    @property
    def inventories(self) -> list[Inventory]:
        """What the SMPs hold of that run."""
        return own_inventories([status.inventory for status in self.statuses], self.run)

    @property
    def older_runs(self) -> list[SeenRun]:
        """Runs that a restart does not go on with, and of which snapshots are still held."""
        return [each for each in self.runs[1:] if each.has_state]

    @property
    def trainerless_s(self) -> float | None:
        """How many seconds no trainer has been connected anywhere; None: none ever was, or all have ended well."""
        return min((s.trainerless_s for s in self.statuses if s.trainerless_s is not None), default=None)

    @property
    def is_well(self) -> bool:
        """Whether all SMPs answer, no node and no snapshot is lost, and the job, if it has begun, has trainers."""
        held = self.safest is None or self.safest.tolerates >= 0
        return bool(self.statuses) and held and not (self.silent or self.lost or self.trainerless_s)

    @property
    def alarms(self) -> list[str]:
        """Problems of the job as a whole, in words. The problems of a node are in its `Status`."""
        bad = []
        if self.trainerless_s:
            bad.append(f"no trainer is connected, for {self.trainerless_s:,.0f} s: the job does not train")
        bad += [f"{name} is lost: the others have regrouped without it" for name in self.lost]
        bad += self.refusals
        if len(self.versions) > 1:
            of = [f"{version or 'unknown'} on {', '.join(nodes)}" for version, nodes in self.versions.items()]
            bad.append(f"SMPs are of several versions of holdfast: {'; '.join(of)}")
        return bad

    @property
    def refusals(self) -> list[str]:
        """Which SMPs do not let this process in, and what to do about it, in words."""
        return [f"the SMP of {name}: {refusal}: {refusal.fix}" for name, refusal in self.refused.items()]

    def check_let_in(self) -> None:
        """Raises `SmpUnavailable` if no SMP answers, and one runs that does not let this process in."""
        if not self.statuses and self.refused:
            raise SmpUnavailable("; ".join(self.refusals))

    @property
    def versions(self) -> dict[str, list[str]]:
        """Nodes by the version of holdfast that their SMPs run; an empty version is too old to report itself."""
        found: dict[str, list[str]] = {}
        for status in self.statuses:
            found.setdefault(status.version, []).append(status.inventory.node)
        return dict(sorted(found.items()))

    @property
    def safest(self) -> Redundancy | None:
        """The newest of the snapshots that tolerate the most node failures."""
        return safest(self.snapshots)

    @property
    def newest(self) -> Redundancy | None:
        """The newest snapshot that can be restored now: the one that a crash of processes alone goes back to."""
        return next((each for each in self.snapshots if each.tolerates >= 0), None)

    @property
    def repeats(self) -> str:
        """The crash loop to show to operators, in words, see `current_crash_loop`; empty if there is none."""
        loop = current_crash_loop(self.inventories)
        return str(loop) if loop is not None else ""

    @property
    def older(self) -> list[SnapshotId]:
        """Whole snapshots that only ``HOLDFAST_RESTORE_STEP`` goes back to, the newest first."""
        newest = newest_whole(self.inventories)
        return [each for each in whole_snapshots(self.inventories) if each != newest]

    @property
    def tiers(self) -> list[str]:
        """The persist tier, in words: one line if it is on, and one more for each node with a problem."""
        tiers = [(status.inventory.node, status.tier) for status in self.statuses if status.tier is not None]
        if not tiers:
            return []
        known = [(tier.persisted, tier) for _, tier in tiers if tier.persisted is not None]
        line = f"nothing is persisted yet at {tiers[0][1].place}"
        if known:
            snapshot, tier = max(known, key=lambda pair: pair[0])
            ago_s = max(0.0, time.time() - tier.at_s)
            line = f"step {snapshot.step:,} is persisted at {tier.place}, {ago_s:,.0f} s ago"
        return [
            line,
            *(f"{node}: not persisted: {tier.problem}" for node, tier in tiers if tier.problem),
            *(f"{node}: storage: {tier.caution}" for node, tier in tiers if tier.caution and not tier.problem),
        ]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The last recoveries of the job, the newest first, see `smp_daemon.recovery.recoveries.summarise`."""
        return summarise({status.inventory.node: list(status.recoveries) for status in self.statuses})

    @property
    def leaving(self) -> list[str]:
        """Nodes that are being drained."""
        return [status.inventory.node for status in self.statuses if status.inventory.leaving]

    @property
    def spent(self) -> Spent:
        """Where the time of the run went, as the rank says that told of it last."""
        return max((status.spent for status in self.statuses), key=lambda each: each.until, default=UNTOLD)

    @property
    def goodput(self) -> tuple[float | None, str]:
        """The effective training time ratio of the run, and where its time went, in words. While no trainer is
        connected, time goes on."""
        now = time.time() if self.trainerless_s else None
        return self.spent.effective(now), self.spent.sentence(now)

    @property
    def stragglers(self) -> list[str]:
        """The ranks that keep the others waiting, in words, the slowest first."""
        trainers = [(status.inventory.node, trainer) for status in self.statuses for trainer in status.trainers]
        return stragglers({f"trainer {trainer.coord} on {node}": trainer.own for node, trainer in trainers})

    @property
    def events(self) -> list[tuple[str, LogEvent]]:
        """(node, event): the last lines of all nodes' logs, the newest first."""
        found = [(status.inventory.node, event) for status in self.statuses for event in status.events]
        return sorted(found, key=lambda pair: -pair[1].at)[:EVENTS_SHOWN]

    @property
    def troubles(self) -> list[str]:
        """Optional parts, trainers and peers that are not well, in words."""
        return troubles(self.statuses)

    @property
    def wanted(self) -> int:
        """How many node losses the job is to survive, by what it started with; 0: none, as on one node."""
        layouts = [layout for status in self.statuses for layout in status.inventory.layouts.values()]
        newest = max((layout.epoch for layout in layouts), default=0)
        codes = [
            [layout.code(group)[1] for group in range(len(layout.groups))]
            for layout in layouts
            if layout.epoch == newest
        ]
        return max((min(parities) for parities in codes), default=0)

    def age_s(self, each: Redundancy) -> float | None:
        """Seconds since the first shard of a snapshot was sealed; None if no SMP that answers knows."""
        ages = [age_s for status in self.statuses for snapshot, age_s in status.ages_s if snapshot == each.snapshot]
        return max(ages, default=None)

    def to_json(self) -> dict[str, Any]:
        """The overview as plain data, for the page and for scripts. Layouts appear only as digests."""
        digests = {layout.digest for status in self.statuses for layout in status.inventory.layouts.values()}
        effective, spent = self.goodput
        return {
            "job": self.job,
            "run": None if self.run is None else to_plain(self.run),
            "older_runs": [str(each) for each in self.older_runs],
            "at": time.time(),
            "safe": self.sentence(),
            "after_a_crash": self._told(self.newest),
            "after_a_loss": self._told(self.safest if self.safest and self.safest.tolerates > 0 else None),
            "silent": self.silent,
            "refused": {name: refusal.value for name, refusal in self.refused.items()},
            "lost": self.lost,
            "leaving": self.leaving,
            "trainerless_s": self.trainerless_s,
            "alarms": self.alarms,
            "versions": self.versions,
            "persisted": self.tiers,
            "recoveries": self.recoveries,
            "stragglers": self.stragglers,
            "goodput": {"effective": effective, "text": spent, **to_plain(self.spent)},
            "events": [[node, event.at, event.level, event.text] for node, event in self.events],
            "repeats": self.repeats,
            "older": [list(snapshot) for snapshot in self.older],
            "snapshots": [
                {
                    "epoch": each.snapshot.epoch,
                    "step": each.snapshot.step,
                    "protected": each.protected,
                    "tolerates": each.tolerates,
                    "age_s": self.age_s(each),
                    "groups": [{"nodes": g.nodes, "silent": g.silent, "tolerates": g.tolerates} for g in each.groups],
                }
                for each in self.snapshots
            ],
            "nodes": [status.to_plain(digests) for status in self.statuses],
        }

    def sentence(self) -> str:
        """Which step is safe against which losses, in words, and on which nodes that is not verified yet."""
        reading = [status.inventory.node for status in self.statuses if status.unverified_bytes]
        return self._safe() + (f". {', '.join(reading)}: not all is verified yet" if reading else "")

    def _safe(self) -> str:
        safest = self.safest
        if safest is None:
            return "nothing is held yet" if self.statuses else "no SMP answers that knows what is held"
        when = self._when(safest)
        what = f"step {safest.snapshot.step:,}"
        if safest.tolerates < 0:
            return f"{what} cannot be restored: too much of it is lost{when}"
        if safest.tolerates == 0:
            return f"{what} is held, but a node loss would lose it{when}"
        nodes = "1 node" if safest.tolerates == 1 else f"{safest.tolerates} nodes"
        line, newest = f"{what} is safe against the loss of any {nodes}{when}", self.newest
        if newest is None or newest.snapshot <= safest.snapshot:
            return line
        return f"{line}. If only processes crash, step {newest.snapshot.step:,} comes back{self._when(newest)}"

    def _when(self, each: Redundancy) -> str:
        age = self.age_s(each)
        return "" if age is None else f"; sealed {age:,.1f} s ago"

    def _told(self, each: Redundancy | None) -> dict[str, Any] | None:
        return None if each is None else {"step": each.snapshot.step, "age_s": self.age_s(each)}


def look(job: str, first: Address) -> Overview:
    """Ask the SMP at `first` about the job, then every SMP that it knows. Blocks for some seconds at most."""
    failures: dict[Address, HoldfastError] = {}
    statuses = take_statuses(job, [first], failures=failures)
    known = [
        layout
        for status in statuses
        for layout in status.inventory.layouts.values()
        if status.inventory.run is None or layout.run.id == status.inventory.run.id
    ]
    newest = max(known, key=lambda layout: (layout.epoch, layout.revision), default=None)
    epoch = [layout for layout in known if newest is not None and layout.epoch == newest.epoch]
    gone = {node.name for layout in epoch for node in layout.nodes} - set(newest.left if newest else ())
    others = [address for address in addresses_of(epoch, gone) if address != first]
    statuses = sorted([*statuses, *take_statuses(job, others, known, failures)], key=lambda each: each.inventory.node)
    answering = {status.inventory.node for status in statuses}
    silent = [node.name for node in newest.nodes if node.name not in answering] if newest else []
    lost = sorted(gone - answering - {node.name for node in newest.nodes}) if newest else []
    names = {node.control: node.name for layout in epoch for node in layout.nodes}
    refusals = {names.get(at, f"{at[0]}:{at[1]}"): refusal_of(error) for at, error in failures.items()}
    refused = {name: refusal for name, refusal in refusals.items() if refusal is not None}
    inventories = [status.inventory for status in statuses]
    seen = runs_in_reach(inventories)
    over = given_up(inventories, seen)
    runs = [each for each in seen if each.run.id not in over]
    held = redundancies(own_inventories(inventories, runs[0].run if runs else None))
    return Overview(job, tuple(statuses), tuple(silent), tuple(held), tuple(lost), tuple(runs), refused)
