"""What the sweep over optimizers says of lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.optimizers.__main__ import judge
from tools.optimizers.lives import KILLS, STEPS, Lived, Lives

STATES = {step: f"state {step}" for step in range(STEPS + 1)}
ALONE = Lived(STATES, [], "", -1, ended=True)


def lives(*, wrong: int = -1, said: str = "", error: str = "", at: int = -1, anew: bool = False) -> list[Lived]:
    ends = [*KILLS, STEPS]
    begins = [0, *(0 if anew else end for end in KILLS)]
    made = [
        ALONE._replace(steps={i: STATES[i] + "!" * (i == wrong) for i in range(begin, end + 1)}, said=[(0, said)])
        for begin, end in zip(begins, ends, strict=True)
    ]
    made[0] = made[0]._replace(error=error, step_of_error=at)
    return [ALONE, *made]


def refused(first: int) -> Lived:
    """A second life that is refused as it begins its second step. `first`: the step that it began with."""
    return ALONE._replace(steps={first: STATES[first]}, error="ConfigError: no step", step_of_error=first + 1)


@pytest.mark.parametrize(
    ("lived", "outcome"),
    [
        (lives(), "exact"),
        (lives(said="it is not captured"), "exact"),
        (lives(wrong=7), "silent"),
        (lives(anew=True), "silent"),
        (lives(wrong=7, said="something else"), "silent"),
        (lives(wrong=7, said="its lock is not captured"), "named"),
        (lives(error="ConfigError: closure", at=1), "named"),
        (lives(error="ConfigError: closure", at=8), "refused late"),
        ([ALONE, ALONE._replace(steps={0: STATES[0]}), refused(0)], "named"),
        ([ALONE, ALONE._replace(steps={0: STATES[0]}), refused(1)], "refused late"),
        (lives(error="KeyError: 'lr'", at=1), "raw error"),
        ([ALONE._replace(error="RuntimeError: no GPU")], "not here"),
    ],
)
def test_an_outcome_is_judged(lived: list[Lived], outcome: str) -> None:
    assert judge(lived)[0] == outcome


class Forgetful(torch.optim.SGD):
    """Keeps what nothing can find: a count in a closure."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self._factor = decreasing()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self._factor()
        for group in self.param_groups:
            group["lr"] = 0.01 * factor
        super().step(closure)


def decreasing() -> Callable[[], float]:
    count = 0

    def factor() -> float:
        nonlocal count
        count += 1
        return 1 / count

    return factor


def test_real_lives_tell_exact_from_silent() -> None:
    running = Lives()
    try:
        assert judge(running.run(torch.optim.Adam))[0] == "exact"
        assert judge(running.run(Forgetful))[0] == "silent"
    finally:
        running.close()
