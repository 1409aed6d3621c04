"""Lets Megatron's experts train without a GPU, and without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Patch Megatron's experts: it only converts split sizes to NumPy if they come from a GPU; and without Transformer
    Engine its router uses a name that 0.16 forgets to define."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = on_cpu
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
