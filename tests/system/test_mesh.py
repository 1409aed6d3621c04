"""Ranks that send each other messages: here they are threads of one process, each with real connections."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from holdfast.snapshot.collective import agreement
from holdfast.snapshot.collective.mesh import AgreementLost, Mesh, hops, sockets_needed
from tests.deadlines import DEADLINE_S
from tests.scripts import python
from tests.smp_kit import open_files

T = TypeVar("T")

SIZES = [1, 2, 3, 4, 5, 8, 13]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def ranks(size: int) -> Iterator[list[Mesh]]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    meshes = [Mesh(store, rank, size, timedelta(seconds=DEADLINE_S)) for rank in range(size)]
    try:
        yield meshes
    finally:
        for mesh in meshes:
            mesh.end()
        for mesh in meshes:
            mesh.join(DEADLINE_S)


def together(meshes: list[Mesh], call: Callable[[Mesh], T]) -> list[T]:
    """The result of `call` on each rank."""
    with ThreadPoolExecutor(len(meshes)) as threads:
        return list(threads.map(call, meshes, timeout=DEADLINE_S))


def sockets() -> int:
    return sum(link.startswith("socket:") for link in open_files(os.getpid()).values())


@pytest.mark.parametrize("size", SIZES)
def test_all_have_the_minimum_of_all(size: int) -> None:
    everyone = range(size)
    with ranks(size) as meshes:
        for first in range(3):

            def least(mesh: Mesh, first: int = first) -> list[int]:
                return mesh.minimum(lambda: [(mesh.rank + first) % size, -mesh.rank, 7], everyone).result()

            assert together(meshes, least) == [[0, 1 - size, 7]] * size


@pytest.mark.parametrize("size", SIZES)
def test_all_are_given_what_each_gave_whatever_its_length(size: int) -> None:
    gave = [bytes([rank]) * (0 if rank % 3 == 1 else rank * 1000) for rank in range(size)]
    with ranks(size) as meshes:
        found = together(meshes, lambda mesh: mesh.gather(gave[mesh.rank], range(size)).result())
    assert found == [gave] * size


@pytest.mark.parametrize("size", SIZES)
def test_what_one_tells_reaches_all(size: int) -> None:
    with ranks(size) as meshes:
        for root in {0, size // 2, size - 1}:
            for text in (b"", b"told" * 5000):

                def tell(mesh: Mesh, root: int = root, text: bytes = text) -> bytes:
                    return mesh.tell(text if mesh.rank == root else b"", root, range(size)).result()

                assert together(meshes, tell) == [text] * size


def test_sets_of_ranks_agree_beside_each_other() -> None:
    sets = [(0, 3, 5), (1,), (4, 2)]
    with ranks(6) as meshes:

        def own(mesh: Mesh) -> tuple[list[bytes], list[int]]:
            among = next(each for each in sets if mesh.rank in each)
            gathered = mesh.gather(str(mesh.rank).encode(), among).result()
            return gathered, mesh.minimum(lambda: [mesh.rank], among).result()

        for rank, found in enumerate(together(meshes, own)):
            among = next(each for each in sets if rank in each)
            assert found == ([str(each).encode() for each in among], [min(among)])


def test_what_each_replica_has_reaches_the_others_by_way_of_their_nodes() -> None:
    nodes = ["a", "a", "b", "b", "c", "other"]
    members = (0, 1, 2, 3, 4)
    with ranks(6) as meshes:

        def fill(mesh: Mesh) -> list[float]:
            tensors = [torch.full((5,), float(owner if owner == mesh.rank else -1)) for owner in members]
            routes = [hops(owner, members, nodes) for owner in members]
            pieces = zip(tensors, routes, strict=True)
            mesh.spread(pieces if mesh.rank in members else []).result()
            return [float(tensor[-1]) for tensor in tensors]

        assert together(meshes, fill) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 5 + [[-1.0] * 5]


@pytest.mark.parametrize("size", [2, 5, 12])
def test_who_leaves_in_a_round_is_noticed_by_all_at_once(size: int) -> None:
    with ranks(size) as meshes:
        everyone = range(size)
        together(meshes, lambda mesh: mesh.minimum(lambda: [0], everyone).result())
        waiting = [mesh.minimum(lambda: [0], everyone) for mesh in meshes[1:]]
        meshes[0].end()
        for future in waiting:
            with pytest.raises(AgreementLost, match="too slow"):
                future.result(DEADLINE_S / 2)  # long before the deadline of a call
        with pytest.raises(AgreementLost, match="an earlier call"):
            meshes[1].minimum(lambda: [0], everyone).result(DEADLINE_S)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_make_different_calls_lose_each_other_and_nothing_else(size: int) -> None:
    def numbers(mesh: Mesh) -> list[int]:
        return mesh.minimum(lambda: [7] * (9 if mesh.rank == size - 1 else 4), range(size)).result()

    def lost(mesh: Mesh) -> str:
        with pytest.raises(AgreementLost) as caught:
            numbers(mesh)
        return str(caught.value)

    with ranks(size) as meshes:
        assert all("elsewhere" in each for each in together(meshes, lost))


def test_a_call_goes_round_while_who_asked_for_it_does_something_else() -> None:
    given = threading.Event()
    with ranks(2) as meshes:

        def later() -> list[int]:
            assert given.wait(DEADLINE_S)
            return [1]

        first = meshes[0].minimum(later, range(2))
        second = meshes[1].minimum(lambda: [2], range(2))
        assert not first.done() and not second.done()
        given.set()
        assert first.result(DEADLINE_S) == second.result(DEADLINE_S) == [1]


def test_a_failure_of_the_values_is_the_callers_alone() -> None:
    with ranks(1) as [mesh]:

        def broken() -> list[int]:
            raise ValueError("of one rank")

        with pytest.raises(ValueError, match="of one rank"):
            mesh.minimum(broken, range(1)).result(DEADLINE_S)
        assert mesh.minimum(lambda: [3], range(1)).result(DEADLINE_S) == [3]


def test_connections_are_few_and_made_when_they_are_used() -> None:
    size = 13
    before = sockets()
    with ranks(size) as meshes:
        made = sockets() - before
        assert made <= 2 * size, "connections are made ahead"

        def all_calls(mesh: Mesh) -> None:
            mesh.minimum(lambda: [0], range(size)).result()
            mesh.gather(b"fact", range(size)).result()
            for root in (0, 5):
                mesh.tell(b"told", root, range(size)).result()

        together(meshes, all_calls)
        assert sockets() - before - made <= size * sockets_needed(size) < size * (size - 1)


FEW_FILES = """
import os, resource, torch.distributed as dist
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.collective.agreement import Group
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Group().close()
resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
try:
    Group()
except ConfigError as error:
    print(error)
"""


def test_a_process_that_may_not_open_enough_files_is_told_how_many_it_needs() -> None:
    done = python(FEW_FILES)
    assert "70 files" in done.stdout and "ulimit -n " in done.stdout


def test_a_group_whose_other_ranks_do_not_come_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "COLLECTIVE_DEADLINE_S", 0.2)
    before = set(threading.enumerate())
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        with pytest.raises(AgreementLost):
            agreement.Group()
    finally:
        dist.destroy_process_group()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive()
