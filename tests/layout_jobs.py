"""A job in any layout of pipeline, data and tensor parallelism that saves into memory through DCP, or loads from it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.chaos import drill
from holdfast.integrations.dcp import MemoryReader, MemoryWriter
from tests.jobs import joined

LAYERS, WIDTH = 4, 20


def checkpoint() -> None:
    """Save or load, depending on `mode`; report digests of the undivided tensors of this rank's stage."""
    trainer = joined()
    args = trainer.args
    sizes = args["pipeline"], trainer.world // args["pipeline"] // args["tensor"], args["tensor"]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(3 if args["mode"] == "save" else 4)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    each = LAYERS // sizes[0]
    stage = range(mesh.get_local_rank("pp") * each, (mesh.get_local_rank("pp") + 1) * each)
    for number in stage:
        if sizes[2] > 1:
            parallelize_module(layers[number], mesh["tp"], RowwiseParallel() if number % 2 else ColwiseParallel())
        fully_shard(layers[number], mesh=mesh["dp"])
    parameters = {f"{number}.{name}": p for number in stage for name, p in layers[number].named_parameters()}
    optim = torch.optim.Adam(parameters.values(), lr=1e-2)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = parameter.detach().clone()
        optim.step()
    state = {name: parameter.detach() for name, parameter in parameters.items()}
    state |= {f"{name}.{key}": value for name, p in parameters.items() for key, value in optim.state[p].items()}
    arena = Path(args["arena"]) / os.environ["HOLDFAST_NODE"]
    if args["mode"] == "save":
        writer = MemoryWriter(job="layout", arena=arena)
        save(dict(state), storage_writer=writer)
        writer.close()
    else:
        reader = MemoryReader(job="layout", arena=arena)
        load(state, storage_reader=reader)
        reader.close()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    trainer.report("end", digests={name: drill.digest(value) for name, value in whole.items()})
