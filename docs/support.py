"""What is exported and what is refused, layout by layout: the table of support.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the support table.

    Attributes:
        layout: what DeepSpeed wrote.
        stages: ZeRO stages it comes with.
        refused: why it is refused; empty where it is exported, bit for bit.
        note: what should be known of the export.
        fixtures: committed checkpoints of this layout that the tests hold against their live truth
            (for a refused layout: that the tests see refused).
    """

    layout: str
    stages: str
    refused: str = ""
    note: str = ""
    fixtures: tuple[str, ...] = ()


SUPPORT = (
    Support(
        "Data parallelism alone",
        "1, 2, 3",
        note="any world size, optimizer, groups and sub-groups; offload to CPU; fp32, fp16, bf16",
        fixtures=(
            "z1_w2_bf16",
            "z2_w2_bf16_groups",
            "z3_w4_bf16_odd",
            "z3_w2_bf16_sub1000",
            "z1_w3_bf16_elastic",
        ),
    ),
    Support(
        "Sequence parallelism (Ulysses)",
        "0-3",
        note="its ranks share the weights as all others do; on a mesh of DeepSpeed's own "
        "(`data_parallel_size`), ZeRO-3 loses files, and is refused",
    ),
    Support("BF16_Optimizer", "1, 0 in pipelines", fixtures=("z1_w2_bf16opt",)),
    Support(
        "Frozen weights, also of LoRA runs",
        "1, 2, 3",
        note="left out at save time: `--base` fills them in, or `--exclude-frozen`",
        fixtures=("z1_w2_bf16_frozen", "z3_w2_bf16_frozen", "z2_w2_bf16_lora"),
    ),
    Support(
        "Base weights that ranks share out (`OptimizedLinear`)",
        "0-3",
        note="DeepSpeed saves the first rank's part alone: they count as left out",
    ),
    Support(
        "LoRA and DoRA adapters of peft",
        "0-3",
        note="kept as peft saves them, bit for bit, or merged into the base model; other methods "
        "are kept where peft saves what it trained and no more",
        fixtures=("z2_w2_bf16_lora",),
    ),
    Support("Tied weights", "0-3", note="written once", fixtures=("z2_w2_bf16_tied",)),
    Support(
        "No ZeRO",
        "0",
        note="fp32 masters where the optimizer has them, matched by order, shape and value; "
        "weights whose master cannot be told from others have the module's values, and are named",
        fixtures=("z0_w2_bf16", "z0_w2_fp16", "z0_w1_fp32_odd", "z0_w2_bf16_fused"),
    ),
    Support(
        "Tensor parallelism (AutoTP)",
        "0-3",
        note="uneven and fused splits; copies on several ranks are compared",
        fixtures=(
            "tp2_z1_w2_bf16_tied",
            "tp2_z1_w2_bf16_fused",
            "tp2_z3_w4_bf16",
            "tp2_z0_w2_bf16",
        ),
    ),
    Support(
        "Pipeline parallelism",
        "0, 1",
        note="under the pipeline's own names, tied layers without ZeRO under their first "
        "layer's; `--rename` gives others",
        fixtures=(
            "pp2_z1_w4_bf16_tied",
            "pp2_z0_w4_fp32",
            "pp2_z0_w4_fp32_tied",
            "pp2_z0_w4_fp16",
            "pp2_z0_w4_fp16_tied",
        ),
    ),
    Support(
        "Tensor and pipeline parallelism together",
        "0, 1",
        note="where the files say how tensors are split, as Megatron-DeepSpeed's name patterns do",
        fixtures=("pp2_tp2_z0_w4_bf16", "pp2_tp2_z1_w8_bf16_tied"),
    ),
    Support(
        "DeepSpeed-MoE",
        "0, 1, 2",
        note="experts numbered globally; both placements; residual",
        fixtures=(
            "moe_z2_w4_ep2",
            "moe_z2_w4_ep2_blocks",
            "moe_z1_w2_ep2_residual",
            "moe_z0_w2_ep2_bf16",
            "moe_z0_w2_ep1_fp16",
            "moe_z0_w2_ep2_bf16_frozen",
            "moe_z0_w2_ep2_bf16_fused",
        ),
    ),
    Support(
        "AutoEP",
        "0-3",
        note="with a config, under the names and in the shapes that the model had before",
        fixtures=(
            "autoep_z0_w2_ep2",
            "autoep_z1_w2_ep2_qwen2",
            "autoep_z2_w4_ep2",
            "autoep_z3_w4_ep2",
            "autoep_z2_w2_ep2_frozen",
        ),
    ),
    Support(
        "Universal checkpoint",
        "1, 2, 3",
        note="what the conversion lost is named and left out",
        fixtures=("uni_z2_w2_bf16_odd", "uni_z3_w2_bf16_frozen"),
    ),
    Support("Parts on several nodes", "all", note="give every node's folder"),
    Support("torch files of the old container", "all"),
    Support(
        "Experts dealt out in several ways at once",
        "0 in 16 bits",
        refused="its fp32 masters are saved without names",
    ),
    Support(
        "Experts in the stages of a pipeline",
        "1",
        note="under the pipeline's own names; saved by DeepSpeed 0.19 or later",
        fixtures=("stages_moe_z1_w4_ep2",),
    ),
    Support(
        "Experts under tensor parallelism",
        "all",
        refused="how one expert is split is not recorded with it",
    ),
    Support(
        "Universal checkpoint of a round-robin run",
        "1, 2",
        refused="DeepSpeed's conversion shuffles its weights for good; export the original",
    ),
    Support(
        "Optimizer swapped to NVMe",
        "3",
        refused="the masters are in swap files, not in the checkpoint's",
    ),
    Support("Compressed or big-endian torch files", "all", refused="no byte range is the tensor's"),
)
