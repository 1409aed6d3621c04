"""The cluster's handle on a zygote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from holdfast.chaos.network.clocks import compile_shim
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.scratch import Scratch

IMPORT_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 30.0


BEFORE_CUDA = ("torch", "holdfast.chaos.trainer")
"""What can be imported before a fork without asking CUDA for anything."""


ON_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What makes cuBLAS give the same bits each time, and what Megatron insists on."""


def check_device(device: str) -> None:
    """Raises `ConfigError` if trainers are to be on a GPU, and there is none."""
    if device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {device}: torch sees no GPU here (torch.cuda.is_available() is false); leave it out to "
                "train on CPUs"
            )


class Launcher:
    """A running zygote. Not thread-safe. `close` ends it and every trainer it forked.

    Attributes:
        shim: the environment in which other processes are started whose wall clocks can be set; empty if none can.
    """

    def __init__(self, modules: Sequence[str], *, clocked: bool = False, device: str = "cpu") -> None:
        """Start it; returns at once. `wait_ready` says when the modules are imported.

        Args:
            clocked: whether trainers' wall clocks can be set, see `chaos.network.clocks`.
            device: ``cpu``: trainers see no GPU. ``cuda``: they do, and import the modules themselves, as CUDA does not
                survive a fork once a module has asked it for anything.

        Raises:
            ConfigError: clocks cannot be set here, or there is no GPU.
        """
        check_device(device)
        self._modules = tuple(modules) if device == "cpu" else BEFORE_CUDA
        self._device = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else ON_CUDA
        self._buffer = b""
        self._ready = False
        self._scratch = Scratch("launcher").__enter__()
        try:
            self.shim = compile_shim(self._scratch.path) if clocked else {}
        except ConfigError:
            self._scratch.remove()
            raise
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        environment = (
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(self._scratch.path),  # tempfile probes it by writing to it; nothing touches a disk
            }
            | self._device
            | self.shim
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.chaos.zygote", str(theirs.fileno()), *self._modules],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to deal with
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        """For a selector: readable when `messages` has something."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """The process that forks trainers."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until the modules are imported. Raises `HoldfastError` if they cannot be."""
        if not self._ready:
            self._await("imported", IMPORT_DEADLINE_S)
            self._ready = True

    def spawn(self, target: str, ranks: list[dict[str, Any]], store: tuple[str, str | None]) -> None:
        """Fork one trainer per element of `ranks`; `store`: address and namespace of their process group's store."""
        host, namespace = store
        self._say({"op": "spawn", "target": target, "ranks": ranks, "store_host": host, "store_namespace": namespace})

    def kill(self, spare: Sequence[int] = ()) -> None:
        """SIGKILL every trainer of the job that is left. Their ends are reported like any other.

        Those of the ranks in `spare` live on as strays; of these only the end is reported.
        """
        self._say({"op": "kill", "spare": list(spare)})

    def replace(self) -> None:
        """SIGKILL the process, and all trainers with it, and start another; blocks until that is ready."""
        self._process.kill()
        self._process.wait(10)
        self._channel.close()
        self._buffer, self._ready = b"", False
        self._start()
        self.wait_ready()

    def end_trainers(self) -> None:
        """SIGKILL every trainer that is left, strays too, and block until none is. Other messages are dropped."""
        self._say({"op": "end"})
        self._await("ended", ANSWER_DEADLINE_S)

    def disk_bytes_written(self) -> int:
        """What this process and all trainers so far wrote to disk. Call while no trainer runs."""
        self._say({"op": "written"})
        return int(self._await("written", ANSWER_DEADLINE_S)["bytes"])

    def messages(self, deadline_s: float = ANSWER_DEADLINE_S) -> list[dict[str, Any]]:
        """What the zygote said. Blocks until there is something.

        Raises:
            HoldfastError: it is gone.
            DeadlineExceeded: it said nothing for `deadline_s`.
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
        """End it and its trainers."""
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
