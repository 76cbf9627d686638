"""SGLang. API names are those of 0.5.22 and 0.5.23; a newer name comes first.

Below its record is what SGLang needs as a library: no server, no model, one rank. New versions break this first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

from traceproof.lazy import StandIns, torch
from traceproof.stacks import GroundTruth, SourceOrigin, Stack

STACK = Stack(
    name="sglang",
    truths=(
        GroundTruth(name="sglang", label="SGLang", calls="SGLang's kernel", priority=20),
        # PyTorch code beside its kernels, which also runs on a CPU.
        GroundTruth(
            name="sglang_native",
            label="SGLang's native forms",
            calls="SGLang's native form, which needs no GPU",
            priority=50,
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
        # Functions that compile a kernel module, for building ahead.
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
        "recurrent_v_first": (
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
    prepare="traceproof.stacks.sglang:stand_in_for_kernels",
    origin=SourceOrigin(
        url="https://github.com/sgl-project/sglang.git",
        package="sglang",
        folders=("python", "test"),  # without the server, its router and translations
        place="python",
    ),
    toolkit=True,
    caches={"SGLANG_CACHE_DIR": "sglang", "SGLANG_JIT_CACHE_DIR": "sglang/jit"},
)

KERNELS, CONTEXT, ARGUMENTS = STACK.modules
# The smallest model config that SGLang's argument check accepts; nothing of it is used.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def stand_in_for_kernels() -> None:
    """Make Triton kernels and native forms importable where SGLang's compiled kernel package is not installed.

    Their modules import names from it that are not called here, except two: SGLang has a Triton version of one,
    and the other sorts indices (`align`).
    """
    if importlib.util.find_spec(KERNELS) is None:
        _Kernels({KERNELS}, _Name).install()


class _Kernels(StandIns):
    """Stands in for the kernel package; `stands_in` tells that it is not the real one."""

    stands_in = True


class _Name:
    """Has every attribute; calling it raises, except for the two functions that are replaced."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *arguments: object) -> None:
        if self._name == f"{KERNELS}.moe_sum_reduce":
            triton = importlib.import_module("sglang.kernels.ops.moe.fused_moe_triton_kernels")
            triton.moe_sum_reduce_triton(*arguments)
        elif self._name == f"{KERNELS}.moe_align_block_size":
            align(*arguments[:6])  # type: ignore[arg-type] # SGLang calls it, with the kernel's own arguments
        else:
            raise RuntimeError(f"{self._name} was called, and the package {KERNELS} is not installed")


def align(  # noqa: PLR0913, PLR0917 - the kernel's own arguments
    ids: torch.Tensor, buckets: int, block: int, tokens: torch.Tensor, experts: torch.Tensor, total: torch.Tensor
) -> None:
    """Sort (token, expert) pairs into blocks of one expert each; integers only.

    Args:
        ids: experts from -1 (left out) to `buckets` - 2, any shape; pair `i` is its `i`-th element.
        buckets: number of experts plus one, for -1.
        block: pairs per block.
        tokens: written; pairs by expert, each expert's last block padded with `ids.numel()`.
        experts: written; each block's expert.
        total: written; one number, the pairs with padding.
    """
    bucket = ids.flatten().long() + 1
    counts = torch.bincount(bucket, minlength=buckets)
    ends = torch.cumsum((counts + block - 1) // block * block, 0)
    order = torch.argsort(bucket, stable=True)
    owner = bucket[order]
    before = torch.cumsum(counts, 0) - counts
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tokens.fill_(ids.numel())
    tokens[starts[owner] + torch.arange(len(order), device=ids.device) - before[owner]] = order.to(tokens.dtype)
    firsts = torch.arange(len(experts), device=ids.device) * block
    block_expert = torch.searchsorted(ends, firsts, right=True) - 1
    experts.copy_(torch.where(firsts < ends[-1], block_expert, -1))
    total.fill_(int(ends[-1]))


def publish() -> None:
    """Give the process a configuration, once, as kernels read flags from it."""
    context = importlib.import_module(CONTEXT)
    if context.publish_role() is not None:
        return
    arguments = importlib.import_module(ARGUMENTS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        server = arguments.ServerArgs(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
        )
        context.publish(server, role="scheduler", ranks=context.SpawnRanks(world_rank=0, gpu_id=0))
    parallel = context.get_parallel()
    first_and_last = {"is_first_rank": True, "is_last_rank": True}
    alone = SimpleNamespace(world_size=1, rank_in_group=0, rank=0, ranks=[0], **first_and_last)
    groups = [name for name in dir(type(parallel)) if name.endswith("_group")]
    parallel.override_permanently(**dict.fromkeys(groups, alone))
