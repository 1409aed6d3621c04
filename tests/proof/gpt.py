"""The GPT of `holdfast.chaos.gpt`, with stand-ins for packages that exist only for GPUs."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.gpt import Gpt, GptOptions
from tests.proof.standins import emerging, fused_adam, gather, offload, quantized


class StandInGpt(Gpt):
    """A `Gpt` whose options may ask for any of these packages."""

    def complete(self, options: GptOptions, chunks: list[Any]) -> None:
        if options.fp8:
            gather.one_by_one()
            for chunk in chunks:
                quantized.quantize_weights(chunk, options.fp8)
        if options.offload is not None or options.aware:
            fused_adam.install()
        if options.offload is not None:
            offload.install()
        if options.muon:
            emerging.install()
            gather.install()
