"""One file per framework, each imported only when it is used. Start with `adapter_for`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.snapshot.state.adapter import Adapter


def adapter_for(model: Any, optim: Any, scheduler: Any = None, extra: dict[str, Any] | None = None) -> Adapter:
    """The adapter for a job, chosen by the framework of its optimizer. Only imports the frameworks that the job uses.

    Raises:
        ConfigError: the objects belong to no known framework.
    """
    if type(optim).__module__.startswith("megatron."):
        from holdfast.integrations.adapters.megatron import MegatronAdapter

        return MegatronAdapter(model, optim, scheduler, extra)
    from holdfast.integrations.adapters.torch_native import TorchAdapter

    return TorchAdapter(model, optim, scheduler, extra)
