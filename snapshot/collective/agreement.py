"""Collectives among ranks over connections of their own, on CPU tensors. No leader, no extra store."""

from __future__ import annotations

import os
import resource
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE, Clocks
from holdfast.snapshot.collective.mesh import AgreementLost, Mesh, c10d, close, hops, sockets_needed

COLLECTIVE_DEADLINE_S = 120.0
"""Timeout for waiting on another rank. If the job's own process group has a longer one, that applies. A rank that is
gone is noticed at once."""

PATIENCE_S = COLLECTIVE_DEADLINE_S / 4
"""How often ranks check in with each other while one of them works for a long time, in seconds."""

SLOW_S = 60.0
"""After how many seconds a rank that waits for others warns of it."""

WAITS = (
    "for %.0f s this rank has waited for others to enter the hook: every rank of the process group has to, and one "
    "that does not, or has died, is waited for up to %.0f s, the timeout of the group"
)

SPARE_FILES = 64
"""Number of files a trainer may have to open besides the connections to other ranks."""

log = get_log(__name__)

Result = Callable[[], list[int]]
Values = Sequence[int] | Callable[[], Sequence[int]]
T = TypeVar("T")


class Agreement:
    """Collectives that every rank calls in the same order: of a job of one process, or, as a `Group`, of several. Not
    thread-safe.

    Attributes:
        rank: the caller's index in the results of `gather`.
    """

    rank = 0

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        """The data of every rank, in rank order. Blocks; raises `AgreementLost`.

        Args:
            among: gather among these ranks only, in this order. The caller must be one of them, and every other rank
                must gather among others.
        """
        return [data]

    def tell(self, data: bytes, root: int) -> bytes:
        """The data of rank `root`. Blocks; raises `AgreementLost`."""
        return data

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        """Start an element-wise minimum over all ranks. Calling the result, in any thread, waits for it.

        Args:
            values: the values, or a function that returns them; it may block, and be called in another thread.
            among: see `gather`.
        """
        return lambda: list(values() if callable(values) else values)

    def everywhere(self, here: bool = True) -> bool:
        """Whether it is so on every rank. Blocks until all have said; raises `AgreementLost`."""
        return self.minimum([int(here)])() == [1]

    def patiently(self, work: Callable[[], T]) -> T:
        """Run `work`, and return its result or raise its error once every rank has finished its own. Blocks.

        `work` may take some ranks much longer than a collective call may take: a lost node's state has to come from
        others. It must make no collective call, and may run in another thread. Raises `AgreementLost` as soon as a rank
        is gone.
        """
        return work()

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        """Fill every tensor, in place, with its contents on the rank it is paired with. Its bytes enter each node once.
        Blocks.

        Args:
            sets: the sets of ranks that share; the same on every rank.
            pieces: (rank, flat tensor), the same on every rank of the caller's set, in the same order.
            nodes: the node of every rank.
        """

    def warn_if_slow(self, text: str, *values: object) -> AbstractContextManager[object]:
        """In the block this rank waits for others: log a warning if that takes longer than `SLOW_S`. `text`: its
        format, for these seconds and `values`."""
        return nullcontext()

    def leave(self) -> None:
        """Close the connections, so that nobody waits for this rank: it will not take part in the next collective call,
        or was interrupted in the last one.

        The other ranks' next call fails at once, and every call on this rank raises `AgreementLost`, until all have
        met. No collective call; may be repeated.
        """

    def meet(self, step: int) -> bool:
        """Whether all ranks are together again. A rank that has left calls this after every step, with the step number.

        Blocks for seconds at most, and only once all ranks have left, have agreed on a step and have reached it.
        """
        return True

    def meet_at_end(self, deadline_s: float) -> bool:
        """Like `meet`, but called once, by a rank that has ended well; waits for the others until the deadline."""
        return True

    def close(self) -> None:
        """Release all connections. No collective call; nothing may be called afterwards."""


class Group(Agreement):
    """All ranks of an initialised `torch.distributed`, with connections of their own.

    Not thread-safe. A thread of the `Mesh` sends and receives.
    """

    def __init__(self) -> None:
        """A collective call.

        Raises:
            ConfigError: this process may not open as many files as its connections need.
        """
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._all = range(self._size)
        _check_files(self._size)
        self._deadline = timedelta(seconds=max(COLLECTIVE_DEADLINE_S, job_deadline_s()))
        job_store = c10d()._get_default_store()
        store = c10d().PrefixStore(f"holdfast group {_number()}", job_store)
        self._left: list[Mesh] = []  # meshes that `close` waits for
        self._mesh: Mesh | None = Mesh(store, self.rank, self._size, self._deadline)
        try:
            with self.warn_if_slow(WAITS, self._deadline.total_seconds()):
                name = self.tell(uuid.uuid4().hex.encode(), 0).decode()
                self.minimum([0])()  # opens all connections that a minimum needs
        except BaseException:
            self.leave()
            raise
        self._store: Any = c10d().PrefixStore(f"holdfast {name}", job_store)
        self._meeting: Meeting | None = None

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        return self._together().gather(data, among or self._all).result()

    def tell(self, data: bytes, root: int) -> bytes:
        return self._together().tell(data, root, self._all).result()

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        given = values if callable(values) else lambda: values
        return self._together().minimum(given, among or self._all).result

    def patiently(self, work: Callable[[], T]) -> T:
        return work_in_rounds(self, work)

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        members = next(each for each in sets if self.rank in each)
        routes = {owner: hops(owner, members, nodes) for owner, _ in pieces}
        self._together().spread([(tensor, routes[owner]) for owner, tensor in pieces]).result()

    @contextmanager
    def warn_if_slow(self, text: str, *values: object) -> Iterator[None]:
        slow = threading.Timer(SLOW_S, log.warning, (text, SLOW_S, *values))
        slow.daemon = True  # it only logs, and must not keep a process from ending whose other ranks never come
        slow.start()
        try:
            yield
        finally:
            slow.cancel()

    def leave(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.end()
            self._left.append(mesh)

    def meet(self, step: int) -> bool:
        try:
            return self._join(self._meetings().come(step))
        except (RuntimeError, AgreementLost) as error:
            log.info("the ranks did not meet after step %d: %s", step, error)
            return False

    def meet_at_end(self, deadline_s: float) -> bool:
        try:
            return self._join(self._meetings().come_last(deadline_s))
        except (RuntimeError, AgreementLost) as error:
            log.warning("the ranks did not meet at the end: %s", error)
            return False

    def _join(self, name: str | None) -> bool:
        """Connect to all ranks again after the round `name`; None: not all have come. Raises `RuntimeError` or
        `AgreementLost` if that fails."""
        if name is None:
            return False
        soon = timedelta(seconds=MEETING_DEADLINE_S)
        mesh = Mesh(c10d().PrefixStore(name, self._store), self.rank, self._size, soon)
        try:
            mesh.minimum(lambda: [0], self._all).result()
        except BaseException:
            mesh.end()
            raise
        mesh.deadline = self._deadline
        self._mesh = mesh
        self._meetings().went_well()
        return True

    def _meetings(self) -> Meeting:
        """Meetings use a store connection of their own, since the job may wait for long in a call on its store. Raises
        `RuntimeError`."""
        if self._meeting is None:
            self._store = self._store.clone()
            self._store.set_timeout(timedelta(seconds=MEETING_DEADLINE_S))
            self._meeting = Meeting(self._store, self.rank, self._size)
        return self._meeting

    def _together(self) -> Mesh:
        """The mesh. Raises `AgreementLost` if this rank has left it."""
        if self._mesh is None:
            raise AgreementLost("this rank has left the others")
        return self._mesh

    def close(self) -> None:
        self.leave()
        close(self._left)


def _check_files(size: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    have = len(list(Path("/proc/self/fd").iterdir()))
    need = have + sockets_needed(size) + SPARE_FILES
    if limit != resource.RLIM_INFINITY and need > limit:
        raise ConfigError(
            f"this process may have {limit} files open, and has {have}. It needs {sockets_needed(size)} connections to "
            f"agree with the other {size - 1} ranks, and {SPARE_FILES} files to spare: set ulimit -n to {need} at least"
        )


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of groups made in each default process group. All ranks make them in the same order."""


def _number() -> int:
    default = c10d()._get_default_group()
    _numbers[default] = number = _numbers.get(default, 0) + 1
    return number


def job_deadline_s() -> float:
    """Timeout of the job's own process group, in seconds; 0 if unknown."""
    group = c10d()._get_default_group()
    found = 0.0
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):  # no backend for this device, or one without these options
            found = max(found, group._get_backend(device).options._timeout.total_seconds())
    return found


def default_agreement() -> Agreement:
    """A `Group` if the job has several ranks, else an `Agreement` of one.

    Raises:
        ConfigError: the launcher says that there are several, and they have no process group: each would take the whole
            job to be its own, and the others for intruders.
    """
    if dist.is_available() and dist.is_initialized():
        return Group() if dist.get_world_size() > 1 else Agreement()
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}, and this process has no process group: call init_process_group first, or unset "
            "WORLD_SIZE if this process trains by itself"
        )
    return Agreement()


def work_in_rounds(agreement: Agreement, work: Callable[[], T]) -> T:
    """`Agreement.patiently`, built on `Agreement.minimum`: a thread works while the ranks check in with each other."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="holdfast-work", daemon=True).start()
    while True:
        wait([outcome], PATIENCE_S)
        if agreement.everywhere(outcome.done()):
            return outcome.result()


LEAD_STEPS = 3
"""How many steps ahead the first meeting lies. Each meeting that fails doubles it."""

MOST_DOUBLINGS = 8
MEETING_DEADLINE_S = 15.0
"""How long training waits for the others at a meeting."""

LOOK_EVERY_S, LOOK_PER_RANK_S = 0.02, 1e-4
"""How often a rank at a meeting looks into the store, in seconds, and how much more seldom for each rank of the group:
one thread of one process answers them all."""


@dataclass(eq=False)
class Meeting:
    """One rank's part in all meetings of a group that has lost each other: through the job's store, after a step that
    all know in advance. Methods raise what the store raises. Not thread-safe.

    A rank that has lost the others announces a step that lies ahead of it. Once all ranks have announced one, they meet
    after the latest of these steps. Each rank has time to read it, because ranks that wait for each other in every step
    are never more than one step apart. Nobody waits before that step.

    Ranks are counted, and only the last one reads what all have announced: if each looked for all the others in every
    step, the store of a thousand ranks would be busy with that for longer than a step takes. Uses `set`, `get`,
    `multi_get`, `check` and `add` of the store.
    """

    _store: Any
    _rank: int
    _size: int
    _clock: Clocks = MACHINE
    _round: int = 0
    _failed: int = 0
    _said: bool = False
    _at: int | None = None

    def come(self, step: int) -> str | None:
        """Called after every step while the others are lost. Blocks at a meeting, for `MEETING_DEADLINE_S` at most.

        Returns:
            The name of the round if all ranks are here now. None if the meeting lies ahead, or if not all ranks have
            come to it; then there will be another.
        """
        kind = f"round {self._round}"
        at = f"{kind} at"
        if not self._said:
            self._store.set(f"{kind} of {self._rank}", str(step + (LEAD_STEPS << min(self._failed, MOST_DOUBLINGS))))
            if self._store.add(kind, 1) == self._size:
                keys = [f"{kind} of {rank}" for rank in range(self._size)]
                self._store.set(at, str(max(map(int, self._store.multi_get(keys)))))
            self._said = True
        if self._at is None:
            if not self._store.check([at]):
                return None
            self._at = int(self._store.get(at))
        if step < self._at:
            return None
        self._round, self._said, self._at = self._round + 1, False, None
        self._failed += 1  # until `went_well` is called
        return kind if self._all_here(f"{kind} here", MEETING_DEADLINE_S) else None

    def went_well(self) -> None:
        """The ranks that met continue together."""
        self._failed = 0

    def come_last(self, deadline_s: float) -> str | None:
        """The job has ended well on this rank: wait until it has on all ranks, for `deadline_s` at most. Called once;
        returns the same as `come`."""
        return "end" if self._all_here("end", deadline_s) else None

    def _all_here(self, kind: str, deadline_s: float) -> bool:
        limit = self._clock.monotonic() + deadline_s
        everyone, over = f"{kind} all", f"{kind} over"
        if self._store.check([over]):
            return False
        if self._store.add(kind, 1) == self._size:
            self._store.set(everyone, "")
        while not self._store.check([everyone]):
            if self._clock.monotonic() > limit or self._store.check([over]):
                self._store.set(over, "")  # ranks that come later must not wait for those that have gone
                return False
            self._clock.sleep(LOOK_EVERY_S + LOOK_PER_RANK_S * self._size)
        return True
