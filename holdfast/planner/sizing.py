"""Computes what a job's snapshots will take, before anything runs: bytes, seconds, memory. Pure functions.

Every byte of state is captured once: state that data-parallel ranks hold identically is divided among them, and shards
of the optimizer are divided anyway. So a node's share is all state divided by the number of nodes, however the job
shards it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.planner.rates import LAST, SmpRates
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_GENERATIONS, MAX_SLOTS, MIN_SLOTS, SLOTS_RULE
from holdfast.snapshot.resume.arrange import Protection
from holdfast.snapshot.step.ledger import ProtectEvery, parity_slots


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's blocks (RMS norms, gated feed-forward, grouped queries), or a mixture of experts of them.

    Attributes:
        hidden, inner: width of the residual stream, and of the feed-forward part (of each expert).
        heads, kv_heads: number of attention heads, and of heads for keys and values.
        experts, active: experts in each layer, and how many a token visits; 1 and 1 without a mixture.
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
        """Number of parameters."""
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
"""Published configurations of Llama 2 and 3.1, and of Mixtral."""

_SHAPE = re.compile(
    r"layers=(\d+),hidden=(\d+),inner=(\d+),heads=(\d+),kv_heads=(\d+),vocab=(\d+)(?:,experts=(\d+)/(\d+))?"
)


def parse_shape(text: str) -> Shape:
    """Parse a preset's name, or ``layers=32,hidden=4096,inner=11008,heads=32,kv_heads=32,vocab=32000,experts=2/8``.

    Raises:
        ConfigError: `text` is neither, or the numbers do not fit together.
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


STATE_BYTES = {"adam": 12.0, "adam-16bit": 6.0, "adam-8bit": 6.0, "sgd": 8.0}
"""Bytes of state for each trained parameter, by optimizer: main copy and two moments in fp32; all three in 16 bits;
main copy in fp32 and two moments of a byte each (Dettmers et al., arXiv 2110.02861; without their scales, 0.4 %); main
copy and one moment in fp32. 16-bit weights follow from main copies and are not captured."""

BASE_BYTES = {"none": 0.0, "16bit": 2.0, "8bit": 1.0, "4bit": 0.5}
"""Bytes for each frozen parameter, captured once, with the first snapshot."""

ADAPTER_RANK = 16

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class ModelJob:
    """How a model is trained.

    Attributes:
        tensor, pipeline: parallel sizes; all other ranks are data parallel.
        zero: the ZeRO stage, which says what data-parallel ranks divide: 0 nothing, 1 optimizer state, 2 also
            gradients, 3 also parameters.
        offload: whether optimizer state lives in host memory.
        base: format of the frozen weights, if only adapters of rank `ADAPTER_RANK` are trained; ``none`` if all weights
            are trained.
        micro_batch, sequence: samples in a micro-batch, tokens in a sample.
        recompute, flash: determine which activations are kept; see `activation_bytes`.
        step_s: duration of a training step in seconds; 0 if it is not known.
    """

    shape: Shape
    nodes: int
    gpus_per_node: int = 8
    tensor: int = 1
    pipeline: int = 1
    zero: int = 1
    offload: bool = False
    optimizer: str = "adam"
    base: str = "none"
    micro_batch: int = 1
    sequence: int = 4096
    recompute: str = "selective"
    flash: bool = True
    step_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ConfigError(f"{self.nodes} nodes of {self.gpus_per_node} GPUs: there must be one of each at least")
        if self.tensor < 1 or self.pipeline < 1 or self.gpus % (self.tensor * self.pipeline):
            raise ConfigError(
                f"tensor {self.tensor} x pipeline {self.pipeline} does not divide {self.gpus} GPUs: use sizes that do"
            )
        if self.optimizer not in STATE_BYTES or self.base not in BASE_BYTES or self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"optimizer {self.optimizer!r}, base {self.base!r} or recompute {self.recompute!r} is not known: "
                f"optimizers are {', '.join(STATE_BYTES)}, bases {', '.join(BASE_BYTES)}, "
                f"recompute {', '.join(RECOMPUTE)}"
            )
        if not 0 <= self.zero <= 3 or self.step_s < 0 or self.micro_batch < 1 or self.sequence < 1:
            raise ConfigError("ZeRO stages are 0 to 3; steps take 0 s or more; batches and sequences are 1 or more")

    @property
    def gpus(self) -> int:
        """Number of GPUs in the job."""
        return self.nodes * self.gpus_per_node

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def trained(self) -> int:
        """Number of parameters that the optimizer changes: all, or two adapter matrices for each linear layer."""
        shape = self.shape
        if self.base == "none":
            return shape.parameters
        kv = shape.hidden // shape.heads * shape.kv_heads
        widths = [(shape.hidden, shape.hidden)] * 2 + [(shape.hidden, kv)] * 2
        widths += [(shape.hidden, shape.inner)] * 3 * shape.experts
        return shape.layers * ADAPTER_RANK * sum(one + other for one, other in widths)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of the nodes, in bytes per second, and their memory. Each is measured, or an assumption to be replaced.

    Attributes:
        device_rate: from one GPU to pinned host memory.
        copy_rate: from host memory to host memory, with one thread (for offloaded state).
        network_rate: at which encoding sends out of a node.
        host_memory: memory of a node, in bytes; 0 if it is not known.
        gpu_memory: memory of one GPU, in bytes.
        digest_rate: at which an SMP seals.
    """

    device_rate: float = 25e9
    copy_rate: float = LAST.copy
    network_rate: float = SmpRates().network
    host_memory: float = 0.0
    gpu_memory: float = 80e9
    digest_rate: float = SmpRates().digest

    def __post_init__(self) -> None:
        if min(self.device_rate, self.copy_rate, self.network_rate, self.digest_rate) <= 0 or self.host_memory < 0:
            raise ConfigError("rates must be more than 0 bytes per second, and memory 0 or more")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The result of `size`.

    Attributes:
        state_bytes: bytes of the whole job that every snapshot captures.
        static_bytes: bytes of the whole job that only the first snapshot captures.
        gpu_bytes, node_bytes: a rank's and a node's share of both.
        arena_bytes: shared memory reserved on each node.
        device_bytes: estimated memory of each GPU for weights, gradients, optimizer state and activations.
        copy_s: time to copy a snapshot into host memory, at full speed.
        seal_s: time to digest it then.
        encode_s: time from then until it is protected.
        interval_s: the shortest time between snapshots with which every snapshot that is to be protected is protected
            before its slot is needed.
        interval_steps: `interval_s` in steps; 0 if the step time is not known.
        data, parity: k and m in effect.
    """

    state_bytes: float
    static_bytes: float
    gpu_bytes: float
    node_bytes: float
    arena_bytes: float
    device_bytes: float
    copy_s: float
    encode_s: float
    interval_s: float
    interval_steps: int
    data: int
    parity: int
    seal_s: float = 0.0

    @property
    def protected_s(self) -> float:
        """Time from the boundary until a snapshot is protected."""
        return self.copy_s + self.seal_s + self.encode_s


def size(
    job: ModelJob,
    machine: Machine,
    protection: Protection,
    slots: int = 3,
    generations: int = 1,
    *,
    persists: bool = False,
    protect_every: ProtectEvery = 1,
) -> Sizes:
    """Compute what snapshots of `job` take.

    Args:
        persists: whether snapshots are also written to storage. One more slot per shard then holds the one being
            written.
        protect_every: which snapshots are protected.

    Raises:
        ConfigError: the protection needs more nodes than the job has, or the number of slots is not 2 to 16, or that of
            generations not 1 to 8.
    """
    if not MIN_SLOTS <= slots <= MAX_SLOTS:
        raise ConfigError(f"{slots} slots: {SLOTS_RULE}")
    if not 1 <= generations <= MAX_GENERATIONS:
        raise ConfigError(f"{generations} generations: keep 1 to {MAX_GENERATIONS}")
    chosen = protection.for_nodes(job.nodes)
    parity = chosen.parity if job.nodes > 1 else 0
    if parity and protection.data and protection.data + parity > job.nodes:
        raise ConfigError(
            f"{protection.data}+{parity} needs {protection.data + parity} nodes, and there are {job.nodes}: "
            "use a smaller code or more nodes"
        )
    kept = slots + generations - 1
    state = job.trained * STATE_BYTES[job.optimizer]
    static = job.shape.parameters * BASE_BYTES[job.base]
    node = (state + static) / job.nodes
    moving = state / job.nodes
    rate = machine.copy_rate if job.offload else machine.device_rate * job.gpus_per_node
    copy_s = moving / rate
    seal_s = moving / machine.digest_rate
    encode_s = parity * moving / machine.network_rate
    commit_s = copy_s + seal_s
    if protect_every == 1:
        interval = max(commit_s, (commit_s + encode_s) / (slots - 1), encode_s)
    else:
        interval = max(commit_s, encode_s / protect_every if isinstance(protect_every, int) else 0.0)
    parities = parity_slots(kept, protect_every, generations)
    return Sizes(
        state_bytes=state,
        static_bytes=static,
        gpu_bytes=node / job.gpus_per_node,
        node_bytes=node,
        arena_bytes=node * (kept + (parities * parity / chosen.data if parity else 0) + persists),
        device_bytes=device_bytes(job),
        copy_s=copy_s,
        encode_s=encode_s,
        interval_s=interval,
        interval_steps=max(1, -int(-interval // job.step_s)) if job.step_s else 0,
        data=chosen.data if parity else 0,
        parity=parity,
        seal_s=seal_s,
    )


def device_bytes(job: ModelJob) -> float:
    """Memory that a GPU needs, counted as ZeRO does (Rajbhandari et al., SC 2020): 2 bytes per weight, 2 per gradient,
    and the optimizer's state; each divided among replicas from its stage on. Activations come on top."""
    slices = job.tensor * job.pipeline
    weights = job.shape.parameters * (BASE_BYTES[job.base] or 2.0) / slices
    trained = job.trained / slices
    share = job.replicas
    parts = [
        0.0 if job.offload else trained * STATE_BYTES[job.optimizer] / (share if job.zero >= 1 else 1),
        trained * 2.0 / (share if job.zero >= 2 else 1),
        weights / (share if job.zero >= 3 else 1),
        activation_bytes(job),
    ]
    return sum(parts)


def activation_bytes(job: ModelJob) -> float:
    """Bytes of activations kept for the backward pass on a pipeline's first stage, sequence parallel over tensor ranks.

    Korthikanti et al. (arXiv 2205.05198), sections 4 and 5: s b h (34 + 5 a s / h) / t per layer. The second term is
    attention's; selective recomputation and FlashAttention remove it. With full recomputation: 2 s b h / t per layer.
    The first of p stages holds p micro-batches, which is as much as all layers hold for one.
    """
    shape = job.shape
    plain = job.sequence * job.micro_batch * shape.hidden / job.tensor * shape.layers
    if job.recompute == "full":
        return 2 * plain
    attention = 0.0 if job.flash or job.recompute == "selective" else 5 * shape.heads * job.sequence / shape.hidden
    return (34 + attention) * plain
