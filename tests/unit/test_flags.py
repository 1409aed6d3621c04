"""Flags that a training loop toggles: what a snapshot keeps of them, and what a restart puts back."""

from __future__ import annotations

import torch

from holdfast.snapshot.state.adapter import Flags


class Words(torch.nn.Module):
    """A model with an embedding of sparse gradients, and a part that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5, 2, sparse=True)
        self.head = torch.nn.Linear(2, 1)
        self.unused = torch.nn.Linear(2, 1)


def trained() -> Words:
    model = Words()
    model.head(model.words(torch.tensor([1, 3]))).sum().backward()
    return model


def kinds(model: Words) -> dict[str, torch.layout | None]:
    return {name: None if p.grad is None else p.grad.layout for name, p in model.named_parameters()}


def test_a_gradient_comes_back_as_zeros_of_its_kind() -> None:
    before = trained()
    flags = Flags([before])
    after = Words()
    Flags([after]).load(flags.names(), flags.state(), flags.gradients())
    assert kinds(after) == kinds(before)
    assert kinds(after)["words.weight"] is torch.sparse_coo
    assert all(not p.grad.to_dense().any() for p in after.parameters() if p.grad is not None)


def test_a_sparse_optimizer_goes_on_as_if_the_gradient_had_been_zeroed() -> None:
    before, after = trained(), Words()
    after.load_state_dict(before.state_dict())
    flags = Flags([before])
    Flags([after]).load(flags.names(), flags.state(), flags.gradients())
    for model in (before, after):
        optimizer = torch.optim.SparseAdam([model.words.weight])
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):  # the first step counts, although the words have no loss in it
            optimizer.step()  # type: ignore[no-untyped-call]
            model.words(torch.tensor([2])).sum().backward()
    assert torch.equal(before.words.weight, after.words.weight)


def test_without_sparse_gradients_there_is_one_bit_for_each_parameter() -> None:
    model = trained()
    model.words.weight.grad = None
    assert len(Flags([model]).gradients()) == 1
    after = trained()
    Flags([after]).load(Flags([model]).names(), Flags([model]).state(), Flags([model]).gradients())
    assert kinds(after) == kinds(model)


def test_what_requires_gradients_and_what_trains_comes_back() -> None:
    before = Words()
    before.words.weight.requires_grad_(False)
    before.unused.eval()
    after = Words()
    Flags([after]).load(Flags([before]).names(), Flags([before]).state(), Flags([before]).gradients())
    assert not after.words.weight.requires_grad
    assert [part.training for part in after.modules()] == [part.training for part in before.modules()]


def test_a_gradient_that_is_there_is_zeroed_where_it_is() -> None:
    """DDP's gradients are views of its buckets, and new memory takes longer to touch than to fill."""
    before, after = trained(), trained()
    held = after.head.weight.grad
    after.unused.weight.grad = torch.ones(1, 2)
    flags = Flags([before])
    Flags([after]).load(flags.names(), flags.state(), flags.gradients())
    assert held is not None and after.head.weight.grad is held and not held.any()
    assert kinds(after) == kinds(before)


def test_a_gradient_with_other_strides_or_a_history_is_replaced() -> None:
    """A kernel may add up in another order for other strides; a history leads to tensors of another step."""
    before, after = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    for each in before.parameters():
        each.grad = torch.ones_like(each)
    after.weight.grad = torch.ones(3, 3).t()
    after.bias.grad = torch.ones(3, requires_grad=True) * 2
    flags = Flags([before])
    Flags([after]).load(flags.names(), flags.state(), flags.gradients())
    for each in after.parameters():
        assert each.grad is not None and not each.grad.any() and not each.grad.requires_grad
        assert each.grad.stride() == each.stride()
