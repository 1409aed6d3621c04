"""Recovery in processes that stay alive: when a rank dies the others keep theirs, and it alone is replaced.

`survive` does all of it. `abandon_process_groups` and `forget` are for a loop of one's own: let the failed collective's
exception leave the block, call them, ``init_process_group`` with a new prefix, and enter a new
`holdfast.InMemorySnapshot`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, ParamSpec

import torch.distributed as dist
from torch.distributed import distributed_c10d

from holdfast.integrations.survivors.attempts import (
    PLACE,
    JobAttempt,
    JobPlace,
    hindrance,
    parse_lines,
    read_too_early,
    to_line,
)
from holdfast.integrations.survivors.rendezvous import await_place, join
from holdfast.integrations.survivors.supervisor import Supervisor, leave
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import Address
from holdfast.smp_daemon.shared.settings import STANDBY
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.connect import node_from_environment
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.state.audit import orders_from_environment

RANK_LOST = (RuntimeError, AgreementLost)
"""What torch's collectives and holdfast's own raise when another rank is gone. Errors of the device and of the model
are `RuntimeError`, too."""

PATIENCE_S = 10.0
"""How long a trainer waits, after such an error, to hear that a rank has died. Its supervisor sees that at once."""

CUDA_ERROR_NOT_INITIALIZED = 3

_abandoned: list[dist.ProcessGroup] = []
"""Process groups that `forget` is to free, after all that uses them. A group waits for its threads as it is freed, and
they may wait for the GIL: DDP's reducer would hold that meanwhile, but a reference of Python's gives it up."""

log = get_log(__name__)
P = ParamSpec("P")


def survive(main: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Call ``main(*args, **kwargs)`` so that it survives the death of other ranks; the last line of a script.

    `main` makes the process group, the model and the optimizer, and enters `holdfast.InMemorySnapshot`. This process
    becomes the supervisor of a trainer, which it forks, so imports are done. If the trainer is killed, another is
    forked at once. In the trainers of the other ranks a collective fails; what `main` raises is caught, and `main` is
    called again in the same process, which keeps imports, CUDA context and compiled code. ``init_process_group()``
    without arguments, or with the address from the environment, finds a new store each time.

    Does not return: the process ends as if `main` were the whole script, with its output and exit code. Any other
    failure of a trainer than by a signal ends the process, too, and the launcher does what it always does. Call it in
    the main thread, before CUDA is initialised and before threads are started. Where survivors cannot be kept, it says
    why and calls `main` in this process.

    With ``HOLDFAST_STANDBY=HOST:PORT`` this process is a standby, and waits for the place of a lost rank first.

    Raises:
        ConfigError: this process cannot be a standby.
        DeadlineExceeded: rank 0 did not come within ten minutes.
        OSError: rank 0 cannot listen at the port that the launcher chose.
    """
    importlib.import_module("torch._dynamo")  # or each trainer would import it, with its first optimizer
    gc.freeze()  # what imports made stays; a survivor's `forget` need not look through it
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    orders = orders_from_environment()
    killed = "an audit kills and starts this process itself" if orders is not None and orders.kill else ""
    host, port = STANDBY.value() or ("", 0)  # with a host, this process is a standby
    if host and (early := read_too_early(vars(sys.modules["__main__"]))):
        raise ConfigError(
            f"a standby has no rank before it takes a place, and {', '.join(early)} was set before `survive`: set it "
            "in the function that `survive` calls"
        )
    if reason := killed or hindrance({} if host else os.environ, threads, _uses_cuda()):
        if host:
            raise ConfigError(f"this process cannot be a standby: {reason}")
        log.warning("survivors of a lost rank will not keep their processes: %s", reason)
        main(*args, **kwargs)
        sys.exit()
    node = node_from_environment()
    taken = _wait_as_standby((host, port), node) if host else None
    place = JobPlace.from_environment(os.environ)
    connection = taken or join(place, node, port)
    patience_s = PATIENCE_S if place.world > 1 else 0.0
    leave(Supervisor(connection, partial(_train, partial(main, *args, **kwargs), patience_s)).run())


def _wait_as_standby(address: Address, node: str) -> socket.socket:
    """Wait for the place of a lost rank, and take it: this process's environment then says what that rank's said. Ends
    this process with exit code 0 once the job has finished."""
    log.info("waiting at %s:%d for the place of a lost node", *address)
    found = await_place(address, node, int(os.environ.get("LOCAL_RANK", "0")))
    if found is None:
        log.info("the job has finished, and no standby is needed")
        sys.exit()
    connection, told = found
    for name in PLACE:
        os.environ.pop(name, None)
    os.environ |= told
    return connection


def abandon_process_groups() -> None:
    """Give up every process group of this process, so that ``init_process_group`` can be called again.

    Not a collective call. Does not wait for ranks that are gone: communicators are aborted, which ends kernels that
    wait for such ranks. Ranks that still wait for this one see that it has left at the next `forget`, unless something
    else, such as DDP, still uses the groups then. Does nothing if there are no groups.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0  # a failed init_process_group has counted, and names must agree
        return
    _abandoned.extend(distributed_c10d._world.pg_map)
    try:
        distributed_c10d._abort_process_group()
    except RuntimeError as error:
        log.warning("a process group could not be aborted and is destroyed as it is: %s", error)
        dist.destroy_process_group()


def forget(error: BaseException | None) -> None:
    """Free what the frames of `error`, and of the errors that led to it, still hold, such as a model; then the process
    groups that were abandoned."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            len(frame.f_locals)  # until Python 3.13 this empties a copy of the variables that the hook has asked for
        error = error.__cause__ or error.__context__
    gc.collect()
    _abandoned.clear()


def _uses_cuda() -> bool:
    """Whether this process has initialised CUDA's driver, as ``torch.cuda.is_available()`` does."""
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    count = ctypes.c_int()
    return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != CUDA_ERROR_NOT_INITIALIZED)


class _News:
    """What the supervisor tells its trainer: the newest attempt, and whether others may follow."""

    def __init__(self, first: JobAttempt, channel: socket.socket) -> None:
        self._channel = channel
        # Guards all below, which the main thread and the one that listens change; both abandon groups under it.
        self._changed = threading.Condition()
        self.attempt = self._newest = first  # the attempt that was taken last, and the newest that was announced
        self._is_open = True
        threading.Thread(target=self._listen, name="holdfast-attempts", daemon=True).start()

    def _listen(self) -> None:
        buffer = b""
        with suppress(ConnectionResetError):  # an end like any other, when something said here was not read
            while data := self._channel.recv(4096):
                messages, buffer = parse_lines(buffer + data)
                with self._changed:
                    for message in messages:
                        self._newest = JobAttempt(*message["attempt"])
                    # A kernel of NCCL waits for a rank that is gone until somebody aborts it; gloo sees by itself.
                    # Under the lock, or this might hit the process groups of the attempt that is taken meanwhile.
                    if self._newest is not self.attempt and _uses_nccl():
                        abandon_process_groups()
                    self._changed.notify_all()
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def take(self, patience_s: float) -> bool:
        """Leave the attempt for a newer one, which may be announced within `patience_s`. Returns whether there is one.

        Blocks. This process's groups are abandoned. Call `begin` once what they were used by is freed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not self.attempt or not self._is_open, patience_s)
            if self._newest is self.attempt:
                return False
            abandon_process_groups()
            self.attempt = self._newest
            return True

    def begin(self) -> None:
        """Say that the attempt begins here. Until then the supervisor waits, though not for long."""
        with suppress(OSError):  # no other attempt will follow, so nobody listens: this one takes place all the same
            self._channel.sendall(to_line({"taken": self.attempt.number}))


def _uses_nccl() -> bool:
    groups = [*distributed_c10d._world.pg_map.values()]  # a copy: the main thread may be making some
    return any("nccl" in str(backend) for backend, _ in groups)


def _train(main: Callable[[], object], patience_s: float, first: JobAttempt, channel: socket.socket) -> None:
    """What a trainer does: call `main` in one attempt after another, until it returns or raises for another reason."""
    news = _News(first, channel)
    started = dict(os.environ)
    os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # of torchrun's store, and attempts have stores of their own
    while True:
        os.environ |= news.attempt.environment(started)
        SnapshotHook.blocks.clear()
        try:
            main()
            return
        except Exception as error:
            if not news.take(patience_s if isinstance(error, RANK_LOST) else 0.0):
                raise
            log.warning(
                "a rank was lost; attempt %d begins in the same process: %s: %s",
                *(news.attempt.number, type(error).__name__, str(error)[:200]),
            )
            forget(error)
            news.begin()
