"""Draws a loop from a seed. The loop depends on nothing but the seed.

Each loop has a model, an optimizer, data, and at most three further features. They are few because a feature that is
rightly refused hides every other fault of its loop.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.proof.loops.script import MODELS, OPTIMIZERS, End, Loop, Twist

PLAIN_DATA = ("fresh", "indexed", "numpy", "python")
OTHER_DATA = (
    "own generator",
    "prefetched",
    "prefetched, before entering",
    "loader, iterator before",
    "loader, iterator inside",
    "loader, iterator inside, shuffled",
    "loader, iterator inside, workers",
    "loader, enumerated",
    "loader, enumerated, shuffled",
    "loader, epochs",
    "loader, epochs, shuffled",
    "loader, iterator inside, shuffled, own generator",
)
DECLARED_DATA = (
    "loader, snap.data",
    "loader, snap.data, workers",
    "loader, snap.data, shuffled",
    "loader, snap.data, shuffled, workers",
    "loader, snap.data, shuffled, own generator",
    "loader, snap.data, iterable",
    "loader, snap.data, list",
)
PLAIN_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "amsgrad", "rmsprop", "adagrad", "groups")
OTHER_OPTIMIZERS = (*(o for o in OPTIMIZERS if o not in PLAIN_OPTIMIZERS), "two", "in backward")
PLAIN_MODELS = ("mlp", "dropout", "batchnorm")
OTHER_MODELS = tuple(m for m in MODELS if m not in PLAIN_MODELS)

WITH_MOMENTUM = ("momentum", "adam", "adamw", "amsgrad", "rmsprop", "groups", "closure")
"""Optimizers whose momentum, or first beta, `OneCycleLR` can change."""

SCHEDULES = ("end", "top", "lambda", "one cycle", "sequential", "plateau", "in extra", "several", "list")
AVERAGES = (
    "tracked",
    "tracked, after step",
    "tracked, data",
    "in extra",
    "module",
    "module, buffers",
    "module, tracked",
    "module, in extra",
)
EVALUATIONS = (
    "eval mode",
    "eval mode, random",
    "train mode",
    "train mode, random",
    "grad, eval mode",
    "grad, train mode",
    "eval mode, at the top",
    "eval mode, loader",
)
CLIPS = ("norm", "value", "weights", "weights, data", "weights, pointer")


def draw(seed: int, *, declared: bool = True) -> Loop:
    """Draw the loop of a seed.

    Args:
        declared: whether the loop may say where its steps begin, by ``snap.begin()``, ``steps`` or ``data``.
    """
    dice = random.Random(f"loop {seed}")
    count = dice.choices((0, 1, 2, 3), (1, 4, 4, 2))[0]
    loop = Loop(
        seed,
        model=dice.choice(PLAIN_MODELS),
        optimizer=dice.choice(PLAIN_OPTIMIZERS),
        data=dice.choice(PLAIN_DATA),
        form=dice.choice(("range", "while")),
        zero=dice.choice(("top", "middle", "end")),
        steps=dice.randint(7, 9),
        held=dice.choice(("free", "free", "evaluation", "evaluated", "stepped", "loss", "backward")),
        waits=dice.choice(("each", "each", "last")),
    )
    for kind in dice.sample(sorted(_KINDS), count):
        loop = _KINDS[kind](loop, dice)
    if declared and dice.random() < 0.5:
        loop = replace(loop, form=dice.choice(("steps", "begin")))
        if loop.data.startswith("loader") or dice.random() < 0.25:
            loop = replace(loop, data=dice.choice(DECLARED_DATA))
    tail = ["schedule", "average", "clip", "evaluation", "counter", "target", "zero", "bank"]
    dice.shuffle(tail)
    loop = _consistent(replace(loop, tail=tuple(tail)))
    return replace(loop, ends=_ends(loop, dice))


def _model(loop: Loop, dice: random.Random) -> Loop:
    return replace(loop, model=dice.choice(OTHER_MODELS))


def _optimizer(loop: Loop, dice: random.Random) -> Loop:
    loop = replace(loop, optimizer=dice.choice(OTHER_OPTIMIZERS))
    if loop.optimizer == "two":
        for name in ("two: critic steps last", "two: critic listed last"):
            loop = _twisted(loop, name) if dice.random() < 0.5 else loop
    return loop


def _data(loop: Loop, dice: random.Random) -> Loop:
    data = dice.choice(OTHER_DATA)
    if data.endswith("shuffled") and dice.random() < 0.2:
        data += ", workers"
    return replace(loop, data=data, form="range")


def _schedule(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"schedule: {dice.choice(SCHEDULES)}")


def _average(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"average: {dice.choice(AVERAGES)}")


def _swap(loop: Loop, dice: random.Random) -> Loop:
    loop = _evaluation(loop, dice)
    if not any(t.name.startswith("average: ") for t in loop.twists):
        loop = _twisted(loop, f"average: {dice.choice(AVERAGES[:3])}")
    return _twisted(loop, f"swap: {dice.choice(('copy', 'data', 'pointer'))}")


def _evaluation(loop: Loop, dice: random.Random) -> Loop:
    if any(t.name.startswith("evaluation: ") for t in loop.twists):
        return loop
    return _twisted(loop, f"evaluation: {dice.choice(EVALUATIONS)}", dice.randint(1, 3))


def _clip(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"clip: {dice.choice(CLIPS)}")


def _freeze(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"freeze: {dice.choice(('once', 'once, unfreeze', 'each step'))}", dice.randint(2, 4))


def _counter(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"counter: {dice.choice(('top', 'end', 'top, when step'))}")


def _group(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, "group: later", dice.randint(2, 4))


def _target(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, "target")


def _scaler(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, "scaler", dice.randint(2, 5))


def _skip(loop: Loop, dice: random.Random) -> Loop:
    return replace(_twisted(loop, "skip", dice.randint(2, 3)), form="range")


def _accumulate(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, "accumulate")


def _in_place(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, "zeroed in place")


def _written(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"written: {dice.choice(('data', 'in place'))}")


def _unzeroed(loop: Loop, dice: random.Random) -> Loop:
    return replace(_twisted(loop, "unzeroed"), zero="top")


def _compile(loop: Loop, dice: random.Random) -> Loop:
    return _twisted(loop, f"compile: {dice.choice(('step', 'model'))}") if dice.random() < 0.15 else loop


_KINDS = {
    "model": _model,
    "optimizer": _optimizer,
    "data": _data,
    "schedule": _schedule,
    "average": _average,
    "swap": _swap,
    "evaluation": _evaluation,
    "clip": _clip,
    "freeze": _freeze,
    "counter": _counter,
    "group": _group,
    "target": _target,
    "scaler": _scaler,
    "skip": _skip,
    "accumulate": _accumulate,
    "unzeroed": _unzeroed,
    "written": _written,
    "zeroed in place": _in_place,
    "compile": _compile,
}


def _twisted(loop: Loop, name: str, at: int = 0) -> Loop:
    return replace(loop, twists=(*loop.twists, Twist(name, at)))


def _consistent(loop: Loop) -> Loop:
    """Drop twists and adjust options that do not fit together. The model wins, then the optimizer, then the twist that
    was drawn first."""
    steps_itself = loop.optimizer in ("lbfgs", "closure", "in backward", "two") or loop.optimizer.startswith("sam")
    several = loop.optimizer == "in backward"
    without_gradients = several or loop.optimizer in ("lbfgs", "closure")  # at the lines that follow backward
    looped = loop.data.startswith(("loader, e", "loader, s"))
    names = {twist.name for twist in loop.twists}
    kept: list[Twist] = []
    seen: set[str] = set()
    for twist in loop.twists:
        kind = twist.name.partition(": ")[0]
        unfit = (
            (kind in ("scaler", "skip", "accumulate", "compile", "unzeroed", "written") and steps_itself)
            or (kind == "written" and ("accumulate" in names or loop.model == "parts"))
            or (kind == "zeroed in place" and "unzeroed" in names)
            or (kind in ("schedule", "group", "freeze") and several)
            or (kind == "group" and (loop.optimizer not in PLAIN_OPTIMIZERS or loop.optimizer == "groups"))
            or (kind == "group" and any(n.startswith(("schedule", "freeze", "skip")) for n in names))
            or (kind == "schedule" and loop.optimizer in ("sam", "container"))
            or (twist.name == "clip: value" and without_gradients)
            or (twist.name == "schedule: one cycle" and loop.optimizer not in WITH_MOMENTUM)
            or (kind == "average" and "module" in twist.name and loop.model in ("old spectral norm", "old weight norm"))
            or (kind == "target" and loop.model in ("old spectral norm", "old weight norm"))
            or (twist.name == "schedule: plateau" and "accumulate" in names)
            or (kind in ("accumulate", "scaler") and (looped or "skip" in seen))
            or (kind == "scaler" and "accumulate" in seen)
            or (kind == "accumulate" and ("scaler" in seen or loop.data.startswith("loader")))
            or (kind == "skip" and ("accumulate" in seen or "scaler" in seen or looped))
            or (kind == "freeze" and loop.optimizer == "noted")
            or (twist.name == "swap: pointer" and loop.optimizer == "schedule-free")
            or (kind == "swap" and not any(n.startswith("average: tracked") for n in names))
            or (kind == "compile" and (loop.model not in PLAIN_MODELS or any("swap" in n for n in names)))
            or kind in seen - {"two"}
        )
        if not unfit:
            kept.append(twist)
            seen.add(kind)
    by_number = loop.data.startswith("loader") or "skip" in seen
    form = "range" if by_number and loop.form == "while" else loop.form
    if looped or (loop.optimizer == "sam" and form == "while"):
        form = "range"
    zero = loop.zero
    if loop.optimizer.startswith("sam") and zero == "middle":
        zero = "end"
    if "accumulate" in seen and zero == "middle":
        zero = "top"
    data = loop.data
    steps = loop.steps
    if loop.optimizer == "sam":  # it never steps itself; holdfast says so after gradients were zeroed 16 times
        data = "fresh" if data.startswith("loader") else data
        steps = 24
    if loop.optimizer in ("lbfgs", "closure") and data == "prefetched":
        data = "fresh"
    if loop.model == "embedding" and loop.optimizer == "two":
        data = data if data in ("indexed", "python") else "fresh"
    return replace(loop, twists=tuple(kept), form=form, zero=zero, data=data, steps=steps)


def _ends(loop: Loop, dice: random.Random) -> tuple[End, ...]:
    places = loop.script.places
    tail = places[places.index("stepped") :]
    ends = []
    for _ in range(2 if dice.random() < 0.2 else 1):
        kind = "exception" if dice.random() < 0.2 else "kill"
        place = dice.choice(tail if kind == "exception" and dice.random() < 0.7 else places)
        ends.append(End(dice.randint(2, loop.steps - 3), place, kind))
    return tuple(sorted(ends, key=lambda end: end.step))
