"""Byte planes: the first bytes of all numbers, then all second bytes, and so on. Pure.

In floating point numbers only the byte with the exponent compresses, and only if the noise of the other bytes is kept
apart from it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from holdfast.smp_daemon.shared.slotfile import SlotFormat

MAX_WIDTH = 8
_COMPONENT = {"C128": 8, "C64": 4, "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_COMPONENT |= {"BF16": 2, "F16": 2, "I16": 2, "U16": 2}


def split(data: memoryview, width: int) -> memoryview:
    """`data` as `width` planes of every `width`-th byte; bytes after the last whole number stay at the end."""
    count = data.nbytes // width
    source, planes = np.frombuffer(data, np.uint8), np.empty(data.nbytes, np.uint8)
    for i in range(width):
        planes[i * count : (i + 1) * count] = source[i : count * width : width]
    planes[count * width :] = source[count * width :]
    return planes.data


def join(planes: memoryview, width: int, out: memoryview) -> None:
    """Undo `split`, into `out`, which is as long as `planes`."""
    count = planes.nbytes // width
    source, target = np.frombuffer(planes, np.uint8), np.frombuffer(out, np.uint8)
    for i in range(width):
        target[i : count * width : width] = source[i * count : (i + 1) * count]
    target[count * width :] = source[count * width :]


def widths(form: SlotFormat, unit_bytes: int) -> list[int]:
    """For each unit of a slot, the number width that covers most of its bytes; 1: planes are not worth while."""
    units = -(-form.total_bytes // unit_bytes)
    share: list[dict[int, int]] = [{} for _ in range(units)]
    for width, start, stop in _spans(form):
        for unit in range(start // unit_bytes, -(-stop // unit_bytes)):
            length = min(stop, (unit + 1) * unit_bytes) - max(start, unit * unit_bytes)
            share[unit][width] = share[unit].get(width, 0) + length
    return [max(of.items(), key=lambda item: item[1])[0] if of else 1 for of in share]


def _spans(form: SlotFormat) -> Iterable[tuple[int, int, int]]:
    """(width, start, stop) of each run of leaves with numbers of one width, in order."""
    width, start, stop = 1, 0, len(form.header)
    for offset, leaf in form.offsets.values():
        own = _COMPONENT.get(leaf.dtype, 1)
        if own != width:
            if start < stop:
                yield width, start, stop
            width, start = own, offset
        stop = offset + leaf.bytes
    if start < stop:
        yield width, start, stop
