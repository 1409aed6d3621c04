"""Small jobs for virtual clusters, some with state that shows which step it belongs to.

They do not destroy their process groups. Freeing a group holds the GIL while it waits for gloo's threads, which may
need the GIL to release what DDP's last reduction held. The process ends right after.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from holdfast.chaos.trainer import Trainer
from holdfast.cli.export import export
from holdfast.integrations.dcp import MemoryReader, MemoryWriter
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.paths import arena_path, read_owner
from tests.proof.chaos.network.namespaces import DEVICE
from tests.proof.chaos.workload import Workload

DRAIN_DEADLINE_S = 1.0
PERSIST_DEADLINE_S = 30.0


def joined(**environment: str) -> Trainer:
    """This rank, with its environment and its process group."""
    trainer = Trainer.from_environment()
    os.environ.update(trainer.args.get("environment", {}) | environment)
    torch.set_num_threads(1)
    trainer.init_process_group()
    return trainer


class Stamp(torch.optim.Optimizer):
    """Fills every parameter, and two state tensors of each, with the number of steps taken."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["double"] = torch.zeros(parameter.shape, dtype=torch.float64)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["count"] += 1
                state["double"].fill_(float(state["count"]))
                parameter.data.fill_(float(state["count"]))


class Stamped(torch.nn.Module):
    """A few tensors of different sizes, and a buffer that forward fills."""

    tokens: torch.Tensor

    def __init__(self, longest: int) -> None:
        super().__init__()
        sizes = [1, 63, 4097, longest]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
        self.register_buffer("tokens", torch.zeros(5))

    def forward(self, step: int) -> None:
        self.tokens.fill_(step)


def stamps(model: Stamped, optim: Stamp) -> list[float]:
    """All distinct values in the state. A single value means that the state is of one step."""
    tensors = [*model.parameters(), model.tokens]
    tensors += [value for state in optim.state.values() for value in state.values()]
    return sorted({float(value) for tensor in tensors for value in torch.unique(tensor.detach())})


def stamped() -> None:
    """Train up to step `steps`; report at the start and the end which steps the tensors are of."""
    trainer = joined()
    model = Stamped(20_000 + trainer.args.get("skew", 1000) * trainer.rank)
    optim = Stamp(model.parameters())
    with InMemorySnapshot(model, optim, start=False, **trainer.args.get("options", {})) as snap:
        trainer.report(
            "started",
            step=snap.step,
            stamps=stamps(model, optim),
            how=snap.restored.how,
            bytes_fetched=snap.restored.bytes_fetched,
        )
        for step in snap.steps(trainer.args["steps"]):
            model(step + 1)
            failpoint("train.step", step + 1)
            snap.drain(DRAIN_DEADLINE_S)  # these steps are so short that most snapshots would be skipped
            dist.barrier()
            optim.step()
            trainer.report("step", step=step + 1, protected=snap.protected_step)
        trainer.report("end", stamps=stamps(model, optim), statistics=_counts(snap.statistics))


class Lines(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def paced() -> None:
    """Train in steps of `quick_s`, and of `slow_s` from step `slower_at` on, at the default interval.

    A snapshot delays the loop by `cost_s`, the duration of a slow ``get``. Reports the steps after which snapshots were
    taken.
    """
    trainer = joined()
    args = trainer.args
    os.environ["HOLDFAST_MTBF"] = args["mtbf"]
    lines, logger = Lines(), logging.getLogger("holdfast.snapshot.interval.control")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    model = Stamped(1000)
    optim = Stamp(model.parameters())
    snap = InMemorySnapshot(model, optim, start=False, every="auto", overhead_budget=args["budget"])
    snap.track("slow", lambda: time.sleep(args["cost_s"]), lambda nothing: None)
    with snap:
        statistics = snap.statistics
        failures = snap._session.intervals.rule.notes()["failures"]
        trainer.report("started", step=snap.step, failures=len(failures))
        taken, before, count = [], 0, 0
        for step in snap.steps(args["steps"]):
            if statistics.taken > count:  # that of the step which ended just now
                taken.append(step)
                trainer.report("step", step=step, taken=True)
            count = statistics.taken
            model(step + 1)
            failpoint("train.step", step + 1)
            time.sleep(args["slow_s"] if step >= args["slower_at"] else args["quick_s"])
            dist.barrier()
            optim.step()
            if step + 1 == args["slower_at"]:
                before = statistics.interval
        trainer.report(
            "end",
            taken=taken,
            before=before,
            after=statistics.interval,
            overhead=statistics.overhead,
            why=statistics.why,
            logged=lines.lines,
            shown=shown(),
        )


def shown() -> list[str]:
    """The messages of trainers on all nodes, as this node's SMP shows them to operators."""
    owner = read_owner(arena_path(os.environ["HOLDFAST_JOB"]))
    assert owner is not None
    return [status.said for status in look(owner.job, owner.control).statuses if status.said]


def replicated() -> None:
    """Train a small model under DDP, with identical replicas; report digests of the state at the start and the end."""
    trainer = joined()
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 300), torch.nn.Dropout(0.3), torch.nn.Linear(300, 8))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(trainer.rank)
    snap = InMemorySnapshot(model, optim, start=False) if trainer.args["snapshots"] else None
    with snap or nullcontext():
        if snap is not None:
            trainer.report("started", step=snap.step, digest=_digest(model, optim))
        for step in range(snap.step if snap else 0, trainer.args["steps"]):
            loss = model(torch.randn(4, 32)).square().mean()
            optim.zero_grad()
            loss.backward()
            failpoint("train.step", step + 1)
            if snap is not None:
                snap.drain(DRAIN_DEADLINE_S)
            optim.step()
        leaves = snap._session.capture._leaves if snap is not None else ()
        names = sorted(leaf.name for leaf in leaves if "@" in leaf.name)
        trainer.report("end", digest=_digest(model, optim), random=torch.rand(1).item(), parts=names)


def spread_over_nodes() -> None:
    """Train under DDP, and report how many bytes a restore received over the network."""
    trainer = joined()
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 4096))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    dist.barrier()
    before = _received(DEVICE)
    with InMemorySnapshot(model, optim, start=False) as snap:
        dist.barrier()
        trainer.report(
            "started",
            step=snap.step,
            received=_received(DEVICE) - before,
            digest=_digest(model, optim),
            state=sum(tensor.nbytes for tensor in _tensors(model, optim)),
        )
        for step in range(snap.step, trainer.args["steps"]):
            model(torch.randn(4, 64)).square().mean().backward()
            failpoint("train.step", step + 1)
            snap.drain(DRAIN_DEADLINE_S)
            optim.step()
        trainer.report("end", digest=_digest(model, optim))


def _received(device: str) -> int:
    """Number of bytes that a network device of this namespace has received."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{device}:")), 0)


def writes() -> None:
    """Write a megabyte to disk."""
    path = Path(Trainer.from_environment().args["path"])
    with path.open("wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())


def _tensors(model: torch.nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(value for state in optim.state.values() for value in state.values())]


def _digest(model: torch.nn.Module, optim: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()
    for tensor in _tensors(model, optim):
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


def _counts(statistics: Any) -> dict[str, Any]:
    return {name: getattr(statistics, name) for name in ("taken", "protected", "failed", "skipped")}


def checkpoint() -> None:
    """Save an FSDP2 model and its optimizer into memory through DCP, or load them, depending on `mode`; report digests
    of all undivided tensors."""
    trainer = joined()
    args = trainer.args
    torch.manual_seed(3 if args["mode"] == "save" else 4)
    model: Any = torch.nn.Sequential(torch.nn.Linear(24, 37), torch.nn.Tanh(), torch.nn.Linear(37, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (trainer.world,)))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    arena = Path(args["arena"]) / os.environ["HOLDFAST_NODE"]
    notes: dict[str, Any] = {"step": 0, "text": "", "nested": {"numbers": [0]}}
    if args["mode"] == "save by one":
        writer = MemoryWriter(job="dcp", arena=arena)
        if trainer.rank == args["rank"]:
            try:
                save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
            except CheckpointException as refusal:
                trainer.report("end", failures=[str(failure[0]) for failure in refusal.failures.values()])
        dist.barrier()
        save({"weight": torch.ones(3)}, storage_writer=writer)
        writer.close(keep=False)
        return
    if args["mode"] == "save what one cannot":
        writer = MemoryWriter(job="dcp", arena=arena)
        part = torch.ones(3).to_sparse() if trainer.rank == args["rank"] else torch.ones(3)
        try:
            save({f"weight{trainer.rank}": part}, storage_writer=writer)
        except CheckpointException as refusal:
            trainer.report("end", failures=[str(failure[0]) for failure in refusal.failures.values()])
        writer.close(keep=False)
        return
    if args["mode"] == "save":
        writer = MemoryWriter(job="dcp", arena=arena)
        for step in range(args["saves"]):
            model(torch.randn(4, 24)).square().sum().backward()
            optim.step()
            optim.zero_grad()
            notes = {"step": step + 1, "text": "x" * (step + 1), "nested": {"numbers": [1, 2, step]}}
            save({**_checkpoint_state(model, optim), "notes": notes}, storage_writer=writer, checkpoint_id="mine")
        writer.close()
    else:
        reader = MemoryReader(job="dcp", arena=arena)
        state = {**_checkpoint_state(model, optim), "notes": notes}
        load(state, storage_reader=reader, checkpoint_id=args.get("id", "mine"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        notes = state["notes"]
        reader.close()
    whole = {name: drill.digest(tensor.full_tensor()) for name, tensor in model.named_parameters()}
    for i, moments in enumerate(optim.state.values()):
        for key, value in moments.items():
            whole[f"{i}.{key}"] = drill.digest(value.full_tensor() if isinstance(value, DTensor) else value)
    trainer.report("end", digests=whole, notes=notes)


def deepspeed() -> None:
    """Train under DeepSpeed, which loads from memory and saves every step; report losses and digests of parameters."""
    trainer = joined(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    args = trainer.args
    import deepspeed as ds

    from holdfast.integrations.deepspeed import MemoryCheckpointEngine

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes most of a minute; gloo is enough
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(24, 37), torch.nn.Tanh(), torch.nn.Linear(37, 10))
    config = {
        "train_batch_size": 4 * trainer.world,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        args["precision"]: {"enabled": True},
        "zero_optimization": {"stage": args["stage"]},
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    folder = Path(args["arena"]) / os.environ["HOLDFAST_NODE"]
    memory = None
    if args["memory"]:
        folder.mkdir(exist_ok=True)
        os.chdir(folder)  # every node needs its own files under the same names
        memory = engine.checkpoint_engine = MemoryCheckpointEngine(job="deepspeed", arena=folder)
        engine.load_checkpoint("files")
    dtype = next(engine.parameters()).dtype
    while engine.global_steps < args["steps"]:
        step = engine.global_steps
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + trainer.rank)).to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        trainer.report("loss", step=step, value=loss.item().hex())
        if memory is not None:
            engine.save_checkpoint("files", tag=f"step{step}")
    whole = [parameter.detach() for parameter in engine.parameters()]
    trainer.report("end", digests=[drill.digest(part) for part in whole])
    if memory is not None:
        memory.close(keep=args["keep"])


def _checkpoint_state(model: Any, optim: Any) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optim)
    return {"model": model_state, "optim": optim_state}


class Persisting(Workload):
    """Waits in the middle of some steps until a number of snapshots are persisted and another one is due. A restored
    job does not wait.

    Args:
        waits: pairs of a step and the number of persisted snapshots to wait for.
    """

    def __init__(self, seed: int, waits: list[tuple[int, int]]) -> None:
        super().__init__(seed)
        self._waits = {int(step): int(count) for step, count in waits}
        self._snap: InMemorySnapshot | None = None

    def protect(self, **options: Any) -> InMemorySnapshot:
        self._snap = super().protect(**options)
        return self._snap

    def step(self, step: int, middle: Callable[[], None]) -> float:
        def wait() -> None:
            count = self._waits.get(step + 1)
            if self._snap is not None and self._snap.restored.snapshot is None and count is not None:
                limit = time.monotonic() + PERSIST_DEADLINE_S
                client = self._snap._session.rank.client
                while client.counters()["snapshots_persisted"] < count or not client.persist_due:
                    if time.monotonic() > limit:
                        raise DeadlineExceeded(f"{count} snapshots were not persisted by step {step + 1}")
                dist.barrier()
            middle()

        return super().step(step, wait)


def exported() -> None:
    """Train a few steps under DDP or FSDP2, export the snapshot as DCP and as safetensors, and load the DCP export into
    one process; report digests of all undivided tensors of the job and of the loaded state."""
    trainer = joined()
    args = trainer.args
    torch.manual_seed(3)
    model: Any = _net()
    if args["kind"] == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (trainer.world,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with InMemorySnapshot(model, optim, start=False) as snap:
        for step in range(3):
            model(torch.randn(4, 24) + step).square().sum().backward()
            optim.step()
            optim.zero_grad()
        snap.begin()
        assert snap.drain(DRAIN_DEADLINE_S * 20)
        dist.barrier()
        trained = _whole(model, optim)
        if trainer.rank == 0:
            folder = Path(args["folder"])
            report = export(folder / "dcp", "dcp")
            export(folder / "safetensors")
            trainer.report("end", report=report, trained=trained, loaded=_loaded(folder / "dcp"))
        dist.barrier()


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(24, 37), torch.nn.BatchNorm1d(37), torch.nn.Linear(37, 10))


def _whole(model: Any, optim: Any) -> dict[str, str]:
    states: Any = get_state_dict(model, optim)
    model_state, optim_state = states
    found = {f"model.{name}": value for name, value in model_state.items()}
    for name, entry in optim_state["state"].items():
        found |= {f"optim.{name}.{key}": value for key, value in entry.items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optim_state["param_groups"]]
    return {"groups": repr(groups)} | {name: drill.digest(value) for name, value in whole.items()}


def _loaded(folder: Path) -> dict[str, str]:
    model = _net()
    optim = torch.optim.AdamW(model.parameters(), lr=1.0)
    states: Any = get_state_dict(model, optim)
    state = dict(zip(("model", "optim"), states, strict=True))
    load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return _whole(model, optim)
