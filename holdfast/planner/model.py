"""How many bytes of state a model has. Pure.

Every byte is captured once: state that data-parallel ranks hold identically is divided among them, and an optimizer's
shards are divided anyway. So a node's share is all state divided by the number of nodes, however the job shards it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's blocks (RMS norms, gated feed-forward, grouped queries), or a mixture of experts of them.

    Attributes:
        hidden, inner: width of the residual stream, and of the feed-forward part (of each expert).
        heads, kv_heads: number of attention heads, and of heads for keys and values.
        experts: experts in each layer; 1 without a mixture.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 1

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + self.experts * 3 * self.hidden * self.inner + router + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


PRESETS = {
    shape.name: shape
    for shape in (
        Shape("7b", 32, 4096, 11008, 32, 32, 32000),
        Shape("13b", 40, 5120, 13824, 40, 40, 32000),
        Shape("70b", 80, 8192, 28672, 64, 8, 32000),
        Shape("405b", 126, 16384, 53248, 128, 8, 128256),
        Shape("moe-8x7b", 32, 4096, 14336, 32, 8, 32000, experts=8),
        Shape("moe-8x22b", 56, 6144, 16384, 48, 8, 32768, experts=8),
    )
}
"""Published configurations of Llama 2 and 3.1, and of Mixtral."""

_SHAPE = re.compile(r"layers=(\d+),hidden=(\d+),inner=(\d+),heads=(\d+),kv_heads=(\d+),vocab=(\d+)(?:,experts=(\d+))?")


def parse_shape(text: str) -> Shape:
    """Parse a preset's name, or ``layers=32,hidden=4096,inner=11008,heads=32,kv_heads=32,vocab=32000,experts=8``.

    Raises:
        ConfigError: `text` is neither, or the numbers do not fit together.
    """
    if text in PRESETS:
        return PRESETS[text]
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--model {text!r}: give one of {', '.join(PRESETS)}, or layers=L,hidden=H,inner=F,heads=A,kv_heads=K,"
            "vocab=V and for a mixture ,experts=N; or give --state"
        )
    layers, hidden, inner, heads, kv_heads, vocab, experts = (int(number or 1) for number in match.groups())
    if min(layers, hidden, inner, heads, kv_heads, vocab, experts) < 1 or hidden % heads or heads % kv_heads:
        raise ConfigError(f"--model {text!r}: hidden must divide by heads, heads by kv_heads, and all be positive")
    return Shape(text, layers, hidden, inner, heads, kv_heads, vocab, experts)


STATE_BYTES = {"adam": 12.0, "adam-16bit": 6.0, "adam-8bit": 6.0, "sgd": 8.0}
"""Bytes of state for each parameter, by optimizer: main copy and two moments in fp32; all three in 16 bits; main copy
in fp32 and two moments of a byte each (Dettmers et al., arXiv 2110.02861; without their scales, 0.4 %); main copy and
one moment in fp32. 16-bit weights follow from main copies and are not captured."""


def state_bytes(shape: Shape, optimizer: str) -> float:
    """Bytes of a whole job's state. Raises `ConfigError` for an unknown optimizer."""
    if optimizer not in STATE_BYTES:
        raise ConfigError(f"--optimizer {optimizer!r} is not known: give one of {', '.join(STATE_BYTES)}, or --state")
    return shape.parameters * STATE_BYTES[optimizer]
