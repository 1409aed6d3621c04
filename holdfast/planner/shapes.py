"""Sizes of transformer language models: parameters, and what training with them keeps. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder: Llama's block (RMS norms, gated feed-forward, grouped queries), or a mixture of experts of it.

    Attributes:
        hidden, inner: width of the stream and of (each expert's) feed-forward part.
        heads, kv_heads: attention heads; those of keys and values.
        experts, active: experts in each layer, and how many a token visits; 1 and 1 if there is only one.
        tied: whether the output layer is the embedding.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 1
    active: int = 1
    tied: bool = False

    @property
    def parameters(self) -> int:
        """How many there are."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + self.experts * 3 * self.hidden * self.inner + router + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden


PRESETS = {
    shape.name: shape
    for shape in (
        Shape("7b", 32, 4096, 11008, 32, 32, 32000),
        Shape("13b", 40, 5120, 13824, 40, 40, 32000),
        Shape("70b", 80, 8192, 28672, 64, 8, 32000),
        Shape("405b", 126, 16384, 53248, 128, 8, 128256),
        Shape("moe-8x7b", 32, 4096, 14336, 32, 8, 32000, experts=8, active=2),
        Shape("moe-8x22b", 56, 6144, 16384, 48, 8, 32768, experts=8, active=2),
    )
}
"""Llama 2 and 3.1, and Mixtral, by their published configurations."""

_SHAPE = re.compile(
    r"layers=(\d+),hidden=(\d+),inner=(\d+),heads=(\d+),kv_heads=(\d+),vocab=(\d+)(?:,experts=(\d+)/(\d+))?"
)


def parse_shape(text: str) -> Shape:
    """A preset's name, or ``layers=32,hidden=4096,inner=11008,heads=32,kv_heads=32,vocab=32000,experts=2/8``.

    Raises:
        ConfigError: it is neither, or cannot be.
    """
    if text in PRESETS:
        return PRESETS[text]
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--model {text!r}: one of {', '.join(PRESETS)}, or layers=L,hidden=H,inner=F,heads=A,kv_heads=K,vocab=V, "
            "and for a mixture ,experts=ACTIVE/ALL"
        )
    layers, hidden, inner, heads, kv_heads, vocab, active, experts = (int(number or 1) for number in match.groups())
    if min(layers, hidden, inner, heads, kv_heads, vocab) < 1 or hidden % heads or heads % kv_heads:
        raise ConfigError(f"--model {text!r}: hidden must divide by heads, heads by kv_heads, and all be positive")
    if not 1 <= active <= experts:
        raise ConfigError(f"--model {text!r}: a token visits at least one and at most all of the experts")
    return Shape(text, layers, hidden, inner, heads, kv_heads, vocab, experts, active)
