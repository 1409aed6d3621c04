"""A trainer's own passes over its data loader: noted while it reads, and made again after a restart.

The trainer reads all batches of a step before the hook learns of the step, and its loader (Accelerate's) reads one
batch ahead of what it gives. So a batch is drawn from the random generators as they were before the reading of the
batch before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.resume.comparison import refuse
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import digest_of, digest_of_batch
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.source import is_loader, workers_anew

log = get_log(__name__)


class Reading:
    """One pass over a loader, which is read step by step: `group` reads the batches of one step.

    Args:
        loader: gives a new iterator for each pass.
        epoch: how many passes are finished.
        heartbeat: called while batches are read again, which may take long, to show that this process is alive.
    """

    def __init__(self, loader: Any, epoch: int, heartbeat: Callable[[], None]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._heartbeat = heartbeat
        self._own = rng.find(loader)
        self._iterator: Iterator[Any] | None = None
        self._opened = False  # whether a batch of the iterator was read; with the first one its seeds are drawn
        self._skips = getattr(loader, "num_workers", 0) == 0  # workers draw by themselves
        self._start = self._last = self._generators()
        self._noted = self._note()

    def state(self) -> Tree:
        """The pass as plain values: where it was before the newest group was read, and digests of that group."""
        return {"start": self._start, **self._noted}

    def between(self) -> None:
        """The next group has not been read yet."""
        self._noted = self._note()

    def group(self, iterator: Iterator[Any], read: Callable[[Iterator[Any]], Any]) -> Any:
        """Call `read` with an iterator, from which it reads the batches of one step; returns what it returns.

        Args:
            iterator: the trainer's; it is read unless `resume` has begun the pass anew.
        """
        if self._iterator is None:
            self._iterator = iterator
        noted, taken = self._note(), _Passed(self._next)
        result = read(taken)
        self._noted = {**noted, "batches": digest_of_batch(taken.batches), "drawn": _digest(self._generators())}
        return result

    def resume(self, held: Tree, done: int, iterator: Iterator[Any], read: Callable[[Iterator[Any]], Any]) -> Any:
        """`group` for the first step after a restart, which comes after `done` batches of the pass.

        If nothing was drawn for those batches, the trainer's iterator is read, which has skipped them. Otherwise, or if
        that leads elsewhere, the pass is read again.

        Args:
            held: `state` of the earlier run.

        Raises:
            StateMismatch: the batches are not those that followed in the earlier run.
        """
        self._start = held["start"]
        self._put(self._start)
        if held["skips"]:
            result = self._continue(held, iterator, False, read)
            if held["batches"] in ("", self._noted["batches"]):
                return result
            log.info("to skip batches of the trainer's pass leads elsewhere")
        iterator = self._again(done, held["last"])
        self._put(held["now"])
        result = self._continue(held, iterator, done > 0, read)
        if held["batches"] and any(self._noted[name] != held[name] for name in ("batches", "drawn")):
            refuse(
                f"the trainer's data is not where it was: after {done} batches of this pass it gives others than in "
                "the earlier run. Either the data has changed, or it depends on something that is not restored: "
                "`track` that, or derive what is random in a batch from its samples"
            )
        return result

    def _continue(self, held: Tree, iterator: Iterator[Any], opened: bool, read: Callable[[Iterator[Any]], Any]) -> Any:
        self._iterator, self._opened = iterator, opened
        self._skips, self._last = held["skips"], held["last"]
        return self.group(iterator, read)

    def _again(self, done: int, last: Tree) -> Iterator[Any]:
        """A new iterator, from which `done` batches were read."""
        log.info("batches of the trainer's pass that are read again: %d", done)
        self._put(self._start)
        iterator: Iterator[Any] = iter(self._loader)
        for number in range(done):
            if 0 < number == done - 1:
                rng.restore(last["global"])
            with self._making() if number == 0 else nullcontext():
                next(iterator, None)
            self._heartbeat()
        return iterator

    def _next(self) -> Any:
        assert self._iterator is not None
        before = self._generators()
        with self._making() if not self._opened else nullcontext():
            batch = next(self._iterator)
        if self._opened and self._skips:
            self._skips = _digest(before) == _digest(self._generators())
        self._opened, self._last = True, before
        return batch

    def _making(self) -> AbstractContextManager[None]:
        """The trainer's loader makes the iterator of the loader inside when its first batch is read."""
        inner = getattr(self._loader, "base_dataloader", self._loader)
        return workers_anew([inner] if is_loader(inner) else [], self._epoch)

    def _note(self) -> Tree:
        return {"now": self._generators(), "last": self._last, "skips": self._skips, "batches": "", "drawn": ""}

    def _generators(self) -> Tree:
        return rng.capture_with(self._own)

    def _put(self, generators: Tree) -> None:
        rng.restore_with(self._own, generators, "the trainer's data")


class _Passed:
    """Passes batches on, and keeps them."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.batches.append(self._read())
        return self.batches[-1]


def _digest(generators: Tree) -> str:
    """A digest of all but devices' generators, which may not be there yet."""
    return digest_of([rng.on_host(generators["global"]), generators["own"]])
