"""Erasure codes and placement: pure functions over buffers and numbers.

This room knows nothing of processes, sockets, files or torch. Start with `ec.stripes` (which byte of which node goes
into which parity unit), then `ec.codec` (what a code does) and `ec.groups`. `ec.matrix` has the arithmetic.
`ec.backends` has the code that multiplies, and chooses it.
"""

from holdfast.ec.backends import choose_codec, describe_auto
from holdfast.ec.codec import Codec, TooManyErasures
from holdfast.ec.groups import crowded, plan_groups
from holdfast.ec.stripes import Piece, Stripes, choose_unit_bytes

__all__ = [
    "Codec",
    "Piece",
    "Stripes",
    "TooManyErasures",
    "choose_codec",
    "choose_unit_bytes",
    "crowded",
    "describe_auto",
    "plan_groups",
]
