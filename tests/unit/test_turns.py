"""The table of a loop's events: what stands in the module's text is what its code does."""

from __future__ import annotations

import re

import pytest

from holdfast.snapshot.step import turns
from holdfast.snapshot.step.turns import DECLARED, PLAIN, Action, Event, NotPlain, TurnState, after


def drawn(kind: str) -> list[str]:
    """The turn that the module's text draws of such a loop: states, and events between them."""
    assert turns.__doc__ is not None
    line = next(line for line in turns.__doc__.splitlines() if line.strip().startswith(f"{kind}:"))
    return re.findall("[A-Z]+", line)


@pytest.mark.parametrize(("kind", "declared"), [("plain", False), ("declares", True)])
def test_the_turn_that_is_drawn_is_the_one_that_is_made(kind: str, declared: bool) -> None:
    where, *way = drawn(kind)
    for event, then in zip(way[::2], way[1::2], strict=True):
        assert after(TurnState[where], Event[event], declared=declared)[0] is TurnState[then]
        where = then


def test_every_row_of_a_table_counts() -> None:
    for table in (PLAIN, DECLARED):
        assert all(what is not Action.NOTHING or then is not where for (where, _), (then, what) in table.items())
    assert (len(PLAIN), len(DECLARED)) == (22, 14)  # no row stands twice


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
