"""Samples of a step's inputs, to detect a different batch after a restart.

A batch that was read before the hook was entered is not captured, so a restart may read another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.copy.tensors import is_dense, local
from holdfast.snapshot.state.digests import thin
from holdfast.snapshot.state.walk import tensors_in

SAMPLED = 64
"""About how many elements of a tensor are sampled."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A sample of some tensors.

    Attributes:
        shapes: data types and shapes of the whole tensors.
        elements: returns the sampled elements of each tensor; see `CopyEngine.fetch`.
    """

    shapes: tuple[str, ...]
    elements: Callable[[], list[NDArray[np.uint8]]]

    def digest(self) -> str:
        """A digest of the sample; empty if there was nothing to sample. Blocks until the elements have arrived. May be
        called from any thread."""
        if not self.shapes:
            return ""
        state = hashlib.blake2b(repr(self.shapes).encode(), digest_size=8)
        for found in self.elements():
            state.update(found.tobytes())
        return state.hexdigest()


def sample_inputs(engine: CopyEngine, given: Any) -> Inputs:
    """A sample of the tensors in `given`, which may be containers of any depth.

    Tensors that require gradients are left out: they were computed, for example by an earlier pipeline stage. Called
    by the training thread; does not wait for a GPU.
    """
    untransformed = map(_untransformed, tensors_in(given))
    tensors = [local(tensor).detach() for tensor in untransformed if not tensor.requires_grad]
    dense = [tensor for tensor in tensors if is_dense(tensor)]
    elements = engine.fetch([thinned(tensor) for tensor in dense]) if dense else list
    return Inputs(tuple(f"{t.dtype} {list(t.shape)}" for t in dense), elements)


def thinned(tensor: torch.Tensor) -> torch.Tensor:
    """A dense one-dimensional copy of about `SAMPLED` elements, spread evenly."""
    rows = tensor[thin(tensor.shape, SAMPLED)]
    return rows.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)


def _untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of torch.func, such as `vmap`, have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
