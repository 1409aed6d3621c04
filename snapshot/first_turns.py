"""What is checked in the first turns of a loop: that it is plain, and that it goes on from what was restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.progress import RankProgress
from holdfast.snapshot.resume.comparison import BY_CHANGE, BY_DATA, Resumed, check_inputs, warn_of_unknown_inputs
from holdfast.snapshot.resume.rehearsal import Rehearsal
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.hidden import SAMPLED
from holdfast.snapshot.state.inputs import Inputs
from holdfast.snapshot.step.position import Position
from holdfast.snapshot.step.script import Script
from holdfast.snapshot.step.turns import FIRST_TURNS, Event

UNSTEPPED_TURNS = 2
"""So many turns at the beginning may change parameters without an optimizer's step. Gradients that are accumulated
change none; an evaluation with other weights may, now and then."""

COMPARED = 16
"""So many parameters are compared for that, since reading one may wait for a GPU."""

AMOUNTS = (
    "%d numbers were drawn from torch's random generator before the first step, and %d before the next. If something "
    "draws after optim.step(), such as noise on the weights, a restart does not draw it again, and is refused: use "
    "`snap.steps(n)`, or call `snap.begin()` at the top of the loop"
)

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Checks:
    """Which checks of a loop are made. Trainers that restore or read state in their own way turn some off.

    Attributes:
        resumption: whether the first step after a restore must begin with the state that was restored.
        another_batch: why the first step after a restore may be given another batch, and what to do about it.
        reading: whether to warn that something was read between entering and the first step.
        restored_by_themselves: packages whose integration restores what their objects hold; see `state.reach.Theirs`.
    """

    resumption: bool = True
    another_batch: str = BY_DATA
    reading: bool = True
    restored_by_themselves: frozenset[str] = frozenset()


class FirstTurns:
    """Each check of a restored state is made once, and then forgotten. Used by the training thread."""

    def __init__(
        self, restored: Restored, checks: Checks, progress: RankProgress, position: Position, script: Script
    ) -> None:
        self._restored = restored
        self._checks = checks
        self._progress = progress
        self._position = position
        self._script = script
        self._generators: Callable[[], Mapping[str, object]] = dict
        self._rewind: Callable[[], None] | None = restored.rewind if restored.snapshot is not None else None
        self._state: Resumed | None = None  # compares the state as the step begins to what was restored
        self._inputs: str | None = None  # digest of what the step's first forward must be given; None: anything
        self._inputs_are_unknown = False
        self._rehearsal: Rehearsal | None = None
        self._unstepped: Unstepped | None = None
        self._was_marked = False

    def look(self, adapter: Adapter, engine: CopyEngine) -> None:
        """Note the state and inputs that the first step must begin with. Calls users' `track` getters, which may ask
        the hook for its step: call it once the hook knows its session."""
        restored = self._restored
        self._generators = adapter.generators
        self._script.entered(self._known_generators(), adapter)
        if adapter.modules():  # without any there is no forward
            self._rehearsal = Rehearsal(adapter, self._script.drawn_from)
            if restored.snapshot is None:
                self._rehearsal.note_values()
        if restored.snapshot is None:
            self._unstepped = Unstepped(adapter) if adapter.modules() and adapter.optimizers() else None
            return
        self._inputs = restored.inputs or None
        if self._checks.resumption:
            self._state = Resumed(adapter, engine, restored.began, restored.snapshot.step)
            self._inputs_are_unknown = restored.inputs is None

    @property
    def is_new(self) -> bool:
        """Whether the job is in its first turns, and nothing of it is protected."""
        return self._restored.snapshot is None and self._progress.step < FIRST_TURNS

    @property
    def _reads(self) -> bool:
        return bool(self._position.sources)

    @property
    def _is_among_first(self) -> bool:
        """Whether this is one of the first turns since the loop was entered."""
        restored = self._restored.snapshot
        return self._progress.step - (0 if restored is None else restored.step) < FIRST_TURNS

    # ------------------------------------------------------------------ what the script keeps

    def note_boundary(self) -> None:
        """A step has ended: note what the script keeps."""
        self._script.note()

    def step_begins(self) -> None:
        """A step has begun. Raises as `Script.check`."""
        if self._unstepped is not None and self._unstepped.step_begins():
            self._script.parameters_changed()
        self._script.step_begins(is_new=self.is_new, declared=self._position.declared, reads=self._reads)

    def check_script(self) -> None:
        """An optimizer is about to step. Raises as `Script.check`."""
        self._script.check(is_new=self.is_new, declared=self._position.declared, reads=self._reads)

    def stop_watching(self) -> None:
        """Stop watching the script."""
        self._script.remove()

    def _known_generators(self) -> set[int]:
        known = [self._generators(), *(data.generators for data in self._position.sources.values())]
        return {id(each) for some in known for each in some.values()}

    # ------------------------------------------------------------------ a loop that is plain

    def drawn(self) -> list[str]:
        """The random generators that were drawn from since the last step."""
        return self._rehearsal.drawn() if self._rehearsal is not None else []

    def unlike_a_restart(self, *, is_due: bool) -> Iterator[tuple[Event, list[str]]]:
        """The first forward of a step is about to run: what a restart would not do again, and to what."""
        self._script.turn_begins()
        rehearsal = self._rehearsal
        if rehearsal is None:
            return
        if self.is_new and (moved := rehearsal.moved()):
            yield Event.MOVED, moved
        if self.is_new and (amounts := rehearsal.amounts()):
            log.warning(AMOUNTS, *amounts)
        if (self._is_among_first or is_due) and (uneven := rehearsal.uneven()):
            yield Event.UNEVEN, uneven

    def step_ended(self, *, is_due: bool) -> None:
        """A step of a plain loop has ended: note how everything is for the next one."""
        if self._rehearsal is None:
            return
        if self.is_new and self._progress.step == 1:
            self._rehearsal.note_values()
        if self._is_among_first or is_due:
            self._rehearsal.note()

    # ------------------------------------------------------------------ what was restored

    def before_reading(self) -> None:
        """Data is about to be read: put the generators back before that happens for the first time."""
        if not self._was_marked:
            self._was_marked = True
            self._warn_of_what_was_read()
            self._script.begins(self._known_generators())
        if self._rewind is not None:
            self._rewind()
            self._rewind = None

    def check_state(self) -> None:
        """Compare the state as the step begins. Raises `StateMismatch`, see `Resumed.check`."""
        if self._state is not None:
            state, self._state = self._state, None
            state.check(declared=self._position.declared)

    def before_forward(self) -> None:
        """A forward is about to run: warn, once, if it is unknown what it must be given."""
        if self._inputs_are_unknown:
            self._inputs_are_unknown = False
            if not self._position.sources:  # sources compare their next batch themselves
                warn_of_unknown_inputs(self._progress.step)

    @property
    def expects_inputs(self) -> bool:
        """Whether it is known what the step's first forward must be given."""
        return self._inputs is not None

    def check_inputs(self, inputs: Inputs) -> None:
        """The first forward of a step runs on these. Raises `StateMismatch` if they are another batch than before."""
        expected, self._inputs = self._inputs, None
        if expected is not None and all(data.exact for data in self._position.sources.values()):
            why = BY_CHANGE if self._position.sources else self._checks.another_batch
            check_inputs(expected, inputs, self._progress.step, why)

    def stepped(self) -> None:
        """An optimizer has stepped: later forwards are not compared."""
        self._inputs = self._unstepped = None

    def came_round(self) -> None:
        """A turn of a loop that declares has ended, and no optimizer has stepped in it. Raises as `Unstepped.look`."""
        if self._unstepped is not None and not self._unstepped.look():
            self._unstepped = None

    def _warn_of_what_was_read(self) -> None:
        """Warn, before the first step, if a batch may have been read ahead of it: after a restart it would be
        another."""
        made = all(type(data.source) in (list, tuple) for data in self._position.sources.values())
        if made and self._checks.reading and (drawn := self.drawn()):
            log.warning(
                "something drew from the random generators of %s between entering and the first step; if it read a "
                "batch ahead, or shuffled data, that is not captured, and a restart will read other data: go through "
                "data by `snap.data`, give it a function that makes the batches of a pass, `snap.data(lambda: ...)`, "
                "or `track` what was read",
                ", ".join(drawn),
            )


class Unstepped:
    """Notices a job whose parameters change although the optimizer that was given never steps, as with LOMO, which
    updates them in backward: no step would ever end, and no snapshot come. Used by the training thread."""

    def __init__(self, adapter: Adapter) -> None:
        trained = (each for module in adapter.modules() for each in module.parameters() if each.requires_grad)
        self._parameters = list(islice(trained, COMPARED))
        self._given = type(adapter.optimizers()[0]).__qualname__
        self._before = self._samples()
        self._turns = 0
        self._has_begun = False

    def step_begins(self) -> bool:
        """A step begins. Returns whether it is the first, and parameters have changed since the loop was entered."""
        is_first, self._has_begun = not self._has_begun, True
        return is_first and self._changed()

    def look(self) -> bool:
        """A turn has ended, and no optimizer has stepped so far. Returns whether to look again.

        Raises:
            ConfigError: parameters have changed in each of the first `UNSTEPPED_TURNS` turns.
        """
        self._turns += 1
        if not self._changed():
            return False
        if self._turns == UNSTEPPED_TURNS:
            raise ConfigError(
                f"parameters changed in each of the first {self._turns} turns, and no step() of {self._given} was "
                "seen, so no snapshot would ever be taken. If it updates them in backward, or the loop does so itself, "
                "leave it out and keep its state beside: InMemorySnapshot(model, extra={'optim': optim}); then each "
                "turn is a step"
            )
        return True

    def _changed(self) -> bool:
        """Whether parameters have changed since this was made or last asked."""
        before, self._before = self._before, self._samples()
        return before != self._before

    def _samples(self) -> list[bytes]:
        return [elements_of(each, SAMPLED) for each in self._parameters]
