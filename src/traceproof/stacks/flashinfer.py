"""FlashInfer. API names are those of 0.6.13 and 0.7.2.post1, the newer one first."""

import contextlib
import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from traceproof.reasons import Skip, Unavailable, UnavailableError
from traceproof.stacks import LIBRARIES, GroundTruth, SourceOrigin, Stack

ENVIRONMENT = "flashinfer.jit.env"  # module that defines FlashInfer's folders
LOADER = "flashinfer.jit.cubin_loader"  # module for kernels that are downloaded when called
SSU = "flashinfer.jit.mamba.selective_state_update"

APIS = {
    "rmsnorm": ("flashinfer.norm:rmsnorm",),
    "fused_add_rmsnorm": ("flashinfer.norm:fused_add_rmsnorm",),
    "gemma_rmsnorm": ("flashinfer.norm:gemma_rmsnorm",),
    "gemma_fused_add_rmsnorm": ("flashinfer.norm:gemma_fused_add_rmsnorm",),
    "decode": ("flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper",),
    "prefill_paged": ("flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper",),
    "prefill_ragged": ("flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper",),
    "mla": ("flashinfer.mla:BatchMLAPagedAttentionWrapper",),
    "sparse_mla": (
        "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla",
        "flashinfer.decode:trtllm_batch_decode_with_kv_cache_mla",
    ),
    "top_k": ("flashinfer.sampling:top_k_sampling_from_probs",),
    "top_p": ("flashinfer.sampling:top_p_sampling_from_probs",),
    "top_k_top_p": ("flashinfer.sampling:top_k_top_p_sampling_from_probs",),
    "rope": ("flashinfer.rope:apply_rope_with_cos_sin_cache_inplace",),
    "gdn_decode": ("flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose",),
    "gdn_mtp": ("flashinfer.gdn_decode:gated_delta_rule_mtp",),
    "gdn_prefill": ("flashinfer.gdn_prefill:chunk_gated_delta_rule",),
    "mamba": (
        "flashinfer.mamba:selective_state_update",
        "flashinfer.mamba.selective_state_update:selective_state_update",
    ),
    "moe_fp8_block": ("flashinfer.fused_moe:trtllm_fp8_block_scale_moe",),
    "moe_fp8_tensor": ("flashinfer.fused_moe:trtllm_fp8_per_tensor_scale_moe",),
    # Generators of kernel modules, for building ahead.
    "gen_norm": ("flashinfer.jit.norm:gen_norm_module",),
    "gen_decode": ("flashinfer.jit:gen_batch_decode_module",),
    "gen_prefill": ("flashinfer.jit:gen_batch_prefill_module",),
    "gen_prefill_fa2": (  # since 0.7 the wrappers build the variant for caches with equal strides
        "flashinfer.jit.attention.modules:_gen_batch_prefill_primary_module",
        "flashinfer.jit:gen_batch_prefill_module",
    ),
    "gen_mla": ("flashinfer.jit:gen_batch_mla_module",),
    "gen_sampling": ("flashinfer.jit.sampling:gen_sampling_module",),
    "gen_topk": ("flashinfer.jit.topk:gen_topk_module",),
    "gen_rope": ("flashinfer.jit.rope:gen_rope_module",),
    "gen_blockscale": ("flashinfer.jit.gemm:gen_fp8_blockscale_gemm_sm90_module",),
    "gen_fmha_v2": ("flashinfer.jit:gen_fmha_v2_module",),
    "gen_gdn_prefill": ("flashinfer.jit.gdn:gen_gdn_prefill_sm90_module",),
    "gen_mamba_sm90": (f"{SSU}:gen_selective_state_update_sm90_module",),
    "gen_mamba_sm100": (f"{SSU}:gen_selective_state_update_sm100_module",),
    "gen_mamba": (f"{SSU}:gen_selective_state_update_module",),
}


def prepare() -> None:
    """Set the variables of STACK.settings, and make FlashInfer use modules that were built ahead.

    They take the place of FlashInfer's own package of binaries, so they are loaded without being compared or
    compiled.
    """
    for name, value in STACK.settings.items():
        os.environ.setdefault(name, value)
    libraries = os.environ.get(LIBRARIES)
    if libraries and importlib.util.find_spec("flashinfer_jit_cache") is None:
        with contextlib.suppress(ImportError):  # whoever looks for an API reports what is missing
            environment: Any = importlib.import_module(ENVIRONMENT)
            environment.FLASHINFER_AOT_DIR = Path(libraries)
    with contextlib.suppress(ImportError):
        loader: Any = importlib.import_module(LOADER)
        waits = {"sleep": lambda seconds: _wait(seconds, loader.FLASHINFER_CUBINS_REPOSITORY)}
        loader.time = SimpleNamespace(**{**vars(time), **waits})


def _wait(seconds: float, repository: str) -> None:
    """Wait before FlashInfer repeats a download, which it does for 35 to 70 s in all.

    Raises:
        UnavailableError: the host is unknown, as without a network, so that repeating does not help.
    """
    host = urlsplit(repository).hostname or repository
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        message = f"this kernel is downloaded from {host}, which is not reached; flashinfer-cubin has it"
        raise UnavailableError(Unavailable(Skip.PACKAGE_ABSENT, message)) from error
    time.sleep(seconds)


def parameters(function: str, inputs: tuple[str, ...]) -> Mapping[str, tuple[str, int | None]]:
    """(parameter, element of its tuple or None) of each input, by a function's template.

    A function has several templates for different forms; the one with these inputs counts. {}: there is none.
    """
    logging: Any = importlib.import_module("flashinfer.api_logging")
    for original, template, _ in getattr(logging, "_TRACE_REGISTRY", ()):
        if f"{original.__module__}.{original.__qualname__}" == function and tuple(template.inputs) == inputs:
            return {
                name: (getattr(spec, "param", None) or name, getattr(spec, "tuple_idx", None))
                for name, spec in template.inputs.items()
            }
    return {}


STACK = Stack(
    name="flashinfer",
    truths=(GroundTruth(name="flashinfer", label="FlashInfer", calls="FlashInfer's kernel", priority=10),),
    package="flashinfer",
    distribution="flashinfer-python",
    versions=("apache-tvm-ffi", "nvidia-cutlass-dsl"),
    apis=APIS,
    backends={  # of 0.7.2.post1; calls report what they need
        "decode": ("fa2", "fa3", "trtllm-gen", "cute-dsl", "cudnn"),
        "prefill_paged": ("fa2", "fa3", "cudnn", "trtllm-gen", "cute-dsl", "cute-dsl-prims"),
        "prefill_ragged": ("fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "cute-dsl-prims", "cutile"),
        "mla": ("fa2", "fa3", "cutlass"),
    },
    tuner="flashinfer.autotuner:AutoTuner",
    optional=frozenset({"gen_gdn_prefill"}),  # since 0.7 CuTe compiles it at its call
    modules=(ENVIRONMENT,),
    prepare="traceproof.stacks.flashinfer:prepare",
    # the CUDA norm kernels, as the CuTe ones need a compiler package
    settings={"FLASHINFER_USE_CUDA_NORM": "1"},
    origin=SourceOrigin(
        url="https://github.com/flashinfer-ai/flashinfer.git",
        package="flashinfer-python",
        submodules=("3rdparty/cutlass", "3rdparty/spdlog"),
        data={"csrc": "csrc", "include": "include", "cutlass": "3rdparty/cutlass", "spdlog": "3rdparty/spdlog"},
    ),
    tagged=True,
    parameters="traceproof.stacks.flashinfer:parameters",
    toolkit=True,
    needs_nvcc=True,  # its kernels are compiled before a run
    compiled={
        "flashinfer.norm": "gen_norm",
        "flashinfer.rope": "gen_rope",
        "flashinfer.sampling": "gen_sampling",
        "flashinfer.cascade": "flashinfer.jit.cascade:gen_cascade_module",
        "flashinfer.page": "flashinfer.jit.page:gen_page_module",
        "flashinfer.mhc": "flashinfer.jit.mhc:gen_mhc_module",
        "flashinfer.fused_moe.hash_topk": "flashinfer.jit:gen_hash_topk_module",
    },
    build_seconds={  # 0.6.13 on an H200; the first one 0.7.2.post1, beside other builds
        "gen_blockscale": 370,
        "gen_prefill": 68,
        "gen_prefill_fa2": 68,
        "gen_sampling": 50,
        "gen_rope": 31,
        "gen_norm": 26,
        "gen_mamba_sm90": 19,
        "gen_mla": 15,
        "gen_decode": 9,
    },
    long_files=frozenset({"gen_blockscale", "gen_sampling", "gen_gdn_prefill"}),
    caches={"FLASHINFER_WORKSPACE_BASE": "", "TVM_FFI_CACHE_DIR": "tvm-ffi", "CUTE_DSL_CACHE_DIR": "cute"},
    variables=("FLASHINFER_",),
)
