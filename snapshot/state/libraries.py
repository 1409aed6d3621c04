"""Objects of libraries that a script keeps, such as environments, running means and buffers of experience.

What an object of the user's own class carries from step to step, its source tells, or its attributes do. A library's
source is not read, and its objects lead to many others. So only what such an object holds by itself is looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.snapshot.state.walk import (
    LIBRARIES,
    LONGEST,
    is_captured_as_such,
    is_ours,
    is_users_own,
    package_of,
    walk,
)

READ_THROUGH = (DataLoader, Dataset, Sampler)
"""Types that data is read through: the hook keeps their place in the data."""

MOST_OPENED = 100
"""How many containers are opened at most in one object."""


def is_environment(value: Any) -> bool:
    """Whether an object is an environment of a library, as gymnasium's are. Those of the user's own are looked into."""
    acts = all(callable(getattr(type(value), name, None)) for name in ("reset", "step"))
    return acts and not (is_users_own(value) or is_captured_as_such(value))


def has_state(value: Any) -> bool:
    """Whether an object, that is neither a model nor an optimizer, says that it keeps state."""
    return hasattr(type(value), "load_state_dict") and not is_captured_as_such(value)


def stands_alone(value: Any) -> bool:
    """Whether an object, such as an environment or a buffer of experience, has nothing that is kept in another way.

    An optimizer of the user's own has parameters: pickled with it, they would come back as copies that no model has.
    """
    held = (each for _, each, _ in walk([("", value)], lambda each: each is value, longest=LONGEST, most=MOST_OPENED))
    kept = (*READ_THROUGH, torch.nn.Parameter)
    return not any(is_captured_as_such(each) or isinstance(each, kept) or is_ours(each) for each in held)


def kept_by_library(path: str, value: Any) -> list[tuple[str, Any, Any]]:
    """What an object of a library holds, as `walk` gives it, if tensors, arrays or numpy's numbers are among that; one
    that holds Python's numbers only is taken for a meter. An environment is told of where a turn acts in it."""
    if not hasattr(value, "__dict__") or is_users_own(value) or package_of(type(value).__module__) in LIBRARIES:
        return []
    if has_state(value) or is_environment(value) or not stands_alone(value):
        return []
    parts = list(walk([(path, value)], lambda each: each is value, longest=LONGEST, most=MOST_OPENED))[1:]
    is_data = any(isinstance(each, torch.Tensor | np.ndarray | np.generic) for _, each, _ in parts)
    return parts if is_data else []
