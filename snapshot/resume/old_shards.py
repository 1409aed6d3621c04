"""What stands in the shards of an older world: read piece by piece through this node's SMP, and told to all ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.slotfile import PAGE_BYTES, RECORD, Leaf, SlotFormat, read_format, read_stamp
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.snapshot.copy.tensors import Block, read_leaf
from holdfast.snapshot.resume.reshard import Held, Region, Run, block_runs, range_runs
from holdfast.snapshot.state import streams
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.manifest import FIXED
from holdfast.snapshot.state.optimizers import NAMED
from holdfast.snapshot.state.record import LATE, decode_values, is_of_record, parse_record, shared_leaves
from holdfast.snapshot.state.replicas import is_part_of, shared_from_json
from holdfast.snapshot.state.shares import parse_part
from holdfast.snapshot.state.values import decode

UNITS_KEPT = 16
"""So many units are remembered: neighbours of a shard are asked for one after another, of a few shards in turn."""


class Units:
    """Bytes of any shard of one snapshot. Blocks while they travel or are computed; not thread-safe.

    Attributes:
        bytes_fetched: what came to this node's SMP over the network for it.
    """

    def __init__(self, client: SmpClient, sources: Sources) -> None:
        client.lend(sources)
        self._client = client
        self._layout = sources.layout
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self.bytes_fetched = 0

    def length(self, coord: str) -> int:
        """Of the slot file of `coord`, in bytes."""
        return self._layout.shard_bytes(coord)

    def read(self, coord: str, offset: int, length: int) -> memoryview:
        """A copy of some bytes of a shard, checked against the digests that they were sealed with."""
        out = memoryview(bytearray(length))
        self.read_into(coord, offset, out)
        return out

    def read_into(self, coord: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            ProtocolError: the shard has no such bytes.
            HoldfastError: they cannot be had.
        """
        if not 0 <= offset <= offset + out.nbytes <= self.length(coord):
            raise ProtocolError(f"{out.nbytes} bytes at {offset} are not within the shard of {coord}")
        done = 0
        while done < out.nbytes:
            index, begin = divmod(offset + done, self._layout.unit_bytes)
            unit = self._unit(coord, index)
            count = min(out.nbytes - done, unit.nbytes - begin)
            out[done : done + count] = unit[begin : begin + count]
            done += count

    def _unit(self, coord: str, index: int) -> memoryview:
        key = coord, index
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        length = min(self._layout.unit_bytes, self.length(coord) - index * self._layout.unit_bytes)
        unit = memoryview(bytearray(length))
        self.bytes_fetched = self._client.unit(coord, index, unit)
        self._kept[key] = unit
        if len(self._kept) > UNITS_KEPT:
            self._kept.popitem(last=False)
        return unit


class OldShard:
    """One shard: its format, and its record, read and checked.

    Raises (on making one):
        ProtocolError: it is not what a trainer wrote.
        HoldfastError: it cannot be had.
    """

    def __init__(self, units: Units, sources: Sources, coord: str) -> None:
        self.coord = coord
        self._units = units
        total = units.length(coord)
        first = units.read(coord, 0, min(PAGE_BYTES, total))
        header = units.read(coord, 0, min(8 + int.from_bytes(first[:8], "little"), total))
        self.form: SlotFormat = read_format(header, total)[0]
        if read_stamp(header) != sources.snapshot:
            raise ProtocolError(f"the shard of {coord} is stamped {read_stamp(header)}, not {sources.snapshot}")
        self.record = parse_record(bytes(units.read(coord, *self.form.record)), sources.snapshot)

    def values(self) -> tuple[Tree, Tree, Tree]:
        """Its early, late and fixed values."""
        return decode_values(self.record, self._tensor)

    def digest(self, name: str) -> str:
        """Of a leaf's bytes."""
        offset, leaf = self.form.offsets[name]
        found = xxhash.xxh3_64()
        for begin in range(0, leaf.bytes, 1 << 20):
            found.update(self._units.read(self.coord, offset + begin, min(1 << 20, leaf.bytes - begin)))
        return found.hexdigest()

    def _tensor(self, name: str) -> torch.Tensor:
        offset, leaf = self.form.offsets[name]
        return read_leaf(self._units.read(self.coord, offset, leaf.bytes), 0, leaf)


@dataclass(frozen=True, slots=True)
class OldManifest:
    """What all ranks must know of one old shard. Plain data.

    Attributes:
        leaves: name, dtype, shape, offset of every tensor but those of the record.
        shared: what its replicas share, whole: dtype and shape by name.
        blocks: which part of a whole each divided leaf is, by name.
        optimizers: of each its ``prefix``, ``groups`` and ``order`` as `OptimizerState.fixed` gives them, and
            ``state``, what of its parameters' state is no tensor, still encoded.
        digests: of the leaves that are neither shared nor divided.
        streams: digests of its random generators.
        carried: whose streams it carries.
        values: digests of what users keep: schedules, extras, tracked values.
    """

    coord: str
    leaves: list[list[Any]]
    shared: dict[str, Any]
    blocks: dict[str, Any]
    optimizers: list[dict[str, Any]]
    digests: dict[str, str]
    streams: dict[str, str]
    carried: list[str]
    values: dict[str, str]

    @classmethod
    def of(cls, shard: OldShard) -> OldManifest:
        """Reads the leaves that only this rank holds.

        Raises:
            StateMismatch: it was written by a version that did not say which parts of a whole tensors are.
        """
        early, late, fixed = shard.values()
        if "blocks" not in shard.record[FIXED]:
            raise StateMismatch(
                f"the snapshot of {shard.coord} was taken by an older holdfast and cannot be cut anew: "
                "start with the same parallel sizes"
            )
        shared, blocks = shared_leaves(shard.record), shard.record[FIXED]["blocks"]
        tensors = {name: place for name, place in shard.form.offsets.items() if not is_of_record(name)}
        encoded = shard.record[LATE].get("optim", [])
        return cls(
            shard.coord,
            [[name, leaf.dtype, list(leaf.shape), offset] for name, (offset, leaf) in tensors.items()],
            shard.record[FIXED]["shared"],
            blocks,
            [
                {
                    "prefix": kept["prefix"],
                    "groups": kept["groups"],
                    "order": kept["order"],
                    "state": plain["state"],
                }
                for kept, plain in zip(fixed.get("optim", []), encoded, strict=True)
            ],
            {name: shard.digest(name) for name in tensors if name not in blocks and not is_part_of(name, shared)},
            streams.digests(early["rng"]),
            sorted(early.get("streams", {})),
            {
                "scheduler": streams.digest(late["scheduler"]),
                **{f"extra[{n!r}]": streams.digest(v) for part in (early, late) for n, v in part["extra"].items()},
                **{f"extra state of {n}": streams.digest(v) for n, v in late["get_extra_state"].items()},
                **{f"tracked {n!r}": streams.digest(v) for part in (early, late) for n, v in part["tracked"].items()},
            },
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> OldManifest:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ProtocolError(f"not what stands in a shard: {error!r}") from error

    def whole_leaves(self) -> dict[str, Leaf]:
        """Every leaf as this rank had it: divided ones in part, shared ones whole."""
        shared = shared_from_json(self.shared)
        own = {
            name: Leaf(name, dtype, tuple(shape))
            for name, dtype, shape, _ in self.leaves
            if name != RECORD and not is_part_of(name, shared)
        }
        return own | shared

    def held(self) -> Iterator[Held]:
        """What stands where in its slot.

        Raises:
            StateMismatch: a leaf is divided in a way that is not known.
        """
        shared = shared_from_json(self.shared)
        for name, dtype, shape, offset in self.leaves:
            base, whole, runs = self._place(name, tuple(shape), shared)
            yield Held(self.coord, offset, Region(base, dtype, whole, runs))

    def states(self) -> Iterator[tuple[str, Leaf]]:
        """Every tensor of an optimizer's state: the stem that it has from its parameter, and its leaf, whole."""
        leaves = self.whole_leaves()
        for told in self.optimizers:
            for place, entries in told["order"].items():
                stem = f"{told['prefix']}.{place}"
                for name in (f"{stem}.{entry}" for entry in entries if not place.startswith(NAMED)):
                    if (leaf := leaves.get(name)) is not None:
                        whole = tuple(self.blocks[name][0]) if name in self.blocks else leaf.shape
                        yield stem, Leaf(name, leaf.dtype, whole)

    def _place(
        self, name: str, shape: tuple[int, ...], shared: Mapping[str, Leaf]
    ) -> tuple[str, tuple[int, ...], tuple[Run, ...]]:
        if is_part_of(name, shared):
            base, first, last = parse_part(name) or (name, 0, shared[name].elements)
            return base, shared[base].shape, range_runs(first, last)
        block = self.blocks.get(name)
        region = region_of(name, shape, Block(tuple(block[0]), tuple(block[1])) if block else None)
        return name, *region


def region_of(name: str, shape: tuple[int, ...], block: Block | None) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """The shape of the whole, and the runs of a rank's part of it.

    Raises:
        StateMismatch: it is no block.
    """
    if block is None:
        return shape, block_runs(shape, (0,) * len(shape), shape)
    try:
        return block.whole, block_runs(block.whole, block.start, shape)
    except ValueError as error:
        raise StateMismatch(
            f"{name} is divided among ranks in a way that is not known here, so the number of ranks cannot change: "
            f"{error}. Start with the same parallel sizes"
        ) from error


def decode_plain(encoded: Any) -> Any:
    """Plain values of an optimizer's state. Raises `ProtocolError` if there is a tensor among them."""

    def none(name: str) -> torch.Tensor:
        raise ProtocolError(f"{name}: a tensor within a plain value of an optimizer's state cannot be resharded")

    return decode(encoded, none)
