"""The samples, their order and the gradient are the same for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.batches import GlobalBatches, portion
from holdfast.smp_daemon.shared.errors import ConfigError


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_batches_go_on_from_wherever_they_were(samples: int, batch: int, before: int, after: int) -> None:
    one = GlobalBatches(samples, batch, seed=3)
    given_out = [next(one) for _ in range(before + after)]
    other = GlobalBatches(samples, batch, seed=3)
    for _ in range(before):
        next(other)
    state = other.state_dict()
    third = GlobalBatches(samples, batch, seed=3)
    third.load_state_dict(state)
    assert [next(third) for _ in range(after)] == given_out[before:]
    flat = [number for each in given_out for number in each]
    for start in range(0, len(flat) - samples + 1, samples):
        assert sorted(flat[start : start + samples]) == list(range(samples)), "each sample once a round"


def test_orders_differ_by_round_and_seed() -> None:
    batches = GlobalBatches(50, 50, seed=1)
    assert len({tuple(next(batches)), tuple(next(batches)), tuple(next(GlobalBatches(50, 50, seed=2)))}) == 3


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 12) | st.none())
def test_portions_are_the_batch_in_order_and_weigh_the_same(ranks: int, size: int, largest: int | None) -> None:
    batch = list(range(100, 100 + size))
    try:
        parts = [portion(batch, ranks, rank, largest) for rank in range(ranks)]
    except ConfigError as error:
        assert "too few" in str(error)
        return
    assert [number for part in parts for numbers, _ in part for number in numbers] == batch
    lengths = [len(numbers) for part in parts for numbers, _ in part]
    assert len({len(part) for part in parts}) == 1, "as many collectives on every rank"
    assert max(lengths) - min(lengths) <= 1 and min(lengths) > 0 and max(lengths) <= (largest or size)
    assert sum(weight for part in parts for _, weight in part) / ranks == pytest.approx(1)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_averaged_over_ranks_the_gradient_is_that_of_the_whole_batch(ranks: int) -> None:
    data = torch.randn(22, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)

    def gradient(rank: int) -> torch.Tensor:
        total = torch.zeros_like(weight)
        for numbers, factor in portion(range(22), ranks, rank, largest=4):
            [each] = torch.autograd.grad((data[numbers] @ weight).square().mean() * factor, weight)
            total += each
        return total

    [whole] = torch.autograd.grad((data @ weight).square().mean(), weight)
    averaged = torch.stack([gradient(rank) for rank in range(ranks)]).mean(0)
    torch.testing.assert_close(averaged, whole)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        GlobalBatches(0, 4)
    with pytest.raises(ConfigError, match="ranks count from 0"):
        portion([1, 2], 2, 2)
    with pytest.raises(ConfigError, match=r"2 samples .* 3 ranks"):
        portion([1, 2], 3, 0)
