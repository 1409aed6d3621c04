"""Forged and random frames and requests, on every socket of an SMP."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from holdfast.smp_daemon.shared.limits import MAX_MESSAGE_BYTES, MAX_UNIT_BYTES
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB
from tests.system.attacks.victim import (
    HELD,
    Address,
    Victim,
    anonymous_bytes,
    ask,
    ask_control,
    dial,
    frame,
    say_control,
)

SEED = "frames"


def sockets(victim: Victim) -> dict[str, Address]:
    return {"local": victim.local, "bulk": victim.smp.bulk, "control": victim.control}


@pytest.mark.parametrize("where", ["local", "bulk"])
def test_a_length_that_is_only_claimed_takes_no_memory(victim: Victim, where: str) -> None:
    """A hundred connections each announce 8 MiB and send ten bytes."""
    before = anonymous_bytes(victim.smp)
    connections = [dial(sockets(victim)[where]) for _ in range(100)]
    for connection in connections:
        connection.sendall(frame(b'{"op": "in', length=MAX_MESSAGE_BYTES))
    assert "bytes" in ask(victim.smp.bulk, HELD)
    assert anonymous_bytes(victim.smp) - before < 32 << 20
    for connection in connections:
        connection.close()


def test_sums_of_any_length_and_chains_of_any_length_are_refused(victim: Victim) -> None:
    unit = {"op": "shard_unit", "coord": "dp0", "unit": 0}
    term = {"at": list(victim.smp.bulk), "factor": 1, "what": unit}
    message = {"op": "fetch", "job": JOB, "snapshot": [1, 1]}
    wanted = {"op": "partial", "terms": [term], "length": MAX_UNIT_BYTES, "position": 1}
    too_long = ask(victim.smp.bulk, {**message, "what": wanted})
    too_many = ask(victim.smp.bulk, {**message, "what": {**wanted, "terms": [term] * 256, "length": 10}})
    assert too_long["error"] == too_many["error"] == "ProtocolError"


def test_random_bodies_of_calls_are_answered_with_an_error(victim: Victim) -> None:
    source = random.Random(f"{SEED} calls")
    whole = json.dumps({"op": "parity_done", "job": JOB, "epoch": 1, "snapshot": [1, 1], "tag": "ab"}).encode()
    for number in range(60):
        cut = source.randrange(len(whole))
        body = whole[:cut] + source.randbytes(source.randrange(1, 200)) if number % 2 else source.randbytes(100)
        assert json.loads(say_control(victim.control, body))["error"] == "ProtocolError"


def test_other_methods_and_bodies_that_are_too_long_are_refused(victim: Victim) -> None:
    with grpc.insecure_channel("{}:{}".format(*victim.control)) as channel:
        for method in ("/holdfast.Smp/Nothing", "/holdfast.v1.Peer/Ping", "/"):
            with pytest.raises(grpc.RpcError) as unknown:
                channel.unary_unary(method, None, None)(b"{}", timeout=DEADLINE_S)
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as too_long:
        say_control(victim.control, bytes(MAX_MESSAGE_BYTES + 1))
    assert too_long.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_names_of_groups_are_not_remembered_without_end(victim: Victim) -> None:
    """At most 256 of 400 reports of parity in unknown groups are accepted."""
    done = {"op": "parity_done", "job": JOB, "epoch": 1, "snapshot": [1, 1 << 40], "position": 0}

    def say(number: int) -> bool:
        return "error" not in ask_control(victim.control, {**done, "tag": f"{number:016x}"})

    with ThreadPoolExecutor(8) as threads:
        taken = sum(threads.map(say, range(400)))
    assert taken <= 256
    assert ask_control(victim.control, {**done, "tag": "x" * 100_000})["error"] == "ProtocolError"
    victim.run["dp0"].client.inventory()


def test_shards_that_there_are_not_leave_nothing_behind(victim: Victim) -> None:
    before = anonymous_bytes(victim.smp)
    for number in range(300):
        what = {"op": "shard_unit", "coord": f"{number}" + "x" * 100_000, "unit": 0}
        message = {"op": "fetch", "job": JOB, "snapshot": [1, 1], "what": what}
        assert ask(victim.smp.bulk, message)["error"] == "ProtocolError"
    assert anonymous_bytes(victim.smp) - before < 16 << 20


def test_a_half_open_connection_is_let_go(victim: Victim) -> None:
    for _ in range(50):
        with dial(victim.smp.bulk) as sock:
            sock.sendall(b"HF")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
