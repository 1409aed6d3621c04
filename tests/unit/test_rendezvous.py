"""Where supervisors meet: who takes the place of a node that is lost."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.integrations.survivors.attempts import JobPlace, to_line
from holdfast.integrations.survivors.rendezvous import Rendezvous, _connect, _host
from tests.deadlines import DEADLINE_S
from tests.smp_kit import limited

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


def test_more_ranks_than_a_process_may_have_files_by_default() -> None:
    files = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 8
    world = files + 8
    with limited(resource.RLIMIT_NOFILE, files):
        address = _host(JobPlace(0, world, "", 0, False, "x", 9, {}), 0)
    serving = psutil.Process().children()[-1]
    connections = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(world)]
    try:
        for rank, connection in enumerate(connections):
            connection.sendall(to_line({"start": "x", "rank": rank}))
            assert b"attempt" in connection.recv(4096)
    finally:
        serving.kill()
        serving.wait(DEADLINE_S)
        for connection in connections:
            connection.close()


def test_a_connection_to_itself_leaves_the_port_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP makes one if nobody listens at a port, and it is drawn as that of the connection."""
    own, connect = socket.socket(), socket.create_connection
    own.bind(("127.0.0.1", 0))
    address = own.getsockname()
    own.connect(address)
    listening: list[socket.socket] = []

    def first_to_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        if own.fileno() >= 0:
            return own
        listening.append(socket.create_server(address))
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", first_to_itself)
    with _connect(lambda: address) as connection, listening[0]:
        assert connection.getpeername() != connection.getsockname()
