"""Erasure codes and placement: pure functions over buffers and numbers.

This room knows nothing of processes, sockets, files or torch. Start with `ec.stripes`, which says what byte of
which node goes into which parity unit, then `ec.codec`, the interface of a code, and `ec.groups`.
"""

from ec.backends import choose_codec
from ec.codec import Codec, TooManyErasures
from ec.groups import plan_groups
from ec.stripes import Piece, Stripes, choose_unit_bytes

__all__ = [
    "Codec",
    "Piece",
    "Stripes",
    "TooManyErasures",
    "choose_codec",
    "choose_unit_bytes",
    "plan_groups",
]
