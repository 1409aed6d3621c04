"""A rank's loop from entering the hook to leaving it: where it is, and what each event does. Pure: `Loop` acts.

A loop *declares* where its steps begin (`snap.begin`, `snap.steps`, `snap.data`), or it is *plain*: a forward of the
given model, in training mode and with gradients, begins the step; gradients of that forward are computed; the given
optimizer steps once. Whatever else a plain loop does is refused, never guessed at. A loop may say at any time that it
declares (DECLARE), and goes on by the other table. ::

    a plain loop
    where        event        then         what is done
    BETWEEN      FORWARD      BEGUN        TAKE
    BETWEEN      STEP         STEPPING     UNSEEN
    BETWEEN      SEVERAL      STEPPING     SEVERAL
    BETWEEN      EVALUATION   BETWEEN      EVALUATED
    BETWEEN      UNEVEN       BETWEEN      UNEVEN
    BETWEEN      MOVED        BETWEEN      MOVED
    BETWEEN      LEAVE        LEFT         TAKE
    BEGUN        DECLARE      BETWEEN      GIVE_UP
    BEGUN        FORWARD      BEGUN        NOTHING
    BEGUN        BACKWARD     CERTAIN      CONFIRM
    BEGUN        STEP         STEPPING     NO_BACKWARD
    BEGUN        SEVERAL      STEPPING     SEVERAL
    BEGUN        ZEROED       BEGUN        SKIPPED
    BEGUN        LEAVE        LEFT         GIVE_UP
    CERTAIN      FORWARD      CERTAIN      NOTHING
    CERTAIN      BACKWARD     CERTAIN      NOTHING
    CERTAIN      STEP         STEPPING     NOTHING
    CERTAIN      SEVERAL      STEPPING     SEVERAL
    CERTAIN      ZEROED       CERTAIN      SKIPPED
    CERTAIN      LEAVE        LEFT         NOTHING
    STEPPING     FORWARD      STEPPING     NOTHING
    STEPPING     STEP         STEPPING     NOTHING
    STEPPING     SEVERAL      STEPPING     NOTHING
    STEPPING     STEPPED      BETWEEN      END
    STEPPING     LEAVE        LEFT         GIVE_UP

    a loop that declares
    where        event        then         what is done
    BETWEEN      MARK         BETWEEN      NOTE
    BETWEEN      BEGIN        BEGUN        TAKE
    BETWEEN      STEP         STEPPING     TAKE
    BETWEEN      LEAVE        LEFT         TAKE
    BEGUN        STEP         STEPPING     NOTHING
    BEGUN        LEAVE        LEFT         CONFIRM
    CERTAIN      STEP         STEPPING     NOTHING
    CERTAIN      LEAVE        LEFT         NOTHING
    STEPPING     STEPPED      STEPPED      CONFIRM
    STEPPING     LEAVE        LEFT         CONFIRM
    STEPPED      STEP         STEPPING     NOTHING
    STEPPED      MARK         BETWEEN      END
    STEPPED      LAST         BETWEEN      END
    STEPPED      LEAVE        LEFT         NOTHING

An event that a table does not name changes nothing. What is taken is a snapshot, if one is due; TAKE beside LEAVE takes
the last one, of a loop that has ended well. How a snapshot goes on from there draws `snapshot.step.orders`.
"""

from __future__ import annotations

from enum import Enum, auto

BEGIN = "call `snap.begin()` at the top of the loop, or use `snap.steps(n)` or `for batch in snap.data(loader)`"
"""The line that a loop which is not plain needs."""

FIRST_TURNS = 2
"""In so many turns of a new job an event that is not of a plain loop ends the job: nothing is protected yet."""


class TurnState(Enum):
    """Where a loop is.

    BETWEEN: between two steps. BEGUN: the step has begun; in a plain loop no gradients of the forward that began it
    were computed yet. CERTAIN: they were. STEPPING: in ``optim.step()``. STEPPED: an optimizer has stepped, and the
    loop that declares has not come round yet. LEFT: the hook is being left, or was.
    """

    BETWEEN = auto()
    BEGUN = auto()
    CERTAIN = auto()
    STEPPING = auto()
    STEPPED = auto()
    LEFT = auto()


class Event(Enum):
    """What a loop does.

    FORWARD: a forward in training mode and with gradients. EVALUATION: another one, and random numbers were drawn since
    the last step. BACKWARD: gradients of the forward that began the step. STEP, STEPPED: the optimizer is about to
    step; it has. SEVERAL: the same as STEP, of one of several. ZEROED: gradients of this step were zeroed, and are
    computed again. MARK: data is about to be read. BEGIN: the loop says that the step begins. DECLARE: it says for the
    first time where steps begin. LAST: it has ended well, and the state after its last step is to be kept. LEAVE: the
    hook is left, in whatever way.

    UNEVEN, MOVED: just before a FORWARD that begins a step, something was drawn or changed in another way than before
    the first step, so that a restart would not get there; see `snapshot.resume.rehearsal`.
    """

    FORWARD = auto()
    EVALUATION = auto()
    BACKWARD = auto()
    STEP = auto()
    STEPPED = auto()
    SEVERAL = auto()
    ZEROED = auto()
    MARK = auto()
    BEGIN = auto()
    UNEVEN = auto()
    MOVED = auto()
    DECLARE = auto()
    LAST = auto()
    LEAVE = auto()


class Action(Enum):
    """What is done: the state is taken (TAKE); what was taken is known to be of a step, and may be sealed (CONFIRM), or
    is not known to be, and is given up (GIVE_UP); the step ends (END); what reading data changes is noted (NOTE)."""

    NOTHING = auto()
    TAKE = auto()
    CONFIRM = auto()
    END = auto()
    NOTE = auto()
    GIVE_UP = auto()


class NotPlain(Enum):
    """Why a loop is not plain, in words: what was seen."""

    UNSEEN = (
        "an optimizer stepped, and no forward of the model in training mode and with gradients was seen since the step "
        "before: forward runs in a closure, in eval mode, or in a compiled model that the hook was not given"
    )
    SEVERAL = "the hook was given several optimizers, so one step of one of them need not be the end of a turn"
    NO_BACKWARD = (
        "the model ran forward in training mode and with gradients, and no gradients of it were computed, as in an "
        "evaluation or in a step that is left out, which `snap.step` does not count; evaluate under model.eval() and "
        "torch.no_grad()"
    )
    EVALUATED = (
        "between two steps random numbers were drawn, and a forward ran that does not train, in eval mode or without "
        "gradients; a restart does not make an evaluation again, and so would go on with other random numbers"
    )
    UNEVEN = (
        "between two steps random numbers were not drawn from the same generators as before the first step: a batch "
        "was read ahead, a forward that does not train came first, or other code draws, too"
    )
    MOVED = (
        "values changed before the first forward, and again before the second, as a schedule or counter at the top of "
        "the loop does; after a restart they would change twice"
    )
    SKIPPED = "gradients were computed and zeroed again without a step of an optimizer that the hook was given"


Table = dict[tuple[TurnState, Event], tuple[TurnState, Action | NotPlain]]

PLAIN: Table = {
    (TurnState.BETWEEN, Event.FORWARD): (TurnState.BEGUN, Action.TAKE),
    (TurnState.BETWEEN, Event.STEP): (TurnState.STEPPING, NotPlain.UNSEEN),
    (TurnState.BETWEEN, Event.SEVERAL): (TurnState.STEPPING, NotPlain.SEVERAL),
    (TurnState.BETWEEN, Event.EVALUATION): (TurnState.BETWEEN, NotPlain.EVALUATED),
    (TurnState.BETWEEN, Event.UNEVEN): (TurnState.BETWEEN, NotPlain.UNEVEN),
    (TurnState.BETWEEN, Event.MOVED): (TurnState.BETWEEN, NotPlain.MOVED),
    (TurnState.BETWEEN, Event.LEAVE): (TurnState.LEFT, Action.TAKE),
    (TurnState.BEGUN, Event.DECLARE): (TurnState.BETWEEN, Action.GIVE_UP),
    (TurnState.BEGUN, Event.FORWARD): (TurnState.BEGUN, Action.NOTHING),
    (TurnState.BEGUN, Event.BACKWARD): (TurnState.CERTAIN, Action.CONFIRM),
    (TurnState.BEGUN, Event.STEP): (TurnState.STEPPING, NotPlain.NO_BACKWARD),
    (TurnState.BEGUN, Event.SEVERAL): (TurnState.STEPPING, NotPlain.SEVERAL),
    (TurnState.BEGUN, Event.ZEROED): (TurnState.BEGUN, NotPlain.SKIPPED),
    (TurnState.BEGUN, Event.LEAVE): (TurnState.LEFT, Action.GIVE_UP),
    (TurnState.CERTAIN, Event.FORWARD): (TurnState.CERTAIN, Action.NOTHING),
    (TurnState.CERTAIN, Event.BACKWARD): (TurnState.CERTAIN, Action.NOTHING),
    (TurnState.CERTAIN, Event.STEP): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.CERTAIN, Event.SEVERAL): (TurnState.STEPPING, NotPlain.SEVERAL),
    (TurnState.CERTAIN, Event.ZEROED): (TurnState.CERTAIN, NotPlain.SKIPPED),
    (TurnState.CERTAIN, Event.LEAVE): (TurnState.LEFT, Action.NOTHING),
    (TurnState.STEPPING, Event.FORWARD): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.STEPPING, Event.STEP): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.STEPPING, Event.SEVERAL): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.STEPPING, Event.STEPPED): (TurnState.BETWEEN, Action.END),
    (TurnState.STEPPING, Event.LEAVE): (TurnState.LEFT, Action.GIVE_UP),
}

DECLARED: Table = {
    (TurnState.BETWEEN, Event.MARK): (TurnState.BETWEEN, Action.NOTE),
    (TurnState.BETWEEN, Event.BEGIN): (TurnState.BEGUN, Action.TAKE),
    (TurnState.BETWEEN, Event.STEP): (TurnState.STEPPING, Action.TAKE),
    (TurnState.BETWEEN, Event.LEAVE): (TurnState.LEFT, Action.TAKE),
    (TurnState.BEGUN, Event.STEP): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.BEGUN, Event.LEAVE): (TurnState.LEFT, Action.CONFIRM),
    (TurnState.CERTAIN, Event.STEP): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.CERTAIN, Event.LEAVE): (TurnState.LEFT, Action.NOTHING),
    (TurnState.STEPPING, Event.STEPPED): (TurnState.STEPPED, Action.CONFIRM),
    (TurnState.STEPPING, Event.LEAVE): (TurnState.LEFT, Action.CONFIRM),
    (TurnState.STEPPED, Event.STEP): (TurnState.STEPPING, Action.NOTHING),
    (TurnState.STEPPED, Event.MARK): (TurnState.BETWEEN, Action.END),
    (TurnState.STEPPED, Event.LAST): (TurnState.BETWEEN, Action.END),
    (TurnState.STEPPED, Event.LEAVE): (TurnState.LEFT, Action.NOTHING),
}


def after(where: TurnState, event: Event, *, declared: bool) -> tuple[TurnState, Action | NotPlain]:
    """Where a loop is after `event`, and what is done, or why it is refused."""
    if declared and event is Event.SEVERAL:
        event = Event.STEP
    return (DECLARED if declared else PLAIN).get((where, event), (where, Action.NOTHING))
