"""What an SMP exports to Prometheus: its own status, and the state of the job as it sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.smp_daemon.ops.overview import Overview
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.shared.counters import COUNTS
from holdfast.smp_daemon.shared.goodput import PARTS
from holdfast.smp_daemon.shared.identity import starts_until
from holdfast.smp_daemon.shared.inventory import Inventory

GAUGES = {
    "holdfast_up_seconds": "how long the SMP has run",
    "holdfast_build_info": "1; its labels say which version of holdfast this is, and which protocol it speaks",
    "holdfast_impaired_parts": "optional parts (page, log, reserve of memory) that are degraded: see the status",
    "holdfast_epoch": "number of starts of the job that this SMP knows of",
    "holdfast_connections": "connections of trainers to this SMP: two per trainer",
    "holdfast_sealed_step": "newest step that this node has sealed; if all have, a crash of processes goes back to it",
    "holdfast_sealed_age_seconds": "seconds since the newest sealed step was sealed",
    "holdfast_protected_step": "newest step that the whole job agreed is protected, as far as this SMP was told",
    "holdfast_arena_bytes": "memory reserved for slots",
    "holdfast_planned_bytes": "memory of slots and reserve once all of it is reserved; 0: it is",
    "holdfast_unverified_bytes": "what the last SMP left here and this one has not read yet",
    "holdfast_memory_bytes": "memory that slots may take, reserved from the start on; 0: no limit",
    "holdfast_rss_bytes": "memory of the process, with what it has mapped of the arena",
    "holdfast_silent_nodes": "nodes of the job whose SMP does not answer this one",
    "holdfast_lost_nodes": "nodes without which the others have regrouped, and which do not answer",
    "holdfast_trainerless_seconds": "how long no trainer has been connected; absent: none ever was, or all ended well",
    "holdfast_trainers": "trainers of this node that have announced themselves",
    "holdfast_trainers_late": "trainers of this node that have been quiet for over half of their phase's deadline",
    "holdfast_trainers_hung": "trainers of this node that have been quiet for longer than their phase's deadline",
    "holdfast_trainers_dead": "trainers of this node that have died and are not back",
    "holdfast_heartbeat_age_seconds": "seconds since the last heartbeat of the slowest trainer of this node",
    "holdfast_lease_age_seconds": "seconds since the last answer of the slowest peer in the group",
    "holdfast_safe_step": "newest step that survives the most node losses; the job goes back to it after one",
    "holdfast_safe_age_seconds": "seconds since that step was sealed",
    "holdfast_safe_interval_seconds": "time between two protected snapshots, as trainers say; 0: unknown",
    "holdfast_tolerated_node_failures": "how many more nodes may be lost before the safe step is; -1: it is lost",
    "holdfast_wanted_node_failures": "how many node losses the job is to survive, by its nodes and protect=; 0: none",
    "holdfast_recovery_seconds": "of the parts of the newest recovery, from the first loss to the first new step",
    "holdfast_effective_fraction": "share of the run's time that went into steps that count, until the newest snapshot",
    "holdfast_spent_seconds": "where the run's time went until then, by part",
    "holdfast_steps_again": "finished steps of the run that had to be done again",
    "holdfast_own_data_seconds": "what the slowest trainer of this node takes in a step to read data",
    "holdfast_own_work_seconds": "what the slowest trainer of this node takes in a step for all that it does by itself",
    "holdfast_stragglers": "trainers of the job that keep the others waiting in each step: see the status",
    "holdfast_persisted_step": "the newest step that this SMP knows to be persisted; -1: none",
    "holdfast_persist_failing": "1 if the last attempt to persist a snapshot failed, else 0",
}

VIEWS = 16
"""Largest number of nodes of a job that export the state of the whole job; each of them asks all other SMPs."""


def sees_the_job(mine: Inventory) -> bool:
    """Whether the SMP of this inventory exports the state of the whole job. Pure.

    Those that do are spread over the newest layout. An SMP that is not in that layout always does.
    """
    newest = max(mine.layouts.values(), key=lambda layout: (layout.epoch, layout.revision), default=None)
    names = [node.name for node in newest.nodes] if newest is not None else []
    return mine.node not in names or names.index(mine.node) % -(-len(names) // VIEWS) == 0


def exposition(job: str, mine: Status, overview: Overview | None) -> bytes:
    """The metrics in Prometheus' text format. Pure.

    Args:
        overview: the state of the job; None: export only the SMP's own status.
    """
    return generate_latest(_StatusCollector(job, mine, overview))


@dataclass(frozen=True, slots=True)
class _StatusCollector(Collector):
    job: str
    mine: Status
    overview: Overview | None

    def collect(self) -> Iterator[Metric]:
        labels = {"job": self.job, "node": self.mine.inventory.node}
        build = {"version": self.mine.version, "protocol": str(self.mine.protocol)}
        of_job = {} if self.overview is None else _of_job(self.overview)
        for name, value in (_gauges(self.mine) | of_job).items():
            if value is not None:
                own = labels | (build if name == "holdfast_build_info" else {})
                gauge = GaugeMetricFamily(name, GAUGES[name], labels=list(own))
                gauge.add_metric(list(own.values()), value)
                yield gauge
        spent = self.mine.spent
        parts = {
            "holdfast_recovery_seconds": self.mine.recoveries[0].spans if self.mine.recoveries else [],
            "holdfast_spent_seconds": [(name, getattr(spent, name)) for name in PARTS] if spent.count else [],
        }
        for name, seconds_of in parts.items():
            gauge = GaugeMetricFamily(name, GAUGES[name], labels=[*labels, "part"])
            for part, seconds in seconds_of:
                gauge.add_metric([*labels.values(), part], seconds)
            yield gauge
        for name, what in COUNTS.items():
            counter = CounterMetricFamily(f"holdfast_{name}", what, labels=list(labels))
            counter.add_metric(list(labels.values()), self.mine.counters[name])
            yield counter


def _of_job(overview: Overview) -> dict[str, float | None]:
    safe = overview.safest
    return {
        "holdfast_silent_nodes": len(overview.silent),
        "holdfast_lost_nodes": len(overview.lost),
        "holdfast_safe_step": safe.snapshot.step if safe else None,
        "holdfast_safe_age_seconds": overview.age_s(safe) if safe else None,
        "holdfast_tolerated_node_failures": safe.tolerates if safe else None,
        "holdfast_wanted_node_failures": overview.wanted,
        "holdfast_stragglers": len(overview.stragglers),
    }


def _gauges(mine: Status) -> dict[str, float | None]:
    inventory = mine.inventory
    persisted = mine.tier.persisted if mine.tier else None
    sealed = max((snapshot for snapshot, _ in inventory.shards), default=None)
    return {
        "holdfast_up_seconds": mine.up_s,
        "holdfast_build_info": 1,
        "holdfast_impaired_parts": len(mine.impaired),
        "holdfast_epoch": starts_until(inventory.epoch),
        "holdfast_connections": inventory.trainers,
        "holdfast_sealed_step": sealed.step if sealed else None,
        "holdfast_sealed_age_seconds": dict(mine.ages_s).get(sealed) if sealed else None,
        "holdfast_protected_step": inventory.protected.step if inventory.protected else None,
        "holdfast_safe_interval_seconds": mine.next_s,
        "holdfast_arena_bytes": mine.arena_bytes,
        "holdfast_planned_bytes": mine.planned_bytes,
        "holdfast_unverified_bytes": mine.unverified_bytes,
        "holdfast_memory_bytes": mine.memory_bytes,
        "holdfast_rss_bytes": mine.rss_bytes,
        "holdfast_trainerless_seconds": mine.trainerless_s,
        "holdfast_trainers": len(mine.trainers),
        **{f"holdfast_trainers_{h}": sum(t.health == h for t in mine.trainers) for h in ("late", "hung", "dead")},
        "holdfast_heartbeat_age_seconds": max((trainer.quiet_s for trainer in mine.trainers), default=0.0),
        "holdfast_lease_age_seconds": max(mine.leases.values(), default=0.0),
        "holdfast_own_data_seconds": max((trainer.own.data_s for trainer in mine.trainers), default=0.0),
        "holdfast_own_work_seconds": max((trainer.own.work_s for trainer in mine.trainers), default=0.0),
        "holdfast_effective_fraction": mine.spent.effective(),
        "holdfast_steps_again": mine.spent.again,
        "holdfast_persisted_step": persisted.step if persisted else -1,
        "holdfast_persist_failing": bool(mine.tier and mine.tier.problem),
    }
