"""The table of a loop's events: what stands in the module's text is what its code does."""

from __future__ import annotations

import re

import pytest

from holdfast.snapshot.step import turns
from holdfast.snapshot.step.turns import DECLARED, PLAIN, Action, Event, NotPlain, Table, TurnState, after


def drawn(heading: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The rows that the module's text has under a heading."""
    assert turns.__doc__ is not None
    text = turns.__doc__.partition(f"    {heading}\n")[2].partition("\n\n")[0]
    rows = [re.split(r"\s+", line.strip()) for line in text.splitlines()[1:]]
    return {(where, event): (then, what) for where, event, then, what in rows}


@pytest.mark.parametrize(("heading", "table"), [("a plain loop", PLAIN), ("a loop that declares", DECLARED)])
def test_the_table_that_is_drawn_is_the_one_that_is_used(heading: str, table: Table) -> None:
    used = {(w.name, e.name): (then.name, what.name) for (w, e), (then, what) in table.items()}
    assert drawn(heading) == used


def test_what_a_table_does_not_name_changes_nothing() -> None:
    for declared, table in ((False, PLAIN), (True, DECLARED)):
        for where in TurnState:
            for event in set(Event) - {Event.SEVERAL}:
                if (where, event) not in table:
                    assert after(where, event, declared=declared) == (where, Action.NOTHING)


def test_every_place_and_every_reason_is_reached() -> None:
    found = {what for _, what in [*PLAIN.values(), *DECLARED.values()]}
    assert found == {*Action, *NotPlain}
    assert {then for then, _ in [*PLAIN.values(), *DECLARED.values()]} == set(TurnState)


@pytest.mark.parametrize("declared", [False, True])
def test_a_loop_may_be_left_from_anywhere_and_nothing_comes_after(declared: bool) -> None:
    for where in TurnState:
        assert after(where, Event.LEAVE, declared=declared)[0] is TurnState.LEFT or (where, declared) == (
            TurnState.STEPPED,
            False,  # no plain loop is there
        )
    for event in Event:
        assert after(TurnState.LEFT, event, declared=declared) == (TurnState.LEFT, Action.NOTHING)


def test_nothing_that_was_taken_is_left_open() -> None:
    """As the loop is left, what nobody has confirmed is confirmed or given up."""
    for table in (PLAIN, DECLARED):
        for (where, event), (_, what) in table.items():
            if event is Event.LEAVE and where in (TurnState.BEGUN, TurnState.STEPPING):
                assert what is (Action.GIVE_UP if table is PLAIN else Action.CONFIRM)


def test_a_loop_that_declares_is_refused_nothing() -> None:
    assert not [what for _, what in DECLARED.values() if isinstance(what, NotPlain)]
    assert after(TurnState.BEGUN, Event.SEVERAL, declared=True) == after(TurnState.BEGUN, Event.STEP, declared=True)


def test_a_plain_loop_is_taken_once_and_confirmed_once_a_turn() -> None:
    turn = [Event.FORWARD, Event.FORWARD, Event.BACKWARD, Event.BACKWARD, Event.STEP, Event.FORWARD, Event.STEPPED]
    where, done = TurnState.BETWEEN, []
    for event in 2 * turn:
        where, what = after(where, event, declared=False)
        done.append(what)
    assert [what for what in done if what is not Action.NOTHING] == 2 * [Action.TAKE, Action.CONFIRM, Action.END]
