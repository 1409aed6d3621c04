"""Parameters and bytes of models, against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast import ConfigError
from holdfast.planner.model import PRESETS, parse_shape, state_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("70b", 68_976_648_192),
        ("405b", 405_853_388_800),
        ("moe-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


def test_a_mixture_of_ones_own_is_read() -> None:
    text = "layers=32,hidden=4096,inner=14336,heads=32,kv_heads=8,vocab=32000,experts=8"
    assert replace(parse_shape(text), name="moe-8x7b") == PRESETS["moe-8x7b"]


@pytest.mark.parametrize(
    "text",
    [
        "8b",
        "layers=2",
        "layers=1,hidden=10,inner=4,heads=3,kv_heads=1,vocab=9",
        "layers=1,hidden=8,inner=4,heads=2,kv_heads=1,vocab=9,experts=0",
    ],
)
def test_a_shape_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        parse_shape(text)


def test_state_is_what_the_optimizer_keeps() -> None:
    assert state_bytes(PRESETS["7b"], "adam") == 6_738_415_616 * 12
    assert state_bytes(PRESETS["7b"], "adam-8bit") == 6_738_415_616 * 6
    with pytest.raises(ConfigError, match="'lion' is not"):
        state_bytes(PRESETS["7b"], "lion")
