"""Where a loop is in its data, and how a restarted loop gets there again: ``for batch in snap.data(loader):``.

A plain `torch.utils.data.DataLoader` cannot say where it is, and making its iterator draws random numbers. So a pass is
read again up to its place: generators are put back as they were when its iterator was made, as many batches are read as
were taken, and generators are put back as they were at the boundary. Then the place is checked: the next batch, and the
random numbers drawn to read it, must be those of the earlier run.

Used by the training thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import digest_of, digest_of_batch
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.values import packed, unpacked
from holdfast.snapshot.step.source import (
    Indices,
    OwnNumbers,
    check,
    complain,
    copy_of,
    first_batch,
    forget_first_iterator,
    is_loader,
    may_draw,
    meaning_of,
    open_pass,
    told,
)
from holdfast.snapshot.step.variables import unwatched

ELSEWHERE = {"elsewhere": True}
"""The saved place of data that another number of ranks read."""

REPEATS = (
    "data %r begins with another batch when it is read a second time, so no restart could go on in it: let what its "
    "workers draw follow from torch.initial_seed(), or from a fixed seed; if it need not be the same, say exact=False"
)

log = get_log(__name__)

REMEMBERED = 2
"""How many of the last batches that drew from the global generators to remember, each with the generators' states
before it."""


@dataclass(slots=True)
class _Place:
    """Where a source is.

    Attributes:
        epoch: number of finished passes.
        under_way: whether a pass has begun; `taken`: how many of its batches were given.
        start, own_start: states of the global generators, and of the source's own, when its iterator was made. There is
            always some `start`, so that the saved place has about one size.
        own: current states of the source's own generators.
        counted_start, counted: the source's own numbers that have changed, when its iterator was made, and now.
        drawn: for each of the last few batches that drew from global generators, its number and their states before it.
        history: a digest of all batches that were taken, or of their indices if those are known.
        last: a digest of the last batch.
        loader: the source's own state_dict, if it is told its place.
    """

    epoch: int = 0
    under_way: bool = False
    taken: int = 0
    start: Tree = field(default_factory=dict)
    own_start: Tree = field(default_factory=dict)
    own: Tree = field(default_factory=dict)
    counted_start: Tree = field(default_factory=dict)
    counted: Tree = field(default_factory=dict)
    drawn: list[list[Any]] = field(default_factory=list)
    history: str = ""
    last: str = ""
    loader: Any = None

    def to_tree(self) -> Tree:
        return {name: getattr(self, name) for name in self.__slots__}


class Data:
    """One source of batches, which remembers how far it was read; each loop over it is a pass.

    A pass that is left by ``break`` is finished, too, unless the whole loop was left there: see `resume_pass`. After a
    restart the first loop gives the rest of the interrupted pass, and only `enumerate` goes on counting there. Read
    only training data through it, not data for evaluation.

    Attributes:
        name: tells the sources of a job apart; the same in every run.
        read_s: how long the source was read, in seconds. clock: by what that is timed.
        is_position_known: whether the loop has asked for `position`.
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
            over: called when a pass has given all its batches, with whether it went on in its middle after a restart.

        Raises:
            ConfigError: the source cannot be brought back to its place after a restart.
            StateMismatch: `held` is not what `state` gives.
        """
        self.name = name
        self.is_position_known = False
        self.read_s, self.clock = 0.0, MACHINE.monotonic
        self._mark = mark
        self._begin = begin
        self._ahead = ahead
        self.exact = exact
        self._heartbeat = heartbeat
        self._over = over
        self._held = held
        self._place = _Place(start=rng.capture()) if held is None else _read(held, name)
        self._turn: object | None = None
        self._left = False  # the pass was left by `break`; it is finished as soon as anything else happens
        self._resumed = False  # the pass goes on in its middle
        self._given: Tree | None = None
        self._asked = False
        self._batch_digest = ""
        self._first_batch = ""  # its digest, when it was read before
        self._indices: Indices | None = None
        self._numbers = OwnNumbers(source)
        self.source = source

    @property
    def source(self) -> Any:
        """The source that is read; another one is read from the next pass on. Setting it raises `ConfigError` if it
        cannot be brought back to its place after a restart, and reads a few batches of copies to find that out."""
        return self._source

    @source.setter
    def source(self, source: Any) -> None:
        check(source, self.name)
        self._meaning = meaning_of(source, self.name, self._heartbeat, exact=self.exact)
        self._source = source
        self._draws = may_draw(source)
        self._numbers.look(source)
        self._own = rng.find(source)

    def __getattr__(self, name: str) -> Any:
        """The source's, such as `dataset` and `sampler`: loops ask for them where they had the loader before."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):  # its place is told by this object alone
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._source, name)

    @property
    def position(self) -> int:
        """How many batches of the current pass were given."""
        self.is_position_known = True
        return self._number

    @property
    def _number(self) -> int:
        return 0 if self._left else self._place.taken

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """A pass whose batches are numbered from `start`, and go on being numbered there after a restart; the built-in
        ``enumerate(data)`` begins anew.

        ::

            for i, (x, y) in snap.data(loader).enumerate():
                ...
        """
        return map(partial(self._numbered, start), self)  # a loop here would keep a batch in memory

    def _numbered(self, start: int, batch: Any) -> tuple[int, Any]:
        return start + self._number - 1, batch

    def epoch(self) -> int:
        """How many passes are finished."""
        return self._place.epoch + (self._left and self._place.under_way)

    def resume_pass(self) -> None:
        """The loop was left for good, by ``break`` in a pass: the next run is to give the rest of that pass."""
        self._left = False

    @property
    def generators(self) -> dict[str, Any]:
        """The random generators of the source, by name."""
        return self._own

    def state(self) -> Tree:
        """The place, as plain values. While a batch is read and its step begins: as at the last mark, with a
        description of that batch once it is read."""
        if self._given is not None:
            self._asked = True
            if self._batch_digest:
                self._given["next"] = self._fetched()
            return self._given
        return self._now() if self._held is None else self._held

    def __len__(self) -> int:
        """Number of batches in a pass. Raises `TypeError` if the source does not know."""
        return len(self._source)

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

    # ------------------------------------------------------------------ a pass

    def _pass(self, turn: object) -> Iterator[Any]:
        iterator = None
        expected = ""
        self._own = rng.find(self._source)
        while self._turn is turn:
            held, self._held = self._held, None
            self._given, self._asked, self._batch_digest = self._now() if held is None else dict(held), False, ""
            try:
                if not torch.is_grad_enabled():
                    raise ConfigError(
                        f"data {self.name!r} is read where gradients are off, so its batches begin no training step: "
                        "evaluate with the loader itself; a loop that trains without gradients says snap.begin()"
                    )
                self._mark()
                if held is not None:  # the mark has put the global generators back
                    expected = str(held.get("next", ""))
                    iterator = self._go_on(expected)
                if iterator is None:
                    iterator = self._start()
                began_s = self.clock()
                try:
                    batch = self._first(iterator, expected) if expected else self._fetch(iterator)
                except StopIteration:
                    batch = _NONE
                self.read_s += self.clock() - began_s
                if batch is _NONE:
                    self._finish()
                    self._over(self._resumed)
                    return
                expected = ""
                self._batch_digest = digest_of_batch(batch)
                if self._first_batch not in ("", self._batch_digest):
                    raise ConfigError(REPEATS % self.name)
                self._first_batch = ""
                if self._asked:
                    self.state()  # completes the state that was asked for at the mark
                self._begin()
            finally:
                self._given = None
            self._place.taken += 1
            self._place.last = self._batch_digest
            self._place.history = told(self._indices, self._place.history, self._batch_digest)
            given = [batch]
            del batch  # the loop alone decides how long it stays in memory
            try:
                yield given.pop()
            except GeneratorExit:  # the loop was left
                if self._turn is turn:
                    self._left = True
                raise
        raise ConfigError(f"data {self.name!r} is read by two loops at once: give each a name=... of its own")

    def _start(self) -> Iterator[Any]:
        """The iterator of a new pass."""
        place = self._place
        place.under_way, self._resumed = True, False
        place.start = rng.capture()
        place.own_start = rng.states(self._own)
        if self.exact and not place.epoch:
            self._first_batch = first_batch(self._source)
        self._numbers.look(self._source)
        place.counted_start = self._numbers.changed()
        iterator, self._indices = open_pass(self._source, self._place.epoch)
        self._numbers.look(self._source)  # what its iterator has made
        return iterator

    def _finish(self) -> None:
        """End the current pass, if there is one."""
        place = self._place
        self._left = False
        if place.under_way:
            self._place = _Place(
                place.epoch + 1, start=place.start, own=place.own, counted=place.counted, loader=place.loader
            )

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        """The next batch. If it draws from the global generators, notes their states before. Raises `StopIteration`."""
        if not self._draws:
            with unwatched():
                return next(iterator)
        before = rng.capture()
        with unwatched():
            batch = next(iterator)
        place = self._place
        if place.taken and not rng.alike(before, rng.capture()):
            remembered = REMEMBERED if self._ahead is None else self._ahead + 1
            place.drawn = [*place.drawn, [place.taken, before]][-remembered:]
        return batch

    def _fetched(self) -> str:
        """Identifies the batch just read, and the random numbers drawn to read it."""
        return f"{self._batch_digest}:{_digest(rng.capture())}"

    def _now(self) -> Tree:
        if self._left:
            self._finish()
        place = self._place
        place.own = rng.states(self._own)
        place.counted = self._numbers.changed()
        # Asked between passes, torchdata's loader makes an iterator, which draws random numbers.
        if self._meaning.told and (place.under_way or not is_loader(self._source)):
            place.loader = packed(copy.deepcopy(self._source.state_dict()))
        return place.to_tree()

    # ------------------------------------------------------------------ after a restore

    def _go_on(self, expected: str) -> Iterator[Any] | None:
        """The iterator of the interrupted pass, at its place; None: a new pass is to begin. Leaves the global
        generators as they are. `expected`: identifies the next batch; empty if it is not known."""
        if self._place.epoch:
            forget_first_iterator(self._source)
        told = self._is_told(expected)
        self._resumed = self._place.under_way and self._place.taken > 0
        if self._place.under_way:
            iterator = self._rebuild(self._source, told=told, checked=bool(expected))
            self._numbers.look(self._source)
            return iterator
        self._between(self._source, told=told)
        return None

    def _is_told(self, expected: str) -> bool:
        """Whether the source is told its place, and not read again."""
        place, found = self._place, self._meaning
        if place.loader is None and not found.anew:
            raise StateMismatch(
                f"data {self.name!r} has a state_dict now, and none was saved when the snapshot was taken: give the "
                "job the source that it had"
            )
        if place.loader is None or not found.told or (is_loader(self._source) and not place.under_way):
            return False
        if not expected or not found.anew or self._leads_to(expected):
            return True
        log.info("data %r: its load_state_dict leads elsewhere; it is read again instead", self.name)
        return False

    def _leads_to(self, expected: str) -> bool:
        """Whether a copy that is told the place goes on with the expected batch. The source itself stays unmoved: it
        may have to be read again."""
        source, drawn = copy_of(self._source), self._place.drawn
        with rng.undrawn():
            if self._place.under_way:
                iterator = self._rebuild(source, told=True, checked=True)
            else:
                self._between(source, told=True)
                iterator, self._indices = open_pass(source, self._place.epoch)
            _, problem = self._compare(iterator, expected)
        self._place.drawn = drawn
        return not problem

    def _between(self, source: Any, *, told: bool) -> None:
        """Bring `source` between two passes."""
        self._tell(source, self._place.counted, told=told)
        rng.put_back(rng.find(source), self._place.own, f"data {self.name!r}")

    def _tell(self, source: Any, counted: Tree, *, told: bool) -> None:
        """Tell `source` its place, or give it the numbers that it had `counted`."""
        if told:
            source.load_state_dict(unpacked(copy.deepcopy(self._place.loader)))
        else:
            self._numbers.put_back(source, counted)

    def _rebuild(self, source: Any, *, told: bool, checked: bool) -> Iterator[Any]:
        """An iterator of `source`, in the middle of a pass. `checked`: whether its next batch will be compared."""
        place, owner, own = self._place, f"data {self.name!r}", rng.find(source)
        with rng.undrawn():
            rng.put_back(own, place.own_start, owner)
            rng.restore(place.start)
            self._tell(source, place.counted_start, told=told)
            iterator, self._indices = open_pass(source, self._place.epoch)
            if not told:
                self._read_again(iterator, checked)
                self._numbers.put_back(source, place.counted)
            elif self._indices is not None:
                self._indices.history = place.history
            rng.put_back(own, place.own, owner)
        return iterator

    def _read_again(self, iterator: Iterator[Any], checked: bool) -> None:
        """Read again the batches that were taken, and drop them."""
        place = self._place
        if not place.taken:
            return
        log.info("data %r: batches read again of pass %d: %d", self.name, place.epoch, place.taken)
        drawn = dict(place.drawn)
        batch, history = None, ""
        drew: set[bool] = set()  # whether what was drawn after the first batch serves the passes of loaders within
        for number in range(place.taken):
            if number in drawn:
                rng.restore(drawn[number])
            before = rng.capture()
            try:
                with unwatched() as made:
                    batch = next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"data {self.name!r} has only {number} batches now, but the snapshot was taken after {place.taken} "
                    f"of pass {place.epoch}: give the job the data that it had"
                ) from None
            self._heartbeat()
            if number and not rng.alike(before, rng.capture()):
                drew.add(_serves_a_pass(made))
            history = told(self._indices, history, "" if self._indices is not None else digest_of_batch(batch))
        if self._ahead is None and history != place.history and drew != {True}:
            complain(
                self.name,
                self.exact,
                "its batches differ from those of the earlier run" + (DRAWN if place.drawn else ""),
            )
        elif not checked and digest_of_batch(batch) != place.last:
            complain(
                self.name, self.exact, f"batch {place.taken} of pass {place.epoch} differs from that of the earlier run"
            )

    def _first(self, iterator: Iterator[Any], expected: str) -> Any:
        """The first batch after a restore; `_NONE` if there is none and `exact` is off."""
        batch, problem = self._compare(iterator, expected)
        if problem:
            complain(self.name, self.exact, problem)
        return batch

    def _compare(self, iterator: Iterator[Any], expected: str) -> tuple[Any, str]:
        """The next batch, and how it differs from that of the earlier run; empty if it does not."""
        where = f"batch {self._place.taken + 1} of pass {self._place.epoch}"
        try:
            batch = self._fetch(iterator)
        except StopIteration:
            return _NONE, f"{where} is not there any more"
        self._batch_digest = digest_of_batch(batch)
        if self._fetched() == expected:
            return batch, ""
        if self._batch_digest == expected.partition(":")[0]:
            return batch, f"reading {where} drew other random numbers than before"
        return batch, f"{where} differs from that of the earlier run"


_NONE = object()

DRAWN = (
    ". They are drawn from random generators that the step may draw from, too: if what is drawn for a batch serves "
    "that batch and the next N only, say ahead=N"
)


def _read(held: Tree, name: str) -> _Place:
    try:
        return _Place(**{field_name: held[field_name] for field_name in _Place.__slots__})
    except (LookupError, TypeError) as error:
        raise StateMismatch(f"data {name!r}: the snapshot does not say where it was: {error!r}") from error


def _serves_a_pass(made: list[Any]) -> bool:
    """Whether what was drawn as these loaders made iterators serves only the passes that these began."""
    return bool(made) and not any(map(may_draw, made))


def _digest(generators: Tree) -> str:
    """A digest of the CPU's generators: one on a device may not be there yet."""
    return digest_of(rng.on_host(generators))
