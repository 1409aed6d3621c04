"""The network between virtual nodes: each has its own namespace, and the only way out is a forwarder process."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.processes import own_command, own_environment
from tests.proof.chaos.network.namespaces import inhabitants, unavailable

ANSWER_DEADLINE_S = 30.0


class Wire:
    """A running forwarder. Not thread-safe; each call blocks until the forwarder has carried it out. `close` ends it.

    Its namespaces are gone when it and the processes in them have ended, also after a SIGKILL of this process.
    """

    def __init__(self) -> None:
        """Start the forwarder. Raises `ConfigError`, with the reason, where that is impossible."""
        if reason := unavailable():
            raise ConfigError(f"faults of the network between nodes cannot be done here: {reason}")
        self._inodes: set[int] = set()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(ANSWER_DEADLINE_S)
        self._answers = self._channel.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                own_command("tests.proof.chaos.network.forwarder", str(theirs.fileno())),
                env=own_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # keeps Ctrl-C from it
            )

    def open(self, host: str) -> str:
        """Give a node a namespace with the address `host`; returns the path by which processes enter it."""
        answer = self._ask(op="open", host=host)
        self._inodes.add(int(answer["inode"]))
        return str(answer["namespace"])

    def unplug(self, host: str) -> None:
        """Stop passing packets from and to a node, without telling anyone."""
        self._ask(op="close", host=host)

    def impair(self, kind: str, hosts: Sequence[str], *, amount: int, seed: int, for_s: float) -> None:
        """Impair packets on the links of `hosts`, as `network.impairments` does for `kind`; 0 s: until the end."""
        self._ask(op="impair", kind=kind, hosts=list(hosts), amount=amount, seed=seed, for_s=for_s)

    def hits(self) -> list[tuple[str, int]]:
        """The kind of each impairment so far, and the number of packets that it hit."""
        return [(str(kind), int(count)) for kind, count in self._ask(op="hits")["hits"]]

    def close(self) -> list[str]:
        """End the forwarder. Returns what is left: nothing, if all processes in its namespaces have ended before."""
        left = []
        self._answers.close()
        self._channel.close()
        try:
            status = self._process.wait(ANSWER_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait(ANSWER_DEADLINE_S)
        if status != 0:
            left.append(f"the forwarder ended with status {status}")
        return left + [f"process {pid} in the namespace of a node" for pid in inhabitants(self._inodes)]

    def _ask(self, **message: Any) -> dict[str, Any]:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the forwarder did not answer within {ANSWER_DEADLINE_S:.0f} s") from error
        except OSError as error:
            raise HoldfastError(f"the forwarder is gone: {error}") from error
        if not line:
            raise HoldfastError(f"the forwarder ended with status {self._process.wait(ANSWER_DEADLINE_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
