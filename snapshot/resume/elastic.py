"""Resuming with another number of data-parallel ranks: a snapshot of an older world is resharded for the new one.

A coordinate without its data-parallel place names a *data-parallel group*: ranks that train the same part of the model.
Only the number of ranks in each group may change from one world to the next.

Only live tensors are written, so the snapshot stays intact whatever goes wrong. It is kept until a snapshot of the new
world is protected.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import xxhash

from holdfast.smp_daemon.shared.belief import Claim
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.crash_loop import newest_start
from holdfast.smp_daemon.shared.errors import HoldfastError, ProtocolError, StateMismatch, failure_of
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.logs import about, get_log, some
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.copy.tensors import slot_tensor
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.resume.attempt import Attempt
from holdfast.snapshot.resume.regions import Held, held_in, index_of, plan_fills, refuse_unfit, unclaimed
from holdfast.snapshot.state import streams
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.digests import digest_of
from holdfast.snapshot.state.live import Change, LiveTensor, Tree
from holdfast.snapshot.state.manifest import FIXED
from holdfast.snapshot.state.optimizers import NAMED
from holdfast.snapshot.state.record import LATE, NOTES, HeldLeaf, SavedShard, leaves_in, whole_leaves
from holdfast.snapshot.state.replicas import is_part_of, same_on_all, shared_leaves_of
from holdfast.snapshot.state.tracked import PREFIX
from holdfast.snapshot.state.values import decode_plain
from holdfast.snapshot.step.data import ELSEWHERE

UNITS_KEPT = 16
"""Number of units that are cached. Reads go through neighbouring units of a shard, and take a few shards in turn."""

_PLACE = re.compile(r"(?:^|-)dp(0|[1-9]\d*)$")
_UNCHANGING = re.compile(r"(?:^|-)(?:cp|ep)[1-9]")

log = get_log(__name__)


def ask_idle(client: SmpClient, agreement: Agreement, inventories: Sequence[Inventory]) -> list[Inventory]:
    """The inventories of SMPs that still answer on nodes without ranks. A collective call: rank 0 asks for all."""
    known = {key: layout for inventory in inventories for key, layout in inventory.layouts.items()}
    at = {node.name: node.control for _, layout in sorted(known.items()) for node in layout.nodes}
    missing = {at[name] for name in at.keys() - {inventory.node for inventory in inventories}}
    if (start := newest_start(inventories)) is not None:
        missing |= set(start.newcomers) - {inventory.control for inventory in inventories}
    told = client.inventories(sorted(missing)) if missing and agreement.rank == 0 else []
    text = agreement.tell(encode_json([inventory.to_plain() for inventory in told]), 0)
    return [Inventory.read(each) for each in decode_json(list[Any], text, "inventories")]


# ------------------------------------------------------------------ which rank continues which: pure, the same on all


def group_of(coord: str) -> str:
    """The data-parallel group of a coordinate; empty if the coordinate is only a data-parallel place."""
    return _PLACE.sub("", coord)


def check_change(old: Collection[str], new: Collection[str]) -> None:
    """Raises `StateMismatch` unless the worlds differ only in the number of data-parallel ranks."""
    for coord in (*old, *new):
        if _PLACE.search(coord) is None:
            raise StateMismatch(f"{coord!r} has no data-parallel place (dp...): the number of ranks cannot change")
        if _UNCHANGING.search(coord):
            raise StateMismatch(
                f"{coord!r}: with context or expert parallelism the number of data-parallel ranks cannot change: "
                "start with as many as before"
            )
    held, wanted = {group_of(coord) for coord in old}, {group_of(coord) for coord in new}
    if held != wanted:
        raise StateMismatch(
            f"only the number of data-parallel ranks may change; not in the snapshot: {sorted(wanted - held)[:8]}; "
            f"not in this job: {sorted(held - wanted)[:8]}. Start with the same tensor and pipeline parallel sizes"
        )


def members(coords: Collection[str], of: str) -> list[str]:
    """The coordinates in the data-parallel group of `of`, in order."""
    return sorted((coord for coord in coords if group_of(coord) == group_of(of)), key=coordinate_key)


def preference(coord: str, old: Collection[str]) -> list[str]:
    """The old ranks to take state from that several hold: first the one that `coord` continues, the one at `coord` if
    it existed, then others of its group."""
    return sorted(members(old, coord), key=lambda other: other != coord)


def readers(old: Sequence[str], ranks: int, index: int) -> list[str]:
    """The old ranks whose manifests rank `index` of `ranks` reads for all."""
    return sorted(old, key=coordinate_key)[index::ranks]


def stream_owners(old: Collection[str], new: Collection[str], carried: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Which random streams each new rank carries for absent ranks: by absent rank, the old rank whose record has them.

    Args:
        carried: streams that were carried already when the snapshot was taken, in the same form.
    """
    found = {coord: holder for coord, holder in carried.items() if coord not in old}
    homeless = {**found, **{coord: coord for coord in old}}
    waiting = sorted((coord for coord in homeless if coord not in new), key=coordinate_key)
    result: dict[str, dict[str, str]] = {coord: {} for coord in new}
    for number, coord in enumerate(waiting):
        takers = members(new, coord)
        result[takers[number % len(takers)]][coord] = homeless[coord]
    return result


# ------------------------------------------------------------------ contents of the old shards


class LentShards:
    """All shards of one snapshot, read through this node's SMP. Blocks while units are fetched or computed; not
    thread-safe.
    """

    def __init__(self, client: SmpClient, sources: Sources) -> None:
        client.lend(sources)
        self._client = client
        self._snapshot = sources.snapshot
        self._layout = sources.layout
        self._unit = lru_cache(UNITS_KEPT)(self._fetch)
        self._bytes_fetched = 0

    def open(self, coord: str) -> SavedShard:
        """What the shard of `coord` says. Raises as `SavedShard`."""
        return SavedShard(partial(self.read, coord), Claim.of_shard(self._snapshot, coord, self._layout))

    def read(self, coord: str, offset: int, length: int) -> memoryview:
        """A copy of some bytes of a shard."""
        out = memoryview(bytearray(length))
        self.read_into(coord, offset, out)
        return out

    def read_into(self, coord: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            ProtocolError: the shard has no such bytes.
            HoldfastError: they can be neither fetched nor computed.
        """
        if not 0 <= offset <= offset + out.nbytes <= self._layout.shard_bytes(coord):
            raise ProtocolError(f"{out.nbytes} bytes at {offset} are not within the shard of {coord}")
        done = 0
        while done < out.nbytes:
            index, begin = divmod(offset + done, self._layout.unit_bytes)
            unit = self._unit(coord, index)
            count = min(out.nbytes - done, unit.nbytes - begin)
            out[done : done + count] = unit[begin : begin + count]
            done += count

    def close(self) -> int:
        """Free what is cached, for which a job that collects no garbage would wait in vain. Returns the bytes that this
        node's SMP fetched over the network for these reads."""
        self._unit.cache_clear()
        return self._bytes_fetched

    def _fetch(self, coord: str, index: int) -> memoryview:
        length = min(self._layout.unit_bytes, self._layout.shard_bytes(coord) - index * self._layout.unit_bytes)
        unit = memoryview(bytearray(length))
        self._bytes_fetched = self._client.unit(coord, index, unit)
        return unit


def digest_of_leaf(saved: SavedShard, name: str) -> str:
    """The digest of a leaf's bytes."""
    offset, leaf = saved.form.offsets[name]
    found = xxhash.xxh3_64()
    for begin in range(0, leaf.bytes, 1 << 20):
        found.update(saved.read(offset + begin, min(1 << 20, leaf.bytes - begin)))
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class OldManifest:
    """What all ranks must know about one old shard. Plain data.

    Attributes:
        leaves: name, dtype, shape and offset of every tensor except those of the record.
        shared: the leaves that its replicas share, whole: dtype and shape by name.
        blocks: which part of a whole each divided leaf is, by name.
        optimizers: for each, ``prefix``, ``groups`` and ``order`` from `OptimizerState.look`, and ``state``: what its
            parameters have that is not tensors, still encoded.
        digests: digests of the leaves that are neither shared nor divided.
        streams: digests of its random generators.
        carried: the absent ranks whose streams it carries.
        values: digests of the user's values: schedules, extras, tracked values.
    """

    coord: str
    leaves: list[HeldLeaf]
    shared: dict[str, Any]
    blocks: dict[str, Any]
    optimizers: list[dict[str, Any]]
    digests: dict[str, str]
    streams: dict[str, str]
    carried: list[str]
    values: dict[str, str]

    @classmethod
    def of(cls, shard: SavedShard) -> OldManifest:
        """The manifest of `shard`. Reads and digests the leaves that only this rank holds. Raises as
        `SavedShard.values`."""
        early, late, fixed = shard.values()
        shared, blocks, leaves = shard.shared, shard.record[FIXED]["blocks"], leaves_in(shard.form)
        encoded = shard.record[LATE].get("optim", [])
        return cls(
            shard.coord,
            leaves,
            shard.record[FIXED]["shared"],
            blocks,
            [
                {key: kept[key] for key in ("prefix", "groups", "order")} | {"state": plain["state"]}
                for kept, plain in zip(fixed.get("optim", []), encoded, strict=True)
            ],
            {
                name: digest_of_leaf(shard, name)
                for name, *_ in leaves
                if name not in blocks and not is_part_of(name, shared)
            },
            streams.digests(early["rng"]),
            sorted(early.get("streams", {})),
            {
                "scheduler": digest_of(late["scheduler"]),
                **{f"extra[{n!r}]": digest_of(v) for part in (early, late) for n, v in part["extra"].items()},
                **{f"extra state of {n}": digest_of(v) for n, v in late["get_extra_state"].items()},
                **{f"tracked {n!r}": digest_of(v) for part in (early, late) for n, v in part["tracked"].items()},
            },
        )

    def whole_leaves(self) -> dict[str, Leaf]:
        """Every leaf as this rank had it: its own part of divided leaves, shared leaves whole."""
        return whole_leaves(self.leaves, shared_leaves_of(self.shared))

    def held(self) -> Iterator[Held]:
        """The regions in its slot. Raises `StateMismatch` if a leaf is divided in an unknown way."""
        return held_in(self.coord, self.leaves, shared_leaves_of(self.shared), self.blocks)

    def states(self) -> Iterator[tuple[str, Leaf]]:
        """Every tensor of optimizer state: the stem that its name has from its parameter, and its leaf, whole."""
        leaves = self.whole_leaves()
        for told in self.optimizers:
            for place, entries in told["order"].items():
                stem = f"{told['prefix']}.{place}"
                for name in (f"{stem}.{entry}" for entry in entries if not place.startswith(NAMED)):
                    if (leaf := leaves.get(name)) is not None:
                        whole = tuple(self.blocks[name][0]) if name in self.blocks else leaf.shape
                        yield stem, Leaf(name, leaf.dtype, whole)


# ------------------------------------------------------------------ resharding


class OtherWorld(Attempt):
    """The ranks are others than those that took the snapshot. Each reads what it needs of any shard.

    Notes are of the whole run, so they apply to another world, too: how it failed, and where its time went. Of the
    position of the loop only a part does.
    """

    def recover(self) -> None:
        """Read the manifests that this rank tells the others."""
        self.restored.how, self.restored.inputs = "resharded", ""
        self._old, self._new = self._sources.layout.coords, sorted(self._coords)
        self._lent = LentShards(self._client, self._sources)
        told = readers(self._old, len(self._new), list(self._coords).index(self._coord))
        self._told: list[OldManifest] = []
        manifests = (OldManifest.of(self._lent.open(coord)) for coord in told)
        if problem := self.problem_of(lambda: self._told.extend(manifests)):
            raise problem

    def plan(self, agreement: Agreement, adapter: Adapter) -> HoldfastError | None:
        texts = agreement.gather(encode_json(self._told))
        everyone = [told for text in texts for told in decode_json(list[OldManifest], text, "what stands in shards")]
        problem = self.problem_of(lambda: self._plan({told.coord: told for told in everyone}, adapter))
        wanted = None if problem else [fill.item.name for fill in self.fills]
        asked = [json.loads(text) for text in agreement.gather(json.dumps([self._coord, wanted]).encode())]
        if problem is None and all(keys is not None for _, keys in asked):
            of_group = {key for coord, keys in asked if group_of(coord) == group_of(self._coord) for key in keys}
            problem = failure_of(lambda: refuse_unfit(unclaimed(self._index, of_group)), StateMismatch)
        return problem

    def _plan(self, manifests: Mapping[str, OldManifest], adapter: Adapter) -> None:
        # The manifests of this rank's data-parallel group: state that several hold is taken from the first.
        preferred = [manifests[coord] for coord in preference(self._coord, self._old)]
        self._index = index_of((held for each in preferred for held in each.held()), [each.coord for each in preferred])
        self._values = self._values_of(manifests, preferred, adapter)
        self.rebuild(adapter, self._values[0])
        adapter.check(*self._values)
        adapter.materialise(_leaves_to_make(preferred, adapter))
        live = list(adapter.tensors())
        self.fills, problems = plan_fills(live, self._index, divided=True)
        refuse_unfit(problems)
        _check_private(live, preferred)

    def fill(self, agreement: Agreement, engine: CopyEngine) -> HoldfastError | None:
        return agreement.patiently(partial(failure_of, self._fill, HoldfastError))

    def _fill(self) -> None:
        """Copy into the live tensors, shard by shard as far as possible."""
        fills = sorted(self.fills, key=lambda fill: [(read.coord, read.source) for read in fill.reads[:1]])
        for number, fill in enumerate(fills):
            if number == len(fills) // 2:
                self.midway()
            tensor = fill.item.tensor.detach()
            if not tensor.numel():
                continue
            # Not into the tensor itself: torch never again resizes memory that it has lent, and this is the user's.
            held = memoryview(bytearray(tensor.nbytes))
            for read in fill.reads:
                self._lent.read_into(read.coord, read.source, held[read.target : read.target + read.bytes])
            tensor.copy_(slot_tensor(held, 0, tensor.dtype, tuple(tensor.shape)))

    def take_over(self, agreement: Agreement, adapter: Adapter) -> None:
        super().take_over(agreement, adapter)
        found = self.restored
        found.bytes_fetched = self._lent.close()
        found.loop = found.loop | {"data": dict.fromkeys(found.loop.get("data", {}), ELSEWHERE)}
        if self._coord not in self._old:
            found.began = None
        text = "%s, of %d ranks, was resharded for %d"
        log.info(text, self.snapshot, len(self._old), len(self._new), extra=about(self.snapshot))

    # ------------------------------------------------------------------ plain values

    def _values_of(
        self, manifests: Mapping[str, OldManifest], preferred: Sequence[OldManifest], adapter: Adapter
    ) -> tuple[Tree, Tree, Tree]:
        saved = self._lent.open(preferred[0].coord)
        early, late, fixed = saved.values()
        self.restored.notes = saved.record.get(NOTES) or {}
        values = [manifest.values for manifest in preferred]
        if own := sorted(set[str]().union(*values) - same_on_all(values)):
            log.warning(
                "values of %s differ between the old ranks: ranks that stay keep their own, new ones take the first "
                "rank's",
                some(own),
            )
        where = {coord: manifest.coord for manifest in manifests.values() for coord in manifest.carried}
        common = streams.alike([manifest.streams for manifest in preferred])
        if self._coord not in self._old:
            known = self._stream(self._coord, where[self._coord]) if self._coord in where else {}
            if len(preferred) == 1 and not known:
                log.warning(
                    "%s is new, and there was one rank: it takes over that rank's random generators, so the two draw "
                    "the same numbers; seed them apart if they should not",
                    self._coord,
                )
            early["rng"] = streams.for_new_rank(early["rng"], common, known, self._coord, self.snapshot.step)
            self._borrow_extras(preferred, early, late, set(adapter.extras()))
        mine = stream_owners(self._old, self._new, where)[self._coord]
        # Generators that all ranks hold alike continue on the ranks that are left, so they are not carried.
        early["streams"] = {
            coord: {name: state for name, state in self._stream(coord, holder).items() if name not in (common or ())}
            for coord, holder in mine.items()
        }
        _regroup(preferred, late, fixed, adapter)
        return early, late, fixed

    def _borrow_extras(self, preferred: Sequence[OldManifest], early: Tree, late: Tree, wanted: set[str]) -> None:
        """Give a new rank its extras, each from the first old rank that had it: some ranks have fewer than others."""
        mine = (early, late)
        for part in mine:
            part["extra"] = {name: value for name, value in part["extra"].items() if name in wanted}
        for manifest in preferred[1:]:
            missing = wanted - early["extra"].keys() - late["extra"].keys()
            if not missing:
                return
            others = self._lent.open(manifest.coord).values()[:2]
            for part, other in zip(mine, others, strict=True):
                part["extra"] |= {name: value for name, value in other["extra"].items() if name in missing}

    def _stream(self, coord: str, holder: str) -> Tree:
        """The random streams of a rank, from the record of `holder`."""
        early, _, _ = self._lent.open(holder).values()
        found: Tree = early["rng"] if coord == holder else early["streams"][coord]
        return found


def _regroup(preferred: Sequence[OldManifest], late: Tree, fixed: Tree, adapter: Adapter) -> None:
    """Rewrite optimizers' plain values for the parameters that this rank has now, whichever rank had them before."""
    updated = adapter.updated()
    for i, (plain, kept) in enumerate(zip(late["optim"], fixed["optim"], strict=True)):
        prefix, own = f"{kept['prefix']}.", kept["groups"]
        stems = [stem for stem in updated if stem.startswith(prefix)]
        places = {stem.removeprefix(prefix): number for number, stem in enumerate(stems)}
        order = {name: entries for name, entries in kept["order"].items() if name.startswith(NAMED)}
        state = {name: value for name, value in plain["state"].items() if name.startswith(NAMED)}
        groups: list[dict[str, None]] = [{} for _ in own]
        for manifest in preferred:
            if len(manifest.optimizers) <= i or len(manifest.optimizers[i]["groups"]) != len(own):
                raise StateMismatch(f"{manifest.coord} had other optimizers, or groups, than {preferred[0].coord}")
            told = manifest.optimizers[i]
            held = decode_plain(told["state"])
            for place, entries in told["order"].items():
                if place in places and not order.get(place):
                    order[place] = entries
                    state |= {place: held[place]} if place in held else {}
            for group, names in zip(groups, told["groups"], strict=True):
                group |= {name: None for name in names if name in places}
        kept["order"], plain["state"] = order, state
        kept["groups"] = [  # if ranks divide the parameters, no order covers all of them
            before if list(group) == before else sorted(group, key=places.__getitem__)
            for group, before in zip(groups, own, strict=True)
        ]


def _leaves_to_make(preferred: Sequence[OldManifest], adapter: Adapter) -> dict[str, Leaf]:
    """The leaves that this rank's job has once it has all that the snapshot holds. Optimizer state of the shape of a
    whole parameter gets the shape of this rank's part; other state stays whole."""
    states = [held for manifest in preferred for held in manifest.states()]
    leaves = preferred[0].whole_leaves()
    for _, leaf in states:
        leaves.pop(leaf.name, None)
    updated = adapter.updated()
    for stem, leaf in reversed(states):
        if (parameter := updated.get(stem)) is not None:
            whole = parameter.block.whole if parameter.block else parameter.shape
            leaves[leaf.name] = Leaf(leaf.name, leaf.dtype, parameter.shape if leaf.shape == whole else leaf.shape)
    return leaves


def _check_private(live: Sequence[LiveTensor], preferred: Sequence[OldManifest]) -> None:
    """Check that leaves that several ranks held whole are alike, since nothing says which of them would be right.

    Leaves that forward changes or that users track may differ by rank."""
    digests = {(name, digest) for manifest in preferred for name, digest in manifest.digests.items()}
    differing = {name for name, count in Counter(name for name, _ in digests).items() if count > 1}
    private = {item.name for item in live if item.change is Change.ANY or item.name.startswith(PREFIX)}
    if bad := sorted(differing - private):
        raise StateMismatch(
            f"{some(bad)}: the old ranks hold different values, and nothing says how to combine them. "
            "Start with the same parallel sizes"
        )
    if own := sorted(differing & private):
        text = "%s differ between old ranks: ranks that stay keep their own, new ones take the first's, others are lost"
        log.warning(text, some(own))
