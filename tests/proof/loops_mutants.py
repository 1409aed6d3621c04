"""``python -m tests.proof.loops_mutants``: builds that are broken on purpose, each with a training loop that it spoils.

Prints a JSON object: for each mutant, the outcome of its loop in the intact build and in the broken one, with reasons.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from typing import Any

from holdfast.snapshot import loop
from holdfast.snapshot.copy.witness import Witness
from holdfast.snapshot.first_turns import FirstTurns
from holdfast.snapshot.rehearsal import Rehearsal
from holdfast.snapshot.resume.comparison import Resumed
from holdfast.snapshot.script.carried import CarriedVariables
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.optimizers import OptimizerState
from holdfast.snapshot.step.boundary import Boundary
from tests.proof.loops.script import End, Loop, Twist
from tests.proof.loops.trial import Trials


def _ignore(*arguments: Any, **options: Any) -> None:
    """Do nothing."""


def _believe(self: loop.Loop, *arguments: Any) -> None:
    """Instead of `Loop._refuse`: seal what was taken."""
    if self._copy is not None:
        self._copy.confirm()


def _blind(self: Boundary, module: Any, *given: Any) -> None:
    """A replacement of `Boundary._forward` by which every forward begins a step, even in an evaluation."""
    self._forwards += 1
    self._listener.on_forward(self._forwards, given)
    self._running.append(self._forwards)


WITHIN = (End(4, "backward", "kill"),)

MUTANTS: dict[str, tuple[list[tuple[Any, str, Any]], Loop]] = {
    "generators are not restored": (
        [
            (rng, "restore", _ignore),
            (Resumed, "check", _ignore),
            (FirstTurns, "check_inputs", _ignore),
        ],
        Loop(1, model="dropout", form="begin", ends=WITHIN),
    ),
    "what changes during a copy is not noticed": (
        [(Witness, "check", _ignore)],
        Loop(2, optimizer="noted", form="begin", held="backward", waits="last", ends=WITHIN),
    ),
    "the first step is not compared with what was restored": (
        [(Resumed, "check", _ignore), (Rehearsal, "moved", lambda _: [])],
        Loop(3, twists=(Twist("schedule: top"),), ends=WITHIN),
    ),
    "an evaluation begins a step": (
        [
            (Boundary, "_forward", _blind),
            (loop.Loop, "_refuse", _believe),
            (CarriedVariables, "look", _ignore),
            (FirstTurns, "check_inputs", _ignore),
        ],
        Loop(
            4,
            data="indexed",
            twists=(Twist("average: tracked"), Twist("evaluation: grad, eval mode", 1)),
            tail=("evaluation", "average"),
            ends=WITHIN,
        ),
    ),
    "options of optimizers are not restored": (
        [(OptimizerState, "load", _ignore)],
        Loop(5, form="steps", twists=(Twist("schedule: end"),), ends=WITHIN),
    ),
    "a batch that was read ahead is not noticed": (
        [(FirstTurns, "check_inputs", _ignore)],
        Loop(7, data="prefetched, before entering", form="steps", ends=WITHIN),
    ),
    "buffers are not restored": (
        [("holdfast.integrations.adapters.torch_native", "buffers", lambda module, prefix: iter(()))],
        Loop(6, model="batchnorm", form="begin", ends=WITHIN),
    ),
}
"""By name: replacements as (owner, attribute, new value), and a loop that they spoil."""


def main() -> None:
    """Run all mutants and print the outcomes."""
    with Trials() as trials:
        found = {
            name: [_verdict(trials, loop, []), _verdict(trials, loop, new)] for name, (new, loop) in MUTANTS.items()
        }
    print(json.dumps(found))


def _verdict(trials: Trials, loop: Loop, changes: list[tuple[Any, str, Any]]) -> list[str]:
    """The outcome of a loop and its reason. Runs in a forked process, because the changes are not undone."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for owner, attribute, new in changes:
                setattr(importlib.import_module(owner) if isinstance(owner, str) else owner, attribute, new)
            verdict = trials.run(loop)
            os.write(write_end, json.dumps([verdict.outcome.value, verdict.why]).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return list(json.loads(text or '["none", "it said nothing"]'))


if __name__ == "__main__":
    main()
