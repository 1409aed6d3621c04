"""Named limits of the formats and messages. What exceeds one is refused before anything is allocated for it."""

from __future__ import annotations

import re

MAX_MESSAGE_BYTES = 8 << 20
"""JSON part of one message between a trainer and an SMP, or between SMPs."""

MAX_UNPACKED_BYTES = 64 << 20
"""The same, of a message that was compressed: two layouts of 50,000 nodes."""

PACKED_FROM_BYTES = 1 << 20
"""Messages of this length or more are compressed. Only those are that have a layout of a thousand nodes."""

MAX_RECORD_BYTES = 64 << 20
"""A commit record or another JSON file of an arena: it grows with the number of units."""

MAX_UNIT_BYTES = 64 << 20
"""Raw bytes that one message between SMPs may carry."""

MAX_HEADER_BYTES = 16 << 20
"""JSON header of a slot file."""

MAX_COUNT = 1 << 53
"""Of epochs and steps: whole in every JSON reader, and with an outcome it fits a word of the board."""

MIN_SLOTS = 2
"""Of a shard: one holds the newest protected snapshot, and another is written meanwhile."""

MAX_SLOTS = 16
"""Of a shard."""

SLOTS_RULE = (
    f"a shard has {MIN_SLOTS} to {MAX_SLOTS} slots: one for the protected snapshot, one to write into, and, with 3 or "
    "more, one for the newest that is sealed"
)

MAX_DIMENSIONS = 64
"""Of a leaf's shape."""

MAX_NODES = 1 << 16
MAX_PORT = (1 << 16) - 1
MAX_HOSTS = 16
"""Addresses of one node: one for each of its network cards."""

MAX_TEXT_BYTES = 255
"""Of a host, or a label of a domain."""

AT_ONCE_BYTES = 128 << 20
"""Slots of a node that take no more are reserved while the trainers wait for it: it is a tenth of a second. For more
nobody waits: it is done beside the training, and snapshots begin when it has come far enough."""

MAX_SHARD_BYTES = 1 << 50
MAX_UNITS = 1 << 22
"""Of one node. Their digests must fit in a commit record."""

MAX_CODINGS = 256
"""Parities that a node keeps in mind at a time; a job in good health has a handful."""

MAX_LEAVES = 1_000_000
MAX_NAME_BYTES = 512

MAX_CONNECTIONS = 1024
"""That one socket of an SMP serves at a time; each has a thread."""

MAX_SAYING = 1000
"""Characters of what a trainer has its SMP show."""

MAX_FAILURE = 500
"""Characters of how a trainer ended."""

MAX_SOCKET_PATH_BYTES = 107
"""What fits in ``sockaddr_un.sun_path`` with its closing zero."""

CALL_DEADLINE_S = 30.0
"""How long one side waits for the other's answer, unless a call says otherwise."""

MOVE_DEADLINE_S = 600.0
"""How long what takes as long as its bytes may take if these are few."""

SLOWEST_BYTES_PER_S = 100e6
"""Of a node's state, whatever is done with it."""

IDENTIFIER = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_IDENTIFIER = re.compile(IDENTIFIER)


def move_deadline(state_bytes: int) -> float:
    """How long to wait, in seconds, until so much state of one node is fetched, decoded or reserved. What stands still
    on the way has deadlines of its own."""
    return MOVE_DEADLINE_S + state_bytes / SLOWEST_BYTES_PER_S


def is_at_once(slots_bytes: int) -> bool:
    """Whether so much memory for slots is reserved, or mapped, while somebody waits for it."""
    return slots_bytes <= AT_ONCE_BYTES


def is_identifier(text: str) -> bool:
    """Whether `text` may name a job, a node or a shard: 1-64 of ``A-Z a-z 0-9 . _ -``, not starting with ``.``."""
    return _IDENTIFIER.fullmatch(text) is not None
