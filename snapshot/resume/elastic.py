"""Going on with another number of data-parallel ranks: a snapshot of an older world, cut anew for this one.

Nothing is written anywhere but into live tensors, so whatever goes wrong on the way leaves the snapshot as it is; it is
kept until one of the new world is protected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError, StateMismatch, failure_of
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.plan import RestorePlan
from holdfast.smp_daemon.shared.points import reach
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.movers import Mover
from holdfast.snapshot.copy.tensors import flat, leaf_of
from holdfast.snapshot.resume.old_shards import OldManifest, OldShard, Units, decode_plain, region_of
from holdfast.snapshot.resume.reshard import Index, Read, Region, plan_reads, unclaimed
from holdfast.snapshot.resume.worlds import carriers, heir_of, members, preference, readers
from holdfast.snapshot.state import streams
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import Change, LiveTensor, Tree
from holdfast.snapshot.state.optimizers import NAMED, some
from holdfast.snapshot.state.record import BEGAN, LOOP

ENV = "HOLDFAST_ELASTIC"
ELSEWHERE = {"elsewhere": True}
"""What is held of a place in data that was read by another number of ranks; see `snapshot.step.data`."""

log = get_log(__name__)


def elastic_from_environment() -> bool:
    """Whether ``HOLDFAST_ELASTIC`` is 1. Raises `ConfigError` if it is neither that nor 0 nor empty."""
    text = os.environ.get(ENV, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{ENV}={text!r}: say 1 to let the number of data-parallel ranks change, or 0")
    return text == "1"


def ask_idle(client: SmpClient, agreement: Agreement, inventories: Sequence[Inventory]) -> list[Inventory]:
    """What the SMPs of nodes hold that have no rank any more, but are still there. A collective call: the first rank
    asks for all."""
    known = {key: layout for inventory in inventories for key, layout in inventory.layouts.items()}
    bulk = {node.name: node.bulk for _, layout in sorted(known.items()) for node in layout.nodes}
    missing = sorted(bulk[name] for name in bulk.keys() - {inventory.node for inventory in inventories})
    told = client.census(missing) if missing and agreement.rank == 0 else []
    texts = agreement.gather(json.dumps([inventory.to_json() for inventory in told]).encode())
    return [Inventory.from_json(each) for text in texts for each in json.loads(text)]


@dataclass(frozen=True, slots=True)
class _Fill:
    """A live tensor, and what it is made of."""

    item: LiveTensor
    reads: list[Read]


class Resharding:
    """One rank's part in bringing back a snapshot of another world; stands in for an attempt at one of the same.

    Attributes:
        how: ``resharded``.
        notes: what the snapshot's record says beside the state: nothing that holds for another world.
        loop: where the loop was, as far as that holds for another world. began, inputs, rewind: see `Restored`.
    """

    how = "resharded"

    def __init__(self, client: SmpClient, plan: RestorePlan, coords: Collection[str], coord: str, rank: int) -> None:
        self.notes: dict[str, Any] = {}
        self.loop: dict[str, Any] = {}
        self.began: Tree | None = None
        self.inputs: str | None = None
        self.rewind: Callable[[], None] = lambda: None
        self._client = client
        self._sources = plan.sources
        self._step = plan.snapshot.step
        self._old = plan.sources.layout.coords
        self._new = sorted(coords)
        self._coord = coord
        self._rank = rank
        self._fills: list[_Fill] = []
        self._made = False

    @property
    def bytes_fetched(self) -> int:
        """What came over the network for this rank."""
        return self._units.bytes_fetched

    def recover(self) -> None:
        """Read what this rank tells the others. Raises what stands against it."""
        self._units = Units(self._client, self._sources)
        self._told = [
            OldManifest.of(self._shard(coord)).to_json() for coord in readers(self._old, len(self._new), self._rank)
        ]

    def load(self, agreement: Agreement, adapter: Adapter, mover: Mover) -> HoldfastError | None:
        """Fill the live job. Nothing is written unless it fits on every rank. A collective call; blocks.

        Returns why it failed on this rank: something cannot be had just now.

        Raises:
            StateMismatch: the snapshot does not fit the job; on every rank.
        """
        everyone = [each for text in agreement.gather(json.dumps(self._told).encode()) for each in json.loads(text)]
        values: tuple[Tree, Tree, Tree] | None = None
        problem: HoldfastError | None = None
        try:
            manifests = {told.coord: told for told in map(OldManifest.from_json, everyone)}
            family = [manifests[coord] for coord in preference(self._coord, self._old)]
            index = Index((held for manifest in family for held in manifest.held()), [m.coord for m in family])
            values = self._values(manifests, family, adapter)
            self._plan(family, index, values, adapter)
        except HoldfastError as error:
            problem = error
        wanted = None if problem else [fill.item.name for fill in self._fills]
        asked = [json.loads(t) for t in agreement.gather(json.dumps([self._coord, wanted]).encode())]
        if problem is None and all(keys is not None for _, keys in asked):
            of_family = {key for coord, keys in asked if coord in members(self._new, self._coord) for key in keys}
            if extra := unclaimed(index, of_family):
                problem = StateMismatch(f"the snapshot does not fit this job: not in this job: {some(extra)}")
        fatal = isinstance(problem, StateMismatch | ConfigError | ProtocolError)
        fits, ready = agreement.minimum([int(not fatal), int(problem is None)])()
        if not ready and self._made:
            adapter.withdraw()
        if not fits:
            raise problem if fatal and problem else StateMismatch("the snapshot does not fit another rank; see its log")
        if not ready or values is None:
            return problem
        failure = agreement.patiently(partial(failure_of, self._fill, HoldfastError))
        if agreement.minimum([int(failure is None)])() == [1]:
            adapter.load(*values)
            early, late, _ = values
            self.loop = early.get(LOOP, {}) | {"data": dict.fromkeys(early.get(LOOP, {}).get("data", {}), ELSEWHERE)}
            self.began = late.get(BEGAN) if self._coord in self._old else None
            self.rewind = adapter.rewinding(early)
            text = "%s, of %d ranks, was cut anew for %d"
            log.info(text, self._sources.snapshot, len(self._old), len(self._new), extra=about(self._sources.snapshot))
        return failure

    # ------------------------------------------------------------------ plain values

    def _shard(self, coord: str) -> OldShard:
        return OldShard(self._units, self._sources, coord)

    def _values(
        self, manifests: Mapping[str, OldManifest], family: Sequence[OldManifest], adapter: Adapter
    ) -> tuple[Tree, Tree, Tree]:
        """The plain values that this rank takes over."""
        early, late, fixed = self._shard(heir_of(self._coord, self._old)).values()
        _warn_of_differences("values", [manifest.values for manifest in family])
        where = {coord: manifest.coord for manifest in manifests.values() for coord in manifest.carried}
        if self._coord not in self._old:
            first = early["rng"]
            common = {n for n in first if len({manifest.streams.get(n) for manifest in family}) == 1}
            known = self._stream(self._coord, where[self._coord]) if self._coord in where else None
            early["rng"] = streams.for_new_rank(first, common, known, self._coord, self._step)
            self._borrow_extras(family, early, late, set(adapter.extras()))
        mine = carriers(self._old, self._new, where)[self._coord]
        early["streams"] = {coord: self._stream(coord, holder) for coord, holder in mine.items()}
        _regroup(family, late, fixed, adapter)
        return early, late, fixed

    def _borrow_extras(self, family: Sequence[OldManifest], early: Tree, late: Tree, wanted: set[str]) -> None:
        """Of a new rank the extras that it has, each of the first old rank that had it: some have fewer than others."""
        mine = (early, late)
        for part in mine:
            part["extra"] = {name: value for name, value in part["extra"].items() if name in wanted}
        for manifest in family[1:]:
            missing = wanted - early["extra"].keys() - late["extra"].keys()
            if not missing:
                return
            others = self._shard(manifest.coord).values()[:2]
            for part, other in zip(mine, others, strict=True):
                part["extra"] |= {name: value for name, value in other["extra"].items() if name in missing}

    def _stream(self, coord: str, holder: str) -> Tree:
        """The random streams of a rank, as they stand in the record of `holder`."""
        early, _, _ = self._shard(holder).values()
        found: Tree = early["rng"] if coord == holder else early["streams"][coord]
        return found

    # ------------------------------------------------------------------ tensors

    def _plan(
        self, family: Sequence[OldManifest], index: Index, values: tuple[Tree, Tree, Tree], adapter: Adapter
    ) -> None:
        adapter.check(*values)
        adapter.materialise(_leaves_to_make(family, adapter))
        self._made = True
        problems = []
        live = list(adapter.tensors())
        for item in live:
            leaf = leaf_of(item.name, item.tensor)
            whole, runs = region_of(item.name, leaf.shape, item.block)
            reads, problem = plan_reads(Region(item.name, leaf.dtype, whole, runs), index)
            problems += [problem] * bool(problem)
            self._fills.append(_Fill(item, reads))
        if problems:
            raise StateMismatch(f"the snapshot does not fit this job: {some(problems)}")
        _check_private(live, family)

    def _fill(self) -> None:
        """Copy, shard by shard as far as can be, into the live tensors."""
        fills = sorted(self._fills, key=lambda fill: [(read.coord, read.source) for read in fill.reads[:1]])
        for number, fill in enumerate(fills):
            if number == len(fills) // 2:
                reach("restore.middle", self._step)
            tensor = fill.item.tensor.detach()
            if not tensor.numel():
                continue
            direct = (
                tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            )
            target = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
            memory = memoryview(flat(target).view(torch.uint8).numpy().data)
            for read in fill.reads:
                self._units.read_into(read.coord, read.source, memory[read.target : read.target + read.bytes])
            if not direct:
                tensor.copy_(target)


def _regroup(family: Sequence[OldManifest], late: Tree, fixed: Tree, adapter: Adapter) -> None:
    """What optimizers say of the parameters that this rank has now, whoever had them.

    Raises:
        StateMismatch: the old ranks did not have the same optimizers.
    """
    updated = adapter.updated()
    for i, (plain, kept) in enumerate(zip(late["optim"], fixed["optim"], strict=True)):
        prefix, own = f"{kept['prefix']}.", kept["groups"]
        stems = [stem for stem in updated if stem.startswith(prefix)]
        places = {stem.removeprefix(prefix): number for number, stem in enumerate(stems)}
        order = {name: entries for name, entries in kept["order"].items() if name.startswith(NAMED)}
        state = {name: value for name, value in plain["state"].items() if name.startswith(NAMED)}
        groups: list[dict[str, None]] = [{} for _ in own]
        for manifest in family:
            if len(manifest.optimizers) <= i or len(manifest.optimizers[i]["groups"]) != len(own):
                raise StateMismatch(f"{manifest.coord} had other optimizers, or groups, than {family[0].coord}")
            told = manifest.optimizers[i]
            held = decode_plain(told["state"])
            for place, entries in told["order"].items():
                if place in places and not order.get(place):
                    order[place] = entries
                    state |= {place: held[place]} if place in held else {}
            for group, names in zip(groups, told["groups"], strict=True):
                group |= {name: None for name in names if name in places}
        kept["order"], plain["state"] = order, state
        kept["groups"] = [  # where ranks divide the parameters, there is no order of all of them
            before if list(group) == before else sorted(group, key=places.__getitem__)
            for group, before in zip(groups, own, strict=True)
        ]


def _leaves_to_make(family: Sequence[OldManifest], adapter: Adapter) -> dict[str, Leaf]:
    """The leaves that this rank's job has once it has all that the snapshot has: state of optimizers above all, which
    is as long as the part of its parameter that this rank has, or else whole."""
    states = [held for manifest in family for held in manifest.states()]
    leaves = family[0].whole_leaves()
    for _, leaf in states:
        leaves.pop(leaf.name, None)
    updated = adapter.updated()
    for stem, leaf in reversed(states):
        if (parameter := updated.get(stem)) is not None:
            whole = parameter.block.whole if parameter.block else parameter.shape
            leaves[leaf.name] = Leaf(leaf.name, leaf.dtype, parameter.shape if leaf.shape == whole else leaf.shape)
    return leaves


def _check_private(live: Sequence[LiveTensor], family: Sequence[OldManifest]) -> None:
    """What several ranks held whole must be alike, or nobody could say which of them is right.

    What forward changes, and what users track, may be a rank's own.

    Raises:
        StateMismatch: a parameter, or an optimizer's state, differs.
    """
    digests: dict[str, set[str]] = {}
    for manifest in family:
        for name, digest in manifest.digests.items():
            digests.setdefault(name, set()).add(digest)
    differing = {name for name, found in digests.items() if len(found) > 1}
    private = {item.name for item in live if item.change is Change.ANY or item.name.startswith("tracked.")}
    if bad := sorted(differing - private):
        raise StateMismatch(
            f"{some(bad)}: each old rank holds another, and nothing says how they make up a whole. "
            "Start with the same parallel sizes"
        )
    if own := sorted(differing & private):
        text = "%s: each old rank had its own; who stays keeps it, a new rank takes the first's, others' are dropped"
        log.warning(text, some(own))


def _warn_of_differences(what: str, found: Sequence[Mapping[str, str]]) -> None:
    names = sorted({name for digests in found for name in digests})
    own = [name for name in names if len({digests.get(name) for digests in found}) > 1]
    if own:
        text = "%s of %s differ between the old ranks: who stays keeps its own, a new rank takes the first's"
        log.warning(text, what, some(own))
