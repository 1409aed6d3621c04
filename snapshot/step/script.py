"""What a script keeps beside what the hook was given, and what of it feeds training: one rank's view.

State that is made once in a process, and drawn from, is restored where that can be done without a word from the user;
the rest is named when it is first seen. Used by the training thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.carried import CarriedVariables, lines_for
from holdfast.snapshot.step.flow import Carries
from holdfast.snapshot.step.iterators import Iterators
from holdfast.snapshot.step.variables import ChangingVariables, Variables

READ_ON = (
    "the iterator of a DataLoader that was made at %s is read on from step to step, and a restart begins it anew, at "
    "other batches"
)
EVALUATED_ON = (
    "evaluations read on from step to step in the iterator of a DataLoader that was made at %s. A restart begins it "
    "anew, so that it draws from torch's random generator at other times, and training goes on with other random "
    "numbers: make the iterator in each evaluation, or give that loader generator=torch.Generator()"
)
CHANGES = (
    "%s: in variables of the script, changed by steps, and not captured. If anything reads later what a step left "
    "there, a restart gives other results: name it before entering, as by %s"
)
CARRIED = (
    "%s: the script carries from turn to turn, and its steps depend on that, but it is not captured: a restart begins "
    "it anew, and gives other results. Begin a count of steps at snap.step; keep other values in a dict or in "
    "attributes, and name these before entering, as by %s"
)
READS_ON = (
    "%s: an iterator that steps read on from, and that a restart begins anew: give the hook a function that makes it, "
    "and read on from what you get, as by %s"
)
COUNTS = (
    "the loop at line %s counts from its beginning again after a restart, so that it makes more turns than it should: "
    "write `for epoch in range(snap.epoch, epochs)` around snap.data, or `for step in snap.steps(n)`"
)
NUMBERED = (
    "steps depend on the number that enumerate() gives a batch, and it begins at 0 again when a restart goes on in the "
    "middle of a pass: write `for i, batch in snap.data(loader).enumerate():`, which goes on counting"
)
PASSES = (
    "a loop begins at snap.epoch, which counts passes over data that is read by `for batch in snap.data(loader)`, and "
    "this loop reads none so: after a restart it would be 0. Count steps: `for step in snap.steps(n)`"
)
CHANGED = (
    "parameters were changed between entering and the first step. A restart would change what it has restored, and be "
    "refused: do that before entering, or only `if snap.step == 0:`"
)
FIX = "go through data by `for batch in snap.data(loader)`"

log = get_log(__name__)


class Script:
    """
    Args:
        held: `tree` of the earlier run; empty if there was none.
        modules: the models.
        is_watched: whether the loop is the user's own; a trainer's restores what it keeps by itself.
        is_plain: whether the earlier run's loop did not say where its steps begin.

    Attributes:
        asked: whether the script has asked for its step or epoch: only then can it find its place in its data by
            itself.
        asked_for_step: whether it has asked for its step.
    """

    def __init__(self, held: Tree, modules: Sequence[torch.nn.Module], *, is_watched: bool, is_plain: bool) -> None:
        self.asked = self.asked_for_step = False
        self._modules = modules
        self._is_watched = is_watched
        self._is_plain = is_plain
        self._iterators = Iterators(held.get("workers", {}), self._is_training)
        self._variables = Variables(held.get("variables", {}))
        self._changing: ChangingVariables | None = None
        self._carried: CarriedVariables | None = None

    def remove(self) -> None:
        """Stop watching."""
        self._iterators.remove()

    def tree(self) -> Tree:
        """What it keeps, as plain values, as it was when it was last noted."""
        return {"workers": self._iterators.tree(), "variables": self._variables.tree()}

    def note(self) -> None:
        """A step has ended: note what belongs to the boundary."""
        self._variables.note()

    def drawn_from(self) -> Tree:
        """The states of the generators in its variables."""
        return self._variables.states()

    def entered(self, but: Collection[int], adapter: Adapter) -> None:
        """The hook is entered. A plain loop draws for its next step before that step begins, so its generators are put
        back now.

        Args:
            but: ids of generators that are captured already.
            adapter: what is captured of its variables.
        """
        if self._is_watched:
            self._changing = ChangingVariables(adapter)
            self._carried = CarriedVariables(adapter)
            self._variables.look(but)
            if self._is_plain:
                self._put_back()

    def begins(self, but: Collection[int]) -> None:
        """A loop that says where its steps begin is about to begin its first one. `but`: as for `entered`."""
        if self._is_watched:
            self._variables.look(but)
            self._put_back()

    def turn_begins(self) -> None:
        """A step of a plain loop is about to begin."""
        self._variables.turn_begins()

    def step_begins(self, *, is_new: bool, declared: bool, reads: bool) -> None:
        """A step begins. Arguments and errors: as for `check`."""
        self.check(is_new=is_new, declared=declared, reads=reads)
        self._iterators.begin()
        if self._carried is not None:
            self._carried.step_begins()
        if self._changing is not None and (found := self._changing.look()):
            log.warning(CHANGES, some([name for name, _ in found]), some([line for _, line in found]))

    def check(self, *, is_new: bool, declared: bool, reads: bool) -> None:
        """A step begins, or is about to end: name what a restart would begin anew, as soon as it is seen.

        Args:
            is_new: whether the job is in its first turns.
            declared: whether the loop says where its steps begin.
            reads: whether it reads data by `snap.data`.

        Raises:
            ConfigError: the job is new, and the loop cannot be bringing such an iterator to its place by itself; or its
                steps depend on the numbers of batches, which begin anew, or on a number of passes that nobody counts.
        """
        if self._carried is not None and (found := self._carried.look()) is not None and not found.skips:
            self._name(found, is_new=is_new, reads=reads)
        for kept in self._iterators.kept() if self._is_watched else ():
            if not kept.trains:
                log.warning(EVALUATED_ON, kept.where)
            elif is_new and declared and kept.has_places and not self.asked:
                raise ConfigError(f"{READ_ON % kept.where}: {FIX}")
            else:
                log.warning(f"{READ_ON}, unless the loop reads up to its place by itself: {FIX}", kept.where)

    def _name(self, found: Carries, *, is_new: bool, reads: bool) -> None:
        """Raises `ConfigError`, see `check`."""
        for wrong in [*[NUMBERED] * found.numbered, *[PASSES] * (found.passes and not reads)]:
            if is_new:
                raise ConfigError(wrong)
            log.warning("%s", wrong)
        if found.counts:
            log.warning(COUNTS, some([str(line) for line in sorted(found.counts)]))
        if found.carried or found.updated:
            names = [f"{name} (line {line})" for name, line in (found.carried | found.updated).items()]
            log.warning(CARRIED, some(names), some(lines_for(found)))
        if found.iterators:
            names = [f"{name} (line {line})" for name, line in found.iterators.items()]
            lines = [
                f'{path} = iter(snap.data(lambda: ..., name="{path.rpartition(".")[2]}"))' for path in found.iterators
            ]
            log.warning(READS_ON, some(names), some(lines))

    def parameters_changed(self) -> None:
        """The script has changed parameters between entering and the first step of a new job."""
        if self._is_watched and not self.asked_for_step:
            log.warning(CHANGED)

    def _put_back(self) -> None:
        if gone := self._variables.put_back():
            log.warning(
                "%s: random generators that the script had in variables as its first step began, and has not now: make "
                "them before that step, or what is drawn from them is other than before",
                some(gone),
            )

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and (not self._modules or any(each.training for each in self._modules))
