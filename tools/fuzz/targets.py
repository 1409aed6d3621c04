"""The parsers. A target takes any bytes, returns quickly, and raises only `HoldfastError` and what it declares."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch

from holdfast.smp_daemon.answers import TrainerRequest, read_trainer_request
from holdfast.smp_daemon.net.peers import METHOD
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.shared.errors import HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.handshake import Signer, Verifier, check_client
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.messages import (
    Accumulate,
    Adopt,
    AskInventories,
    AskShard,
    Configure,
    Drain,
    Ended,
    Fetch,
    Hello,
    Join,
    ParityDone,
    ParityUnit,
    PartialSum,
    PeerBulk,
    PeerControl,
    PeerInventory,
    Recover,
    RepairParity,
    Request,
    ShardUnit,
    SumReply,
    Term,
    UnitReply,
    read_peer_bulk,
    read_peer_control,
)
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.plain import (
    decode_digested,
    decode_json,
    encode_digested,
    encode_json,
    from_plain,
    to_plain,
)
from holdfast.smp_daemon.shared.records import (
    ParityRecord,
    ShardRecord,
)
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, read_format, read_record, read_stamp, write_stamp
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.starts import Choice, CrashLoop, Start
from holdfast.smp_daemon.shared.transport import SocketStream, frame
from holdfast.snapshot.state.record import decode_values, parse_record
from holdfast.snapshot.state.replicas import parse_part, shared_leaves_of
from holdfast.snapshot.state.values import decode, encode

SNAPSHOT = SnapshotId(3, 41)
JOB = "job-7"


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        read: the parser.
        seeds: inputs that it accepts.
        text: whether inputs are JSON.
        may_raise: errors that it may raise besides `HoldfastError`.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    text: bool = False
    may_raise: tuple[type[Exception], ...] = ()


class Heard:
    """A socket that delivers given data in pieces of any length."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)

    def recv_into(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = min(len(view), len(self._rest), 1 + len(self._rest) % 97)
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing, as nothing blocks."""

    def sendall(self, data: bytes) -> None:
        """Discard the data."""


def read_slot(data: bytes) -> None:
    view = memoryview(data)
    read_stamp(view)
    form, _ = read_format(view)
    for offset, leaf in form.offsets.values():
        if not 0 <= offset <= offset + leaf.bytes <= len(data):
            raise AssertionError(f"{leaf} at {offset} is not in the file")
    parse_record(read_record(view, form), SnapshotId(0, 0))


def read_frames(data: bytes) -> None:
    stream = SocketStream(cast("socket.socket", Heard(data)), None)
    while (received := stream.receive()) is not None:
        message, payload = received
        nowhere = memoryview(bytearray(4096))
        while payload:
            piece = nowhere[: min(payload, 4096)]
            stream.receive_into(piece)
            payload -= len(piece)
        for read in (read_trainer_request, read_peer_control, read_peer_bulk):
            try:
                read(message)
            except ProtocolError:
                pass


def _json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A parser of bytes that decodes them as JSON, as for a frame, and passes the value to `read`."""

    def parse(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return parse


def read_layout(value: Any) -> None:
    layout = Layout.read(value)
    for group in range(len(layout.groups)):
        layout.tag(group)
        for position in range(len(layout.groups[group])):
            layout.has_parity(group, position)
    assert Layout.read(to_plain(layout)) == layout


def read_parity_record(value: Any) -> None:
    record = from_plain(ParityRecord, value)
    for index in range(len(record.digests)):
        record.unit(index)


def read_leaf_of_records(value: Any) -> None:
    if isinstance(value, dict):
        decode_values(value, lambda name: torch.zeros(1))
        fixed = value.get("fixed")
        shared_leaves_of(fixed.get("shared") if isinstance(fixed, dict) else None)


def read_call(data: bytes) -> None:
    verifier = Verifier(b"0123456789abcdef", JOB)
    verifier.verify(METHOD, data)
    verifier.verify_request(b"", data)


def _layout() -> Layout:
    nodes = tuple(
        Node(f"node{i}", f"127.0.0.{i + 1}", 4000 + i, 5000 + i, (Shard(f"pp0-dp{i}", 3000 + i),), (f"rack=r{i}",))
        for i in range(3)
    )
    return Layout(JOB, 3, 1, nodes, ((2, 0, 1),), 2, 1, 1 << 10, 3)


def _slot() -> bytes:
    leaves = [Leaf("weight", "F32", (5, 3)), Leaf("mask", "U8", (7,)), Leaf("scalar", "I64", ())]
    form = plan_slot(JOB, "pp0-dp0", leaves, 200)
    slot = bytearray(form.total_bytes)
    slot[: len(form.header)] = form.header
    offset, capacity = form.record
    slot[offset : offset + capacity] = b'{"epoch":0,"step":0,"early":{}}'.ljust(capacity)
    write_stamp(memoryview(slot), SnapshotId(0, 0))
    return bytes(slot)


def _inventory() -> Inventory:
    layout = _layout()
    return Inventory(
        *("node1", "127.0.0.2", 4001, 5001, 3, SNAPSHOT, 2),
        {(3, 1): layout},
        frozenset({(SNAPSHOT, "pp0-dp1")}),
        frozenset({(SNAPSHOT, layout.tag(0), 2)}),
        frozenset({SnapshotId(3, 40)}),
    )


def _values() -> bytes:
    import numpy as np

    value = {
        "a": [1, 2.5, None, True, "text", b"bytes", (1, 2), {3, 4}, float("nan"), 1 << 5000],
        "b": {1: "one", (2,): np.arange(4, dtype="<i4"), "c": np.float32(3.5)},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "tensor": torch.zeros(2),
    }
    encoded = encode(value, "state", {})
    record = {"epoch": 3, "step": 41, "coord": "pp0-dp0", "early": encoded, "late": {}}
    return _text(record | {"fixed": {"state": encoded, "shared": {"w": ["F32", [2, 3]]}, "strides": {}, "blocks": {}}})


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _trainer_requests(layout: Layout, sources: Sources) -> Iterator[Request]:
    yield Hello(job=JOB, speaks=(3, 3), coord="pp0-dp0")
    yield AskInventories(addresses=(("127.0.0.1", 5000),))
    yield Join(epoch=3, start=Start(3, 40, CrashLoop(2, 30, 41, "killed"), Choice(SNAPSHOT, 3), (("10.0.0.1", 9),)))
    yield Configure(layout=layout)
    yield Recover(epoch=3, sources=sources, coord="pp0-dp0")
    yield RepairParity(epoch=3, sources=sources, group=0, position=2)
    yield Ended(epoch=3, coord="pp0-dp0", step=41, failure="killed")


def _peer_requests(layout: Layout, sources: Sources) -> Iterator[Request]:
    yield ParityDone(job=JOB, epoch=3, snapshot=SNAPSHOT, tag="ab", position=1)
    yield AskShard(job=JOB, coord="pp0-dp0")
    yield PeerInventory(job=JOB, known=frozenset({layout.digest}))
    yield Drain(job=JOB, deadline_s=3.5, spares=(("127.0.0.1", 5000),))
    yield Adopt(job=JOB, epoch=3, sources=sources, layout=layout)
    yield Accumulate(job=JOB, epoch=3, snapshot=SNAPSHOT, tag="ab", stripe=0, position=1, digest=1 << 63)
    terms = Term(("127.0.0.1", 5000), ShardUnit("pp0-dp0", 1), 7), Term(("127.0.0.2", 5001), ParityUnit("ab", 1, 0), 1)
    yield Fetch(job=JOB, snapshot=SNAPSHOT, what=PartialSum(terms, 100, 1))


@cache
def targets() -> dict[str, Target]:
    """All targets, by name."""
    layout, inventory = _layout(), _inventory()
    sources = Sources(SNAPSHOT, layout, {"pp0-dp0": ("127.0.0.1", 5000)}, {0: {2: ("127.0.0.2", 5001)}})
    status = Status(
        inventory, 77, 1.5, "/dev/shm/x", 1 << 20, 1 << 21, {"free": 2}, 1 << 20, ((SNAPSHOT, 2.0),), {"pauses": 1}
    )
    shard = ShardRecord(SNAPSHOT, "pp0-dp0", 3000, 1024, (1, 2, (1 << 64) - 1))
    parity = ParityRecord(SNAPSHOT, layout.tag(0), 2, 1024, (1024, 5), (7, 8), ({0: 1, 1: 2}, {0: 3}))
    owner = Owner(7, 15, JOB, "node1", "127.0.0.1", 4001, 5001, more_bulk=(("127.0.0.2", 5002),))
    message = {"op": "accumulate", "job": JOB, "epoch": 3, "snapshot": SNAPSHOT, "coord": "pp0-dp0", "digest": 1 << 63}
    rank = Node(inventory.node, "127.0.0.1", 4001, 5001, (Shard("pp0-dp0", 3000),), ("rack=r1",))
    return {
        "slot": Target(read_slot, (_slot(),)),
        "frames": Target(read_frames, (frame(message, 100) + bytes(100) + frame({"op": "status"}), frame({}))),
        "layout": Target(_json(read_layout), (_text(to_plain(layout)),), text=True),
        "sources": Target(_json(partial(from_plain, Sources)), (_text(to_plain(sources)),), text=True),
        "inventory": Target(_json(Inventory.read), (_text(inventory.to_plain()),), text=True),
        "status": Target(_json(Status.read), (_text(status.to_plain()),), text=True),
        "shard-record": Target(_json(partial(from_plain, ShardRecord)), (_text(to_plain(shard)),), text=True),
        "parity-record": Target(_json(read_parity_record), (_text(to_plain(parity)),), text=True),
        "small-file": Target(decode_digested, (encode_digested(to_plain(shard)),)),
        "owner": Target(_json(partial(from_plain, Owner)), (_text(to_plain(owner)),), text=True),
        "record-leaf": Target(_json(read_leaf_of_records), (_values(),), text=True),
        "values": Target(_json(lambda v: decode(v, lambda name: torch.zeros(1))), (_values(),), text=True),
        "rank": Target(_json(partial(from_plain, Node)), (_text(to_plain(rank)),), text=True),
        "trainer-request": Target(
            lambda data: decode_json(cast("type[Any]", TrainerRequest), data, "a request"),
            tuple(map(encode_json, _trainer_requests(layout, sources))),
            text=True,
        ),
        "peer-request": Target(
            lambda data: decode_json(cast("type[Any]", PeerControl | PeerBulk), data, "a request"),
            tuple(map(encode_json, _peer_requests(layout, sources))),
            text=True,
        ),
        "unit-reply": Target(
            _json(partial(from_plain, UnitReply)), (_text({"digest": 7, "sources": {"0": 1, "12": 5}}),), text=True
        ),
        "sum-reply": Target(
            _json(partial(from_plain, SumReply)), (_text({"digest": 7, "expected": 7, "waits": [120, 7]}),), text=True
        ),
        "part": Target(lambda data: parse_part(data.decode("utf-8", "replace")), (b"weight[3:17]", b"a.b[0:1]")),
        "call": Target(read_call, (Signer(b"0123456789abcdef", JOB).sign("here", METHOD, b""), bytes(120))),
        "handshake": Target(
            lambda data: check_client(cast("socket.socket", Heard(data)), b"0123456789abcdef", JOB),
            (b"HFA2" + bytes(104), b"HFST" + bytes(64)),
            may_raise=(EOFError, TimeoutError),
        ),
    }


def try_one(target: Target, data: bytes) -> bool:
    """Have a target read `data`; return whether it accepted them. Forbidden errors propagate."""
    allowed: tuple[type[Exception], ...] = (HoldfastError, *target.may_raise)
    try:
        target.read(data)
    except allowed:
        return False
    return True
