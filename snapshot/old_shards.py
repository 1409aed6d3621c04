"""What stands in the shards of an older world: read piece by piece through this node's SMP, and told to all ranks."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from smp_daemon.client import SmpClient
from smp_daemon.errors import ProtocolError, StateMismatch
from smp_daemon.slotfile import PAGE_BYTES, RECORD, Leaf, SlotFormat, read_format, read_stamp
from smp_daemon.sources import Sources
from snapshot import streams
from snapshot.adapter import Block, Tree
from snapshot.manifest import FIXED
from snapshot.replicas import is_part_of, shared_from_json
from snapshot.reshard import Held, Region, Run, block_runs, range_runs
from snapshot.shares import parse_part
from snapshot.state import LATE, decode_values, is_of_record, parse_record, shared_leaves
from snapshot.tensors import read_leaf
from snapshot.values import decode

UNITS_KEPT = 16
"""So many units are remembered: neighbours of a shard are asked for one after another, of a few shards in turn."""

_STATE = re.compile(r"((optim\d*)\.(\d+\.\d+))\.(.+)", re.DOTALL)


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
        optimizers: of each its ``prefix``, ``owners`` and ``order`` as `OptimizerState.fixed` gives them, and
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
        """Reads the leaves that only this rank holds."""
        early, late, fixed = shard.values()
        shared, blocks = shared_leaves(shard.record), shard.record[FIXED].get("blocks", {})
        tensors = {name: place for name, place in shard.form.offsets.items() if not is_of_record(name)}
        encoded = shard.record[LATE].get("optim", [])
        return cls(
            shard.coord,
            [[name, leaf.dtype, list(leaf.shape), offset] for name, (offset, leaf) in tensors.items()],
            shard.record[FIXED]["shared"],
            blocks,
            [
                {
                    "prefix": kept.get("prefix", ""),
                    "owners": kept.get("owners", {}),
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

    @property
    def owners(self) -> dict[str, str]:
        """What each optimizer's parameters are called in the whole job, by the stem of their state's names."""
        return {f"{o['prefix']}.{name}": owner for o in self.optimizers for name, owner in o["owners"].items()}

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
        shared, owners = shared_from_json(self.shared), self.owners
        for name, dtype, shape, offset in self.leaves:
            base, whole, runs = self._place(name, tuple(shape), shared)
            yield Held(self.coord, offset, Region(key_of(base, owners), dtype, whole, runs))

    def states(self) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
        """Of every tensor of an optimizer's state: its parameter's `state_key`, entry, dtype, shape of the whole."""
        owners = self.owners
        for name, leaf in self.whole_leaves().items():
            if (match := _STATE.fullmatch(name)) is not None:
                whole = tuple(self.blocks[name][0]) if name in self.blocks else leaf.shape
                yield state_key(match[2], match[3], owners.get(match[1], "")), match[4], leaf.dtype, whole

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


def key_of(name: str, owners: Mapping[str, str]) -> str:
    """What a leaf is called in the whole job: state of a parameter by that parameter, as ranks may number them in
    different ways; all else as it is."""
    match = _STATE.fullmatch(name)
    if match is None:
        return name
    return f"{state_key(match[2], match[3], owners.get(match[1], ''))}.{match[4]}"


def state_key(prefix: str, place: str, owner: str) -> str:
    """What the state of one parameter of an optimizer is called in the whole job."""
    return f"{prefix}:{owner}" if owner else f"{prefix}.{place}"


def is_state(name: str) -> bool:
    """Whether a leaf belongs to a parameter of an optimizer."""
    return _STATE.fullmatch(name) is not None


def decode_plain(encoded: Any) -> Any:
    """Plain values of an optimizer's state. Raises `ProtocolError` if there is a tensor among them."""

    def none(name: str) -> torch.Tensor:
        raise ProtocolError(f"{name}: a tensor within a plain value of an optimizer's state cannot be resharded")

    return decode(encoded, none)
