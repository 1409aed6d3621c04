"""Where a loop is in its data, and how a restarted loop gets there again: ``for batch in snap.data(loader):``.

`snapshot.step.reader` reads the source, and finds the place in it again. Used by the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.reader import OVER, Reader

ELSEWHERE = {"elsewhere": True}
"""The saved place of data that another number of ranks read."""


class Data:
    """One source of batches, which remembers how far it was read; each loop over it is a pass.

    A pass that is left by ``break`` is finished, too, unless the whole loop was left there: see `resume_pass`. After a
    restart the first loop gives the rest of the interrupted pass, and only `enumerate` goes on counting there. Read
    only training data through it, not data for evaluation.

    Attributes:
        name: tells the sources of a job apart; the same in every run.
        read_s: how long the source was read, in seconds. clock: by what that is timed.
    """

    def __init__(
        self,
        source: Any,
        name: str,
        held: Tree | None,
        mark: Callable[[], None],
        begin: Callable[[], None],
        *,
        ahead: int | None = None,
        exact: bool = True,
        heartbeat: Callable[[], None] = lambda: None,
        over: Callable[[bool], None] = lambda resumed: None,
    ) -> None:
        """
        Args:
            source: a `DataLoader`, a sequence of batches, anything else that gives a new iterator each time, or a
                function without arguments that returns one. A source with ``state_dict`` and ``load_state_dict`` is
                tried on copies, see `snapshot.step.source`: if these lead back to its place, and later passes begin as
                they would have, it is told its place after a restart. Loaders with workers, loaders that Accelerate has
                prepared and every other source are read again.
            held: `state` of the earlier run.
            mark: called before each batch is read: what `state` returns then belongs to the boundary.
            begin: called when a batch was read, before it is given: the next step begins. Not called at the end of a
                pass.
            ahead: a promise about a source that draws from the same generators as the step: what it draws while it
                reads a batch serves only that batch and the next `ahead` ones. Without the promise such a source is
                refused after a restart if its batches, read again, differ. Not needed for a `DataLoader` with workers,
                nor for one over a dataset with indices.
            exact: raise if the batch that follows a restart is not the one that followed before; if not, warn.
            heartbeat: called while batches are read again, which may take long, to show that this process is alive.
            over: called when a pass has given all its batches, with whether it went on in its middle after a restart
                and the loop may count its batches from 0 again.

        Raises:
            ConfigError: the source cannot be brought back to its place after a restart.
            StateMismatch: `held` is not what `state` gives.
        """
        self.name = name
        self.exact = exact
        self.read_s, self.clock = 0.0, MACHINE.monotonic
        self._mark = mark
        self._begin = begin
        self._over = over
        self._held = held
        self._turn: object | None = None
        self._left = False  # the pass was left by `break`; it is finished as soon as anything else happens
        self._counts_on = False  # the loop has asked for the place in a pass, so it counts on after a restart
        self._given: Tree | None = None
        self._reader = Reader(source, name, held, ahead, exact, heartbeat)

    @property
    def source(self) -> Any:
        """The source that is read; another one is read from the next pass on. Setting it raises `ConfigError` if it
        cannot be brought back to its place after a restart, and reads a few batches of copies to find that out."""
        return self._reader.source

    @source.setter
    def source(self, source: Any) -> None:
        self._reader.source = source

    def __getattr__(self, name: str) -> Any:
        """The source's, such as `dataset` and `sampler`: loops ask for them where they had the loader before."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):  # its place is told by this object alone
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._reader.source, name)

    @property
    def position(self) -> int:
        """How many batches of the current pass were given. A loop that asks is taken to count on from there."""
        self._counts_on = True
        return 0 if self._left else self._reader.place.taken

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """A pass whose batches are numbered from `start`, and go on being numbered there after a restart; the built-in
        ``enumerate(data)`` begins anew.

        ::

            for i, (x, y) in snap.data(loader).enumerate():
                ...
        """
        self._counts_on = True
        return map(partial(self._numbered, start), self)  # a loop here would keep a batch in memory

    def _numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        return start + self.position - 1, batch

    def epoch(self) -> int:
        """How many passes are finished."""
        place = self._reader.place
        return place.epoch + (self._left and place.under_way)

    def resume_pass(self) -> None:
        """The loop was left for good, by ``break`` in a pass: the next run is to give the rest of that pass."""
        self._left = False

    @property
    def generators(self) -> dict[str, Any]:
        """The random generators of the source, by name."""
        return self._reader.generators

    def state(self) -> Tree:
        """The place, as plain values. While a batch is read and its step begins: as before that, with a description of
        that batch once it is read."""
        if self._given is not None:
            if fetched := self._reader.fetched():
                self._given["next"] = fetched
            return self._given
        return self._now() if self._held is None else self._held

    def __len__(self) -> int:
        """Number of batches in a pass. Raises `TypeError` if the source does not know."""
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or, after a restore, the rest of the interrupted one.

        Raises:
            StateMismatch: the place cannot be found again; the message says why.
            ConfigError: two loops read this source at once.
        """
        if self._held is None:
            self._finish()
        turn = self._turn = object()
        return self._pass(turn)

    def _pass(self, turn: object) -> Iterator[Any]:
        reader, iterator, expected = self._reader, None, ""
        reader.look()
        while self._turn is turn:
            held, self._held = self._held, None
            self._given = self._now() if held is None else dict(held)
            try:
                if not torch.is_grad_enabled():
                    raise ConfigError(
                        f"data {self.name!r} is read where gradients are off, so its batches begin no training step: "
                        "evaluate with the loader itself; a loop that trains without gradients says snap.begin()"
                    )
                self._mark()
                if held is not None:  # the mark has put the global generators back
                    expected = str(held.get("next", ""))
                    iterator = reader.go_on(expected)
                if iterator is None:
                    iterator = reader.start()
                began_s = self.clock()
                batch = reader.read(iterator, expected)
                self.read_s += self.clock() - began_s
                if batch is OVER:
                    self._finish()
                    self._over(reader.resumed and not self._counts_on)
                    return
                expected = ""
                self._begin()
            finally:
                self._given = None
            reader.take()
            given = [batch]
            del batch  # the loop alone decides how long it stays in memory
            try:
                yield given.pop()
            except GeneratorExit:  # the loop was left
                if self._turn is turn:
                    self._left = True
                raise
        raise ConfigError(f"data {self.name!r} is read by two loops at once: give each a name=... of its own")

    def _finish(self) -> None:
        """End the current pass, if there is one."""
        self._left = False
        self._reader.finish()

    def _now(self) -> Tree:
        if self._left:
            self._finish()
        return self._reader.now()
