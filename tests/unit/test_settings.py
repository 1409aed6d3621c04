"""The table of settings: every entry is complete, its default is a value, and a bad value is refused by its name."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.deadlines import Deadlines
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import (
    DEADLINES,
    HOST,
    MEMORY,
    OF_AN_SMP,
    REBUILD,
    SMP_OPTIONS,
    SWITCH,
    TABLE,
    VARIABLES,
    Setting,
    add_options,
    given,
)
from holdfast.snapshot.options import Options, OptionsGiven

each_setting = pytest.mark.parametrize("setting", TABLE, ids=lambda each: each.name)


def test_no_two_settings_have_one_name() -> None:
    assert len(VARIABLES) == len(TABLE) > 40
    assert all(re.fullmatch(r"HOLDFAST(_[A-Z0-9]+)+", name) for name in VARIABLES)


@each_setting
def test_a_setting_has_one_sentence(setting: Setting[Any]) -> None:
    assert setting.meaning.endswith(".") and setting.meaning[0].isupper()
    assert not re.search(r"[.!?] [A-Z]", setting.meaning)


@each_setting
def test_its_default_is_a_value(setting: Setting[Any]) -> None:
    assert setting.value({}) == setting.kind.read(setting.default)
    assert not setting.blank or setting.value({setting.variable: " "}) == setting.value({})


def test_an_address_that_is_empty_is_not_loopback() -> None:
    with pytest.raises(ConfigError, match=r"HOLDFAST_HOST.*'' .*IP address"):
        HOST.value({"HOLDFAST_HOST": ""})


BAD = {
    "{": "many",
    "0|1": "yes",
    "N": "-1",
    "SIZE": "much",
    "RATE": "64MB",
    "TIME": "soon",
    "FRACTION": "1.5",
    "PORT": "http",
    "ADDRESS,...": "node-7",
    "HOST:PORT,...": "host:0",
    "PHASE=TIME,...": "walk=3s",
    "STEPS": "sometimes",
    "snapshot|STEP": "0",
    "FILE": "secrets/token",
    "URL": "snapshots",
    "COMMAND": "\udcff",
}
"""Texts that are refused, by how the kind is shown. Names and lists of ids are any text."""

REFUSING = [
    (each, bad) for each in TABLE if (bad := BAD.get("{" if each.kind.shown[0] == "{" else each.kind.shown)) is not None
]


@pytest.mark.parametrize(("setting", "bad"), REFUSING, ids=lambda value: getattr(value, "name", value))
def test_a_bad_value_is_refused_by_name(setting: Setting[Any], bad: str) -> None:
    with pytest.raises(ConfigError) as refused:
        setting.value({setting.variable: bad})
    assert setting.variable in str(refused.value) and repr(bad)[1:-1].split("=")[0] in str(refused.value)


def test_options_that_are_given_come_before_variables() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, SMP_OPTIONS)
    assert given(parser.parse_args([]), SMP_OPTIONS) == {}
    words = [word for each in SMP_OPTIONS for word in ([each.option] if each.kind is SWITCH else [each.option, "x"])]
    assert given(parser.parse_args(words), SMP_OPTIONS) == {
        each.variable: "1" if each.kind is SWITCH else "x" for each in SMP_OPTIONS
    }
    said = given(parser.parse_args(["--memory", "2GB"]), SMP_OPTIONS)
    assert MEMORY.value({"HOLDFAST_MEMORY": "1GB"} | said) == int(2e9)


def test_the_deadlines_of_the_table_are_those_of_the_class() -> None:
    assert DEADLINES.value({}) == Deadlines()


@pytest.mark.parametrize(
    ("setting", "bad"),
    [(each, bad) for each, bad in REFUSING if each in (*OF_AN_SMP, REBUILD)],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_smp_refuses_it_before_it_touches_its_arena(setting: Setting[Any], bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting.variable):
        Smp("job", "n0", tmp_path / "arena", "127.0.0.1", environment={setting.variable: bad})
    assert not (tmp_path / "arena").exists()


def test_what_may_be_given_is_what_there_is() -> None:
    """`run` and `give_up` are said to one start, by variables."""
    assert {*OptionsGiven.__annotations__, "run", "give_up"} == {each.name for each in fields(Options)}
    kinds = get_type_hints(OptionsGiven)
    for name, kind in get_type_hints(Options).items():
        assert name in ("run", "give_up") or kinds[name] in (kind, kind | None), name


def test_an_option_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="evry"):
        Options.given(job="some", evry=2)
