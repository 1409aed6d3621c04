"""``python -m tests.loops_mutants [NAME]``: loops in a build that is broken on purpose.

A process of its own, as all that it changes is inherited by the lives that it forks. Prints a JSON object: what came of
the loop that this mutant spoils; without a name, of the loops of all mutants in a build that is whole.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from chaos.loops.script import End, Loop, Twist
from chaos.loops.trial import Trials
from snapshot import rng
from snapshot.boundary import Boundary
from snapshot.capture import Capture
from snapshot.optimizers import OptimizerState
from snapshot.resumed import Resumed
from snapshot.witness import Witness


def _ignore(*arguments: Any, **options: Any) -> None:
    """Do nothing."""


def _blind(self: Boundary, module: Any) -> None:
    """Every forward begins a step, an evaluation's too."""
    self._forwards += 1
    self._listener.on_forward(self._forwards)
    self._running.append(self._forwards)


WITHIN = (End(4, "backward", "kill"),)

MUTANTS: dict[str, tuple[list[tuple[Any, str, Any]], Loop]] = {
    "generators are not restored": (
        [(rng, "restore", _ignore), (Resumed, "check", _ignore)],
        Loop(1, model="dropout", form="begin", ends=WITHIN),
    ),
    "what changes during a copy is not noticed": (
        [(Witness, "check", _ignore)],
        Loop(2, optimizer="noted", form="begin", held="backward", waits="last", ends=WITHIN),
    ),
    "the first step is not compared with what was restored": (
        [(Resumed, "check", _ignore)],
        Loop(3, twists=(Twist("schedule: top"),), ends=WITHIN),
    ),
    "an evaluation begins a step": (
        [(Boundary, "_forward", _blind), (Capture, "changed", lambda *_: (False, False))],
        Loop(
            4,
            twists=(Twist("average: tracked"), Twist("evaluation: grad, eval mode", 1)),
            tail=("evaluation", "average"),
            ends=WITHIN,
        ),
    ),
    "options of optimizers are not restored": (
        [(OptimizerState, "load", _ignore)],
        Loop(5, form="steps", twists=(Twist("schedule: end"),), ends=WITHIN),
    ),
    "buffers are not restored": (
        [("integrations.torch_native", "buffers", lambda module, prefix: iter(()))],
        Loop(6, model="batchnorm", form="begin", ends=WITHIN),
    ),
}
"""By name: what is replaced by what, and a loop that this spoils."""


def main() -> None:
    """Patch, run, print."""
    chosen = sys.argv[1:]
    for name in chosen:
        for owner, attribute, new in MUTANTS[name][0]:
            setattr(importlib.import_module(owner) if isinstance(owner, str) else owner, attribute, new)
    with Trials() as trials:
        verdicts = {name: trials.run(MUTANTS[name][1]) for name in chosen or MUTANTS}
    print(json.dumps({name: [verdict.outcome.value, verdict.why] for name, verdict in verdicts.items()}))


if __name__ == "__main__":
    main()
