"""One life of a drawn loop, in a process of its own. It runs the program and writes events to a file of JSON lines:

{"kind": "entered", "step": ...}   restored at that step; null: a cold start
{"kind": "note", "step": ..., "loss": ...}   {"kind": "ends", "how": ...}: about to be killed, or to raise
{"kind": "warning", "text": ...}   logged by holdfast
{"kind": "error", "own": ..., "type", "text"}   the exception that ended it; own: holdfast's
{"kind": "finished", "state": {name: digest}}
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy
import torch
import torch.nn.utils
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils

from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.errors import HoldfastError
from tests.proof.loops import kit
from tests.proof.loops.script import End, Loop

FRONT_DOOR = "holdfast.hook"
"""The module of `InMemorySnapshot`. It is in a higher room, so it is imported by name."""

WAIT_S = 10.0
"""Timeout for protection, for messages to the gate, and for a copy held at the gate, in seconds."""

HELD_S = 0.02
"""How long a place waits for a copy to begin, in seconds."""

COPY_S = 1.0
"""How long a place waits for a copy of kilobytes that has begun, in seconds. A copy that takes longer was given up."""

LIBRARY: dict[str, Any] = {
    **{name: getattr(nn, name) for name in ("BatchNorm1d", "Dropout", "Embedding", "Linear", "ModuleDict")},
    **{name: getattr(nn, name) for name in ("ReLU", "Sequential", "Tanh")},
    **{name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adagrad", "LBFGS", "RMSprop")},
    **{
        name: getattr(lr_scheduler, name)
        for name in (
            "ExponentialLR",
            "LambdaLR",
            "LinearLR",
            "OneCycleLR",
            "ReduceLROnPlateau",
            "SequentialLR",
            "StepLR",
        )
    },
    **{name: getattr(kit, name) for name in ("Average", "Bank", "Container", "Rows", "SAM", "Scaled", "ScheduleFree")},
    **{name: getattr(kit, name) for name in ("RowStream", "Tied", "noting", "stepping")},
    "AveragedModel": swa_utils.AveragedModel,
    "DataLoader": torch.utils.data.DataLoader,
    "copy": copy,
    "numpy": numpy,
    "parametrizations": parametrizations,
    "random": random,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "torch": torch,
    "weight_norm": torch.nn.utils.weight_norm,
}
"""The global names of a program, so that it needs no imports."""


class Interrupted(Exception):
    """Raised in the loop to end a life by an exception."""


class Undisturbed:
    """Replaces `holdfast.InMemorySnapshot` in the run without holdfast: counts steps, and does nothing else."""

    def __init__(self, model: Any, optim: Any, **options: Any) -> None:
        self.step = self.epoch = 0
        last = optim[-1] if isinstance(optim, list) else optim
        scaler = (options.get("extra") or {}).get("scaler")
        if scaler is None:
            last.register_step_post_hook(self._stepped)
        else:  # a step that the scaler skips counts, too
            step = scaler.step

            def stepping(optimizer: Any) -> None:
                step(optimizer)
                self._stepped()

            scaler.step = stepping

    def _stepped(self, *args: Any) -> None:
        self.step += 1

    def track(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def steps(self, count: int) -> Iterable[int]:
        """The numbers of all steps."""
        return range(count)

    def data(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The loader itself."""
        return loader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        pass


@dataclass(frozen=True)
class Order:
    """The parameters of a life.

    Attributes:
        undisturbed: whether it runs without holdfast.
        end: how to end it early; None: it runs to the end of the loop.
        program: the file that it runs.
        events: the file that it writes events to.
        gate: unix socket path of the `Gate`.
    """

    undisturbed: bool
    end: End | None
    program: Path
    events: Path
    gate: Path


class Life:
    """Runs a program and provides the functions that it calls. Used by the training thread, except `_say`."""

    def __init__(self, loop: Loop, order: Order) -> None:
        self._loop = loop
        self._order = order
        self._file = os.open(order.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._step = -1
        self._snap: Any = None
        self._protected = False
        self._gate: Gate | None = None
        self._release = {loop.held, *loop.script.before_steps}

    def run(self) -> None:
        """Run the program to its end, unless the order kills this process or raises before."""
        handler = _Warnings(self._say)
        logging.getLogger("holdfast").addHandler(handler)
        if self._loop.held != "free" and not self._order.undisturbed:
            self._gate = Gate(self._order.gate)
        names = LIBRARY | {
            "InMemorySnapshot": self._snapshot,
            "here": self._here,
            "note": self._note,
            "finished": self._finished,
        }
        try:
            runpy.run_path(str(self._order.program), names)
        except HoldfastError as error:
            self._say(kind="error", own=True, type=type(error).__name__, text=str(error))
        except Interrupted:
            pass
        except BaseException as error:
            self._say(kind="error", own=False, type=type(error).__name__, text=str(error))
            raise

    def _say(self, **event: Any) -> None:
        # Thread-safe: one write per line to a file opened with O_APPEND. Any thread of holdfast may log a warning.
        os.write(self._file, json.dumps(event).encode() + b"\n")

    # ------------------------------------------------------------------ called by the program

    def _snapshot(self, *args: Any, **options: Any) -> Any:
        if self._order.undisturbed:
            return Undisturbed(*args, **options)
        watched = _watched(importlib.import_module(FRONT_DOOR).InMemorySnapshot, self._say, self._leave)
        self._snap = watched(*args, **options)
        return self._snap

    def _leave(self) -> None:
        if self._gate is not None:
            self._gate.open(self._snap.step)

    def _here(self, place: str, step: int | None = None) -> None:
        self._step = self._step if step is None else step
        if self._order.undisturbed:
            return
        if self._gate is not None and place in self._release:
            self._gate.open(self._snap.step)
        end = self._order.end
        if end is None:
            return
        if place == self._loop.script.before_steps[-1] and (self._loop.waits == "each" or self._step >= end.step - 1):
            self._protected = self._wait() or self._protected
        if self._protected and self._step >= end.step and place == end.place:
            self._say(kind="ends", how=end.kind, step=self._step, place=place)
            if end.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted

    def _wait(self) -> bool:
        """Wait until the snapshots taken so far are protected or given up. Return whether any snapshot is protected."""
        taken = self._snap.statistics.taken
        return bool(taken and self._snap.drain(WAIT_S)) or self._snap.protected_step is not None

    def _note(self, step: int, loss: torch.Tensor) -> None:
        self._say(kind="note", step=step, loss=float(loss.detach()).hex())

    def _finished(self, **kept: Any) -> None:
        self._say(kind="finished", state=dict(digests(kept)))


def _watched(kind: Any, say: Callable[..., None], leave: Callable[[], None]) -> Any:
    """A kind of `InMemorySnapshot` that reports the restored step on entry, and calls `leave` before it exits."""

    class Watched(kind):  # type: ignore[misc]
        def __enter__(self) -> Any:
            snap = super().__enter__()
            restored = snap.restored.snapshot
            say(kind="entered", step=restored.step if restored else None)
            return snap

        def __exit__(self, *raised: Any) -> Any:
            leave()
            return super().__exit__(*raised)

    return Watched


class Gate:
    """Holds the copy thread at its failpoints until `open`, so that a copy is made at a known place of the loop."""

    def __init__(self, path: Path) -> None:
        # Guards the three step numbers below, and is notified of changes. Used by the training thread (`open`) and the
        # gate's own thread (`_serve`). The copy thread waits for a byte on the socket, and takes no lock of ours.
        self._changed = threading.Condition()
        self._allowed = -1
        self._arrived = -1
        self._copied = -1
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listening.bind(str(path))
        self._listening.listen(16)
        rules = {"socket": str(path), "who": "trainer", "rules": [["copy.before", None], ["copy.done", None]]}
        os.environ[failpoints.ENV] = json.dumps(rules)
        failpoints.arm()
        threading.Thread(target=self._serve, name="loops-gate", daemon=True).start()

    def open(self, step: int) -> None:
        """Let copies proceed, up to that of `step`. If that copy begins within `HELD_S`, wait until it is made."""
        with self._changed:
            self._allowed = max(self._allowed, step)
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._arrived >= step, HELD_S):
                self._changed.wait_for(lambda: self._copied >= step, COPY_S)

    def _serve(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            with sock:
                said = json.loads(_line(sock))
                with self._changed:
                    if said["point"] == "copy.before":
                        self._arrived = max(self._arrived, said["step"])
                        self._changed.notify_all()
                        self._changed.wait_for(
                            lambda: self._allowed >= said["step"],  # noqa: B023  # called here
                            WAIT_S,
                        )
                    else:
                        self._copied = max(self._copied, said["step"])
                        self._changed.notify_all()
                sock.sendall(b"g")


def _line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        select.select([sock], [], [], WAIT_S)
        more = sock.recv(1 << 12)
        if not more:
            raise ConnectionError("a process ended while it was stopped at a failpoint")
        line += more
    return line


class _Warnings(logging.Handler):
    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = say

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(kind="warning", text=record.getMessage(), at=record.name)


# ---------------------------------------------------------------------- digests

NO_OPTIONS = frozenset({"params", "capturable"})
"""Keys of a group that are left out: torch.compile adds ``capturable`` to the groups of a step that it traces, and does
not trace a step that has hooks, unless it is torch's own."""


def digests(kept: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Digests of all state of the objects, and of this process's random generators, by name."""
    modules = [(name, value) for name, value in kept.items() if isinstance(value, nn.Module)]
    names = {id(p): f"{name}.{key}" for name, module in modules for key, p in module.named_parameters()}
    for name, value in kept.items():
        yield from _of(name, value, names)
    yield "generator of torch", _bytes(torch.get_rng_state())
    yield "generator of numpy", _plain(numpy.random.get_state(legacy=False))
    yield "generator of Python", _plain(random.getstate())


def _of(name: str, value: Any, names: dict[int, str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{key}", _bytes(tensor)
        for key, part in value.state_dict().items():
            if not isinstance(part, torch.Tensor):
                yield f"{name}.{key}", _plain(part)
    elif isinstance(value, torch.optim.Optimizer):
        groups = [{k: v for k, v in g.items() if k not in NO_OPTIONS} for g in value.param_groups]
        yield f"{name}'s options", _plain(groups)
        for p, state in value.state.items():
            for key, part in state.items():
                yield f"{name}'s {key} of {names.get(id(p), '?')}", _plain(part)
    elif isinstance(value, list) and any(isinstance(part, torch.optim.Optimizer) for part in value):
        for i, part in enumerate(value):
            yield from _of(f"{name}[{i}]", part, names)
    elif isinstance(value, torch.Generator):
        yield name, _bytes(value.get_state())
    elif hasattr(value, "state_dict"):
        yield name, _plain(value.state_dict())
    elif isinstance(value, dict):
        for key, part in value.items():
            yield f"{name}[{key!r}]", _plain(part)
    else:
        yield name, _plain(value)


def _plain(value: Any) -> str:
    return hashlib.sha256(_written(value).encode()).hexdigest()[:16]


def _written(value: Any) -> str:
    """A text that differs if values differ in any bit."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{_bytes(value)}"
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bool | int | str | bytes | None):
        return repr(value)
    if hasattr(value, "state_dict"):
        return _written(value.state_dict())
    return type(value).__qualname__


def _bytes(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
