"""Bringing SGLang 0.5.22 or 0.5.23 up as a library: no server, no model, one rank. It breaks first."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

from traceproof.lazy import torch
from traceproof.stacks.sglang import STACK
from traceproof.stand_ins import StandIns

KERNELS, CONTEXT, ARGUMENTS = STACK.modules
# The smallest model description that SGLang's argument check accepts; nothing of it is used.
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
    """Let the Triton kernels and native forms import where SGLang's compiled kernel package is absent.

    Their modules import names of it that they do not call here, but for two: of one SGLang has a Triton
    version, the other sorts indices (`align`).
    """
    if importlib.util.find_spec(KERNELS) is None:
        _Kernels({KERNELS}, _Name).install()


class _Kernels(StandIns):
    """The kernel package; `stands_in` tells whoever asks if it is there."""

    stands_in = True


class _Name:
    """Has every attribute; what is called raises, but for the two that are stood in for."""

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
    """Sort (token, expert) pairs into blocks of one expert each; only indices, no arithmetic on values.

    Args:
        ids: experts from -1 (left out) to `buckets` - 2, any shape; pair `i` is its `i`-th element.
        buckets: experts and one more for -1.
        block: pairs a block.
        tokens: written; pairs by expert, each expert's last block filled up with `ids.numel()`.
        experts: written; each block's expert.
        total: written; one number, the pairs with the padding.
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
    found = torch.searchsorted(ends, firsts, right=True) - 1
    experts.copy_(torch.where(firsts < ends[-1], found, -1))
    total.fill_(int(ends[-1]))


def publish() -> None:
    """Give the process a configuration: kernels read flags out of it. Once is enough."""
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
    alone = SimpleNamespace(
        world_size=1, rank_in_group=0, rank=0, ranks=[0], is_first_rank=True, is_last_rank=True
    )
    groups = [name for name in dir(type(parallel)) if name.endswith("_group")]
    parallel.override_permanently(**dict.fromkeys(groups, alone))
