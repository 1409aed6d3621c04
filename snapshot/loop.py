"""What one rank's loop does, and what is done then: the training thread's way through a step.

::

    optim.step() of s ──► the step ends: apply the ranks' reports, note generators
    code between steps: schedules, averages, evaluations, reading data
    step s+1 begins ────► capture, hand over ──────────────────────────────┐
    forward, backward of s+1                                               │ copy thread: slot, copy, check
    optim.step() of s+1 ◄─ before_step: wait for the copy, report outcomes ┘ seal thread; SMP: digest, encode, post

The state at a boundary is the state with which the next step begins. Changes by code between two steps belong to it,
unless that code undoes them. Where the loop is, and what each of its events does, says `snapshot.step.turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import Episodes, get_log, some
from holdfast.snapshot.copy.errors import GivenUp
from holdfast.snapshot.first_turns import FirstTurns
from holdfast.snapshot.progress import Statistics
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.comparison import refuse
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.audit import Auditor
from holdfast.snapshot.state.inputs import sample_inputs
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.gradients import Gradients
from holdfast.snapshot.step.orders import Due, SnapshotCopy
from holdfast.snapshot.step.position import Position
from holdfast.snapshot.step.turns import BEGIN, Action, Event, NotPlain, TurnState, after

PATIENCE_S = 0.5
"""How long ``optim.step()`` may wait for a copy to begin, in seconds. If the SMP gives no slot by then,
``optim.step()`` does not wait at all until a copy begins in time again."""

UNCONFIRMED = {
    Event.DECLARE: "the loop says for the first time where its steps begin",
    Event.LEAVE: "the loop was left before gradients of the step's forward were computed",
}
"""Why a snapshot is given up of a step that nobody knows to have begun."""

log = get_log(__name__)


class Loop:
    """Hears what the loop says, and what hooks see of it (`snapshot.step.boundary.Listener`). Used by the training
    thread; on a GPU autograd may call `on_backward` in a thread of its own, while the training thread waits for it."""

    def __init__(
        self,
        adapter: Adapter,
        rank: Rank,
        position: Position,
        first: FirstTurns,
        capture: Capture,
        protecting: Protecting,
        statistics: Statistics,
        auditor: Auditor | None,
        deadline_s: float,
        on_step_ended: Callable[[], None],
    ) -> None:
        """
        Args:
            deadline_s: how long a copy may take from when its step must go on, in seconds.
            on_step_ended: called when a step has ended, after everything else.
        """
        self._rank = rank
        self._position = position
        self._progress = rank.progress
        self._first = first
        self._capture = capture
        self._protecting = protecting
        self._statistics = statistics
        self._auditor = auditor
        self._deadline_s = deadline_s
        self._on_step_ended = on_step_ended
        self._gradients = Gradients(adapter.modules(), log.warning, lambda: self._hear(Event.ZEROED))
        self._steppers = adapter.steppers()
        self._has_several = len(adapter.optimizers()) > 1
        self._has_none = bool(adapter.modules()) and not adapter.optimizers()
        self._episodes = Episodes(log)
        self._where = TurnState.BETWEEN
        self._due: Due | None = None  # a snapshot to take when the next step begins
        self._copy: SnapshotCopy | None = None  # the one that was taken when this step began
        self._began_with = 0  # number of the forward that began the step, in a plain loop
        self._refused_at: int | None = None  # the newest step that has no snapshot because the loop was not plain in it
        self._smp_is_slow = False
        self._is_in_turn = False  # of a loop over step numbers
        self.boundary = Boundary(adapter.optimizers(), adapter.modules(), self, adapter.scalers())

    # ------------------------------------------------------------------ what the loop says

    def begin_turn(self) -> None:
        """See `SnapshotHook.begin`."""
        if self._is_in_turn:
            return
        self._declare()
        self._position.turn_begins()
        self.mark()
        self.begin()

    def steps(self, count: int) -> Iterator[int]:
        """See `SnapshotHook.steps`."""
        self._declare()
        while (turn := self._position.next_turn) < count:
            self.begin_turn()
            self._position.steps_begin()
            self._is_in_turn = True
            try:
                yield turn
            finally:  # the loop may be left
                self._is_in_turn = False
        self._position.steps_over()

    def data(self, source: Any, name: str, ahead: int | None, exact: bool) -> Data:
        """See `SnapshotHook.data`."""
        self._declare()
        return self._position.data(
            source,
            name,
            lambda held: Data(
                source,
                name,
                held,
                self.mark,
                self._begin_with_batch,
                ahead=ahead,
                exact=exact,
                heartbeat=self._rank.heartbeat,
                over=self._pass_over,
            ),
        )

    def mark(self) -> None:
        """Data is about to be read for the next step. If a step has ended, note the state at its boundary."""
        self._declare()
        self._end_without_optimizer()
        if self._where is TurnState.BEGUN:
            self._first.came_round()
        self._first.before_reading()
        self._hear(Event.MARK)

    def begin(self) -> None:
        """The next step begins here."""
        if self._where is TurnState.BEGUN:
            self._gradients.come_round()
        self._begins(Event.BEGIN)

    def _end_without_optimizer(self) -> None:
        """If no optimizer steps, a step has ended when the loop comes round."""
        if self._has_none and self._where is TurnState.BEGUN:
            self.before_step()
            self.after_step()

    def _declare(self) -> None:
        """The loop says where its steps begin."""
        if not self._position.declared:
            self._hear(Event.DECLARE)
            self._position.declare(self._progress.step)

    def _begin_with_batch(self) -> None:
        self._position.batch_begins()
        self.begin()

    def _pass_over(self, resumed: bool) -> None:
        unused = self._where is TurnState.BEGUN and self._gradients.unused()
        if wrong := self._position.pass_over(resumed, unused):
            refuse(wrong)

    # ------------------------------------------------------------------ what hooks see

    def before_step(self) -> None:
        """The fence: wait until nothing that is about to change is still being copied."""
        if self._auditor is not None:
            self._auditor.before_step(self._progress.step)
        with self._holding_up() as began:
            if self._where is TurnState.BETWEEN:
                self._first.check_state()
            self._hear(Event.SEVERAL if self._has_several else Event.STEP)
            self._first.check_script()
            self._protecting.pace.fenced(began)
            if (copy := self._protecting.newest) is not None:
                in_time = copy.fence(0.0 if self._smp_is_slow else PATIENCE_S, self._deadline_s)
                self._smp_is_slow = not in_time
                self._capture.let_go()
            self._protecting.end_if_agreed()
            self._protecting.report()

    def after_step(self) -> None:
        """An optimizer has stepped. Unless the loop says where its steps begin, the step is over."""
        self._first.stepped()
        self._hear(Event.STEPPED)

    def on_forward(self, number: int, given: Any) -> None:
        """A module runs forward, in training mode and with gradients. This begins the step of a plain loop."""
        if self._where is TurnState.BETWEEN and not self._position.declared:
            self._began_with = number
            self._begins(Event.ALONE if self._has_none else Event.FORWARD)
        self._first.before_forward()
        if self._where is not TurnState.BETWEEN:
            self._note_inputs(given)

    def on_evaluation(self) -> None:
        """A module has run forward without training."""
        watched = self._where is TurnState.BETWEEN and (self._first.is_new or self._due is not None)
        if watched and not self._position.declared and (drawn := self._first.drawn()):
            self._hear(Event.EVALUATION, drawn)

    def on_backward(self, number: int) -> None:
        """Gradients are computed for a forward that `on_forward` reported."""
        if number == self._began_with:
            self._hear(Event.BACKWARD)

    # ------------------------------------------------------------------ what is done

    @property
    def is_due(self) -> bool:
        """Whether a step has ended whose snapshot is only taken as the next one begins."""
        return self._due is not None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped, and the loop that declares its steps has not ended that one."""
        return self._where is TurnState.STEPPED

    def _begins(self, event: Event) -> None:
        with self._holding_up():
            self._rank.heartbeat()
            self._first.check_state()
            if self._auditor is not None:
                self._auditor.settled(self._progress.step)
            if not self._position.declared:
                for unlike, names in self._first.unlike_a_restart(is_due=self.is_due):
                    self._hear(unlike, names)
            self._hear(event)
            self._first.step_begins()

    def _hear(self, event: Event, names: Sequence[str] = ()) -> None:
        """Something happened: go to where the loop is now, and do what that asks for. `names`: what it happened to."""
        self._where, what = after(self._where, event, declared=self._position.declared)
        if isinstance(what, NotPlain):
            self._refuse(what, names)
        elif what is Action.TAKE:
            self._take(is_last=event is Event.LEAVE)
        elif what is Action.CONFIRM and self._copy is not None:
            self._copy.confirm()
        elif what is Action.GIVE_UP and self._copy is not None and not self._copy.is_confirmed:
            self._copy.abort(GivenUp(UNCONFIRMED[event]))
        elif what is Action.END:
            self._end_step(is_last=event is Event.LAST)
        if what in (Action.END, Action.NOTE) and self.is_due:
            self._first.note_boundary()
            self._capture.mark()

    def _refuse(self, refusal: NotPlain, names: Sequence[str]) -> None:
        """The loop is not plain, and does not say where its steps begin.

        Raises:
            ConfigError: the job is new. Otherwise this step has no snapshot, and training goes on.
        """
        text = f"{refusal.value}{f' ({some(names)})' if names else ''}: {BEGIN}"
        step = self._progress.step
        if self._first.is_new or refusal in (NotPlain.SEVERAL, NotPlain.ALONE):
            raise ConfigError(f"it cannot be told where the steps of this loop begin. In step {step + 1}, {text}")
        self._due = None
        if self._copy is not None:
            self._copy.abort(GivenUp(text))
        if self._refused_at == step:
            return  # what follows from the first reason need not be told
        self._refused_at = step
        if self._episodes.begin(refusal, "no snapshot of step %d: %s", step, text):
            self._protecting.copier.say(f"no snapshot of step {step}, and of others like it: {text}")

    def _take(self, *, is_last: bool) -> None:
        """If a snapshot is due, capture the state as it is now; see `Protecting.take`. The last one is of a step that
        never begins, so there is nothing to wait for."""
        due, self._due = self._due, None
        if due is not None:
            self._copy = self._protecting.take(due, declared=self._position.declared or is_last)
            if is_last and self._copy is not None:
                self._copy.confirm()

    def _note_inputs(self, given: Any) -> None:
        """The step's forward runs on what is `given`. Raises `StateMismatch` if a restored step gets another batch."""
        copy = self._copy if self._copy is not None and self._copy.awaits_inputs else None
        if copy is None and not self._first.expects_inputs:
            return
        inputs = sample_inputs(self._rank.engine, given)
        self._first.check_inputs(inputs)
        if copy is not None:
            copy.note_inputs(inputs)
            if copy.order.declared:
                copy.confirm()

    def _end_step(self, *, is_last: bool) -> None:
        """Apply what the ranks report of earlier snapshots, and decide with them whether another is due."""
        with self._holding_up() as began:
            self._due = self._copy = None
            self._gradients.stepped()
            self._steppers.check()
            self._progress.step_ended()
            self._rank.heartbeat()
            if not self._protecting.layouts.is_planned:  # it will be, with room for what this step drew from
                self._first.note_boundary()
            self._due = self._protecting.step_ended(began, is_last=is_last)
            if not self._position.declared:
                self._first.step_ended(is_due=self.is_due)
        self._on_step_ended()

    @contextmanager
    def _holding_up(self) -> Iterator[float]:
        """The training thread is held up while the block runs. Gives the time at which it began to be."""
        began = self._rank.system.monotonic()
        yield began
        self._statistics.stall_s += self._rank.system.monotonic() - began

    # ------------------------------------------------------------------ the end

    def stop_watching(self, *, ended_well: bool) -> None:
        """Take all hooks off. If the loop `ended_well`, warn of gradients that no step has used."""
        if ended_well and not self.has_stepped:
            self._gradients.check()
        self.boundary.remove()
        self._first.stop_watching()
        self._gradients.remove()
        self._steppers.remove()

    def leave(self, *, takes: bool, goes_on: bool) -> None:
        """The hook is left. Nothing that happens after this is of the loop.

        Args:
            takes: take a last snapshot of where the loop is now. A collective call then.
            goes_on: the loop was left before its end: the next start goes on where it was left.
        """
        if takes and not goes_on:  # else nothing tells whether the turn has changed the state yet: it is done again
            self._end_without_optimizer()
        if takes and self.has_stepped:
            self._position.last_turn_ended(goes_on=goes_on)
            self._hear(Event.LAST)
        elif not takes:
            self._due = None
        self._hear(Event.LEAVE)
        self._copy = None
