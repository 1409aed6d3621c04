"""A runner of nodes hears everything that their processes report."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from holdfast.chaos.runner import Event, Runner


class Listening(Runner):
    """Records what it hears."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self.listen(path)

    def heard(self, event: Event, sock: socket.socket) -> None:
        self.events.append(event)


def test_who_has_ended_before_its_connection_was_accepted_is_heard(tmp_path: Path) -> None:
    runner = Listening(tmp_path / "events")
    for rank in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(tmp_path / "events"))
            for step in range(2):
                sock.sendall(json.dumps({"rank": rank, "step": step}).encode() + b"\n")
    runner.catch_up()
    said = [(event["rank"], event["step"]) for event in runner.events]
    assert sorted(said) == [(rank, step) for rank in range(3) for step in range(2)]
    runner.hang_up()
