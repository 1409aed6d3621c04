"""A source of batches: how it is brought back to its place, what reading it draws, how its passes begin.

Nothing says what ``load_state_dict`` of a source means: whether it sets where the next iterator begins, or where every
later one begins; whether it moves an iterator that exists; or whether it brings back everything. With the wrong guess a
restarted loop would read other batches, perhaps not before its next pass. So it is tried on copies before the first
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils import data as torch_data

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.script.iterators import for_a_later_pass, unwatched
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import digest_of_batch
from holdfast.snapshot.state.live import Stateful, Tree
from holdfast.snapshot.state.walk import LONGEST, is_users_own, walk

log = get_log(__name__)

LIVE_ON = (
    "persistent_workers=True: workers are started anew for each pass all the same, since no restart could bring them "
    "back to where they were. What they draw at random from the second pass on is other than without holdfast"
)

_QUIET_SAMPLERS = frozenset(
    {
        torch_data.BatchSampler,
        torch_data.DistributedSampler,
        torch_data.RandomSampler,
        torch_data.SequentialSampler,
        torch_data.SubsetRandomSampler,
        torch_data.WeightedRandomSampler,
    }
)
"""Samplers that draw nothing from the global generators after the first batch."""

_QUIET_DATA = frozenset({torch_data.TensorDataset, list, tuple, range})
_QUIET_COLLATING = (torch_data.default_collate, torch_data.default_convert)


class Indices:
    """Passes on the indices that a loader asks its dataset for.

    Attributes:
        history: a digest of all so far.
    """

    def __init__(self, indices: Iterator[Any]) -> None:
        self._rest = indices
        self.history = ""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._rest)
        self.history = digest_of_batch((self.history, index))
        return index


def check(source: Any, name: str) -> None:
    """Raise `ConfigError` unless a pass over `source` can be made again."""
    give = "give the DataLoader, a list, or a function that returns a new iterator each time"
    if isinstance(source, Iterator) and not _is_stateful(source):
        kind = type(source).__qualname__
        raise ConfigError(f"data {name!r} is a {kind}, which can be read once and not again after a restart: {give}")
    if not _is_iterable(source) and not callable(source):
        raise ConfigError(f"data {name!r} is a {type(source).__qualname__}, which gives no batches: {give}")
    if is_loader(source) and source.num_workers > 1 and not source.in_order:
        raise ConfigError(
            f"data {name!r} has in_order=False: its batches come in an order that no restart can repeat; leave it out"
        )


def is_loader(source: Any) -> bool:
    """Whether it is a `DataLoader`."""
    return isinstance(source, torch_data.DataLoader)


def _is_stateful(source: Any) -> bool:
    """Whether a source may save and restore its place by itself. Loaders with workers are read again instead: their
    state_dict leaves out the workers' random generators. So are those that Accelerate has prepared: they tell it what
    they read, copies included."""
    if is_loader(source) and (source.num_workers or hasattr(source, "base_dataloader")):
        return False
    return isinstance(source, Stateful)


def forget_first_iterator(source: Any) -> None:
    """Forget an iterator that was made, and drew random numbers, before the first pass. In torchdata's loader this is
    done by ``state_dict``, which Accelerate asks for when it prepares it. Later passes made iterators of their own."""
    loader = getattr(source, "base_dataloader", source)
    if getattr(loader, "_initial_iter_for_state_dict", False):
        loader._iterator, loader._initial_iter_for_state_dict = None, False


def _is_iterable(source: Any) -> bool:
    return isinstance(source, Iterable) or hasattr(type(source), "__getitem__")


def may_draw(source: Any) -> bool:
    """Whether reading a batch, except the first of a pass, may draw from this process's generators."""
    if type(source) in (list, tuple, range):
        return False
    if not is_loader(source):
        return True
    if source.num_workers == 0 and not (type(source.dataset) in _QUIET_DATA and source.collate_fn in _QUIET_COLLATING):
        return True
    samplers = [source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None)]
    return not _is_of_iterables(source) and any(s is not None and type(s) not in _QUIET_SAMPLERS for s in samplers)


def _is_of_iterables(loader: Any) -> bool:
    return isinstance(loader.dataset, torch_data.IterableDataset)


def meaning_of(source: Any, name: str, heartbeat: Callable[[], None], *, exact: bool) -> Meaning:
    """How `source` is brought back to its place; see `Data`. Reads a few batches of copies to find out.

    Raises:
        ConfigError: it cannot be; if it need not be `exact`, that is only logged.
    """
    if not _is_stateful(source):
        return AGAIN
    found = examine(source, heartbeat)
    if found.told:
        return found
    kind = type(source).__qualname__
    if not found.anew:
        problem = (
            f"data {name!r}, a {kind}, cannot be brought back to its place after a restart: {found.why}, and "
            "it is not known to begin each pass at its beginning. Give a function that makes a new one for each "
            f"pass: snap.data(lambda: {kind}(...))"
        )
        if exact:
            raise ConfigError(f"{problem}; or, if batches need not be the same after a restart, say exact=False")
        log.warning("%s", problem)
        return Meaning(anew=False)  # told all the same: nothing else finds its place
    log.info("data %r, a %s, will be read again after a restart: %s", name, kind, found.why)
    return found


END = "end"
"""What is read after the last batch."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """How a source gets back to its place.

    Attributes:
        anew: each pass begins at the beginning, so that the place is also found by reading the pass again.
        why: what speaks against ``load_state_dict``. Empty: it leads to the place, and later passes begin as they would
            have without it.
    """

    anew: bool
    why: str = ""

    @property
    def told(self) -> bool:
        """Whether the source is told its place by ``load_state_dict``."""
        return not self.why


AGAIN = Meaning(anew=True, why="it has none to rely on")
"""For a source that is read again in any case."""


def copy_of(source: Any) -> Any:
    """A copy that can be read without moving `source`. It shares a loader's data set, unless that has a place, too.
    Whatever `source` raises when it is copied is raised."""
    shared: dict[int, Any] = {}
    if is_loader(source):
        shared[id(source._iterator)] = None  # an earlier pass's; torchdata's cannot be copied
        if not isinstance(source.dataset, torch_data.IterableDataset | Stateful):
            shared[id(source.dataset)] = source.dataset
    return copy.deepcopy(source, shared)


def examine(source: Any, heartbeat: Callable[[], None]) -> Meaning:
    """Read up to five batches of two copies of `source`, one of which is told the place of the other.

    Leaves `source` and all random generators as they are. Errors while batches are read are raised.
    """
    with rng.undrawn(rng.find(source)):  # a copy may share the data set, and with it its generators
        try:
            plain, told = _Trial(source, heartbeat), _Trial(source, heartbeat)
        except Exception as error:  # whatever classes of the user raise
            # A loader makes a new iterator for each pass.
            return Meaning(anew=is_loader(source), why=f"it cannot be copied: {error!r}")
        return _compare(plain, told)


def _compare(plain: _Trial, told: _Trial) -> Meaning:
    first = plain.begin()
    at_first, place, why = plain.generators(), None, ""
    try:
        place = copy.deepcopy(plain.source.state_dict())
    except Exception as error:  # whatever classes of the user raise
        why = f"its state_dict fails: {error!r}"
    second = plain.read()
    later = plain.begin()
    after = digest_of_batch(plain.state()) if later == second else ""  # batches that are equal do not tell places apart
    if why:
        return Meaning(later == first, why)
    try:
        told.source.load_state_dict(place)
        if told.begin(at_first) != second:
            why = "its load_state_dict does not lead to the next batch"
        if told.begin() != later or (after and digest_of_batch(told.state()) != after):
            why = why or "its load_state_dict also moves the beginnings of later passes"
    except Exception as error:  # as above
        why = f"its load_state_dict fails: {error!r}"
    return Meaning(later == first, why)


class _Trial:
    """A copy of a source, and the iterators over it; the last one is read."""

    def __init__(self, source: Any, heartbeat: Callable[[], None]) -> None:
        self.source = copy_of(source)
        self._heartbeat = heartbeat
        self._at_start = self.generators()
        self._iterators: list[Any] = []  # all of them: to end one may move the source

    def generators(self) -> Tree:
        """The states of the global generators, and of the source's own."""
        return rng.capture_with(rng.find(self.source))

    def begin(self, generators: Tree | None = None) -> str:
        """The first batch of a new iterator, which is made with the generators as they were at first. `generators`: as
        they are to be after that."""
        self._put(self._at_start)
        self._iterators.append(iter(self.source))
        if generators is not None:
            self._put(generators)
        return self.read()

    def read(self) -> str:
        """The next batch."""
        self._heartbeat()
        try:
            return digest_of_batch(next(self._iterators[-1]))
        except StopIteration:
            return END

    def state(self) -> Any:
        return self.source.state_dict()

    def _put(self, generators: Tree) -> None:
        rng.restore_with(rng.find(self.source), generators, "data")


def open_pass(source: Any, epoch: int) -> tuple[Iterator[Any], Indices | None]:
    """An iterator of a new pass over `source`, and the indices it asks for, if those are known.

    Args:
        epoch: how many passes are finished.
    """
    read = [source] if is_loader(source) else _read_through(source)
    if read and not is_loader(source):
        return _with_first(iter(source), read, epoch), None
    with workers_anew(read, epoch):
        iterator: Any = iter(source if _is_iterable(source) else source())
    indices = None
    if is_loader(source) and not _is_of_iterables(source) and hasattr(iterator, "_sampler_iter"):
        indices = iterator._sampler_iter = Indices(iterator._sampler_iter)
    return iterator, indices


def first_batch(source: Any) -> str:
    """A digest of the batch that the next pass begins with, read by workers that end then. Empty unless what they give
    follows from no index: nothing else tells whether it is the same when it is read again, as it is not where a shuffle
    is seeded by the time."""
    if not is_loader(source) or not source.num_workers or not _is_of_iterables(source):
        return ""
    if isinstance(source, Stateful) or hasattr(source, "base_dataloader"):  # they count what is read
        return ""
    with unwatched(), rng.undrawn(rng.find(source)):
        return digest_of_batch(next(iter(source), None))


def _read_through(source: Any) -> list[Any]:
    """The loaders in the attributes of an object that wraps them, as timm's PrefetchLoader does."""
    return (
        [part for part in getattr(source, "__dict__", {}).values() if is_loader(part)] if _is_iterable(source) else []
    )


def _with_first(batches: Iterator[Any], loaders: list[Any], epoch: int) -> Iterator[Any]:
    """The same batches. A generator makes the iterators of its loaders only when its first batch is read."""
    with workers_anew(loaders, epoch):
        first = list(islice(batches, 1))
    if first:
        yield first.pop()  # the loop alone decides how long it stays in memory
        yield from batches


@contextmanager
def workers_anew(loaders: list[Any], epoch: int) -> Iterator[None]:
    """Loaders make iterators meanwhile. Persistent workers do not live on: what they drew in earlier passes cannot be
    restored.

    Args:
        epoch: how many passes are finished.
    """
    with unwatched(), ExitStack() as stack:
        for loader in loaders:
            if loader.persistent_workers:
                loader._iterator = None
                if epoch:
                    generator = torch.Generator().manual_seed(torch.initial_seed() ^ epoch)
                    stack.enter_context(for_a_later_pass(loader, generator))
                else:
                    log.warning(LIVE_ON)
        yield


def complain(name: str, exact: bool, problem: str) -> None:
    """The source is not where it was. Raises `StateMismatch`, or, if it need not be `exact`, warns."""
    text = (
        f"data {name!r} is not where it was: {problem}. Either the data has changed, or what it gives depends "
        "on something that is not restored: give the source state_dict and load_state_dict, or keep its random "
        "generators in its attributes; if it need not be the same, say exact=False"
    )
    if exact:
        raise StateMismatch(text)
    log.warning("%s", text)


def told(indices: Indices | None, history: str, look: str) -> str:
    """The history of a pass with one more batch. If its indices are known, only they count: a dataset makes each sample
    independently of the others."""
    return digest_of_batch((history, look)) if indices is None else indices.history


class OwnNumbers:
    """Numbers that a source keeps in objects of the user's own classes: a sampler's count of its passes, the stage of a
    curriculum; or in a library's object around a loader, as Lightning Fabric counts passes. They are part of its place,
    as its random generators are; only those count that are not what the script first made them."""

    def __init__(self, source: Any) -> None:
        """`source`: as it is before the first pass; later ones may take its place."""
        self.look(source)
        self._made = dict(self._numbers())

    def look(self, source: Any) -> None:
        """Find the objects of `source` again. Too slow for `changed`, which is called in every step."""
        self._owners = dict(_owners(source))

    def changed(self) -> Tree:
        """Those that have changed, by path."""
        return {path: number for path, number in self._numbers() if self._made.get(path) != number}

    def put_back(self, source: Any, held: Mapping[str, Any]) -> None:
        """Make them what `changed` returned in an earlier process. Some may only be attributes of classes yet."""
        owners = dict(_owners(source)) if held else {}
        for path, number in held.items():
            owner, _, name = path.rpartition(".")
            if owner in owners:
                setattr(owners[owner], name, number)

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        for path, owner in self._owners.items():
            for name, value in vars(owner).items():
                if type(value) in (bool, int, float):
                    yield f"{path}.{name}", value


def _owners(source: Any) -> Iterator[tuple[str, Any]]:
    """Objects of the user's own classes in a source, by path, and the source itself if it is a library's wrapper. A
    loader leads to its data and its samplers."""
    for path, value, _ in walk([("", source)], lambda each: not callable(each), longest=LONGEST):
        counts = is_users_own(value) or (value is source and not is_loader(value))
        if hasattr(value, "__dict__") and not callable(value) and counts:
            yield path, value
