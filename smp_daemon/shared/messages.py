"""Every message that an SMP answers: what its trainers ask over the unix socket, and other SMPs over the network.

A message is a JSON object; `op` says which of these it is. Replies without a type here are objects without fields.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_NODES, MAX_SAYING
from holdfast.smp_daemon.shared.plain import Count, Identifier, Unsigned, reader
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.starts import Failure, Start
from holdfast.smp_daemon.shared.versions import RELEASE, UNSAID, Range, check_range, spoken

MAX_KNOWN = 4096
MAX_WAIT_US = 1 << 40
MAX_TERMS = 255
"""Nodes in a chain: no code has more units in a stripe."""

Microseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_US)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Speaks = tuple[Count, Count]
"""A `versions.Range`: the oldest and the newest protocol."""

Version = Annotated[str, msgspec.Meta(max_length=64)]
"""A version of holdfast."""

Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_NODES)]
Digests = Annotated[frozenset[str], msgspec.Meta(max_length=MAX_KNOWN)]
"""Of layouts, see `Layout.digest`: those that the asker knows need not be sent."""


class Request(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="op"):
    """A message that is answered."""


class Reply(msgspec.Struct, kw_only=True):
    """An answer."""


# ---------------------------------------------------------------------- from a trainer


class Hello(Request, tag="hello", kw_only=True):
    """The first message.

    Attributes:
        version: the oldest protocol that is spoken. `newest`: the newest, if there are several.
        release: of holdfast.
        coord: of a trainer that wants to be watched. `epoch`: that it has joined already.
    """

    job: str
    version: Count
    newest: Count | None = None
    release: Version = ""
    coord: Identifier | None = None
    epoch: Count | None = None

    @property
    def speaks(self) -> Range:
        """Which protocols."""
        return self.version, self.version if self.newest is None else self.newest


class Greeted(Reply, kw_only=True):
    """Who answers; `row`: of the board, for a watched trainer's heartbeat. `speaks`, `release`: of the SMP."""

    node: str
    pid: Count
    row: int | None
    speaks: Speaks = UNSAID
    release: Version = ""


class AskInventory(Request, tag="inventory", kw_only=True):
    """What is held here? Answered by an `Inventory`."""


class AskInventories(Request, tag="inventories", kw_only=True):
    """What do the SMPs at these addresses hold?"""

    addresses: Addresses


class Inventories(Reply, kw_only=True):
    """An `Inventory` of each that answered, without its layouts."""

    inventories: tuple[dict[str, Any], ...]


class Join(Request, tag="join", kw_only=True):
    """Enter an epoch, and fence older ones.

    `start`: if the job starts with it. `near`: on this NUMA node the trainer's slots shall lie.
    """

    epoch: Count
    start: Start | None = None
    near: Annotated[int, msgspec.Meta(ge=0, lt=1024)] | None = None


class Configure(Request, tag="configure", kw_only=True):
    """Reserve memory for a layout. `wait`: until all of it is there."""

    layout: Layout
    wait: bool = True


class AwaitReserved(Request, tag="await_reserved", kw_only=True):
    """Answer once `count` slots of every shard of that epoch's layout, and of parity, may be used, or after seconds."""

    epoch: Count
    count: Count


class Reserved(Reply, kw_only=True):
    """How many slots of every shard, and of parity, trainers may use; None: all."""

    count: Count | None = None


class Begin(Request, tag="begin", kw_only=True):
    """Give a slot for a shard. What is not in `keep` may go; `protected`: the newest that is, job-wide.

    `with_parity`: of what is kept, only these keep their parity, or are still to get it; None: all. `ahead`: `snapshot`
    is a guess, so what is younger than all of `keep` stays: another rank may have begun what comes before it.
    """

    snapshot: SnapshotId
    coord: Identifier
    keep: tuple[SnapshotId, ...]
    protected: SnapshotId | None = None
    with_parity: tuple[SnapshotId, ...] | None = None
    ahead: bool = False


class SlotFile(Reply, kw_only=True):
    """A slot: a file of the arena, and which one of that name."""

    file: str
    inode: Count
    bytes: Count


class AskSlots(Request, tag="slots", kw_only=True):
    """Which slots are there for shards of `coord` in that epoch's layout?"""

    epoch: Count
    coord: Identifier


class SlotFiles(Reply, kw_only=True):
    """Slots."""

    slots: tuple[SlotFile, ...]


class Seal(Request, tag="seal", kw_only=True):
    """All bytes are written. `encode`: the snapshot is to be protected."""

    snapshot: SnapshotId
    coord: Identifier
    protected: SnapshotId | None = None
    encode: bool = True


class Abandon(Request, tag="abandon", kw_only=True):
    """The slot will not be sealed; `unused`: nothing was to be written into it after all."""

    snapshot: SnapshotId
    coord: Identifier
    unused: bool = False


class Await(Request, tag="await", kw_only=True):
    """Answer once the snapshot is protected, or has failed."""

    snapshot: SnapshotId
    deadline_s: Seconds


class Outcome(Reply, kw_only=True):
    """A `board.SnapshotOutcome`."""

    outcome: int


class InEpoch(Request, kw_only=True):
    """Changes something here, and names no snapshot of the epoch at hand: who has joined one says which."""

    epoch: Count | None = None


class Recover(InEpoch, tag="recover", kw_only=True):
    """Hold a shard again. `check`: read one that is held already."""

    sources: Sources
    coord: Identifier
    check: bool = True


class Recovered(SlotFile, kw_only=True):
    """Where it is, how it came there, and its digests; see `client.RecoveredShard`."""

    how: str
    bytes_fetched: Count
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]
    digests: tuple[Unsigned, ...]


class Lend(InEpoch, tag="lend", kw_only=True):
    """From now on give units of that snapshot."""

    sources: Sources


class AskUnit(InEpoch, tag="unit", kw_only=True):
    """A unit of what is lent; its bytes follow the reply."""

    coord: Identifier
    unit: Count


class LentUnit(Reply, kw_only=True):
    """Its digest, and what was fetched over the network since `Lend`."""

    digest: Unsigned
    bytes_fetched: Count


class RepairParity(InEpoch, tag="repair_parity", kw_only=True):
    """Compute the parity of a position again, in the background, unless it is here or somebody is at it."""

    sources: Sources
    group: Count
    position: Count


class Repaired(Reply, kw_only=True):
    """A `board.RepairState`."""

    state: Count = 1


class Persist(Request, tag="persist", kw_only=True):
    """Persist this node's part of a snapshot, in the background."""

    snapshot: SnapshotId


class Accepted(Reply, kw_only=True):
    """Whether it is done."""

    accepted: bool


class AskPersisted(Request, tag="persisted", kw_only=True):
    """What is persisted? Answered by a `Persisted`."""


class AskPersistedLayout(Request, tag="persisted_layout", kw_only=True):
    """In which layout was that taken? Answered by a `Layout`."""

    snapshot: SnapshotId


class AskCounters(Request, tag="counters", kw_only=True):
    """What was counted? Answered by numbers by name, as `Scrub` is."""


class Scrub(Request, tag="scrub", kw_only=True):
    """Check every sealed unit now."""


class Verify(Request, tag="verify", kw_only=True):
    """Check the newest shards in the background. Answered by `Accepted`: False if that is under way already."""


class Say(InEpoch, tag="say", kw_only=True):
    """Show this to operators."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_SAYING)]


class Suspect(Request, tag="suspect", kw_only=True):
    """A node seems to be dead."""

    node: Identifier


class Ended(InEpoch, tag="ended", kw_only=True):
    """How the job ends for a trainer."""

    coord: Identifier
    step: Count
    failure: Failure


class Finish(Request, tag="finish", kw_only=True):
    """The job has ended well."""

    epoch: Count


class Stop(Request, tag="stop", kw_only=True):
    """End. `remove`: the arena, too; `force`: though trainers are connected."""

    remove: bool = False
    force: bool = False


TrainerRequest = (
    Hello
    | AskInventory
    | AskInventories
    | Join
    | Configure
    | AwaitReserved
    | AskSlots
    | Begin
    | Seal
    | Abandon
    | Await
    | Recover
    | Lend
    | AskUnit
    | RepairParity
    | Persist
    | AskPersisted
    | AskPersistedLayout
    | AskCounters
    | Scrub
    | Verify
    | Say
    | Suspect
    | Ended
    | Finish
    | Stop
)

ANSWERED = "a message that is answered here"

read_trainer_request = reader(TrainerRequest, ANSWERED)

# ---------------------------------------------------------------------- from another SMP, or a command


class PeerRequest(Request, kw_only=True):
    """`job`: whose SMP is meant. `speaks`, `release`: of whoever asks; `introduced` adds them."""

    job: str
    speaks: Speaks = UNSAID
    release: Version = ""


P = TypeVar("P", bound=PeerRequest)


class Ping(PeerRequest, tag="ping", kw_only=True):
    """Are you there, and whose are you?"""


class Pong(Reply, kw_only=True):
    """`revision`: of its newest layout, see `Layout.revision`."""

    job: str
    node: str
    epoch: Count
    revision: Count


class ParityDone(PeerRequest, tag="parity_done", kw_only=True):
    """The sender's parity of a snapshot is complete and committed. `epoch`: the sender's now."""

    epoch: Count
    snapshot: SnapshotId
    tag: Identifier
    position: Annotated[int, msgspec.Meta(ge=0, le=255)]


class PeerInventory(PeerRequest, tag="inventory", kw_only=True):
    """What is held there? Answered by an `Inventory`."""

    known: Digests = frozenset()


class PeerStatus(PeerRequest, tag="status", kw_only=True):
    """How is it there? Answered by an `ops.status.Status`."""

    known: Digests = frozenset()


class Regroup(PeerRequest, tag="regroup", kw_only=True):
    """See whether the groups are complete."""


class Move(PeerRequest, tag="move", kw_only=True):
    """Somebody leaves: regroup now. `spares`: SMPs that may take something over."""

    spares: Addresses = ()


class Enlist(PeerRequest, tag="enlist", kw_only=True):
    """Take part in this job, as a spare."""

    epoch: Count


class Drain(PeerRequest, tag="drain", kw_only=True):
    """Give what is held there to others, and end. Answered by a `coding.drain.Drained`."""

    deadline_s: Seconds
    spares: Addresses = ()
    wait: bool = False


class Phase(PeerRequest, kw_only=True):
    """A node's share of a phase of regrouping, see `coding.regroup`."""

    epoch: Count
    sources: Sources
    layout: Layout


class Adopt(Phase, tag="adopt", kw_only=True):
    """Keep the new layout, and hold its shards."""


class Encode(Phase, tag="encode", kw_only=True):
    """Have the parity of the new groups."""


class Release(Phase, tag="release", kw_only=True):
    """Drop the parity of the old groups."""


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
    """A unit of a sum: who has it, and what it is multiplied by."""

    at: Address
    what: ShardUnit | ParityUnit
    factor: Annotated[int, msgspec.Meta(ge=0, le=255)]


class PartialSum(msgspec.Struct, frozen=True, tag_field="op", tag="partial"):
    """A sum of units, of which the first is held by whoever is asked, and the rest by those that it asks in turn.

    Attributes:
        length: of the sum, in bytes; shorter units end in zeros.
        position: of the node whose unit it is. Who holds parity knows its digest by that.
    """

    terms: Annotated[tuple[Term, ...], msgspec.Meta(min_length=1, max_length=MAX_TERMS)]
    length: Count
    position: Count


class AskShard(PeerRequest, tag="shard", kw_only=True):
    """What is the newest of a shard that is held there?"""

    coord: Identifier


class HeldShard(Reply, kw_only=True):
    """A sealed shard: of which snapshot, how long, and in units of how many bytes."""

    snapshot: SnapshotId
    bytes: Count
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]


class AskShardUnit(PeerRequest, tag="shard_unit", kw_only=True):
    """A `ShardUnit` of a snapshot."""

    snapshot: SnapshotId
    coord: Identifier
    unit: Count


class AskParityUnit(PeerRequest, tag="parity_unit", kw_only=True):
    """A `ParityUnit` of a snapshot."""

    snapshot: SnapshotId
    tag: Identifier
    position: Count
    unit: Count


class AskPartialSum(PeerRequest, tag="partial", kw_only=True):
    """A `PartialSum` of a snapshot."""

    snapshot: SnapshotId
    terms: Annotated[tuple[Term, ...], msgspec.Meta(min_length=1, max_length=MAX_TERMS)]
    length: Count
    position: Count


class UnitReply(Reply, kw_only=True):
    """The bytes of a unit follow.

    Attributes:
        digest: of them.
        sources: for parity, the digests of what was accumulated into it, by position.
    """

    digest: Unsigned
    sources: dict[int, Unsigned] = {}


class SumReply(Reply, kw_only=True):
    """The bytes of a sum follow.

    Attributes:
        digest: of them.
        expected: of the whole unit, if somebody on the way knows it.
        waits: how long each of those on the way, but the last, waited for the next, in microseconds.
    """

    digest: Unsigned
    expected: Unsigned | None = None
    waits: Annotated[tuple[Microseconds, ...], msgspec.Meta(max_length=MAX_TERMS)] = ()


PeerControl = (
    Ping | ParityDone | PeerInventory | PeerStatus | Regroup | Move | Enlist | Drain | Adopt | Encode | Release
)
"""Small messages, over gRPC."""

read_peer_control = reader(PeerControl, ANSWERED)

PeerBulk = Accumulate | AskShard | AskShardUnit | AskParityUnit | AskPartialSum
"""What carries raw bytes, or is answered with some, over connections of its own."""

read_peer_bulk = reader(PeerBulk, ANSWERED)


def introduced(request: P) -> P:
    """A request, with which protocols this process speaks."""
    return msgspec.structs.replace(request, speaks=spoken(), release=RELEASE)


def check_request(request: PeerRequest, job: str) -> None:
    """Raises `VersionMismatch` if no protocol is common with whoever asks, `ProtocolError` if it is not of this job."""
    check_range("whoever asks", request.speaks, request.release)
    if request.job != job:
        raise ProtocolError(f"this SMP serves job {job!r}, not {request.job!r}")
