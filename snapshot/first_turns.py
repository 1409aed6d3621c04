"""What is checked of a script and its loop: in the first turns that the loop is plain, and goes on from what was
restored; and, as soon as it is seen, what a restart would begin anew.

State that the script makes once in a process, and draws from, is restored where that can be done without a word from
the user; the rest is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.progress import RankProgress
from holdfast.snapshot.rehearsal import Rehearsal
from holdfast.snapshot.resume.comparison import Resumed, refuse
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.script.carried import CarriedVariables, lines_for, lines_for_iterators
from holdfast.snapshot.script.flow import Carries
from holdfast.snapshot.script.iterators import Iterators
from holdfast.snapshot.script.syntax import shown
from holdfast.snapshot.script.variables import ChangingVariables, Variables, feeding
from holdfast.snapshot.state.adapter import Adapter, entered
from holdfast.snapshot.state.inputs import Inputs
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.step.gradients import STEPS_NOTED, Ahead, Forgotten, holding
from holdfast.snapshot.step.position import Position
from holdfast.snapshot.step.turns import FIRST_TURNS, Event
from holdfast.snapshot.step.unstepped import Unstepped

AMOUNTS = (
    "%d numbers were drawn from torch's random generator before the first step, and %d before the next. If something "
    "draws after optim.step(), such as noise on the weights, a restart does not draw it again, and is refused: use "
    "`snap.steps(n)`, or call `snap.begin()` at the top of the loop"
)

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
    "attributes, and name these before entering, as by %s. `holdfast audit` tells whether that is all"
)
READS_ON = (
    "%s: steps read on from it, and a restart begins it anew: give the hook the loader, or a function that makes such "
    "an iterator, with whatever fills it, and read on from what you get, as by %s"
)
FEEDING = (
    "threads put something into a queue beside the loop (%s). If steps are fed from it, a restart begins it anew, at "
    "other batches: start the thread in a function that gives the batches of a pass, and go through it by "
    "`for batch in snap.data(function)`"
)
COUNTS = (
    "the loop at %s counts from its beginning again after a restart, so that it makes more turns than it should: "
    "write `for epoch in range(snap.epoch, epochs)` around snap.data, or `for step in snap.steps(n)`"
)
WITHIN = (
    "a turn of snap.steps reads batches after an optimizer has stepped, and each begins a step in the middle of the "
    "turn: a restart may go on there, though the turn begins at its top. Read all batches of a turn before its first "
    "optimizer steps, as by `batches = [next(data) for _ in range(n)]`"
)
AHEAD = (
    "a turn runs forward before it reads the batch that begins its step, as where a loop reads each batch while it "
    "trains on the one before, so a restart would go on in the middle of a turn: read a turn's batches before its "
    "first forward; or call `snap.begin()` at the top of the loop, and track what was read ahead; or read ahead in the "
    "source, as by `snap.data(function, ahead=1)`"
)
AGAIN = (
    "what %s does at the top of a pass is done once more when a restart goes on in the middle of that pass, which "
    "is refused then, or fails: do it at the end of the pass before"
)
NUMBERED = (
    "steps depend on the number that enumerate() gives a batch, on what zip() puts beside it, or on how many islice() "
    "takes, and that begins anew when a restart goes on in the middle of a pass: write `for i, batch in "
    "snap.data(loader).enumerate():`, which goes on counting, and look up by i what belongs to a batch, or end the "
    "pass by it; if data is read through something else, count from there, with data = snap.data(loader): "
    "`enumerate(..., data.position)`, `islice(..., n - data.position)`"
)
PASSES = (
    "a loop begins at snap.epoch, which counts passes over data that is read by `for batch in snap.data(loader)`, and "
    "this loop reads none so: after a restart it would be 0. Count steps: `for step in snap.steps(n)`"
)
UNCOUNTED = (
    "the script has asked for neither snap.epoch nor snap.step. If it, or a library that it uses, counts passes over "
    "data or steps by itself, a restart begins that count anew, and makes more of them than it should: write "
    '`for epoch in range(snap.epoch, epochs)`, or give what counts, as by extra={"trainer": trainer}'
)
JOINED = (
    "torch's Join is entered, with which ranks may make different numbers of steps. Here each makes as many as the "
    "others: one that ends earlier lets them wait for it, up to the timeout of the process group. Give all ranks the "
    "same number of batches"
)
CHANGED = (
    "parameters were changed between entering and the first step. A restart would change what it has restored, and be "
    "refused: do that before entering, or only `if snap.step == 0:`"
)
SCRIPTED = (
    "%s: modules of TorchScript, which computes in another way once it has run a few times in a process, so that steps "
    "after a restart may differ in their last bits: start the job with PYTORCH_JIT=0"
)
TOGETHER = (
    "another hook is entered already. After a restart each goes on from a snapshot of its own, which may be of another "
    "step: if one loop trains what both were given, give it all to one hook, InMemorySnapshot([model, other], [optim, "
    "other_optim])"
)
UNKNOWN_INPUTS = (
    "the snapshot of step %d was sealed before the inputs of that step's first forward were known (by `drain`, at the "
    "end of a loop, or because that forward came late): nobody will notice if it is given another batch now. If "
    "batches are read ahead, go through data by `snap.data`"
)
ANOTHER_BATCH = (
    "the first step after the restore of step %d was given another batch than when the snapshot was taken: %s"
)
MOVED_UP = (
    "the snapshot of step %d was taken as a batch was read, and now steps begin earlier, by `snap.begin()` or "
    "`snap.steps(n)`. What the loop does from there to that batch would be done once more, such as a count at its top: "
    "begin steps where the earlier run did, or give up that run"
)
BY_DATA = (
    "it was read ahead, before the hook was entered, or from another place in the data. Go through data by "
    "`snap.data`, and make what reads ahead a part of its source; or read the first batch after entering"
)
"""Why a loop's first batch may be another, and what to do about it."""

BY_CHANGE = (
    "its data gave the same batch as then, so what is done to it before the forward depends on something that is not "
    "restored: on what a warning of the run's first turns named, or on a torch.Generator or numpy.random.Generator "
    "in a local variable (mixup, noise). Keep that in an attribute of the model, or track it before entering: "
    'snap.track("mixup", get=generator.get_state, set=generator.set_state)'
)
"""The same where the loop's sources have compared their batches."""

THROUGH_DATA = "go through data by `for batch in snap.data(loader)`, or read on from `iter(snap.data(loader))`"

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Checks:
    """Which checks of a loop are made. Trainers that restore or read state in their own way turn some off.

    Attributes:
        resumption: whether the first step after a restore must begin with the state that was restored.
        another_batch: why the first step after a restore may be given another batch, and what to do about it.
        reading: whether to warn that something was read between entering and the first step.
        restored_by_themselves: packages whose integration restores what their objects hold; for audits.
    """

    resumption: bool = True
    another_batch: str = BY_DATA
    reading: bool = True
    restored_by_themselves: frozenset[str] = frozenset()


class CountedTurn(NamedTuple):
    """A turn of a loop over step numbers, as it began.

    Attributes:
        number: of the turn after it; 0: none has begun. passes, steps: how many were finished.
    """

    number: int
    passes: int
    steps: int


class FirstTurns:
    """Each check of a restored state is made once, and then forgotten. Used by the training thread.

    Attributes:
        asked: whether the script has asked for its step or epoch: only then can it find its place in its data by
            itself.
        asked_for_step: whether it has asked for its step.
    """

    def __init__(
        self, restored: Restored, checks: Checks, progress: RankProgress, position: Position, adapter: Adapter
    ) -> None:
        self.asked = self.asked_for_step = False
        self._restored = restored
        self._checks = checks
        self._progress = progress
        self._position = position
        self._adapter = adapter
        self._rewind: Callable[[], None] | None = restored.rewind if restored.snapshot is not None else None
        self._state: Resumed | None = None  # compares the state as the step begins to what was restored
        self._inputs: str | None = None  # digest of what the step's first forward must be given; None: anything
        self._inputs_are_unknown = False
        self._rehearsal: Rehearsal | None = None
        self._unstepped: Unstepped | None = None
        self._was_marked = False
        self._counts_are_told = self._reads_are_told = False
        self._turn = CountedTurn(0, 0, 0)
        self._iterators = Iterators(restored.loop.get("workers", {}), self._is_training)
        self._variables = Variables(restored.loop.get("variables", {}))
        self._ahead: Ahead | None = None
        self._forgotten: Forgotten | None = None
        self._changing: ChangingVariables | None = None
        self._carried: CarriedVariables | None = None

    def look(self, engine: CopyEngine, place: Path) -> None:
        """Note the state and inputs that the first step must begin with. Calls users' `track` getters, which may ask
        the hook for its step: call it once the hook knows its session. `place`: see `entered`."""
        restored, adapter = self._restored, self._adapter
        if self._checks.reading:
            if get_ident() in (thread for thread, _ in [*entered.values()]):
                log.warning(TOGETHER)
            self._changing, self._carried = ChangingVariables(), CarriedVariables()
            self._variables.look(self._known_generators())
            if restored.began is not None:  # a plain loop draws for its next step before that step begins
                self._put_back_variables()
        entered[adapter] = get_ident(), place
        named = (each for module in adapter.modules() for each in module.named_modules())
        if scripted := [name or "the model" for name, each in named if isinstance(each, torch.jit.ScriptModule)]:
            log.warning(SCRIPTED, some(scripted))
        if self._may_refuse and self._checks.reading and adapter.optimizers():
            self._ahead = Ahead(adapter.modules())
        if adapter.modules():  # without any there is no forward
            self._rehearsal = Rehearsal(adapter, self._variables.states)
            if restored.snapshot is None:
                self._rehearsal.note_values()
        if restored.snapshot is None:
            self._unstepped = Unstepped(adapter) if adapter.modules() and adapter.optimizers() else None
            return
        self._inputs = restored.inputs or None
        self._forgotten = Forgotten(adapter.modules(), restored.loop.get("gradients", ()), log.warning)
        if self._checks.resumption:
            self._state = Resumed(adapter, engine, restored.began, restored.snapshot.step)
            self._inputs_are_unknown = restored.inputs is None

    @property
    def is_new(self) -> bool:
        """Whether the job is in its first turns, and little is lost if it is refused."""
        return self._progress.step < FIRST_TURNS

    @property
    def _may_refuse(self) -> bool:
        """Whether a loop that is wrong in all of its turns may be refused: in a new job, and in one that goes on from a
        snapshot of its first turns, which a process may have left that was refused in its second."""
        return self._begun_at < FIRST_TURNS and self._is_among_first

    @property
    def _is_first(self) -> bool:
        """Whether the job is new, and no earlier process has made a turn."""
        return self._restored.snapshot is None and self.is_new

    @property
    def _is_among_first(self) -> bool:
        """Whether this is one of the first turns since the loop was entered."""
        return self._progress.step - self._begun_at < FIRST_TURNS

    @property
    def _begun_at(self) -> int:
        """The step with which this process began."""
        return 0 if self._restored.snapshot is None else self._restored.snapshot.step

    # ------------------------------------------------------------------ what the script keeps

    def tree(self) -> Tree:
        """What the script keeps, as plain values, as it was when it was last noted; and, of the first steps, which
        gradients there are."""
        known: Tree = {"workers": self._iterators.tree(), "variables": self._variables.tree()}
        if self._progress.step < STEPS_NOTED:
            known["gradients"] = holding(self._adapter.modules())
        return known

    def note_boundary(self) -> None:
        """A step has ended: note what the script keeps."""
        self._variables.note()

    def step_begins(self) -> None:
        """A step has begun. Raises `ConfigError`, see `check_script`."""
        if not self._may_refuse:
            self._stop_looking_ahead()
        changed = self._unstepped is not None and self._unstepped.step_begins()
        if changed and self._checks.reading and not self.asked_for_step:
            log.warning(CHANGED)
        if self._position.is_in_steps and self._position.sources and self._position.next_turn != self._turn.number:
            self._check_turn()
        self._check_iterators()
        self._iterators.begin()
        if self._carried is not None:
            self._carried.step_begins()
        if self._changing is not None and (found := self._changing.look()):
            log.warning(CHANGES, some([name for name, _ in found]), some([line for _, line in found]))

    def _check_turn(self) -> None:
        """A turn of a loop over step numbers has begun: warn, once, if the one before had several steps, in a pass that
        goes on. If each turn makes passes of its own, a restart goes on in these."""
        before, now = self._turn, CountedTurn(self._position.next_turn, self._position.epoch, self._progress.step)
        self._turn = now
        several = before.number and now.passes == before.passes and now.steps > before.steps + 1
        if several and self._checks.reading and not self._reads_are_told:
            self._reads_are_told = True
            log.warning(WITHIN)

    def check_script(self) -> None:
        """A step is about to end: name what a restart would begin anew, as soon as it is seen.

        Raises:
            ConfigError: the job is new, and the loop cannot be bringing such an iterator to its place by itself; or its
                steps depend on the numbers of batches, which begin anew, or on a number of passes that nobody counts;
                or they begin in the middle of its turns.
        """
        self._check_ahead("s")
        if self._carried is not None and (found := self._carried.look()) is not None:
            self._carried = None  # it holds the frames of the script
            if not found.skips:
                self._name(found)
            self._check_passes(is_counted_elsewhere=found.is_called)
            joins = (getattr(each, "_join_config", None) for each in self._adapter.modules())
            if any(getattr(each, "enable", False) for each in joins):
                log.warning(JOINED)
        self._check_passes(is_counted_elsewhere=False)
        self._check_iterators()

    def _check_ahead(self, what: str) -> None:
        """`what`: see `Ahead.found`. Raises `ConfigError`, see `check_script`."""
        if self._ahead is not None and self._ahead.found(what):
            raise ConfigError(AHEAD)

    def _stop_looking_back(self) -> None:
        if self._forgotten is not None:
            self._forgotten.remove()
            self._forgotten = None

    def _stop_looking_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.remove()
            self._ahead = None

    def _check_iterators(self) -> None:
        """Raises `ConfigError`, see `check_script`."""
        for kept in self._iterators.kept() if self._checks.reading else ():
            if not kept.trains:
                log.warning(EVALUATED_ON, kept.where)
            elif self._may_refuse and self._position.declared and kept.has_places and not self.asked:
                raise ConfigError(f"{READ_ON % kept.where}: {THROUGH_DATA}")
            else:
                log.warning(f"{READ_ON}, unless the loop reads up to its place by itself: {THROUGH_DATA}", kept.where)

    def _check_passes(self, *, is_counted_elsewhere: bool) -> None:
        """Warn, once, if passes seem to be counted by what a restart begins anew: as a second one begins, or earlier if
        the loop is a library's, which counts them itself."""
        position, adapter = self._position, self._adapter
        if not self._checks.reading or self._counts_are_told or not position.sources:
            return
        if not (position.epoch or is_counted_elsewhere):
            return
        self._counts_are_told = True
        if not self.asked and not position.is_in_steps and len(adapter.named()) == len(adapter.scalers()):
            log.warning(UNCOUNTED)

    def stop_watching(self) -> None:
        """Stop watching the script."""
        entered.pop(self._adapter, None)
        self._iterators.remove()
        self._stop_looking_ahead()
        self._stop_looking_back()
        if self._carried is not None:
            self._carried.stop()

    def _name(self, found: Carries) -> None:
        """Raises `ConfigError`, see `check_script`."""
        for wrong in [*[NUMBERED] * found.numbered, *[PASSES] * (found.passes and not self._position.sources)]:
            if self._may_refuse:
                raise ConfigError(wrong)
            log.warning("%s", wrong)
        if found.counts:
            self._counts_are_told = True
            log.warning(COUNTS, some([str(line) for line in sorted(found.counts)]))
        if found.again:
            log.warning(AGAIN, some([str(line) for line in sorted(found.again)]))
        carried = found.objects | found.environments | found.carried | found.updated
        if names := [f"{shown(name)} ({line})" for name, line in carried.items()]:
            log.warning(CARRIED, some(names), some(lines_for(found)))
            self._adapter.told |= found.attributes
            if self._changing is not None:
                self._changing.leave_out(carried)
        if found.iterators:
            names = [f"{shown(name)} ({line})" for name, line in found.iterators.items()]
            log.warning(READS_ON, some(names), some(lines_for_iterators(found)))
        elif not self._position.sources and (threads := feeding()):
            log.warning(FEEDING, some(threads))

    def _known_generators(self) -> set[int]:
        known = [self._adapter.generators(), *(data.generators for data in self._position.sources.values())]
        return {id(each) for some in known for each in some.values()}

    def _put_back_variables(self) -> None:
        if gone := self._variables.put_back():
            log.warning(
                "%s: random generators that the script had in variables as its first step began, and has not now: make "
                "them before that step, or what is drawn from them is other than before",
                some(gone),
            )

    def _is_training(self) -> bool:
        modules = self._adapter.modules()
        return torch.is_grad_enabled() and (not modules or any(each.training for each in modules))

    # ------------------------------------------------------------------ a loop that is plain

    def drawn(self) -> list[str]:
        """The random generators that were drawn from since the last step."""
        return self._rehearsal.drawn() if self._rehearsal is not None else []

    def unlike_a_restart(self, *, is_due: bool) -> Iterator[tuple[Event, list[str]]]:
        """The first forward of a step is about to run: what a restart would not do again, and to what."""
        self._variables.turn_begins()
        rehearsal = self._rehearsal
        if rehearsal is None:
            return
        if self._is_first and (moved := rehearsal.moved()):
            yield Event.MOVED, moved
        if self._is_first and (amounts := rehearsal.amounts()):
            log.warning(AMOUNTS, *amounts)
        if (self._is_among_first or is_due) and (uneven := rehearsal.uneven()):
            yield Event.UNEVEN, uneven
        if is_due and rehearsal.grew():
            yield Event.GREW, []
        if (self.is_new or is_due) and (exchanged := rehearsal.exchanged()):
            yield Event.EXCHANGED, exchanged

    def step_ended(self, *, is_due: bool) -> None:
        """A step of a plain loop has ended: note how everything is for the next one."""
        if self._rehearsal is None:
            return
        if self._is_first and self._progress.step == 1:
            self._rehearsal.note_values()
        if self._is_among_first or is_due:
            self._rehearsal.note()

    # ------------------------------------------------------------------ what was restored

    def before_reading(self) -> None:
        """Data is about to be read: put the generators back before that happens for the first time. Raises
        `StateMismatch` if the earlier run's steps began elsewhere."""
        if self._ahead is not None:
            self._ahead.reads()
        if not self._was_marked:
            self._was_marked = True
            if self._checks.resumption and self._position.is_moved_up:
                refuse(MOVED_UP % self._progress.step)
            self._warn_of_what_was_read()
            if self._checks.reading:
                self._variables.look(self._known_generators())
                self._put_back_variables()
        if self._rewind is not None:
            self._rewind()
            self._rewind = None

    def check_state(self) -> None:
        """Compare the state as the step begins. Raises `StateMismatch`, see `Resumed.check`."""
        if self._state is not None:
            state, self._state = self._state, None
            state.check(declared=self._position.declared)

    def before_forward(self) -> None:
        """A forward is about to run: warn, once, if it is unknown what it must be given. Raises `ConfigError`, see
        `check_script`."""
        self._check_ahead("f")
        if self._inputs_are_unknown:
            self._inputs_are_unknown = False
            if not self._position.sources:  # sources compare their next batch themselves
                log.warning(UNKNOWN_INPUTS, self._progress.step)

    @property
    def expects_inputs(self) -> bool:
        """Whether it is known what the step's first forward must be given."""
        return self._inputs is not None

    def check_inputs(self, inputs: Inputs) -> None:
        """The first forward of a step runs on these. Raises `StateMismatch` if they are another batch than before."""
        expected, self._inputs = self._inputs, None
        is_compared = expected is not None and all(data.exact for data in self._position.sources.values())
        if is_compared and inputs.digest() != expected:
            why = BY_CHANGE if self._position.sources else self._checks.another_batch
            refuse(ANOTHER_BATCH % (self._progress.step, why))

    def stepped(self) -> None:
        """An optimizer has stepped: later forwards are not compared."""
        self._inputs = self._unstepped = None
        if self._ahead is not None:
            self._ahead.stepped()
        self._stop_looking_back()

    def came_round(self) -> None:
        """A turn of a loop that declares has ended, and no optimizer has stepped in it. Raises as `Unstepped.look`."""
        if self._unstepped is not None and not self._unstepped.look():
            self._unstepped = None

    def _warn_of_what_was_read(self) -> None:
        """Warn, before the first step, if a batch may have been read ahead of it: after a restart it would be
        another. If there are several hooks, another one may have put the generators back."""
        made = all(type(data.source) in (list, tuple) for data in self._position.sources.values())
        if made and len(entered) == 1 and self._checks.reading and (drawn := self.drawn()):
            log.warning(
                "something drew from the random generators of %s between entering and the first step; if it read a "
                "batch ahead, or shuffled data, that is not captured, and a restart will read other data: go through "
                "data by `snap.data`, give it a function that makes the batches of a pass, `snap.data(lambda: ...)`, "
                "or `track` what was read",
                ", ".join(drawn),
            )
