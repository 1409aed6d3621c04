"""A snapshot as a checkpoint of ``torch.distributed.checkpoint`` (DCP): any number of ranks can load it.

For plain torch, DDP and FSDP2, the names are those of ``get_state_dict``: ``model.<parameter>``,
``optim.state.<parameter>.exp_avg``, ``optim.param_groups``. Everything else keeps its own name, prefixed with its
replica set (``pp0-tp1-cp0-ep0.optim0.model0.head.weight.main``), or with its coordinate if replicas do not share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.export.tensors import SlotCopy, Tensor, replica_set, whole_tensors
from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import empty_like_leaf, flat, leaf_tensor
from holdfast.snapshot.state.values import decode

RECORDS = "holdfast"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def write_dcp(path: Path, slots: Sequence[SlotCopy]) -> int:
    """Write the checkpoint into `path`; return its number of tensors. Blocks.

    Tensors that several shards make up are assembled in memory; all others are read from the slot files while writing.
    """
    state = state_dict(slots)
    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return _count(state)


def state_dict(slots: Sequence[SlotCopy]) -> dict[str, Any]:
    """The nested state of a snapshot. A tensor that lies in one slot is a view of it, not a copy.

    Raises:
        StateMismatch: a part of a tensor that is divided among ranks is missing.
    """
    by_coord = {slot.coord: slot for slot in slots}
    tensors = whole_tensors(slots)
    names = _Names(slots)
    state: dict[str, Any] = {}
    divided: dict[tuple[str, ...], list[tuple[list[int], torch.Tensor]]] = {}
    shapes: dict[tuple[str, ...], list[int]] = {}
    for coord, found in tensors.items():
        for tensor in found:
            place = names.place(coord, tensor.name)
            piece = names.piece(coord, tensor.name)
            value = _assemble(tensor, by_coord)
            if piece is None or list(value.shape) == piece[0]:
                _put(state, place or (*names.prefix(coord), tensor.name), value, keep=place is not None)
            else:
                where = place or (*names.prefix(coord), tensor.name)
                shapes[where] = piece[0]
                divided.setdefault(where, []).append((piece[1], value))
    for where, pieces in divided.items():
        _put(state, where, _whole(where, shapes[where], pieces))
    for i, groups in enumerate(names.groups()):
        state.setdefault(f"optim{i or ''}", {})["param_groups"] = groups
    state[RECORDS] = {"records": {slot.coord: slot.record for slot in slots}}
    return state


class _Names:
    """The names that leaves have outside holdfast."""

    def __init__(self, slots: Sequence[SlotCopy]) -> None:
        self._slots = {slot.coord: slot for slot in slots}
        self._export = {slot.coord: _fixed(slot).get("export") for slot in slots}
        self._states = {slot.coord: _states(slot) for slot in slots}
        self._first = {replica_set(slot.coord): slot.coord for slot in reversed(slots)}

    def prefix(self, coord: str) -> tuple[str, ...]:
        """The prefix for names that are not known outside holdfast."""
        key = replica_set(coord)
        if self._first[key] != coord:
            return (coord,)
        return (key,) if key else ()

    def place(self, coord: str, name: str) -> tuple[str, ...] | None:
        """The path of a leaf in ``get_state_dict``; None: it has none, because it belongs to another rank alone, or to
        no model or optimizer."""
        export = self._export[coord]
        if export is None or (self.prefix(coord) and self.piece(coord, name) is None):
            return None
        if name.startswith("model"):
            return self._model(name, export)
        if name not in self._states[coord]:
            return None
        prefix, owner, entry = self._states[coord][name]
        parameter = self._model(owner, export)
        return None if parameter is None else (prefix, "state", parameter[1], entry)

    def piece(self, coord: str, name: str) -> tuple[list[int], list[int]] | None:
        """The shape of the whole tensor, and the offset in it of this rank's part; None: the leaf is not a part."""
        known = name.startswith("model") or name in self._states[coord]
        if self._export[coord] is None or not known:
            return None
        whole, start = self._slots[coord].record["fixed"]["blocks"].get(name, ((), ()))
        return (list(whole), list(start)) if start else None

    def groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer, with parameter names; empty if these are not known."""
        slot = next(iter(self._slots.values()))
        export = self._export[slot.coord]
        late = slot.record.get("late")
        if export is None or late is None:
            return []

        def tensor(name: str) -> torch.Tensor:
            offset, leaf = slot.form.offsets[name]
            return leaf_tensor(slot.view, offset, leaf).clone()

        optimizers = decode(late["optim"], tensor)
        parameters_of_all = [kept["groups"] for kept in _fixed(slot)["optim"]]
        return [
            [
                {**group, "params": [(self._model(name, export) or ("", ""))[1] for name in names]}
                for group, names in zip(optim["groups"], parameters, strict=True)
            ]
            for optim, parameters in zip(optimizers, parameters_of_all, strict=True)
        ]

    @staticmethod
    def _model(name: str, export: Mapping[str, Any]) -> tuple[str, str] | None:
        match = re.fullmatch(r"model(\d+)\.(.+)", name)
        if match is None:
            return None
        inner = match[2].removeprefix("module.") if export["wrapped"] else match[2]
        for wrapper in _WRAPPERS:
            inner = inner.replace(wrapper, "")
        return ("model" if match[1] == "0" else f"model{match[1]}"), inner


def _fixed(slot: SlotCopy) -> dict[str, Any]:
    """The part of a slot's record that is the same for every snapshot. Raises `ProtocolError`."""
    fixed: dict[str, Any] = decode(slot.record.get("fixed", {}).get("state", {}), lambda name: torch.empty(0))
    return fixed


def _states(slot: SlotCopy) -> dict[str, tuple[str, str, str]]:
    """By leaf name: optimizer, parameter and entry, for each leaf that is optimizer state."""
    return {
        f"{kept['prefix']}.{place}.{entry}": (kept["prefix"], place, entry)
        for kept in _fixed(slot).get("optim", [])
        for place, entries in kept["order"].items()
        for entry in entries
    }


def _assemble(tensor: Tensor, slots: Mapping[str, SlotCopy]) -> torch.Tensor:
    """A tensor as a view of its only range, or as a new tensor put together from several ranges."""
    leaf = Leaf(tensor.name, tensor.dtype, tensor.shape)
    if len(tensor.ranges) == 1:
        ((coord, offset, _),) = tensor.ranges
        return leaf_tensor(slots[coord].view, offset, leaf)
    made = empty_like_leaf(leaf, torch.device("cpu"))
    octets, end = flat(made).view(torch.uint8), 0
    for coord, offset, count in tensor.ranges:
        octets[end : end + count] = torch.frombuffer(slots[coord].view, dtype=torch.uint8, count=count, offset=offset)
        end += count
    return made


def _whole(where: tuple[str, ...], shape: list[int], pieces: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """Put a divided tensor together. A piece may occur more than once, if replicas hold it too."""
    made = torch.empty(shape, dtype=pieces[0][1].dtype)
    filled = torch.zeros(shape, dtype=torch.bool)
    for offset, value in pieces:
        places = tuple(slice(start, start + length) for start, length in zip(offset, value.shape, strict=True))
        made[places] = value
        filled[places] = True
    if not bool(filled.all()):
        raise StateMismatch(f"{'.'.join(where)} is divided among ranks, and not all of it is there")
    return made


def _put(state: dict[str, Any], where: Sequence[str], value: torch.Tensor, *, keep: bool = False) -> None:
    *path, last = where
    for name in path:
        state = state.setdefault(name, {})
    if not (keep and last in state):
        state[last] = value


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return int(isinstance(value, torch.Tensor))
