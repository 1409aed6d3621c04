"""A rank's loop from entering the hook to leaving it: where it is, and what each event does. Pure: `Loop` acts.

A loop *declares* where its steps begin (`snap.begin`, `snap.steps`, `snap.data`), or it is *plain*: a forward of the
given model, in training mode and with gradients, begins the step; gradients of that forward are computed; the given
optimizer steps once. Whatever else a plain loop does is refused, never guessed at. One turn of each::

    plain:    BETWEEN ─FORWARD→ BEGUN ─BACKWARD→ CERTAIN ─STEP→ STEPPING ─STEPPED→ BETWEEN
    declares: BETWEEN ─BEGIN→ BEGUN ─STEP→ STEPPING ─STEPPED→ STEPPED ─MARK→ BETWEEN ─LEAVE→ LEFT

`PLAIN` and `DECLARED` below are the whole of it; an event that they do not name changes nothing. A loop may declare at
any time, and goes on by the other table. TAKE takes a snapshot if one is due; beside LEAVE, the last one of a loop that
has ended well. How a snapshot goes on from there is drawn in `snapshot.step.orders`.
"""

from __future__ import annotations

from enum import Enum, auto

BEGIN = (
    "if it reads a DataLoader, go through that by `for batch in snap.data(loader)`; otherwise use `snap.steps(n)`, or "
    "call `snap.begin()` at the top of the loop"
)
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
    step; it has. SEVERAL: the same as STEP, of one of several. ALONE: a FORWARD, and the hook has no optimizer. ZEROED:
    gradients of this step were zeroed, and are computed again. MARK: data is about to be read. BEGIN: the loop says
    that the step begins. DECLARE: it says for the first time where steps begin. LAST: it has ended well, and the state
    after its last step is to be kept. LEAVE: the hook is left, in whatever way.

    UNEVEN, MOVED, GREW: just before a FORWARD that begins a step, something was drawn or changed in another way than
    before the first step, or an optimizer was given parameters, so that a restart would not get there; see
    `snapshot.rehearsal.Rehearsal`. EXCHANGED: that FORWARD runs with other tensors in the place of parameters.
    """

    FORWARD = auto()
    EVALUATION = auto()
    BACKWARD = auto()
    STEP = auto()
    STEPPED = auto()
    SEVERAL = auto()
    ALONE = auto()
    ZEROED = auto()
    MARK = auto()
    BEGIN = auto()
    UNEVEN = auto()
    MOVED = auto()
    GREW = auto()
    EXCHANGED = auto()
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
    ALONE = "the hook was given no optimizer, whose steps it could see"
    NO_BACKWARD = (
        "the model ran forward in training mode and with gradients, and no gradients of it were computed, as in an "
        "evaluation or in a step that is left out, which `snap.step` does not count; evaluate under model.eval() and "
        "torch.no_grad()"
    )
    EVALUATED = (
        "between two steps random numbers were drawn, and a forward ran in eval mode or without gradients. If that is "
        "how the model is trained, as with frozen BatchNorm, steps look like evaluations. A restart does not make an "
        "evaluation again, and so would go on with other random numbers"
    )
    UNEVEN = (
        "between two steps random numbers were not drawn from the same generators as before the first step: a batch "
        "was read ahead, the iterator of a DataLoader was made, a forward that does not train came first, or other "
        "code draws, too"
    )
    MOVED = (
        "values changed before the first forward, and again before the second, as a schedule or counter at the top of "
        "the loop does; after a restart they would change twice"
    )
    GREW = (
        "an optimizer was given parameters between two steps; where that is done at the top of a turn, a restart would "
        "do it again"
    )
    EXCHANGED = (
        "the model ran forward with other tensors in the place of its parameters, as in torch.func.functional_call, so "
        "that its state could not be read as the step began"
    )
    SKIPPED = (
        "gradients were computed and zeroed again without a step of an optimizer that the hook was given. An optimizer "
        "that is made later has to be made before the block, and given in a list with the other"
    )


Table = dict[tuple[TurnState, Event], tuple[TurnState, Action | NotPlain]]


def _table(text: str) -> Table:
    rows = [line.split() for line in text.strip().splitlines()[1:]]
    done: dict[str, Action | NotPlain] = {**Action.__members__, **NotPlain.__members__}
    return {(TurnState[where], Event[event]): (TurnState[then], done[what]) for where, event, then, what in rows}


PLAIN = _table(
    """
    where        event        then         what is done
    BETWEEN      FORWARD      BEGUN        TAKE
    BETWEEN      ALONE        BETWEEN      ALONE
    BETWEEN      STEP         STEPPING     UNSEEN
    BETWEEN      SEVERAL      STEPPING     SEVERAL
    BETWEEN      EVALUATION   BETWEEN      EVALUATED
    BETWEEN      UNEVEN       BETWEEN      UNEVEN
    BETWEEN      MOVED        BETWEEN      MOVED
    BETWEEN      GREW         BETWEEN      GREW
    BETWEEN      EXCHANGED    BETWEEN      EXCHANGED
    BETWEEN      LEAVE        LEFT         TAKE
    BEGUN        DECLARE      BETWEEN      GIVE_UP
    BEGUN        BACKWARD     CERTAIN      CONFIRM
    BEGUN        STEP         STEPPING     NO_BACKWARD
    BEGUN        SEVERAL      STEPPING     SEVERAL
    BEGUN        ZEROED       BEGUN        SKIPPED
    BEGUN        LEAVE        LEFT         GIVE_UP
    CERTAIN      STEP         STEPPING     NOTHING
    CERTAIN      SEVERAL      STEPPING     SEVERAL
    CERTAIN      ZEROED       CERTAIN      SKIPPED
    CERTAIN      LEAVE        LEFT         NOTHING
    STEPPING     STEPPED      BETWEEN      END
    STEPPING     LEAVE        LEFT         GIVE_UP
    """
)

DECLARED = _table(
    """
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
    """
)


def after(where: TurnState, event: Event, *, declared: bool) -> tuple[TurnState, Action | NotPlain]:
    """Where a loop is after `event`, and what is done, or why it is refused."""
    if declared and event is Event.SEVERAL:
        event = Event.STEP
    return (DECLARED if declared else PLAIN).get((where, event), (where, Action.NOTHING))
