"""Every message that an SMP answers: from its trainers over the unix socket, and from other SMPs over the network.

A message is a JSON object whose `op` names its type. Requests without a reply type are answered by an empty object.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.goodput import UNTOLD, Spent
from holdfast.smp_daemon.shared.identity import MAX_FOLLOWED
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_NODES, MAX_SAYING
from holdfast.smp_daemon.shared.plain import Count, Identifier, Unsigned, reader
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.starts import Failure, Start
from holdfast.smp_daemon.shared.versions import RELEASE, UNSAID, check_range, spoken

MAX_KNOWN = 4096
MAX_WAIT_US = 1 << 40
MAX_TERMS = 255
"""Most nodes in a chain: no code has more units in a stripe."""

Microseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_US)]
LONGEST_S = 86400.0
"""Longest time that a message may name: nothing is waited for, or put off, for longer on a peer's word."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
Speaks = tuple[Count, Count]
"""A `versions.Range`: the oldest and the newest protocol."""

Version = Annotated[str, msgspec.Meta(max_length=64)]
"""A version of holdfast."""

Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_NODES)]
Digests = Annotated[frozenset[str], msgspec.Meta(max_length=MAX_KNOWN)]
"""Digests of layouts (`Layout.digest`) that the sender of the request knows, so that the reply can leave them out."""


class Request(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="op"):
    """A message that expects an answer."""


class Reply(msgspec.Struct, kw_only=True):
    """An answer."""


# ---------------------------------------------------------------------- from a trainer


class Hello(Request, tag="hello", kw_only=True):
    """The first message on a connection.

    Attributes:
        speaks, release: protocols and version of the sender.
        coord: its coordinate, if it is a trainer that wants to be watched.
        epoch: the epoch that it has joined, if it reconnects.
    """

    job: str
    speaks: Speaks = UNSAID
    release: Version = ""
    coord: Identifier | None = None
    epoch: Count | None = None


class Greeted(Reply, kw_only=True):
    """Which SMP answers, and which protocols and version of holdfast it has.

    Attributes:
        row: row of the board for the heartbeats of a watched trainer.
        settings: the texts of what it was started with; see `Setting.text`.
    """

    node: str
    pid: Count
    row: int | None
    speaks: Speaks
    release: Version
    settings: dict[str, str] = {}


class AskInventory(Request, tag="inventory", kw_only=True):
    """Ask what this SMP holds. Answered by an `Inventory`."""


class AskInventories(Request, tag="inventories", kw_only=True):
    """Ask what the SMPs at these addresses hold."""

    addresses: Addresses


class Inventories(Reply, kw_only=True):
    """An `Inventory` of each SMP that answered, without layouts."""

    inventories: tuple[dict[str, Any], ...]


class Join(Request, tag="join", kw_only=True):
    """Enter an epoch, and fence older ones.

    Attributes:
        start: set if the job starts with this epoch.
        near: the NUMA node on which to place the trainer's slots.
    """

    epoch: Count
    start: Start | None = None
    near: Annotated[int, msgspec.Meta(ge=0, lt=1024)] | None = None


class Configure(Request, tag="configure", kw_only=True):
    """Reserve memory for a layout. The board says how far that is."""

    layout: Layout


class Reserved(Reply, kw_only=True):
    """How many slots of every shard, and of parity, trainers may use."""

    count: Count


class SlotFile(Reply, kw_only=True):
    """A slot: the name of its file in the arena, and the inode, as a file may be replaced by another of that name."""

    file: str
    inode: Count
    bytes: Count


class AskSlots(Request, tag="slots", kw_only=True):
    """Ask which slots exist for shards of `coord` in that epoch's layout."""

    epoch: Count
    coord: Identifier


class SlotFiles(Reply, kw_only=True):
    """Slots."""

    slots: tuple[SlotFile, ...]


class Seal(Request, tag="seal", kw_only=True):
    """Seal a shard: all its bytes are written. Snapshots older than this one that are not kept may be freed.

    Attributes:
        slot, taken: the file of the slot, and the number under which the trainer has taken it; see `owners.taken`.
        keep: the snapshots to keep.
        protected: the newest snapshot that the whole job knows to be protected. It must be in `keep`.
        with_parity: those of `keep` that keep their parity, or are still to get it; None: all.
        encode: whether the snapshot is to be protected; the same on every rank.
        next_s: how long after it the next one is to be protected, in seconds, for operators; 0: unknown.
        spent: where the time of the run went until then, for operators.
        digests: digests of the shard's units, taken as they were written; empty: the SMP reads the slot for them.
    """

    snapshot: SnapshotId
    coord: Identifier
    slot: str
    taken: Count
    keep: tuple[SnapshotId, ...]
    protected: SnapshotId | None = None
    with_parity: tuple[SnapshotId, ...] | None = None
    encode: bool = True
    next_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    spent: Spent = UNTOLD
    digests: tuple[Unsigned, ...] = ()


class InEpoch(Request, kw_only=True):
    """A request that changes something but names no snapshot of the current epoch.

    A trainer that has joined an epoch sends `epoch`, and is refused if that epoch is over.
    """

    epoch: Count | None = None


class Recover(InEpoch, tag="recover", kw_only=True):
    """Recover a shard. `check`: if this SMP holds it already, read and verify it."""

    sources: Sources
    coord: Identifier
    check: bool = True


class Recovered(SlotFile, kw_only=True):
    """Where a recovered shard is.

    Attributes:
        how: ``held``, ``repaired`` (some units were damaged), ``fetched`` from another node, ``rebuilt`` from the rest
            of its stripes, or ``persisted`` (read from storage).
        bytes_fetched: how many came over the network for it.
        unit_bytes, digests: from its commit record.
    """

    how: str
    bytes_fetched: Count
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]
    digests: tuple[Unsigned, ...]


class Lend(InEpoch, tag="lend", kw_only=True):
    """Choose the snapshot whose units `AskUnit` returns from now on."""

    sources: Sources


class AskUnit(InEpoch, tag="unit", kw_only=True):
    """Ask for a unit of the lent snapshot. Its bytes follow the reply."""

    coord: Identifier
    unit: Count


class LentUnit(Reply, kw_only=True):
    """The unit's digest, and the bytes fetched over the network since `Lend`."""

    digest: Unsigned
    bytes_fetched: Count


class RepairParity(InEpoch, tag="repair_parity", kw_only=True):
    """Recompute the parity of a position in the background, until it is there, hopeless, or not wanted any more. The
    board says how far it is."""

    sources: Sources
    group: Count
    position: Count


class Persist(Request, tag="persist", kw_only=True):
    """Persist this node's part of a snapshot, in the background."""

    snapshot: SnapshotId


class Accepted(Reply, kw_only=True):
    """Whether the SMP does what was asked."""

    accepted: bool


class AskPersisted(Request, tag="persisted", kw_only=True):
    """Ask what is persisted. Answered by a `Persisted`."""


class AskPersistedLayout(Request, tag="persisted_layout", kw_only=True):
    """Ask in which layout a persisted snapshot was taken. Answered by a `Layout`. `run`: id of its run."""

    run: Identifier
    snapshot: SnapshotId


class AskCounters(Request, tag="counters", kw_only=True):
    """Ask for the SMP's counters. Answered by an object of numbers by name."""


class Scrub(Request, tag="scrub", kw_only=True):
    """Check every sealed unit now. Answered by an object of numbers by name."""


class Say(InEpoch, tag="say", kw_only=True):
    """Show a text to operators."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_SAYING)]


class Ended(InEpoch, tag="ended", kw_only=True):
    """Report how the job ends for a trainer."""

    coord: Identifier
    step: Count
    failure: Failure


class Leave(InEpoch, tag="leave", kw_only=True):
    """Move everything that the SMP holds to other nodes. All trainers of the job hold still, and end afterwards."""

    deadline_s: Seconds


class Finish(Request, tag="finish", kw_only=True):
    """Report that the job has ended well: the SMP removes its arena and ends."""

    epoch: Count


class Stop(Request, tag="stop", kw_only=True):
    """Stop the SMP. `remove`: remove the arena too. `force`: stop even while trainers are connected."""

    remove: bool = False
    force: bool = False


ANSWERED = "a message that is answered here"

# ---------------------------------------------------------------------- from another SMP, or a command


class PeerRequest(Request, kw_only=True):
    """A request from another SMP or a command.

    Attributes:
        job: the job of the SMP that is meant.
        speaks, release: protocols and version of the sender; `introduced` adds them.
    """

    job: str
    speaks: Speaks = UNSAID
    release: Version = ""


P = TypeVar("P", bound=PeerRequest)


class Ping(PeerRequest, tag="ping", kw_only=True):
    """Ask whether an SMP is there, and of which job and node it is."""


class Pong(Reply, kw_only=True):
    """Which SMP answers. `revision`: that of its newest layout, see `Layout.revision`; 0 if it has none of `epoch`."""

    job: str
    node: str
    epoch: Count
    revision: Count


class ParityDone(PeerRequest, tag="parity_done", kw_only=True):
    """Report that the sender's parity of a snapshot is committed. `epoch`: the sender's current epoch."""

    epoch: Count
    snapshot: SnapshotId
    tag: Identifier
    position: Annotated[int, msgspec.Meta(ge=0, le=255)]


class PeerInventory(PeerRequest, tag="inventory", kw_only=True):
    """Ask what the SMP holds. Answered by an `Inventory`."""

    known: Digests = frozenset()


class PeerStatus(PeerRequest, tag="status", kw_only=True):
    """Ask for the SMP's status. Answered by an `ops.status.Status`."""

    known: Digests = frozenset()


class Regroup(PeerRequest, tag="regroup", kw_only=True):
    """Have the SMP in charge check whether the groups are complete, and regroup if not.

    Attributes:
        leaving: a node is leaving: answered once its data is moved; else at once.
        spares: further SMPs that may take over some of that.
        still: the trainers that are connected hold still, and end afterwards.
    """

    leaving: bool = False
    spares: Addresses = ()
    still: bool = False


class Enlist(PeerRequest, tag="enlist", kw_only=True):
    """Have the SMP take part in the job as a spare, in the epoch of that start."""

    epoch: Count
    start: Start | None = None


class GiveUpRuns(PeerRequest, tag="give_up", kw_only=True):
    """Give runs of the job up: their snapshots are dropped, and no later start goes on with them. Refused while
    trainers of one of them are connected."""

    runs: Annotated[tuple[Identifier, ...], msgspec.Meta(min_length=1, max_length=MAX_FOLLOWED)]


class Drain(PeerRequest, tag="drain", kw_only=True):
    """Move everything that the SMP holds to other nodes, then end it. Answered by a `coding.regroup.Drained`.

    `wait`: wait for trainers to end, instead of asking them to.
    """

    deadline_s: Seconds
    spares: Addresses = ()
    wait: bool = False


class Phase(PeerRequest, kw_only=True):
    """A node's part in one phase of regrouping, see `coding.regroup`."""

    epoch: Count
    sources: Sources
    layout: Layout


class Adopt(Phase, tag="adopt", kw_only=True):
    """Store the new layout, and get hold of this node's shards in it."""


class Encode(Phase, tag="encode", kw_only=True):
    """Compute this node's part of the new groups' parity."""


class Release(Phase, tag="release", kw_only=True):
    """Drop the parity of the old groups."""


class Obeyed(Reply, kw_only=True):
    """Whether the phase is done on this node. If not, the same message is sent again, as long as `moved` changes: see
    `Board.moves`."""

    done: bool
    moved: Count


class Accumulate(PeerRequest, tag="accumulate", kw_only=True):
    """Add the unit that follows to the parity of a stripe."""

    epoch: Count
    snapshot: SnapshotId
    tag: Identifier
    stripe: Count
    position: Count
    digest: Unsigned


class ShardUnit(msgspec.Struct, frozen=True, tag_field="op", tag="shard_unit"):
    """A unit of a shard."""

    coord: Identifier
    unit: Count


class ParityUnit(msgspec.Struct, frozen=True, tag_field="op", tag="parity_unit"):
    """A unit of the parity of a position of a group."""

    tag: Identifier
    position: Count
    unit: Count


class Term(msgspec.Struct, frozen=True):
    """A unit of a sum: the SMP that holds it, and the factor that it is multiplied by."""

    at: Address
    what: ShardUnit | ParityUnit
    factor: Annotated[int, msgspec.Meta(ge=0, le=255)]


class PartialSum(msgspec.Struct, frozen=True, tag_field="op", tag="partial"):
    """A sum of units. The SMP that is asked holds the first unit, and asks the next SMP for the sum of the rest.

    Attributes:
        length: length of the sum in bytes; shorter units are padded with zeros.
        position: position of the node whose unit the sum is. Holders of parity find that unit's digest by it.
    """

    terms: Annotated[tuple[Term, ...], msgspec.Meta(min_length=1, max_length=MAX_TERMS)]
    length: Count
    position: Count


class AskShard(PeerRequest, tag="shard", kw_only=True):
    """Ask for the newest sealed shard of `coord` that the SMP holds."""

    coord: Identifier


class HeldShard(Reply, kw_only=True):
    """A sealed shard: its run and snapshot, its length and the length of its units, in bytes."""

    run: Identifier
    snapshot: SnapshotId
    bytes: Count
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]


class Fetch(PeerRequest, tag="fetch", kw_only=True):
    """Ask for a unit of a snapshot, or for a sum of some. Its bytes follow the reply."""

    snapshot: SnapshotId
    what: ShardUnit | ParityUnit | PartialSum


class UnitReply(Reply, kw_only=True):
    """A unit; its bytes follow the reply.

    Attributes:
        digest: digest of the bytes.
        sources: for parity, the digests of the data units accumulated into it, by position.
    """

    digest: Unsigned
    sources: dict[int, Unsigned] = {}


class SumReply(Reply, kw_only=True):
    """A partial sum; its bytes follow the reply.

    Attributes:
        digest: digest of the bytes.
        expected: digest of the complete unit, if an SMP in the chain knows it.
        waits: how long each SMP in the chain, except the last, waited for the next, in microseconds.
    """

    digest: Unsigned
    expected: Unsigned | None = None
    waits: Annotated[tuple[Microseconds, ...], msgspec.Meta(max_length=MAX_TERMS)] = ()


PeerControl = (
    Ping | ParityDone | PeerInventory | PeerStatus | Regroup | Enlist | GiveUpRuns | Drain | Adopt | Encode | Release
)
"""Small messages, which go over gRPC."""

read_peer_control = reader(PeerControl, ANSWERED)

PeerBulk = Accumulate | AskShard | Fetch
"""Messages that carry raw bytes or are answered with some. They go over separate connections."""

read_peer_bulk = reader(PeerBulk, ANSWERED)


def introduced(request: P) -> P:
    """A copy of the request, with the protocols and the version of this process."""
    return msgspec.structs.replace(request, speaks=spoken(), release=RELEASE)


def check_request(request: PeerRequest, job: str) -> None:
    """Raises `VersionMismatch` if the sender shares no protocol with this process, `ProtocolError` for another job."""
    check_range("the caller", request.speaks, request.release)
    if request.job != job:
        raise ProtocolError(f"this SMP serves job {job!r}, not {request.job!r}")
