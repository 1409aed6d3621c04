"""xxHash's functions for the compiled copy and the compiled receive, from the library inside the ``xxhash`` package."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import Any

_NAMES = ("XXH3_createState", "XXH3_64bits_reset", "XXH3_64bits_update", "XXH3_64bits_digest", "XXH3_freeState")


@cache
def functions() -> Any | None:
    """The table of functions that ``struct hash`` describes in C; None if this build of the package does not export
    them."""
    found = importlib.util.find_spec("xxhash._xxhash")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    try:
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES]
    except AttributeError:
        return None
    return (ctypes.c_void_p * len(addresses))(*addresses)
