"""Which layouts are exported and which are refused: the table of support.md."""

from __future__ import annotations

from msgspec import Struct


class Support(Struct, frozen=True):
    """One row of the support table.

    Attributes:
        layout: what DeepSpeed wrote.
        stages: ZeRO stages it occurs with.
        note: limits of the export.
        refused: why it is refused; empty if it is exported.
        fixtures: committed checkpoints with this layout.
    """

    layout: str
    stages: str
    note: str = ""
    refused: str = ""
    fixtures: tuple[str, ...] = ()


SUPPORT = (
    Support(
        "Data parallelism",
        "1, 2, 3",
        "any world size, optimizer, parameter groups, CPU offload; fp32, fp16, bf16",
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
        "except ZeRO-3 with DeepSpeed's own mesh (`data_parallel_size`), which loses files",
    ),
    Support("BF16_Optimizer", "1; 0 in pipelines", fixtures=("z1_w2_bf16opt",)),
    Support(
        "Frozen weights",
        "1, 2, 3",
        "if they were not saved: `--base` or `--exclude-frozen`",
        fixtures=("z1_w2_bf16_frozen", "z3_w2_bf16_frozen", "z2_w2_bf16_lora"),
    ),
    Support(
        "`OptimizedLinear` with sharded base weights",
        "0-3",
        "DeepSpeed saves only rank 0's part: they count as not saved",
    ),
    Support(
        "LoRA, DoRA (PEFT)",
        "0-3",
        "kept or merged; other PEFT methods kept",
        fixtures=("z2_w2_bf16_lora",),
    ),
    Support("Tied weights", "0-3", "stored once", fixtures=("z2_w2_bf16_tied",)),
    Support(
        "No ZeRO",
        "0",
        "master weights matched by order, shape and values; those too similar keep module values",
        fixtures=("z0_w2_bf16", "z0_w2_fp16", "z0_w1_fp32_odd", "z0_w2_bf16_fused"),
    ),
    Support(
        "Tensor parallelism (AutoTP)",
        "0-3",
        "uneven and fused splits; replicas are compared",
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
        "under the pipeline's names; `--rename` changes them",
        fixtures=(
            "pp2_z1_w4_bf16_tied",
            "pp2_z0_w4_fp32",
            "pp2_z0_w4_fp32_tied",
            "pp2_z0_w4_fp16",
            "pp2_z0_w4_fp16_tied",
        ),
    ),
    Support(
        "Tensor and pipeline parallelism",
        "0, 1",
        "if the files record the splits, as Megatron-DeepSpeed does",
        fixtures=("pp2_tp2_z0_w4_bf16", "pp2_tp2_z1_w8_bf16_tied"),
    ),
    Support(
        "DeepSpeed-MoE",
        "0, 1, 2",
        "experts numbered globally; both placements; residual",
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
        "with a config: the model's original names and shapes",
        fixtures=(
            "autoep_z0_w2_ep2",
            "autoep_z1_w2_ep2_qwen2",
            "autoep_z2_w4_ep2",
            "autoep_z3_w4_ep2",
            "autoep_z2_w2_ep2_frozen",
        ),
    ),
    Support(
        "Experts in pipeline stages",
        "1",
        "under the pipeline's names; DeepSpeed 0.19 or later",
        fixtures=("stages_moe_z1_w4_ep2",),
    ),
    Support(
        "Universal checkpoint",
        "1, 2, 3",
        "what the conversion lost is named",
        fixtures=("uni_z2_w2_bf16_odd", "uni_z3_w2_bf16_frozen"),
    ),
    Support("Node-local checkpoint", "all", "pass every node's folder"),
    Support("Legacy torch files", "all", "no checksums"),
    Support("FSDP1, FSDP2, HSDP: DCP folder", "FSDP", "with tensor parallelism; empty shards; EMA"),
    Support(
        "FSDP: rank files (verl, SkyRL, Accelerate)",
        "FSDP",
        "DTensor and ShardedTensor; replicas are compared",
    ),
    Support("FSDP: sharded safetensors, full state dict", "FSDP", "no checksums in safetensors"),
    Support(
        "Experts with several expert-parallel sizes",
        "0, 16-bit",
        refused="master weights have no names",
    ),
    Support("Experts with tensor parallelism", "all", refused="the split is not recorded"),
    Support(
        "Universal checkpoint of a round-robin run",
        "1, 2",
        refused="the conversion scrambled its weights; export the original",
    ),
    Support("NVMe offload", "3", refused="master weights are in swap files"),
    Support("Compressed or big-endian torch files", "all", refused="cannot be read in place"),
)
