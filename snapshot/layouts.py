"""Where the snapshots of one layout lie, and which of its slots may be used.

A layout is made for the state as it is. Each, and each attempt at one, is an epoch of its own::

    unplanned ──► reserving ──► usable, slot by slot ──► all slots usable
        ▲             │                  │                     │
        └── an SMP is away, or memory is refused; the state does not fit any more; ranks had lost each other
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError, SmpUnavailable, StateMismatch, failure_of
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.slotfile import SlotFormat
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.options import Options
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.reserve import AWAY, REFUSED, Reserving, lay_out, raise_together
from holdfast.snapshot.step.capture import Capture

MOST_DOUBLINGS = 10
"""How often the number of steps is doubled after which a state is tried again that could not be captured."""

log = get_log(__name__)


@dataclass(eq=False)
class Layouts:
    """Used by the training thread, except `attach_again` (the copy thread) and `_pin` (the thread that prepares slots).

    Attributes:
        layout: the newest one; None: there was none yet. index: this rank's index among the ranks of its node in it.
        is_planned: the layout fits the state, and its memory is there or being reserved.
        fits: the layout fits the state of this rank, as far as it knows; the other ranks may not know yet if not.
        was_usable: slots were usable at some time: since then no failure here ends the job.
    """

    _options: Options
    _rank: Rank
    _run: Run
    _capture: Capture
    _intervals: IntervalController
    _episodes: Episodes
    _tell_operators: Callable[[str], None]
    _wait_for_copies: Callable[[], None]
    layout: Layout | None = None
    index: int = 0
    is_planned: bool = False
    fits: bool = True
    was_usable: bool = False
    _was_attempted: bool = False  # in this epoch: the next attempt begins another
    _reserving: Reserving | None = None  # set until every rank may use all slots
    _usable: int = 0  # number of slots that every rank may use
    _unplanned: int = 0  # how often in a row the state could not be captured
    _not_before: int = 0  # the step from which that is tried again: to compare replicas takes a read of the state

    @property
    def is_reserving(self) -> bool:
        """Whether memory is still being reserved: so far there is none, or less than planned."""
        return self._reserving is not None

    def has_room(self, held: int) -> bool:
        """Whether a usable slot is free beside the `held` ones. Those of an earlier layout are counted, too, so after a
        change of layout it may take until more slots are usable."""
        return held < self._usable

    @property
    def moved_bytes(self) -> int:
        """See `Layout.moved_bytes`; 0 before there is a layout."""
        return 0 if self.layout is None else self.layout.moved_bytes

    def outgrow(self) -> None:
        """The state has changed: the layout does not fit it any more."""
        self.fits = False

    def standing(self) -> int:
        """How many slots this rank may use; `AWAY` or `REFUSED` if they could not be reserved."""
        return self._options.slots_with_generations if self._reserving is None else self._reserving.look()

    def apply(self, *, fits: bool, usable: int) -> None:
        """All ranks have reported: whether the layout `fits` everywhere, and how many slots each may use.

        Raises:
            HoldfastError: memory cannot be reserved; raised on every rank.
        """
        if not fits:
            self.is_planned, self.fits = False, True
        if (reserving := self._reserving) is not None:
            failure = failure_of(lambda: self._note_usable(reserving, usable), SmpUnavailable)
            if failure is not None:
                self._without_smp(failure)

    def begin_anew(self) -> None:
        """Ranks that had lost each other have met: plan another layout, in another epoch."""
        self._was_attempted, self.is_planned, self.fits = True, False, True
        self._unplanned = self._not_before = 0  # ranks may have counted otherwise
        self.stop_reserving()

    def configure(self) -> bool:
        """Agree on a layout for the state as it is now, and reserve it. A collective call.

        Every change of layout, and every attempt at one, is an epoch of its own; earlier snapshots stay until a new one
        is protected. Returns False, on every rank, if an SMP is away, or if the state, of which there were snapshots
        before, cannot be captured as it is now: then it must be tried again.
        """
        progress = self._rank.progress
        if progress.step < self._not_before:
            return False
        failure = failure_of(lambda: self._rank.smp.attach(progress.epoch, self._wait_for_copies), SmpUnavailable)
        if self._rank.agreement.everywhere(failure is None):
            if (form := self._plan()) is None:
                return False
            if self._was_attempted:
                progress.enter(progress.epoch + 1)
            self._was_attempted = True
            failure = failure_of(lambda: self._reserve(form.total_bytes), SmpUnavailable)
            if failure is None:
                self.is_planned = True
                return True
        self._without_smp(failure or SmpUnavailable("the SMP of another node is away"))
        return False

    def _plan(self) -> SlotFormat | None:
        """See `Capture.plan`. Returns None, on every rank, if one cannot capture its state, and could before."""
        step, form, problem = self._rank.progress.step, None, ""
        try:
            form = self._capture.plan(SnapshotId(self._rank.progress.epoch, step))
        except (ConfigError, StateMismatch) as error:
            if self._options.strict or not self.was_usable:
                raise
            problem = str(error)
        if self._rank.agreement.everywhere(form is not None):
            self._unplanned = 0
            return form
        self._unplanned += 1
        self._not_before = step + (1 << min(self._unplanned, MOST_DOUBLINGS))
        text = "no snapshot of step %d, and no new layout: %s"
        why = problem or "the state of another rank cannot be captured"
        self._episodes.begin("capture", text, step, why, level=logging.ERROR)
        return None

    def _without_smp(self, failure: SmpUnavailable) -> None:
        """Log that there is no layout for now. Raises `failure` if the hook is strict."""
        if self._options.strict:
            raise failure
        text = "no snapshots are taken from step %d on, until the SMPs of all nodes answer: %s"
        self._episodes.begin("layout", text, self._rank.progress.step, failure)

    def _reserve(self, slot_bytes: int) -> None:
        """Lay out slots and reserve them, beside the training if that takes long. A collective call."""
        rank = self._rank
        self.stop_reserving()
        self.layout, there = lay_out(
            rank.client,
            rank.agreement,
            self._options.job,
            self._rank.progress.epoch,
            rank.coord,
            slot_bytes,
            self._options.protection,
            self._options.slots_with_generations,
            rank.domains,
            run=self._run,
            parity_slots=self._options.parity_slots,
        )
        reserving = Reserving(rank.client, self.layout, rank.coord, there, lambda slots: self._pin(reserving, slots))
        self._usable, self._reserving = 0, reserving
        self._intervals.placed(len(self.layout.nodes))
        self.index = [shard.coord for shard in self.layout.node(rank.client.node).shards].index(rank.coord)
        if self.layout.coords[0] == rank.coord:
            self._tell_operators(self._intervals.say_plan())
        [usable] = rank.agreement.minimum([reserving.look()])()
        self._note_usable(reserving, usable)
        if not self._usable:
            self._say(
                "memory for snapshots is being reserved beside the training: the first is taken once its slot is there"
            )

    def _note_usable(self, reserving: Reserving, usable: int) -> None:
        """`usable`: how many slots every rank may use; `AWAY` or `REFUSED` if reserving failed on one."""
        if usable == AWAY:
            self.is_planned = False
        if usable in (AWAY, REFUSED):
            self.stop_reserving()
            raise_together(usable, reserving.failure)
        step = self._rank.progress.step
        if usable and not self._usable:
            self.was_usable = True
            self._episodes.end("layout", "memory is reserved again: snapshots are taken from step %d on", step)
            if not reserving.is_small:
                self._say("memory for the first slot is reserved: snapshots are taken from step %d on", step)
        self._usable = usable
        if usable >= self._options.slots_with_generations:
            self._reserving = None

    def _say(self, text: str, *values: object, level: int = logging.INFO) -> None:
        """Log, on one rank only, a text that is the same on all."""
        if self.layout is not None and self.layout.coords[0] == self._rank.coord:
            log.log(level, text, *values)

    def _pin(self, reserving: Reserving, slots: list[memoryview]) -> None:
        """Have the copy engine register slots, in turns with the other ranks of this node. Runs in the thread that
        reserves slots, or, if they are small, in the training thread."""
        if not reserving.is_small:  # otherwise the training thread runs this, and uses its device anyway
            self._rank.engine.enter_thread()
        self._rank.engine.prepare(slots, reserving.turn)

    def stop_reserving(self, deadline_s: float | None = None) -> None:
        """Stop reserving slots of this layout. With a deadline, block until the reserving thread has ended.

        Raises:
            DeadlineExceeded: it has not ended by then.
        """
        reserving, self._reserving = self._reserving, None
        if reserving is None:
            return
        reserving.close()
        if deadline_s is not None:
            reserving.join(deadline_s)
            if not self.was_usable:
                text = "the job ends without a snapshot: memory for the first was still being reserved"
                self._say(text, level=logging.WARNING)

    def attach_again(self) -> None:
        """Called by the copy thread before the first copy after the SMP went away."""
        self._rank.smp.attach_again(self._rank.progress.epoch, self.layout)
