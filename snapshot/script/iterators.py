"""The iterators of loaders that a script makes by itself, beside those that `snap.data` reads."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.snapshot.script.variables import name_of, users_frames
from holdfast.snapshot.state.adapter import entered
from holdfast.snapshot.state.live import Tree

_quiet: list[list[DataLoader[Any]]] = []
"""For each caller of `unwatched` that is active, the loaders whose iterators were made."""


@contextmanager
def unwatched() -> Iterator[list[DataLoader[Any]]]:
    """Iterators that are made meanwhile are not watched: whoever makes them brings them back to their place. Gives the
    loaders that made some."""
    _quiet.append([])
    try:
        yield _quiet[-1]
    finally:
        _quiet.pop()


class _EmptyAtFirst:
    """A sampler in all respects, except that its first iterator is empty, and is not made by the sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        if self._is_first:
            self._is_first = False
            return iter(())
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


@contextmanager
def for_a_later_pass(loader: DataLoader[Any], generator: torch.Generator) -> Iterator[None]:
    """An iterator that a loader makes meanwhile stands for one with persistent workers that begins a later pass.

    Such a one draws no seed, so the new one draws its seed from `generator`. And it makes one iterator of its sampler,
    where a new one makes two: torchdata's sampler draws the order of a pass whenever one is made.
    """
    of_batches = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    own, sampler = loader.generator, getattr(loader, of_batches)
    loader.generator = generator
    vars(loader)[of_batches] = _EmptyAtFirst(sampler)  # setting it is forbidden, as other attributes depend on it
    try:
        yield
    finally:
        loader.generator = own
        vars(loader)[of_batches] = sampler


@dataclass(frozen=True, slots=True)
class Kept:
    """An iterator that is read in more than one step.

    Attributes:
        where: file and line that made it.
        trains: whether it was made to train, not to evaluate.
        has_places: whether its batches are looked up by indices, so that it matters where in the pass it is.
        is_captured: whether its place is, as its loader reports it.
    """

    where: str
    trains: bool
    has_places: bool
    is_captured: bool


_LoaderIterator: Any = _BaseDataLoaderIter  # without its types, as its constructor is replaced

watched: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()
"""The iterators of loaders that a script has made by itself while a hook was entered."""


class Iterators:
    """Watches the iterators of loaders that a script makes by itself in this thread, beside those that `snap.data`
    reads, until `remove`.

    Making one draws a seed from torch's global generator. An evaluation over a loader with persistent workers draws it
    in its first pass only; a restarted process makes the iterator again, and must not draw again. An iterator that is
    kept from step to step begins anew after a restart; that is said as soon as it is seen.

    Args:
        held: `tree` of the earlier run; empty if there was none.
        trains: whether the loop is training just now, and not evaluating.
    """

    def __init__(self, held: Tree, trains: Callable[[], bool]) -> None:
        self._seeds: dict[str, list[int]] = {name: list(seeds) for name, seeds in held.items()}
        self._trains = trains
        self._made_again: Counter[str] = Counter()
        self._read: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._told: set[Kept] = set()
        self._at_work = os.getpid(), threading.get_ident()
        make = self._make = _LoaderIterator.__init__

        def making(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            if _quiet or self._at_work != (os.getpid(), threading.get_ident()):
                make(iterator, loader, *args, **kwargs)
                for made in _quiet:
                    made.append(loader)
                return
            trains = self._trains()
            if loader.persistent_workers and loader.num_workers and not trains:
                self._make_once(iterator, loader, *args, **kwargs)
                return
            make(iterator, loader, *args, **kwargs)
            if loader.generator is None:  # another generator is nobody else's
                has_places = not isinstance(loader.dataset, IterableDataset)
                is_captured = any(each.keeps_place(loader) for each in [*entered])
                watched[iterator] = Kept(_caller(), trains, has_places, is_captured)

        _LoaderIterator.__init__ = making

    def remove(self) -> None:
        """Stop watching."""
        _LoaderIterator.__init__ = self._make

    def tree(self) -> Tree:
        """The seeds of the persistent workers that were made, by their loaders, in order."""
        return {name: list(seeds) for name, seeds in self._seeds.items()}

    def begin(self) -> None:
        """A step begins: note how far iterators were read."""
        for iterator in watched:
            if iterator._num_yielded:
                self._read[iterator] = iterator._num_yielded

    def kept(self) -> list[Kept]:
        """Those that were read on since the last `begin` and before it, each once, and whose place is not captured."""
        if not self._read:
            return []
        found = [watched[each] for each, count in self._read.items() if each._num_yielded > count]
        new = [each for each in dict.fromkeys(found) if each not in self._told and not each.is_captured]
        self._told.update(new)
        return new

    def _make_once(self, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """The workers live as long as their loader. If the earlier process had made them when the snapshot was taken,
        it had drawn their seed, and the restored generator is past that."""
        name = _name_of(loader)
        seeds, number = self._seeds.setdefault(name, []), self._made_again[name]
        self._made_again[name] += 1
        if number == len(seeds):
            self._make(iterator, loader, *args, **kwargs)
            seeds.append(int(iterator._base_seed))
            return
        with for_a_later_pass(loader, torch.Generator()):
            self._make(iterator, loader, *args, **kwargs)
        iterator._base_seed = seeds[number]


def _name_of(loader: DataLoader[Any]) -> str:
    """Tells loaders apart, the same in every run."""
    data = loader.dataset
    length = f" of {len(data)}" if hasattr(data, "__len__") else ""
    return f"{name_of(loader)}: {type(data).__qualname__}{length} by {loader.batch_size}"


def _caller() -> str:
    """File and line of the user's code that is running."""
    frame = next(users_frames(), None)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "a library"
