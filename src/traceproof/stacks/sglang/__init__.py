"""SGLang. APIs read off 0.5.22 and 0.5.23; a newer name goes in front of an older one. `boot` brings it up."""

from traceproof.stacks.base import GroundTruth, Origin, Stack

STACK = Stack(
    name="sglang",
    truths=(
        GroundTruth(name="sglang", label="SGLang", calls="SGLang's kernel", priority=20),
        # PyTorch code beside its kernels, which runs on a CPU too.
        GroundTruth(
            name="sglang_native",
            label="SGLang's native forms",
            calls="SGLang's native form, which needs no GPU",
            priority=50,
            eager=True,
        ),
    ),
    package="sglang",
    distribution="sglang",
    versions=("sgl-kernel", "sglang-kernel", "transformers"),
    apis={
        "rmsnorm": ("sglang.kernels.ops.layernorm.norm:rmsnorm",),
        "fused_add_rmsnorm": ("sglang.kernels.ops.layernorm.norm:fused_add_rmsnorm",),
        "triton_rmsnorm": (
            "sglang.kernels.ops.layernorm.fused_rmsnorm:fused_rmsnorm",
            "sglang.kernels.ops.elementwise.elementwise:fused_rmsnorm",
        ),
        "triton_gemma_rmsnorm": ("sglang.kernels.ops.layernorm.minimax_m3_rmsnorm:gemma_rmsnorm",),
        "triton_gemma_fused_add_rmsnorm": (
            "sglang.kernels.ops.layernorm.minimax_m3_rmsnorm:gemma_fused_add_rmsnorm",
        ),
        "rotary_embedding": ("sgl_kernel:rotary_embedding",),
        # Compile a kernel module, for the build stage.
        "gen_rmsnorm": ("sglang.kernels.ops.layernorm.norm:_jit_rmsnorm_module",),
        "gen_fused_add_rmsnorm": ("sglang.kernels.ops.layernorm.norm:_jit_fused_add_rmsnorm_module",),
        # Native forms.
        "RMSNorm": ("sglang.srt.layers.layernorm:RMSNorm",),
        "GemmaRMSNorm": ("sglang.srt.layers.layernorm:GemmaRMSNorm",),
        "filter_and_sample": ("sglang.srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",),
        "apply_rotary_emb": (
            "sglang.srt.layers.rotary_embedding.utils:apply_rotary_emb",
            "sglang.srt.layers.rotary_embedding:_apply_rotary_emb",
        ),
        "chunk": (
            "sglang.kernels.ops.attention.fla.chunk:chunk_gated_delta_rule",
            "sglang.srt.layers.attention.fla.chunk:chunk_gated_delta_rule",
        ),
        "recurrent": (
            "sglang.kernels.ops.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule",
            "sglang.srt.layers.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule",
        ),
        "recurrent_on_pool": (
            "sglang.kernels.ops.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule_update",
            "sglang.srt.layers.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule_update",
        ),
        "decode_attention": (
            "sglang.kernels.ops.attention.decode_attention:decode_attention_fwd",
            "sglang.srt.layers.attention.triton_ops.decode_attention:decode_attention_fwd",
        ),
        "extend_attention": (
            "sglang.kernels.ops.attention.extend_attention:extend_attention_fwd",
            "sglang.srt.layers.attention.triton_ops.extend_attention:extend_attention_fwd",
        ),
        "mamba": (
            "sglang.kernels.ops.mamba.triton_ops.mamba_ssm:selective_state_update",
            "sglang.srt.layers.attention.mamba.ops.mamba_ssm:selective_state_update",
        ),
        "experts": ("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe:fused_experts_impl",),
        "grouped_topk": ("sglang.srt.layers.moe.topk:biased_grouped_topk_impl",),
        "router": ("sglang.kernels.ops.moe.moe_fused_gate:moe_fused_gate",),
        "matmul": ("sglang.srt.batch_invariant_ops.batch_invariant_ops:_matmul_persistent_triton",),
        "top_k_renorm": ("sglang.kernels.ops.sampling.renorm_triton:top_k_renorm_probs_triton",),
        "top_p_renorm": ("sglang.kernels.ops.sampling.renorm_triton:top_p_renorm_probs_triton",),
    },
    modules=("sgl_kernel", "sglang.srt.runtime_context", "sglang.srt.server_args"),
    prepare="traceproof.stacks.sglang.boot:stand_in_for_kernels",
    origin=Origin(
        url="https://github.com/sgl-project/sglang.git",
        package="sglang",
        folders=("python", "test"),  # the server, its router and translations are not what kernels are made of
        place="python",
    ),
    toolkit=True,
    caches={"SGLANG_CACHE_DIR": "sglang", "SGLANG_JIT_CACHE_DIR": "sglang/jit"},
)
