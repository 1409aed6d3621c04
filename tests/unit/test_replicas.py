"""What replicas share: only state that they really hold identically; each keeps a part, and all of it is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.collective.agreement import Agreement, Result, T, Values
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.state.replicas import (
    ALONE,
    Sharing,
    agree_on_shares,
    is_part_of,
    shared_leaves_of,
)
from tests.deadlines import DEADLINE_S


class Table:
    """A meeting point for ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=DEADLINE_S)
        self.places: list[Any] = [None] * ranks

    def put(self, rank: int, what: Any) -> list[Any]:
        self.places[rank] = what
        self.barrier.wait()
        everything = list(self.places)
        self.barrier.wait()
        return everything


class Rank(Agreement):
    """`snapshot.collective.agreement.Agreement` at a `Table`."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank = rank
        self._table = table

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        everyone = self._table.put(self.rank, data)
        return everyone if among is None else [everyone[rank] for rank in among]

    def tell(self, data: bytes, root: int) -> bytes:
        told: bytes = self._table.put(self.rank, data)[root]
        return told

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        everyone = self._table.put(self.rank, list(values() if callable(values) else values))
        columns = zip(*(everyone if among is None else [everyone[rank] for rank in among]), strict=True)
        result = [min(column) for column in columns]
        return lambda: result

    def patiently(self, work: Callable[[], T]) -> T:
        return work()

    def spread(
        self, sets: Sequence[Sequence[int]], pieces: Sequence[tuple[int, torch.Tensor]], nodes: Sequence[str]
    ) -> None:
        everyone = self._table.put(self.rank, pieces)
        for i, (owner, tensor) in enumerate(pieces):
            tensor.copy_(everyone[owner][i][1].clone())
        self._table.put(self.rank, None)

    def leave(self) -> None:
        pass

    def meet(self, step: int) -> bool:
        return False

    def meet_at_end(self, deadline_s: float) -> bool:
        return False

    def close(self) -> None:
        pass


def together(work: Callable[[Rank], Any], ranks: int) -> list[Any]:
    table = Table(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, [Rank(table, rank) for rank in range(ranks)]))


def state(rank: int) -> list[LiveTensor]:
    generator = torch.Generator().manual_seed(1)
    alike = [torch.randn(n, generator=generator) for n in (1000, 1, 37)]
    return [
        *(LiveTensor(f"w{i}", tensor, Change.STEP, replicated=True) for i, tensor in enumerate(alike)),
        LiveTensor("said", torch.full((9,), float(rank)), Change.STEP, replicated=True),
        LiveTensor("own", alike[0].clone(), Change.STEP),
        LiveTensor("odd", torch.arange(12.0).view(3, 4).t(), Change.STEP, replicated=True),
    ]


def shared(rank: Rank) -> Sharing:
    return agree_on_shares(rank, "all", iter(state(rank.rank)))


def test_only_what_all_hold_alike_is_shared() -> None:
    for sharing in together(shared, 3):
        assert sharing.leaves.keys() == {"w0", "w1", "w2"}


def test_who_is_alone_shares_nothing() -> None:
    assert together(shared, 1) == [ALONE]
    assert together(lambda rank: agree_on_shares(rank, f"{rank.rank}", iter(state(0))), 3) == [ALONE] * 3


def test_sets_of_replicas_do_not_mix() -> None:
    def work(rank: Rank) -> Sharing:
        items = [LiveTensor("w", torch.full((64,), float(rank.rank // 2)), Change.STEP, replicated=True)]
        return agree_on_shares(rank, f"set{rank.rank // 2}", iter(items))

    sharings = together(work, 4)
    assert [sharing.parts["w"].start for sharing in sharings] == [0, 32, 0, 32]


def test_each_keeps_a_part_and_together_they_keep_everything_once() -> None:
    kept: dict[str, list[tuple[int, int]]] = {}
    for sharing in together(shared, 3):
        for name, part in sharing.parts.items():
            kept.setdefault(name, []).append((part.start, part.stop))
    assert {name: sum(stop - start for start, stop in ranges) for name, ranges in kept.items()} == {
        "w0": 1000,
        "w1": 1,
        "w2": 37,
    }


def test_divided_tensors_are_views_of_the_live_ones() -> None:
    def work(rank: Rank) -> list[LiveTensor]:
        items = state(rank.rank)
        return list(agree_on_shares(rank, "all", iter(items)).divide(iter(items)))

    for rank, items in enumerate(together(work, 2)):
        names = [item.name for item in items]
        assert {"said", "own", "odd"} <= set(names)
        assert sum(item.tensor.numel() for item in items if is_part_of(item.name, {"w0": Leaf("w0", "F32", (1000,))}))
        assert all(item.tensor.data_ptr() != 0 for item in items), rank


def test_a_tensor_that_has_another_shape_by_now_is_not_divided() -> None:
    sharing = together(shared, 2)[0]
    items = [LiveTensor("w0", torch.zeros(999), Change.STEP, replicated=True)]
    assert list(sharing.divide(iter(items))) == items


@pytest.mark.parametrize("data", [None, [], {"w": None}, {"w": ["F32"]}, {"w": ["F32", ["x"]]}])
def test_what_is_no_list_of_leaves_is_refused(data: Any) -> None:
    if data == []:
        data = ["w"]
    with pytest.raises(ProtocolError):
        shared_leaves_of(data)
