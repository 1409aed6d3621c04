"""What `load_state_dict` of a source means. Whatever it means, a loop over the source goes on exactly after a kill, in
later passes too; or the source is refused by name before its first batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state import rng
from holdfast.snapshot.step.source import examine
from tests.unit.test_data import Hook, Loop, begin_a_process, check, over, train

LENGTHS = (0, 1, 2, 5)


class Batches:
    """Batches of a given length, whose numbers depend on `turn`. Subclasses keep a place in them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = self.turn = self.start = 0

    def batch(self, number: int) -> tuple[str, int, int]:
        return ("batch", self.turn, number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.turn = state["at"], state["turn"]


class Moves(Batches):
    """An iterator goes on where the last one stopped; after the end the next turn begins."""

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield self.batch(self.at - 1)
        self.at, self.turn = 0, self.turn + 1


class EveryTime(Batches):
    """Every iterator begins where `load_state_dict` said."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, self.length):
            self.at = number + 1
            yield self.batch(number)


class Once(Batches):
    """The next iterator begins where `load_state_dict` said. A turn counts as it begins to be read."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.turn = state["at"], state["turn"]

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number in range(start, self.length):
            self.at = number + 1
            yield self.batch(number)


class OnceInTurns(Once):
    """The same, where later turns differ."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.turn, self.at = self.turn + 1, 0


class AtNext(Batches):
    """An iterator that never ends for good: after the end its next pass begins."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            self.at, self.turn = 0, self.turn + 1
            raise StopIteration
        self.at += 1
        return self.batch(self.at - 1)


class Resets(AtNext):
    """An iterator that each pass puts back to where `load_state_dict` said."""

    def __iter__(self) -> Iterator[Any]:
        self.at = self.start
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.batch(self.at - 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Ahead(Batches):
    """Says where it has read ahead to, and not what it has given."""

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number in range(start, self.length):
            self.at = number + 2
            yield self.batch(number)


class NotAtAll(Batches):
    """Cannot go anywhere."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield self.batch(number)


class Decorative(NotAtAll):
    """Says that it goes there, and does not."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Alike(EveryTime):
    """All batches are equal, so only the place tells them apart."""

    def batch(self, number: int) -> tuple[str, int, int]:
        return ("batch", 0, 0)


class Locked(Once):
    """Cannot be copied."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lock = threading.Lock()


class Live(AtNext):
    """An iterator that cannot go back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Streamed(IterableDataset[Any]):
    """A data set with a place, made of any of these."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)  # type: ignore[call-overload, no-any-return]

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)


EXACT = [Moves, EveryTime, Once, OnceInTurns, AtNext, Resets, Ahead, NotAtAll, Decorative]


def numbered(make: Callable[[], Any], passes: int = 3, leave: int | None = None) -> Loop:
    """The usual loop; every step says its own number, so that equal batches differ. Passes may be left early."""

    def loop(hook: Hook) -> Iterator[str]:
        data = hook.data(make())
        for epoch in range(data.epoch(), passes):
            for number, batch in enumerate(data, data.position):
                yield f"{epoch}.{number} {train(hook, batch)}"
                if number == leave:
                    break

    return loop


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [*EXACT, Alike])
@pytest.mark.proves("mid-epoch")
def test_a_loop_goes_on_whatever_load_state_dict_means(kind: type[Batches], length: int) -> None:
    assert len(check(numbered(lambda: kind(length)))) == 3 * length


@pytest.mark.parametrize("kind", EXACT)
def test_passes_that_are_left_early_are_left_again(kind: type[Batches]) -> None:
    check(numbered(lambda: kind(5), leave=2))


@pytest.mark.parametrize("kind", EXACT)
def test_two_sources_in_turn(kind: type[Batches]) -> None:
    """One rests, in the middle of a pass or at its end, while the other is read."""

    def endless(data: Any) -> Iterator[Any]:
        while True:
            yield from data

    def loop(hook: Hook) -> Iterator[str]:
        one, other = hook.data(kind(5), "one"), hook.data(kind(3), "other")
        rest = endless(other)
        for epoch in range(one.epoch(), 3):
            for number, batch in enumerate(one, one.position):
                more = next(rest) if number % 2 else None
                yield f"{epoch}.{number} {train(hook, batch, more)}"

    check(loop)


@pytest.mark.parametrize("kind", [EveryTime, Once, Resets, NotAtAll, Decorative])
def test_the_loader_of_a_data_set_with_a_place_is_read_again(kind: type[Batches]) -> None:
    check(numbered(lambda: DataLoader(Streamed(kind(7)), batch_size=2)))


@pytest.mark.parametrize("kind", [Locked, Live])
def test_what_cannot_be_brought_back_is_refused_before_its_first_batch(kind: type[Batches]) -> None:
    source = kind(5)
    with pytest.raises(ConfigError, match=rf"a {kind.__name__}.*snap\.data\(lambda: {kind.__name__}\("):
        Hook().data(source)
    assert source.at == 0


def test_it_is_taken_if_batches_need_not_be_the_same(caplog: pytest.LogCaptureFixture) -> None:
    _, steps = begin_a_process(over(lambda: Live(5), exact=False), None)
    assert len(list(steps)) == 15
    assert "Live" in caplog.text


def test_a_loader_that_cannot_be_copied_is_read_again() -> None:
    class Kept(DataLoader[Any]):
        lock = None

        def __iter__(self) -> Any:
            self.lock = threading.Lock()
            return super().__iter__()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("it is not to be told")

    def make() -> Any:
        made = Kept(range(7), batch_size=2)  # type: ignore[arg-type]
        made.lock = threading.Lock()
        return made

    check(numbered(make))


@pytest.mark.parametrize("kind", [*EXACT, Live, Locked])
def test_to_examine_a_source_moves_nothing(kind: type[Batches]) -> None:
    source, before = kind(5), rng.capture()
    places = dict(vars(source))
    examine(source, lambda: None)
    assert vars(source) == places
    assert rng.alike(rng.capture(), before)


def test_what_it_means_is_told_apart() -> None:
    found = {kind: examine(kind(5), lambda: None) for kind in (*EXACT, Live)}
    assert {kind for kind, each in found.items() if each.told} == {Moves, Once, OnceInTurns, AtNext}
    assert {kind for kind, each in found.items() if not each.anew} == {Moves, AtNext, Live}
    assert all(bool(each.why) != each.told for each in found.values())
