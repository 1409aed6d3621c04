"""Twenty thousand inputs to the parsers, and every input that once found a bug. `make fuzz` runs two million."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scripts import completed
from tools.fuzz.campaign import CORPUS, Found, kept, limited, one, run
from tools.fuzz.mutation import mutate
from tools.fuzz.targets import Target, targets, try_one

INPUTS = 20_000
SEED = os.environ.get("HOLDFAST_SEED") or "20261122"
ROOT = Path(__file__).parents[2]


def test_twenty_thousand_inputs_crash_and_hang_nothing() -> None:
    """In a separate process, whose memory is limited."""
    command = [sys.executable, "-m", "tools.fuzz", "--inputs", str(INPUTS), "--shards", "1", "--seed", SEED]
    done = completed(command, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", targets())
def test_what_is_right_is_read(name: str) -> None:
    """Otherwise mutations of these inputs would prove little. Signed ones are all refused: they prove a secret."""
    target = targets()[name]
    refused = [seed for seed in target.seeds if not try_one(target, seed)]
    assert refused == list(target.seeds if name in ("call", "handshake") else ())


@pytest.mark.parametrize("name", targets())
def test_the_corpus_finds_nothing_any_more(name: str) -> None:
    found = Found()
    with limited():
        for path in kept(name):
            one(found, name, targets()[name], path.read_bytes(), measured=True)
    assert found.crashes == []


def test_the_corpus_is_small_and_of_targets_that_there_are() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1 << 20
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= set(targets())


@pytest.mark.parametrize("name", targets())
def test_hypothesis_finds_nothing(name: str) -> None:
    target, found = targets()[name], Found()

    @given(st.binary(max_size=200), st.integers(0, 1 << 30), st.integers(0, 400))
    def throw(data: bytes, number: int, at: int) -> None:
        good = target.seeds[number % len(target.seeds)]
        for each in (data, good[:at] + data + good[at:]):
            one(found, name, target, each, measured=False)
        assert found.crashes == []

    throw()


def test_a_parser_that_crashes_hangs_or_takes_too_much_is_noticed() -> None:
    def crash(data: bytes) -> None:
        raise KeyError(data)

    def hang(data: bytes) -> None:
        while True:
            pass

    found = Found()
    with limited():
        for read in (crash, hang, lambda data: bytearray(1 << 30), lambda data: [0] * (1 << 18)):
            one(found, "broken", Target(read, (b"",)), b"", measured=read not in (crash, hang))
    assert [crash["target"] for crash in found.crashes] == ["broken"] * 4


def test_the_same_seed_gives_the_same_inputs() -> None:
    from random import Random

    target = targets()["inventory"]
    first, second = ([mutate(Random(seed), target.seeds, True) for seed in range(50)] for _ in range(2))
    assert first == second
    assert run(2 * len(targets()), "seed").by_target == dict.fromkeys(targets(), 2)
