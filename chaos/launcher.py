"""The cluster's handle on a zygote, the process that forks trainers (`chaos.zygote`)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from holdfast.scratch import Scratch
from holdfast.sessions import trial_environment
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.processes import own_command, own_environment

IMPORT_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 30.0


BEFORE_CUDA = ("torch", "holdfast.chaos.trainer")
"""Modules that can be imported before a fork without using CUDA."""


ON_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Variables for GPUs: the first makes cuBLAS deterministic, and Megatron requires the second."""


def check_device(device: str) -> None:
    """Raises `ConfigError` if trainers are to use a GPU and there is none."""
    if device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {device}: torch sees no GPU here (torch.cuda.is_available() is false); leave it out to "
                "train on CPUs"
            )


class Launcher:
    """A running zygote. Not thread-safe. `close` ends it and every trainer it forked."""

    def __init__(
        self, modules: Sequence[str], *, device: str = "cpu", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the zygote; returns at once. `wait_ready` blocks until the modules are imported.

        Args:
            modules: the modules that the zygote imports before it forks.
            device: ``cpu``: trainers see no GPU. ``cuda``: they do, and import the modules themselves, since CUDA does
                not survive a fork once a module has used it.
            environment: more environment variables for the zygote.

        Raises:
            ConfigError: there is no GPU.
        """
        check_device(device)
        self._modules = tuple(modules) if device == "cpu" else BEFORE_CUDA
        self._environment = ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else ON_CUDA) | dict(environment or {})
        self._buffer = b""
        self._ready = False
        self._scratch = Scratch("launcher").__enter__()
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        environment = (
            trial_environment()
            | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(self._scratch.path),  # on tmpfs: tempfile probes it by writing to it
            }
            | self._environment
        )
        self._process = subprocess.Popen(
            own_command("holdfast.chaos.zygote", str(theirs.fileno()), *self._modules),
            pass_fds=[theirs.fileno()],
            env=own_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # we handle Ctrl-C
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor for a selector: readable when `messages` would not block."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """The pid of the zygote."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until the modules are imported. Raises `HoldfastError` if that fails."""
        if not self._ready:
            self._await("imported", IMPORT_DEADLINE_S)
            self._ready = True

    def spawn(self, target: str, ranks: list[dict[str, Any]], store: tuple[str, Sequence[str]]) -> None:
        """Fork one trainer per element of `ranks`; `store`: address and place of their process group's store."""
        host, place = store
        self._say({"op": "spawn", "target": target, "ranks": ranks, "store_host": host, "store_place": place})

    def kill(self, spare: Sequence[int] = ()) -> None:
        """SIGKILL every trainer of the job that still runs, except the ranks in `spare`.

        Their ends are reported as usual. The spared trainers live on as strays, whose ends are reported as ``stray``.
        """
        self._say({"op": "kill", "spare": list(spare)})

    def replace(self) -> None:
        """SIGKILL the zygote, and with it all trainers, and start another; blocks until that is ready."""
        self._process.kill()
        self._process.wait(10)
        self._channel.close()
        self._buffer, self._ready = b"", False
        self._start()
        self.wait_ready()

    def end_trainers(self) -> None:
        """SIGKILL every trainer that still runs, strays too, and block until all are gone. Drops other messages."""
        self._say({"op": "end"})
        self._await("ended", ANSWER_DEADLINE_S)

    def disk_bytes_written(self) -> int:
        """Bytes that the zygote and all its trainers so far wrote to disk. Call while no trainer runs."""
        self._say({"op": "written"})
        return int(self._await("written", ANSWER_DEADLINE_S)["bytes"])

    def messages(self, deadline_s: float = ANSWER_DEADLINE_S) -> list[dict[str, Any]]:
        """The zygote's next messages. Blocks until it says something.

        Raises:
            HoldfastError: the zygote is gone.
            DeadlineExceeded: the zygote said nothing for `deadline_s`.
        """
        self._channel.settimeout(deadline_s)
        try:
            data = self._channel.recv(1 << 16)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the launcher's process said nothing for {deadline_s:.0f} s") from error
        if not data:
            raise HoldfastError(f"the launcher's process ended with status {self._process.wait(10)}")
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the zygote and its trainers."""
        if not self._ready:
            self._process.kill()  # it still imports, and would not see that the channel is closed
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        finally:
            self._scratch.remove()

    def _await(self, kind: str, deadline_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + deadline_s
        while True:
            for message in self.messages(max(0.01, deadline - time.monotonic())):
                if message["kind"] == kind:
                    return message

    def _say(self, message: dict[str, Any]) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")
