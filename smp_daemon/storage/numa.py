"""Chooses the NUMA node on which the pages of a mapped file are allocated."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

_PREFERRED = 1
"""``MPOL_PREFERRED``: pages come from that node while it has free memory, else from another."""

_CALLS = {"x86_64": 237, "aarch64": 235}
"""System call number of ``mbind`` by machine; libc has no wrapper for it."""


def prefer(mapped: mmap.mmap, node: int) -> None:
    """Allocate the missing pages of a mapped file on a NUMA node, whichever thread touches them first. The file keeps
    this policy.

    Raises:
        OSError: this machine does not support it, or has no such node.
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
        bits = ctypes.c_ulong(words * 64 + 1)  # the kernel reads one bit fewer
        if libc.syscall(call, place, count, ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(0)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        del begin  # the mapping cannot be closed while this refers to it
