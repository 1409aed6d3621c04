"""Sizes, times and rates: what is read, and that a number without a unit is refused everywhere, in the same words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import ConfigError
from holdfast.cli.main import main, make_parser
from holdfast.smp_daemon.shared.quantities import amount, duration, parse_rate, parse_size, parse_time
from holdfast.smp_daemon.shared.settings import DEADLINES, TABLE, Setting

REFUSED = {
    "SIZE": "'64' has no unit: .* 64GB",
    "RATE": "'64' has no unit: .* 2GB/s",
    "TIME": "'64' has no unit: .* 800ms",
}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("0", 0), ("0B", 0), ("0.0", 0), ("4096B", 4096), ("64G", 64 * 10**9), ("1.5GB", 15 * 10**8)),
        *(("2GiB", 2**31), ("2Gi", 2**31), ("1e9B", 10**9), (" 2 kB ", 2000), (".5MB", 500_000), ("1PB", 10**15)),
    ],
)
def test_a_size_is_read(text: str, count: int) -> None:
    assert parse_size(text) == count
    if text not in ("0", "0.0"):
        assert parse_rate(f"{text.strip()}/s") == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("800ms", 0.8), ("90s", 90), ("5min", 300), ("5m", 300), ("36h", 129600), ("1d", 86400), ("1e3s", 1000)],
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


NONE = ("", " ", "much", "-1", "-2GB", "1.2.3GB", "G", "inf", "nanGB", "1e400GB", "0x10", "٣GB", "1_0GB", "2 GB 3 GB")


@pytest.mark.parametrize(
    ("read", "texts", "refusal"),
    [
        (parse_size, (*NONE, "2GB/s", "5min", "2gb", "2Gbit", "0min"), "64GB or 60GiB"),
        (parse_rate, (*NONE, "2GB", "2Gb/s", "2GB/min", "2GB\\s"), "2GB/s or 500MB/s"),
        (parse_time, (*NONE, "5GB", "1d 3h", "5 M"), "800ms, 90s, 5min"),
    ],
)
def test_what_is_none_is_refused(read: Callable[[str], float], texts: tuple[str, ...], refusal: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=refusal):
            read(text)


@pytest.mark.parametrize(
    ("read", "most"), [(parse_size, "1000Pi"), (parse_rate, "1000Pi/s"), (parse_time, "10000000d")]
)
def test_more_than_anyone_has_is_refused(read: Callable[[str], float], most: str) -> None:
    assert read(most) > 0
    with pytest.raises(ConfigError, match=f"more than {most}"):
        read("9" + most)


@pytest.mark.parametrize(("read", "text"), [(parse_size, "0.5B"), (parse_rate, "1e-10GB/s"), (parse_time, "1e-300s")])
def test_next_to_nothing_is_not_taken_for_nothing(read: Callable[[str], float], text: str) -> None:
    """Nothing often means that there is no limit."""
    with pytest.raises(ConfigError, match="next to nothing"):
        read(text)


@pytest.mark.parametrize(("read", "kind"), [(parse_size, "SIZE"), (parse_rate, "RATE"), (parse_time, "TIME")])
def test_a_number_without_a_unit_is_refused(read: Callable[[str, str], float], kind: str) -> None:
    for text in ("64", "1e9", "1.5"):
        with pytest.raises(ConfigError, match="--it: " + REFUSED[kind].replace("64", text, 1)):
            read(text, "--it")


def options() -> Iterator[tuple[list[str], str, str]]:
    """Command, option and metavar of every option that takes a value."""

    def walk(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[tuple[list[str], str, str]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield from walk(inner, [*words, name])
            elif action.option_strings and action.nargs != 0:
                yield words, action.option_strings[0], str(action.metavar)

    return walk(make_parser(), [])


def needed(words: list[str]) -> list[str]:
    """Other arguments that a command requires."""
    return {"drain": ["node0"], "smp": ["--job", "some"]}.get(words[0], [])


MEASURES = [(words, option, kind) for words, option, kind in options() if kind in REFUSED]


@pytest.mark.parametrize(("words", "option", "kind"), MEASURES, ids=lambda value: "-".join(value) if value else "")
def test_every_option_refuses_a_number_without_a_unit(
    words: list[str], option: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *needed(words), f"{option}=64"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: {option}") and re.search(REFUSED[kind], said) and said.count("\n") == 1


def test_options_that_mean_a_size_a_time_or_a_rate_say_so() -> None:
    telling = ("-rate", "memory", "deadline", "bandwidth", "older", "step-time", "mtbf", "window", "grace", "span")
    silent = [
        (words, option)
        for words, option, kind in options()
        if any(word in option for word in telling) and kind not in REFUSED and option not in ("--deadlines",)
    ]
    assert silent == []
    assert not [(words, option) for words, option, kind in options() if kind in ("SECONDS", "BYTES")]
    assert len(MEASURES) > 20


@pytest.mark.parametrize("setting", [each for each in TABLE if each.kind.shown in REFUSED], ids=lambda each: each.name)
def test_every_variable_refuses_a_number_without_a_unit(setting: Setting[Any]) -> None:
    with pytest.raises(ConfigError, match=f"{setting.variable}.*{REFUSED[setting.kind.shown]}"):
        setting.value({setting.variable: "64"})


def test_deadlines_refuse_a_number_without_a_unit() -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_DEADLINES.*" + REFUSED["TIME"]):
        DEADLINES.value({"HOLDFAST_DEADLINES": "step=64"})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (59.94, "59.9 s"),
        (59.96, "60 s"),
        (59.98, "1 min"),
        (3599.9, "1 h"),
        (0.0, "0 ms"),
        (3650 * 86400.0, "3650 d"),
    ],
)
def test_a_time_that_is_rounded_up_gets_the_next_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_written_can_be_read() -> None:
    for seconds in (0.25, 1.5, 90.0, 300.0, 7200.0, 864000.0, 1e9):
        assert parse_time(duration(seconds)) == pytest.approx(seconds, rel=0.01)
    for count in (0.0, 12.0, 5e6, 64e9, 999.4e9, 1.5e12):
        assert parse_size(amount(count)) == pytest.approx(count, rel=0.01)
