"""Makes almost valid inputs from a seeded generator: the same seed gives the same inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

MAX_INPUT_BYTES = 1 << 16
NUMBERS = (0, 1, 2, 7, 127, 255, 256, 65535, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 63, (1 << 64) - 1, 1 << 64)
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 255, 65536, 1 << 31, 1 << 52, 1 << 53, 1 << 63, 1 << 64, 10**40, 10**4000),
    *(0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "a", "../../escape", "a/b", "\0", "é" * 40, "\ud800", "x" * 300, "$", "0", "-1", "1e9", "F32", "BOOL"),
    *(
        [],
        {},
        [[]],
        [{}],
        {"$": "tuple"},
        {"$": "mapping", "type": "dict", "items": [[[], 1]]},
        {"$": "int", "data": "z"},
    ),
    *(
        {"$": "ndarray", "dtype": "O", "shape": [1], "data": ""},
        {"$": "ndarray", "dtype": "<f8", "shape": [1 << 62], "data": ""},
    ),
    *(
        {"$": "scalar", "dtype": "(9999999,)f8", "data": ""},
        {"$": "dtype", "data": "_dynamo"},
        {"$": "device", "data": "x"},
    ),
)


def mutate(random: Random, seeds: Sequence[bytes], text: bool) -> bytes:
    """An input: one of `seeds`, changed in a few places. If `text`, 60 % of inputs are changed as JSON."""
    data = random.choice(seeds)
    if text and random.random() < 0.6:
        try:
            return _json(random, data)
        except (ValueError, RecursionError):
            pass  # inputs in the corpus need not be JSON
    changed = bytearray(data)
    for _ in range(1 + min(int(random.expovariate(0.5)), 8)):
        _bytes(random, changed, seeds)
    return bytes(changed[:MAX_INPUT_BYTES])


def _bytes(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = random.randrange(len(data) + 1)
    length = min(1 + int(random.expovariate(0.1)), len(data) - at)
    match random.randrange(9):
        case 0 if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        case 1 if data:
            data[random.randrange(len(data))] = random.randrange(256)
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = random.randbytes(random.randrange(9))
        case 4:
            data[at:at] = data[at : at + length] * random.choice((1, 2, 50))
        case 5:
            number = random.choice(NUMBERS) + random.randrange(-1, 2)
            width = random.choice((1, 2, 4, 8))
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, random.choice(("little", "big")))
        case 6:
            data[at : at + length] = str(random.choice(NUMBERS)).encode()
        case 7:
            other = random.choice(seeds)
            data[at:] = other[random.randrange(len(other) + 1) :]
        case _:
            del data[at:]


def _json(random: Random, data: bytes) -> bytes:
    value = json.loads(data)
    for _ in range(1 + min(int(random.expovariate(0.8)), 4)):
        value = _spoil(random, value)
    return json.dumps(value, separators=(",", ":")).encode()[:MAX_INPUT_BYTES]


def _spoil(random: Random, value: Any) -> Any:
    inside = value
    while isinstance(inside, dict | list) and inside:
        key = random.choice(list(inside)) if isinstance(inside, dict) else random.randrange(len(inside))
        if isinstance(inside[key], dict | list) and inside[key] and random.random() < 0.75:
            inside = inside[key]
            continue
        match random.randrange(6):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside[key:key] = [inside[key]] * random.choice((1, 3, 200))
            case 2 if isinstance(inside, dict):
                inside[random.choice(("$", "", "x", "items", "data"))] = inside[key]
            case 3:
                inside[key] = _deep(random, inside[key])
            case _:
                inside[key] = random.choice(ODD)
        return value
    return random.choice(ODD)


def _deep(random: Random, value: Any) -> Any:
    for _ in range(random.choice((1, 3, 60, 400))):
        value = random.choice(([value], {"a": value}, {"$": "tuple", "items": [value]}))
    return value
