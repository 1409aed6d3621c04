"""A sample tells apart the inputs of the first forwards of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from holdfast.snapshot.copy.engines import CpuEngine
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.hidden import sample_of
from holdfast.snapshot.state.inputs import SAMPLED, sample_inputs


def digest(*given: Any) -> str:
    return sample_inputs(CpuEngine(), given).digest()


def tokens() -> torch.Tensor:
    return torch.arange(4 * 1024).reshape(4, 1024)


@dataclass
class Batch:
    tokens: torch.Tensor
    size: int = 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tokens(), tokens() + 1),
        (tokens(), tokens().reshape(1024, 4)),
        (tokens(), tokens().int()),
        (tokens().float(), -tokens().float()),
        (tokens(), tokens().flip(1)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.zeros(0, 3), torch.zeros(0, 4)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j),
    ],
)
def test_other_tensors_have_another_digest(one: torch.Tensor, other: torch.Tensor) -> None:
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(other)
    assert digest(tokens(), one) != digest(tokens(), other)


def test_views_are_what_they_show() -> None:
    wide = torch.randn(6, 8)
    for view in (wide.t(), wide[::2, 1:], wide[0].expand(5, 8), torch.randn(3, dtype=torch.complex64).conj()):
        assert digest(view) == digest(view.clone().contiguous())


class Unsliced(torch.Tensor):
    """A batch that may be taken apart in its own way only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            raise ValueError("sliced")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_a_subclass_of_tensors_is_sampled_as_a_tensor() -> None:
    batch = torch.arange(12.0).reshape(3, 4)
    for view in (batch, batch.t()):
        own = view.as_subclass(Unsliced)
        with pytest.raises(ValueError, match="sliced"):
            own[:1]
        assert elements_of(own, SAMPLED) == elements_of(view, SAMPLED)


def test_tensors_are_found_in_containers() -> None:
    batch = tokens()
    assert digest([{"x": (batch, 3)}], {"mask": None}) == digest(Batch(batch)) == digest(batch)
    assert digest((None, [3, "text"], {})) == ""


def test_what_was_computed_is_no_batch() -> None:
    activations = torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert digest([activations]) == ""
    assert digest(activations, tokens()) == digest(tokens())


def test_a_sample_of_much_is_little() -> None:
    for shape in ((10**6,), (1000, 1000), (100, 100, 100), (2, 3, 4, 5, 6, 7), (1, 10**6)):
        inputs = sample_inputs(CpuEngine(), torch.zeros(shape))
        assert 4 * 8 <= len(inputs.elements()[0]) <= 4 * 4 * SAMPLED


def test_the_sample_stays_what_it_was() -> None:
    batch = tokens()
    inputs = sample_inputs(CpuEngine(), batch)
    before = digest(batch)
    batch.zero_()
    assert inputs.digest() == before != digest(batch)


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_was_looked_at_may_still_be_resized(size: int) -> None:
    digested, sampled, fetched = torch.ones(size), torch.ones(size), torch.ones(size)
    elements_of(digested)
    sample_of(sampled)
    CpuEngine().fetch([fetched])()
    for tensor in (digested, sampled, fetched):
        assert tensor.resize_(2 * size).shape == (2 * size,)


def test_a_transform_of_torch_func_changes_nothing_of_a_sample() -> None:
    found: list[str] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        with temporarily_clear_interpreter_stack():
            found.append(digest(x))
        return x.sum()

    given = tokens().float()
    torch.func.vmap(torch.func.grad(look))(given)
    assert found == [digest(given)]
