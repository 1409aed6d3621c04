"""Where supervisors meet: who takes the place of a node that is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.integrations.survivors.attempts import JobPlace, to_line
from holdfast.integrations.survivors.rendezvous import Rendezvous
from tests.deadlines import DEADLINE_S

WORLD = 4


class Meeting:
    """A rendezvous and what connects to it, in one thread."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.rendezvous = Rendezvous(self.listening, "", JobPlace(0, WORLD, "", 0, False, "x", 9, {}))
        self.connections: list[socket.socket] = []

    def connect(self, message: dict[str, Any]) -> socket.socket:
        connection = socket.create_connection(self.listening.getsockname(), timeout=DEADLINE_S)
        self.connections.append(connection)
        self.rendezvous.serve()
        connection.sendall(to_line(message))
        self.rendezvous.serve()
        return connection

    def supervisor(self, rank: int, node: str) -> socket.socket:
        return self.connect({"start": "x", "rank": rank, "node": node, "told": {"RANK": str(rank)}})

    def standby(self, node: str, local: int = 0) -> socket.socket:
        return self.connect({"standby": node, "local": local})


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    for connection in [meeting.listening, *meeting.connections]:
        connection.close()


def heard(connection: socket.socket) -> list[dict[str, Any]]:
    """What was said to it until now."""
    connection.setblocking(False)
    try:
        return [json.loads(line) for line in connection.recv(1 << 16).splitlines()]
    except BlockingIOError:
        return []


def test_a_node_whose_supervisors_go_at_once_is_replaced_once(meeting: Meeting) -> None:
    first, second, third, fourth = (meeting.supervisor(rank, "ab"[rank // 2]) for rank in range(WORLD))
    small, late, early = meeting.standby("c"), meeting.standby("d", local=1), meeting.standby("d", local=0)
    third.close()
    fourth.close()
    meeting.rendezvous.serve()
    assert [heard(each)[-1]["attempt"][0] for each in (first, second)] == [1, 1]
    assert [message.get("place") for message in heard(early)] == [{"RANK": "2"}, None]
    assert [message.get("place") for message in heard(late)] == [{"RANK": "3"}, None]
    assert not heard(small)
    early.close()
    meeting.rendezvous.serve()
    assert heard(first) == [{"over": True}]  # nobody is left with as many processes


def test_a_supervisor_that_says_that_it_leaves_is_not_replaced(meeting: Meeting) -> None:
    first, second, *_ = [meeting.supervisor(rank, f"node{rank}") for rank in range(WORLD)]
    standby = meeting.standby("c")
    second.sendall(to_line({"leaves": True}))
    second.close()
    meeting.rendezvous.serve()
    meeting.rendezvous.serve()
    assert heard(first)[-1] == {"over": True} and not heard(standby)


def test_a_standby_that_goes_is_forgotten_and_one_that_stays_hears_of_the_end(meeting: Meeting) -> None:
    job = [meeting.supervisor(rank, f"node{rank}") for rank in range(WORLD)]
    gone, stays = meeting.standby("c"), meeting.standby("d")
    gone.close()
    meeting.rendezvous.serve()
    job[3].close()
    meeting.rendezvous.serve()
    assert [message.get("place") for message in heard(stays)] == [{"RANK": "3"}, None]
    last = meeting.standby("e")
    for connection in (*job[:3], stays):
        connection.setblocking(True)
        connection.sendall(to_line({"done": 1}))
        meeting.rendezvous.serve()
    assert heard(last) == [{"end": True}]


@pytest.mark.parametrize("message", [{"standby": "c", "local": "x"}, {"rank": 0}, {"start": "x", "rank": 9}])
def test_whoever_says_nothing_sensible_is_left(meeting: Meeting, message: dict[str, Any]) -> None:
    assert meeting.connect(message).recv(1) == b""
