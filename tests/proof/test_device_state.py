"""State that has another form on a GPU than on a CPU, as far as that can be tested without a GPU."""

from __future__ import annotations

import mmap
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from holdfast.integrations.adapters.megatron import TRIED, MegatronAdapter, _put_back
from holdfast.integrations.adapters.megatron_optimizers import _shards, casts, check_captured, layer_wise, parts
from holdfast.integrations.adapters.releases import warn_of_untried
from holdfast.smp_daemon.shared.budget import Budget
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.owners import Owners
from holdfast.smp_daemon.shared.populate import populate, prefer
from holdfast.smp_daemon.storage.pool import Deleted, SlotPool
from holdfast.snapshot.copy import devices
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.rng import own_first, placed
from tests.deadlines import DEADLINE_S


@pytest.mark.parametrize(
    ("was", "now", "count", "wanted"),
    [
        (0, 0, 1, {0: "a"}),
        (2, 2, 4, {2: "c", 0: "a", 1: "b", 3: "d"}),
        (2, 0, 4, {0: "c", 1: "a", 2: "b", 3: "d"}),
        (3, 0, 1, {0: "d"}),
        (1, 5, 8, {5: "b", 0: "a", 1: "c", 2: "d"}),
    ],
)
def test_what_a_device_drew_goes_on_on_the_device_that_a_rank_has_now(
    was: int, now: int, count: int, wanted: dict[int, str]
) -> None:
    states = "abcd" if count > 1 or was else "a"
    assert placed(own_first(states, was), now, count) == wanted


def test_ranks_that_drew_alike_have_the_same_generators_whatever_device_is_theirs() -> None:
    assert own_first("xoo", 0) == own_first("oxo", 1) == own_first("oox", 2) != own_first("xoo", 1)


def test_a_generator_that_graphs_know_is_put_back_in_place() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    drawn = torch.rand(3, generator=generator)
    assert _put_back(generator, state) is generator
    assert torch.equal(torch.rand(3, generator=generator), drawn)
    plain = _put_back(state.clone(), state)
    assert torch.equal(plain, state) and plain is not state


@pytest.mark.parametrize("graphed", [True, False])
def test_generators_of_the_tracker_draw_the_same_again(graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(("model", "expert"))}
    states = {name: each if graphed else each.get_state() for name, each in generators.items()}
    monkeypatch.setattr(tracker, "states_", states)

    def draw(name: str) -> list[float]:
        held = tracker.get_states()[name]
        generator = held if graphed else torch.Generator().set_state(held)
        drawn: list[float] = torch.rand(3, generator=generator).tolist()
        if not graphed:
            tracker.states_[name] = generator.get_state()
        return drawn

    adapter = MegatronAdapter.__new__(MegatronAdapter)
    Adapter.__init__(adapter, torch.nn.Linear(1, 1), [], None, None)
    draw("model")
    early = adapter.early()
    drawn = [draw(name) for name in ("model", "expert", "model")]
    for _ in range(2):  # restoring does not draw from the kept state
        adapter.rewinding(early)()
        assert [draw(name) for name in ("model", "expert", "model")] == drawn
    if graphed:
        assert all(tracker.get_states()[name] is each for name, each in generators.items())


def optimizer(main: torch.Tensor | None, weight: torch.Tensor) -> Any:
    """A distributed optimizer of Megatron, with the attributes that the adapter reads."""
    piece = SimpleNamespace(start=2, end=6)
    return SimpleNamespace(
        model_float16_groups=[[weight]],
        shard_float16_groups=[[weight.view(-1)[2:6]]],
        shard_fp32_from_float16_groups=[[main]],
        model_fp32_groups=[[]],
        shard_fp32_groups=[[]],
        _get_model_param_range_map=lambda of: {"param": piece},
    )


def test_where_there_is_no_main_parameter_the_shard_of_the_weight_is_state() -> None:
    weight = torch.arange(8.0).bfloat16()
    part = optimizer(None, weight)
    [(of, shard, block)] = _shards(part)
    assert of is weight and torch.equal(shard, weight[2:6])
    assert (block.whole, block.start) == ((8,), (2,))
    assert list(casts(part)) == []
    main = torch.arange(2.0, 6.0)
    [(_, shard, _)] = _shards(optimizer(main, weight))
    assert shard is main


def test_a_device_says_to_which_numa_node_it_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PCI", tmp_path)
    for place, node in {"0000:1a:00.0": "1", "0001:3b:00.0": "-1"}.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "numa_node").write_text(f"{node}\n")
    properties = {
        0: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0),
        1: SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0),
        2: SimpleNamespace(pci_domain_id=2, pci_bus_id=0, pci_device_id=0),
        3: SimpleNamespace(),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    asked = [{torch.device("cpu")}, *({torch.device("cuda", number)} for number in range(4))]
    assert [devices.numa_node(each) for each in asked] == [None, 1, None, None, None]
    assert devices.numa_node({torch.device("cpu"), torch.device("cuda", 0)}) == 1
    assert devices.numa_node({torch.device("cuda", 0), torch.device("cuda", 1)}) is None


def test_a_new_slot_lies_on_the_numa_node_that_its_trainer_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            prefer(page, 0)
        except OSError as error:
            pytest.skip(f"this kernel has no mbind: {error}")
    pool = SlotPool(tmp_path, "dp0", "safetensors", Budget(tmp_path, 0), Owners(tmp_path), Deleted())
    pool.near = 0
    slot = pool.create(8 * mmap.PAGESIZE)
    pool.view(slot)[:4] = b"here"
    assert not caplog.records
    pool.near = 777
    slot = pool.create(8 * mmap.PAGESIZE)
    assert pool.view(slot).nbytes == 8 * mmap.PAGESIZE
    assert "NUMA node 777" in caplog.text


def test_a_mapping_is_touched_while_other_threads_go_on() -> None:
    mapped = mmap.mmap(-1, 64 << 20)
    turns = 0
    over = threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    populate(mapped)
    after = turns
    over.set()
    thread.join(DEADLINE_S)
    assert after > before
    mapped.close()  # no reference to it is left
    populate(mmap.mmap(-1, mmap.PAGESIZE))


# ---------------------------------------------------------------------- what would come back wrong


def made(kind: type[Any], **attributes: Any) -> Any:
    """An instance of a class of Megatron, made without its constructor, which needs CUDA."""
    found = object.__new__(kind)
    vars(found).update(attributes)
    return found


def test_chains_of_chains_are_taken_apart() -> None:
    first, second, stub = made(FP32Optimizer), made(FP32Optimizer), made(FP32Optimizer, is_stub_optimizer=True)
    inner = made(LayerWiseDistributedOptimizer, chained_optimizers=[first, stub])
    optim = made(ChainedOptimizer, chained_optimizers=[inner, second])
    check_captured(optim, [])
    assert parts(optim) == [first, second]
    assert layer_wise(optim) == [inner]
    assert layer_wise(second) == []


def test_an_optimizer_that_nobody_has_tried_is_refused_by_name() -> None:
    class Unheard(MegatronOptimizer):  # type: ignore[misc]
        """Stands for a class of a later release."""

    Unheard.__abstractmethods__ = frozenset()
    with pytest.raises(ConfigError, match=r"Unheard .*use Dist"):
        check_captured(made(Unheard), [])
    inside = made(ChainedOptimizer, chained_optimizers=[made(FP32Optimizer), made(Unheard)])
    with pytest.raises(ConfigError, match="Unheard is not"):
        check_captured(made(LayerWiseDistributedOptimizer, chained_optimizers=[inside]), [])


def test_a_chain_that_nobody_has_tried_is_refused_by_name() -> None:
    class Woven(ChainedOptimizer):  # type: ignore[misc]
        """Stands for a class of a later release."""

    with pytest.raises(ConfigError, match=r"Woven .*ChainedOptimizer, Layer"):
        check_captured(made(Woven, chained_optimizers=[]), [])


@pytest.mark.parametrize("offloads", [True, False])
def test_state_that_leaves_the_device_between_steps_is_refused_by_name(offloads: bool) -> None:
    """The option is one of later releases."""
    part = made(FP32Optimizer, config=SimpleNamespace(offload_optimizer_states=offloads))
    chain = made(ChainedOptimizer, chained_optimizers=[part])
    refused: AbstractContextManager[object] = (
        pytest.raises(ConfigError, match="--offload-optimizer-states") if offloads else nullcontext()
    )
    with refused:
        check_captured(chain, [])


def test_megatrons_own_fsdp_is_refused() -> None:
    chunk = SimpleNamespace(ddp_config=DistributedDataParallelConfig(use_megatron_fsdp=True))
    with pytest.raises(ConfigError, match=r"Megatron-FSDP.*--use-megatron-fsdp"):
        check_captured(made(ChainedOptimizer, chained_optimizers=[]), [chunk])


@pytest.mark.parametrize(("version", "said"), [("0.16.1", False), ("0.19.2", False), ("0.20.0rc1", True)])
def test_a_release_that_nobody_has_tried_is_said(version: str, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_untried("megatron-core", version, TRIED)
    assert ("was never tried" in caplog.text) is said
