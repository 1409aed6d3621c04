"""Named limits of the formats and messages. Data that exceeds one is refused before memory is allocated for it."""

from __future__ import annotations

import re

MAX_MESSAGE_BYTES = 8 << 20
"""Length of the JSON part of one message between a trainer and an SMP, or between SMPs."""

MAX_UNPACKED_BYTES = 64 << 20
"""The same for a compressed message once it is decompressed: room for two layouts of 50,000 nodes."""

PACKED_FROM_BYTES = 1 << 20
"""Messages at least this long are compressed. Only messages with a layout of about a thousand nodes are."""

MAX_RECORD_BYTES = 64 << 20
"""Length of a commit record, which grows with the number of units, or of another JSON file of an arena."""

MAX_UNIT_BYTES = 64 << 20
"""Raw bytes that one message between SMPs may carry."""

MAX_HEADER_BYTES = 256 << 20
"""Length of the JSON header of a slot file: enough for a million tensors."""

MAX_COUNT = 1 << 53
"""Largest epoch or step: exact in every JSON reader, and small enough to fit a word of the board with an outcome."""

MIN_SLOTS = 2
"""Fewest slots of a shard: one holds the newest protected snapshot while another is written."""

MAX_SLOTS = 16
"""Most slots of a shard."""

MAX_GENERATIONS = 8
"""Most protected snapshots that are kept."""

SLOTS_RULE = (
    f"a shard has {MIN_SLOTS} to {MAX_SLOTS} slots: one for the protected snapshot, one to write into, and, with 3 or "
    "more, one for the newest that is sealed"
)

MAX_DIMENSIONS = 64
"""Dimensions of a leaf's shape."""

MAX_NODES = 1 << 16
MAX_PORT = (1 << 16) - 1
MAX_HOSTS = 16
"""Addresses of one node, one for each network card."""

MAX_LINKS = 16
"""Connections of a node to a peer for each of its network cards."""

MAX_TEXT = 255
"""Characters of a host, or of the label of a domain."""

AT_ONCE_BYTES = 128 << 20
"""Up to this total, a node's slots are reserved while the trainers wait, for a tenth of a second. Larger ones are
reserved in the background during training, and snapshots begin once enough of them are ready."""

MAX_SHARD_BYTES = 1 << 50
MAX_UNITS = 1 << 22
"""Units of one node. Their digests must fit in a commit record."""

MAX_CODINGS = 256
"""Parities that a node tracks at a time; a healthy job has a handful."""

MAX_LEAVES = 1_000_000
MAX_NAME_BYTES = 512

MAX_CONNECTIONS = 1024
"""Connections that one socket of an SMP serves at a time; each has a thread."""

MAX_SAYING = 1000
"""Characters of the text that a trainer has its SMP show to operators."""

MAX_FAILURE = 500
"""Characters of the text that says how a trainer ended."""

MAX_GIVEN = 200
"""Characters of the text that says what a block of a script was given."""

MAX_SOCKET_PATH_BYTES = 107
"""Longest path that fits in ``sockaddr_un.sun_path`` with its terminating zero."""

CALL_DEADLINE_S = 30.0
"""How long one side waits for the other's answer, unless a call sets another deadline."""

MOVE_DEADLINE_S = 600.0
"""Timeout for an operation that takes time in proportion to its bytes, if those are few."""

SLOWEST_BYTES_PER_S = 100e6
"""Lowest rate expected for any operation on a node's state."""

IDENTIFIER = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_IDENTIFIER = re.compile(IDENTIFIER)


def move_deadline(state_bytes: int) -> float:
    """How long to wait, in seconds, until `state_bytes` of one node are fetched, decoded or reserved. Single steps that
    stall have deadlines of their own."""
    return MOVE_DEADLINE_S + slowest_s(state_bytes)


def slowest_s(count: int) -> float:
    """How long, in seconds, work on `count` bytes may take before something is wrong with it."""
    return count / SLOWEST_BYTES_PER_S


def is_at_once(slots_bytes: int) -> bool:
    """Whether `slots_bytes` of slots are reserved, or mapped, while the caller waits."""
    return slots_bytes <= AT_ONCE_BYTES


def is_identifier(text: str) -> bool:
    """Whether `text` may name a job, node or shard: 1-64 of ``A-Z a-z 0-9 . _ -``, starting with a letter or digit."""
    return _IDENTIFIER.fullmatch(text) is not None
