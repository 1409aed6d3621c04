"""Which kinds of megatron-core's state are restored, and what proves it. `docs/support.md` is written from this table.

`tests/unit/test_support.py` compares it with the matrix, the tests that it names, and the reports that are committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SupportStatus(StrEnum):
    """How well a kind is supported."""

    EXACT = "exact, tested on CPU"
    STRUCTURES = "by the package's own structures"
    DEVICE = "needs a device"
    REFUSED = "refused by name"


@dataclass(frozen=True, slots=True)
class SupportedKind:
    """A kind of state, of optimizer or of parallelism.

    Attributes:
        option: Megatron-LM's option that enables it.
        cells: cells of the matrix in which it is killed and restored.
        tests: tests that prove it, as ``file::function``, from tests/ on.
        note: what the status leaves open.
    """

    name: str
    option: str
    status: SupportStatus
    cells: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""


OPTIMIZERS = "frameworks/test_megatron_optimizers.py"
DEVICE_STATE = "proof/test_device_state.py"

KINDS: tuple[SupportedKind, ...] = (
    SupportedKind(
        "distributed optimizer; tensor, pipeline and data parallel",
        "--use-distributed-optimizer",
        SupportStatus.EXACT,
        (
            "TP2",
            "PP2",
            "DP4",
            "TP2 PP2 DP2",
            "Llama, tied embeddings, TP2 PP2 DP2",
            "tied embeddings, PP2 DP2",
            "two optimizer instances, DP4",
        ),
    ),
    SupportedKind("32-bit weights", "no --bf16", SupportStatus.EXACT, ("TP2 PP2 DP2, fp32",)),
    SupportedKind("16-bit weights with a loss scale", "--fp16", SupportStatus.EXACT, ("TP2 PP2 DP2, fp16",)),
    SupportedKind(
        "the same optimizer state on all data-parallel ranks",
        "no --use-distributed-optimizer",
        SupportStatus.EXACT,
        (
            "TP2 PP2 DP2, no distributed optimizer",
            "TP2 PP2 DP2, fp32, no distributed optimizer",
            "TP2 DP2, fp16, no distributed optimizer",
        ),
    ),
    SupportedKind(
        "virtual pipeline", "--num-layers-per-virtual-pipeline-stage", SupportStatus.EXACT, ("virtual pipeline",)
    ),
    SupportedKind("sequence parallel", "--sequence-parallel", SupportStatus.EXACT, ("sequence parallel",)),
    SupportedKind("recomputed activations", "--recompute-granularity full", SupportStatus.EXACT, ("recompute",)),
    SupportedKind(
        "overlapped reduction and gathering",
        "--overlap-grad-reduce --overlap-param-gather",
        SupportStatus.EXACT,
        ("overlap, TP2 DP4", "overlap, PP2 DP2"),
    ),
    SupportedKind(
        "experts, balanced by a loss or a bias",
        "--num-experts",
        SupportStatus.EXACT,
        (
            "MoE, TP2 PP2 DP2 EP2",
            "MoE, TP2 EP2, experts cut in two: none has a replica",
            "MoE with expert bias, PP2 EP2",
        ),
    ),
    SupportedKind(
        "CPU offload of all parameters (HybridDeviceOptimizer)",
        "--optimizer-cpu-offload",
        SupportStatus.EXACT,
        ("CPU offload of all, DP2",),
        (f"{OPTIMIZERS}::test_an_offloaded_optimizer_goes_on_bit_for_bit",),
    ),
    SupportedKind(
        "CPU offload of a part, overlapped or not",
        "--optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d",
        SupportStatus.STRUCTURES,
        ("CPU offload of a half, overlap, TP2 DP2",),
        (
            f"{OPTIMIZERS}::test_an_offloaded_optimizer_goes_on_bit_for_bit",
            f"{OPTIMIZERS}::test_another_fraction_than_the_snapshots_is_refused",
        ),
        "a stand-in for FusedAdam steps the rest. The fraction must be that of the snapshot",
    ),
    SupportedKind(
        "Muon",
        "--optimizer muon",
        SupportStatus.EXACT,
        ("Muon, TP2 DP2",),
        note="with 0.16, a stand-in for its package, emerging_optimizers 0.1",
    ),
    SupportedKind(
        "Muon, layer by layer (LayerWiseDistributedOptimizer)",
        "--optimizer dist_muon",
        SupportStatus.EXACT,
        ("layer-wise Muon, TP2 DP2", "layer-wise Muon, MoE, DP4 EP2"),
        note="as above",
    ),
    SupportedKind(
        "the same with its layers in the buffers that are gathered",
        "--use-layer-wise-distributed-optimizer",
        SupportStatus.EXACT,
        ("layer-wise Muon in buffers, overlap, TP2 DP2",),
        note="from 0.19 on",
    ),
    SupportedKind(
        "precision-aware optimizer: moments in 16 bits, main parameters of FusedAdam's, remainders",
        "--use-precision-aware-optimizer",
        SupportStatus.STRUCTURES,
        (
            "precision aware, bf16 moments, TP2 DP2",
            "precision aware, fp16 moments and main parameters, DP2",
            "precision aware, remainders, overlap, TP2 DP2",
        ),
        (f"{OPTIMIZERS}::test_narrow_moments_come_back_with_their_scales",),
        "a stand-in for FusedAdam",
    ),
    SupportedKind(
        "weights in 8 bits: delayed, tensorwise and MXFP8 recipes",
        "--fp8-param-gather",
        SupportStatus.STRUCTURES,
        (
            "weights in 8 bits, delayed scaling, TP2 DP2",
            "weights in 8 bits, a scale for each tensor, DP2",
            "weights in 8 bits, MXFP8, PP2 DP2",
        ),
        (f"{OPTIMIZERS}::test_weights_that_are_quantized_anew_are_the_same_or_refused",),
        "stand-ins for Transformer Engine's tensors",
    ),
    SupportedKind(
        "Transformer Engine's extra state, delayed scaling",
        "--fp8-format",
        SupportStatus.STRUCTURES,
        ("weights in 8 bits, delayed scaling, TP2 DP2",),
        (
            f"{OPTIMIZERS}::test_delayed_scaling_comes_back_though_extra_state_is_not_unpickled",
            "unit/test_extras.py::test_it_may_be_anything_that_can_be_kept",
            "unit/test_extras.py::test_what_forward_changes_of_it_is_as_it_was_when_the_step_began",
        ),
        "stand-ins for its layers",
    ),
    SupportedKind(
        "random generators that CUDA graphs know",
        "--cuda-graph-impl",
        SupportStatus.STRUCTURES,
        (),
        (
            f"{DEVICE_STATE}::test_a_generator_that_graphs_know_is_put_back_in_place",
            f"{DEVICE_STATE}::test_generators_of_the_tracker_draw_the_same_again",
        ),
        "with generators of the CPU",
    ),
    SupportedKind(
        "weights in 8 bits, blockwise recipe; weights in 4 bits (NVFP4)",
        "--fp8-recipe blockwise; --fp4-param-gather",
        SupportStatus.DEVICE,
        note="that quantizing again gives the same bytes is checked as a job begins",
    ),
    SupportedKind("context parallel", "--context-parallel-size", SupportStatus.DEVICE, note="attention needs it"),
    SupportedKind(
        "moments in 8 bits",
        "--exp-avg-dtype fp8",
        SupportStatus.REFUSED,
        (),
        (f"{OPTIMIZERS}::test_moments_in_eight_bits_are_refused_by_name",),
    ),
    SupportedKind(
        "weights in 8 bits that FusedAdam or a layer-wise optimizer steps",
        "--fp8-param-gather with --use-precision-aware-optimizer, or Muon layer by layer",
        SupportStatus.REFUSED,
        (),
        (f"{OPTIMIZERS}::test_weights_in_eight_bits_without_main_parameters_are_refused",),
    ),
    SupportedKind(
        "weights of another class, such as grouped ones",
        "--moe-single-grouped-weight",
        SupportStatus.REFUSED,
        (),
        (f"{OPTIMIZERS}::test_weights_of_an_unknown_class_are_refused_by_name",),
    ),
    SupportedKind(
        "Megatron-FSDP",
        "--use-megatron-fsdp",
        SupportStatus.REFUSED,
        (),
        (f"{DEVICE_STATE}::test_megatrons_own_fsdp_is_refused",),
        "its buffers are made on CUDA devices alone",
    ),
    SupportedKind(
        "optimizer state that is moved to the host between steps",
        "--offload-optimizer-states",
        SupportStatus.REFUSED,
        (),
        (f"{DEVICE_STATE}::test_state_that_leaves_the_device_between_steps_is_refused_by_name",),
    ),
    SupportedKind(
        "any other optimizer, or chain of them",
        "",
        SupportStatus.REFUSED,
        (),
        (
            f"{DEVICE_STATE}::test_an_optimizer_that_nobody_has_tried_is_refused_by_name",
            f"{DEVICE_STATE}::test_a_chain_that_nobody_has_tried_is_refused_by_name",
        ),
    ),
)
