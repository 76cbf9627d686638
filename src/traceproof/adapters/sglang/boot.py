"""Bringing SGLang up as a library: no server, no model, one rank. What breaks first when SGLang moves on.

Checked with 0.5.22 and 0.5.23.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
    """Let the Triton kernels import where SGLang's compiled kernel package is absent.

    They need one symbol of it at import, and SGLang has a Triton version of that one.
    """
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    module = ModuleType("sgl_kernel")

    def moe_sum_reduce(*arguments: object) -> None:
        triton = importlib.import_module("sglang.kernels.ops.moe.fused_moe_triton_kernels")
        triton.moe_sum_reduce_triton(*arguments)

    module.moe_sum_reduce = moe_sum_reduce  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = module


def publish() -> None:
    """Give the process a configuration: kernels read flags out of it. Once is enough."""
    context = importlib.import_module("sglang.srt.runtime_context")
    if context.publish_role() is not None:
        return
    arguments = importlib.import_module("sglang.srt.server_args")
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
