"""Where memory lies: on which NUMA node the pages of a file are made."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

_PREFERRED = 1
"""``MPOL_PREFERRED``: of that node if it has any left, else of another."""

_CALLS = {"x86_64": 237, "aarch64": 235}
"""The number of ``mbind``, for which libc has no name."""


def prefer(mapped: mmap.mmap, node: int) -> None:
    """Have the pages of a mapped file that are not there yet made on a NUMA node, whoever touches them first. The file
    remembers it.

    Raises:
        OSError: this machine cannot, or has no such node.
    """
    call = _CALLS.get(platform.machine())
    if call is None:
        raise OSError(f"mbind is not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    begin = ctypes.c_char.from_buffer(mapped)
    try:
        place, count = ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_ulong(len(mapped))
        bits = ctypes.c_ulong(words * 64 + 1)  # the kernel looks at one bit less
        if libc.syscall(call, place, count, ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(0)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        del begin  # or the mapping could not be closed
