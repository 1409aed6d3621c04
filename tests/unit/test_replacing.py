"""What integrations replace is put back, and what others put around it stays."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from holdfast.integrations.replacing import Replacements


def counted(calls: list[str], name: str) -> Any:
    def make(original: Any) -> Any:
        def call() -> str:
            calls.append(name)
            return str(original())

        return call

    return make


def test_what_others_put_around_a_stand_in_stays() -> None:
    calls: list[str] = []
    owner = SimpleNamespace(train=lambda: "trained")
    Replacements().replace(owner, "train", counted(calls, "given up"))
    first = owner.train

    @functools.wraps(first)
    def theirs() -> str:
        calls.append("theirs")
        return str(first())

    owner.train = theirs
    again = Replacements()
    again.replace(owner, "train", counted(calls, "again"))
    assert owner.train() == "trained" and calls == ["again", "theirs", "given up"]
    again.undo()
    assert owner.train is theirs


def test_a_stand_in_that_was_left_is_replaced_itself() -> None:
    calls: list[str] = []
    owner = SimpleNamespace(train=lambda: "trained")
    Replacements().replace(owner, "train", counted(calls, "given up"))
    Replacements().replace(owner, "train", counted(calls, "again"))
    assert owner.train() == "trained" and calls == ["again"]
