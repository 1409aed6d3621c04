"""Reads one source of batches, and finds the place in it again.

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
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.script.iterators import unwatched
from holdfast.snapshot.script.shuffled import Shuffled
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

REPEATS = (
    "data %r begins with another batch when it is read a second time, so no restart could go on in it: let what its "
    "workers draw follow from torch.initial_seed(), or from a fixed seed; if it need not be the same, say exact=False"
)

DRAWN = (
    ". They are drawn from random generators that the step may draw from, too: if what is drawn for a batch serves "
    "that batch and the next N only, say ahead=N"
)

REMEMBERED = 2
"""How many of the last batches that drew from the global generators to remember, each with the generators' states
before it."""

OVER = object()
"""What `Reader.read` returns at the end of a pass."""

log = get_log(__name__)


@dataclass(slots=True)
class Place:
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


class Reader:
    """Reads a source pass by pass.

    Attributes:
        place: where it is.
        generators: the random generators of the source, by name.
        resumed: whether the pass that is under way went on in its middle after a restart.
    """

    def __init__(
        self, source: Any, name: str, held: Tree | None, ahead: int | None, exact: bool, heartbeat: Callable[[], None]
    ) -> None:
        """See `Data`.

        Raises:
            ConfigError: the source cannot be brought back to its place after a restart.
            StateMismatch: `held` is not what `Data.state` gives.
        """
        self.place = Place(start=rng.capture()) if held is None else _place_of(held, name)
        self.resumed = False
        self._name = name
        self._ahead = ahead
        self._exact = exact
        self._heartbeat = heartbeat
        self._batch_digest = ""
        self._first_batch = ""  # its digest, when it was read before
        self._indices: Indices | None = None
        self._shuffled: Shuffled | None = None  # until the first batch of the first pass was read
        self._numbers = OwnNumbers(source)
        self.source = source

    @property
    def source(self) -> Any:
        """See `Data.source`."""
        return self._source

    @source.setter
    def source(self, source: Any) -> None:
        check(source, self._name)
        self._meaning = meaning_of(source, self._name, self._heartbeat, exact=self._exact)
        self._source = source
        self._draws = may_draw(source)
        self._numbers.look(source)
        self.look()

    def look(self) -> None:
        """Look for the source's generators again: a sampler may make them as late as when a pass begins."""
        self.generators = rng.find(self._source)

    # ------------------------------------------------------------------ a pass

    def start(self) -> Iterator[Any]:
        """The iterator of a new pass."""
        place = self.place
        place.under_way, self.resumed = True, False
        place.start = rng.capture()
        place.own_start = rng.states(self.generators)
        if self._exact and not place.epoch:
            self._first_batch = first_batch(self._source)
            if not self._meaning.told:
                self._shuffled = Shuffled(self._source, self._name)
        self._numbers.look(self._source)
        place.counted_start = self._numbers.changed()
        iterator, self._indices = open_pass(self._source, place.epoch)
        self._numbers.look(self._source)  # what its iterator has made
        return iterator

    def read(self, iterator: Iterator[Any], expected: str) -> Any:
        """The next batch; `OVER` if there is none.

        Args:
            expected: identifies the batch, if it follows a restart; empty if it does not.

        Raises:
            StateMismatch: it is another batch than the expected one, and the place must be found exactly.
            ConfigError: the first batch is another one than when it was read before.
        """
        self._batch_digest = ""
        try:
            batch, problem = self._compare(iterator, expected) if expected else (self._fetch(iterator), "")
        except StopIteration:
            return OVER
        if problem:
            complain(self._name, self._exact, problem)
        if batch is not OVER:
            self._batch_digest = digest_of_batch(batch)
            if self._first_batch not in ("", self._batch_digest):
                raise ConfigError(REPEATS % self._name)
            self._first_batch = ""
        return batch

    def fetched(self) -> str:
        """Identifies the batch just read, and the random numbers drawn to read it; empty if none was read."""
        if not self._batch_digest:
            return ""
        return f"{self._batch_digest}:{digest_of(rng.on_host(rng.capture()))}"  # one on a device may not be there yet

    def take(self) -> None:
        """The batch just read was given."""
        if self._shuffled is not None:
            self._shuffled.look()
            self._shuffled = None
        place = self.place
        place.taken += 1
        place.last = self._batch_digest
        place.history = told(self._indices, place.history, self._batch_digest)

    def finish(self) -> None:
        """End the current pass, if there is one."""
        place = self.place
        if place.under_way:
            self.place = Place(
                place.epoch + 1, start=place.start, own=place.own, counted=place.counted, loader=place.loader
            )

    def now(self) -> Tree:
        """The place, as plain values, between two batches: `fetched` knows of none until the next one is read."""
        place, self._batch_digest = self.place, ""
        place.own = rng.states(self.generators)
        place.counted = self._numbers.changed()
        # Asked between passes, torchdata's loader makes an iterator, which draws random numbers.
        if self._meaning.told and (place.under_way or not is_loader(self._source)):
            place.loader = packed(copy.deepcopy(self._source.state_dict()))
        return place.to_tree()

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        """The next batch. If it draws from the global generators, notes their states before. Raises `StopIteration`."""
        if not self._draws:
            with unwatched():
                return next(iterator)
        before = rng.capture()
        with unwatched():
            batch = next(iterator)
        place = self.place
        if place.taken and not rng.alike(before, rng.capture()):
            remembered = REMEMBERED if self._ahead is None else self._ahead + 1
            place.drawn = [*place.drawn, [place.taken, before]][-remembered:]
        return batch

    # ------------------------------------------------------------------ after a restore

    def go_on(self, expected: str) -> Iterator[Any] | None:
        """The iterator of the interrupted pass, at its place; None: a new pass is to begin. Leaves the global
        generators as they are. `expected`: identifies the next batch; empty if it is not known.

        Raises:
            StateMismatch: the place cannot be found again; the message says why.
        """
        if self.place.epoch:
            forget_first_iterator(self._source)
        is_told = self._is_told(expected)
        self.resumed = self.place.under_way and self.place.taken > 0
        if self.place.under_way:
            iterator = self._rebuild(self._source, told=is_told, checked=bool(expected))
            self._numbers.look(self._source)
            return iterator
        self._between(self._source, told=is_told)
        return None

    def _is_told(self, expected: str) -> bool:
        """Whether the source is told its place, and not read again."""
        place, found = self.place, self._meaning
        if place.loader is None and not found.anew:
            raise StateMismatch(
                f"data {self._name!r} has a state_dict now, and none was saved when the snapshot was taken: give the "
                "job the source that it had"
            )
        if place.loader is None or not found.told or (is_loader(self._source) and not place.under_way):
            return False
        if not expected or not found.anew or self._leads_to(expected):
            return True
        log.info("data %r: its load_state_dict leads elsewhere; it is read again instead", self._name)
        return False

    def _leads_to(self, expected: str) -> bool:
        """Whether a copy that is told the place goes on with the expected batch. The source itself stays unmoved: it
        may have to be read again."""
        source, drawn = copy_of(self._source), self.place.drawn
        with rng.undrawn():
            if self.place.under_way:
                iterator = self._rebuild(source, told=True, checked=True)
            else:
                self._between(source, told=True)
                iterator, self._indices = open_pass(source, self.place.epoch)
            _, problem = self._compare(iterator, expected)
        self.place.drawn = drawn
        return not problem

    def _between(self, source: Any, *, told: bool) -> None:
        """Bring `source` between two passes."""
        self._tell(source, self.place.counted, told=told)
        rng.put_back(rng.find(source), self.place.own, f"data {self._name!r}")

    def _tell(self, source: Any, counted: Tree, *, told: bool) -> None:
        """Tell `source` its place, or give it the numbers that it had `counted`."""
        if told:
            source.load_state_dict(unpacked(copy.deepcopy(self.place.loader)))
        else:
            self._numbers.put_back(source, counted)

    def _rebuild(self, source: Any, *, told: bool, checked: bool) -> Iterator[Any]:
        """An iterator of `source`, in the middle of a pass. `checked`: whether its next batch will be compared."""
        place, owner, own = self.place, f"data {self._name!r}", rng.find(source)
        with rng.undrawn():
            rng.put_back(own, place.own_start, owner)
            rng.restore(place.start)
            self._tell(source, place.counted_start, told=told)
            iterator, self._indices = open_pass(source, place.epoch)
            if not told:
                self._read_again(iterator, checked)
                self._numbers.put_back(source, place.counted)
            elif self._indices is not None:
                self._indices.history = place.history
            rng.put_back(own, place.own, owner)
        return iterator

    def _read_again(self, iterator: Iterator[Any], checked: bool) -> None:
        """Read again the batches that were taken, and drop them."""
        place, name = self.place, self._name
        if not place.taken:
            return
        log.info("data %r: batches read again of pass %d: %d", name, place.epoch, place.taken)
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
                    f"data {name!r} has only {number} batches now, but the snapshot was taken after {place.taken} of "
                    f"pass {place.epoch}: give the job the data that it had"
                ) from None
            self._heartbeat()
            if number and not rng.alike(before, rng.capture()):
                drew.add(_serves_a_pass(made))
            history = told(self._indices, history, "" if self._indices is not None else digest_of_batch(batch))
        if self._ahead is None and history != place.history and drew != {True}:
            more = DRAWN if place.drawn else ""
            complain(name, self._exact, f"its batches differ from those of the earlier run{more}")
        elif not checked and digest_of_batch(batch) != place.last:
            where = f"batch {place.taken} of pass {place.epoch}"
            complain(name, self._exact, f"{where} differs from that of the earlier run")

    def _compare(self, iterator: Iterator[Any], expected: str) -> tuple[Any, str]:
        """The next batch, and how it differs from that of the earlier run; empty if it does not."""
        where = f"batch {self.place.taken + 1} of pass {self.place.epoch}"
        try:
            batch = self._fetch(iterator)
        except StopIteration:
            return OVER, f"{where} is not there any more"
        self._batch_digest = digest_of_batch(batch)
        if self.fetched() == expected:
            return batch, ""
        if self._batch_digest == expected.partition(":")[0]:
            return batch, f"reading {where} drew other random numbers than before"
        return batch, f"{where} differs from that of the earlier run"


def _place_of(held: Tree, name: str) -> Place:
    try:
        return Place(**{field_name: held[field_name] for field_name in Place.__slots__})
    except (LookupError, TypeError) as error:
        raise StateMismatch(f"data {name!r}: the snapshot does not say where it was: {error!r}") from error


def _serves_a_pass(made: list[Any]) -> bool:
    """Whether what was drawn as these loaders made iterators serves only the passes that these began."""
    return bool(made) and not any(map(may_draw, made))
