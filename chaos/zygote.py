"""The launcher's process, the *zygote*: imports torch and the job's module once, then forks trainers on request.

Importing takes seconds per process; forking takes milliseconds, and the ranks share the imported modules. The zygote
runs no torch operation and starts no thread itself. It talks JSON lines over one socket, the descriptor in argument 1:

    in   {"op": "spawn", "ranks": [{"rank", "env", "log", "place"}, ...], "target": "module:function",
          "store_host", "store_place"}: for places see `runner.within`
         {"op": "kill", "spare": [rank, ...]}   {"op": "end"}   {"op": "written"}
    out  {"kind": "imported"}   {"kind": "spawned", "pids": {rank: pid}}   {"kind": "exit", "rank", "status", "at"}
         {"kind": "ended"}: no trainer is left   {"kind": "stray", "rank", "status", "at"}: a spared trainer ended
         {"kind": "written", "bytes"}: to disk, by the zygote and all trainers that have ended

Trainers die with the zygote. When its socket closes, it kills them and ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from holdfast.chaos.accounting import disk_bytes_written
from holdfast.chaos.runner import find, within
from holdfast.chaos.trainer import rehearse

PR_SET_PDEATHSIG = 1


class TrainerZygote:
    """The zygote's loop, and the ranks of its children by pid: those of the job, and strays, which were spared.

    The selector watches the channel, and a descriptor of each child, which is readable once that has ended.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}
        self._strays: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._buffer = b""

    def run(self) -> None:
        """Serve until the other end of the channel closes."""
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._say({"kind": "imported"})
        while True:
            if any(key.fileobj is self._channel for key, _ in self._selector.select()) and not self._listen():
                self._end()
                return
            self._reap()

    def _listen(self) -> bool:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:  # the other end was closed before it had read everything
            return False
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["op"] == "spawn":
                self._spawn(message)
            elif message["op"] == "kill":
                self._kill(message["spare"])
            elif message["op"] == "end":
                self._end()
                self._say({"kind": "ended"})
            elif message["op"] == "written":
                self._say({"kind": "written", "bytes": disk_bytes_written()})
        return bool(data)

    def _spawn(self, message: dict[str, Any]) -> None:
        world = len(message["ranks"])
        with within(message["store_place"]), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind((message["store_host"], 0))
            listening.listen(2 * world)
            store = (*listening.getsockname(), listening.fileno())
            pids = {}
            for rank in message["ranks"]:
                pid = os.fork()
                if pid == 0:
                    self._become_trainer(rank, store, message["target"])
                self._children[pid] = rank["rank"]
                self._ends[pid] = os.pidfd_open(pid)
                self._selector.register(self._ends[pid], selectors.EVENT_READ)
                pids[rank["rank"]] = pid
        self._say({"kind": "spawned", "pids": pids})

    def _become_trainer(self, rank: dict[str, Any], store: tuple[Any, ...], target: str) -> None:
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._channel.close()
            log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            trainer = json.loads(rank["env"]["HOLDFAST_TRAINER"]) | {"store": store}
            os.environ.update(rank["env"] | {"HOLDFAST_TRAINER": json.dumps(trainer)})
            from holdfast.smp_daemon.shared import failpoints

            failpoints.arm()
            with within(rank["place"]):
                find(target)()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _kill(self, spare: list[int]) -> None:
        """SIGKILL and reap the job's trainers, except the ranks in `spare`, which become strays."""
        self._strays |= {pid: rank for pid, rank in self._children.items() if rank in spare}
        self._children = {pid: rank for pid, rank in self._children.items() if rank not in spare}
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)  # an unreaped child, so the pid is still the trainer's
        while self._children:
            self._reaped(*os.waitpid(-1, 0))

    def _end(self) -> None:
        self._children |= self._strays
        self._strays.clear()
        self._kill([])

    def _reap(self) -> None:
        while self._children or self._strays:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._reaped(pid, status)

    def _reaped(self, pid: int, status: int) -> None:
        self._selector.unregister(self._ends[pid])
        os.close(self._ends.pop(pid))
        kind = "stray" if pid in self._strays else "exit"
        rank = self._strays.pop(pid) if pid in self._strays else self._children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        self._say({"kind": kind, "rank": rank, "status": code, "at": time.monotonic()})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            pass  # the other end is closed; the next read of the channel ends this process


def _settle_access_times() -> None:
    """Read the files that a trainer may be the first to read: sources, as for a traceback, and what a step loads late.

    The first read of a freshly installed file, or of any file in a day, updates its access time, which the kernel
    counts as bytes written to disk. Reading the files here keeps that out of the account of what trainers write.
    """
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path).is_file():
            with Path(path).open("rb") as source:
                source.read(1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            rehearse()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    if ended != 0:
        raise RuntimeError(f"the rehearsal of a trainer failed with status {os.waitstatus_to_exitcode(ended)}")


def main() -> None:
    """``python -m holdfast.chaos.zygote FD MODULE...``"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _settle_access_times()
    gc.collect()
    gc.freeze()  # otherwise a collection in a trainer would touch, and so copy, every page of the imported modules
    TrainerZygote(channel).run()


if __name__ == "__main__":
    main()
