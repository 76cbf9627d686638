"""Write every definition that the trace templates of the installed FlashInfer can write, one file per template.

Run it with an interpreter that has FlashInfer (that of the stack); no GPU is needed. Sizes are those of each
template's own `init`, tried without memory first. A call of a template without one, or whose `init` raises, is
made from what it declares: sizes of AXES that its constraints allow, tensors without memory of dtypes declared, or
of DTYPES, or bfloat16. `--as-written` leaves those templates without sizes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dumped_source import completed

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--out", type=Path, required=True, help="a folder, made if it is not there")
PARSER.add_argument("--only", nargs="*", default=[], help="write definitions of these op_types alone")
PARSER.add_argument("--as-written", action="store_true", help="leave the code as FlashInfer writes it")
PACKAGE = "flashinfer"
SIZES = {"batch_size": 4, "num_tokens": 16, "seq_len": 16}
OTHER = 8
SECONDS = 8.0  # of a processor, for one `init`
WIDE = 512
# Sizes of const axes where no `init` gives one, smaller than models' so that a CPU computes them; others: OTHER.
SMALL = """
num_qo_heads:8 num_heads_qo:8 nheads:8 num_kv_heads:2 num_heads_kv:2 ngroups:2 num_q_heads:2 num_v_heads:4
kv_planes:2 kv_cache_dim:2 head_dim:128 kv_storage_head_dim:128 dstate:128 chunk_size:128 headdim:64
page_size:16 q_block_size:16 storage_page_size:16 kv_block_size:16 hc:4 mhc_mix:24 scale_size:3
kv_lora_rank:512 qk_rope_head_dim:64 head_dim_qk:576 head_dim_ckv:512 head_dim_kpe:64 projection_groups:3
conv_width:4 conv_history:3 singleton:1 one:1 num_tokens:1 hidden_dim:512 hidden_size:512 hidden:512
hidden_padded:512 hidden_size_padded:512 shard_hidden:512 beam_width:1 num_householder:2 seq_len_q:1
kv_pad_dim:1 K:256 N:128 block_size:16 K_packed:128 rank:32 intermediate_size:256 activation_type:3
heads_per_destination:7 packed_head_dim:64 scale_dim:8 scale_head_dim:8 packed_head_dim_ckv:256 scale_dim_ckv:32
page_bytes:3168 B_scale_size:1024 SF_dim_1:16
"""
AXES = dict(pair.split(":") for pair in SMALL.split())
WHOLE = """
state_indices block_tables seq_lens seq_lens_kv qo_indptr cu_seqlens seq_idx initial_state_indices
ssm_state_indices checkpoint_cu_starts query_start_loc num_accepted_tokens t1_state_indices adaln_index
"""
# Dtypes of codes, by words of descriptions; the first counts.
WORDS = {
    "as uint8": "uint8",
    "as int32": "int32",
    "e8m0 scale": "uint8",
    "float8_e4m3fn": "float8_e4m3fn",
    "device scalar": "float32",
}
DTYPES = {
    **dict.fromkeys(("A_log", "A", "dt_bias", "norm_weight"), "float32"),
    **dict.fromkeys(WHOLE.split(), "int32"),
}
# Dtypes of inputs whose descriptions say none, by op_type.
OF_OP = {
    "bmm_mxfp8": {"A": "float8_e4m3fn", "B": "float8_e4m3fn"},
    "gemm_bf16_fp4": {"A": "bfloat16", "B": "uint8", "b_descale": "uint8", "alpha": "float32"},
    "minimax_h3_qkv_quantize_pack": {"out_q": "uint8", "out_sf": "uint8"},
    "minimax_h3_mxfp8_pre_attention": {
        "qkv_weight_q": "float8_e4m3fn",
        "qkv_weight_sf": "uint8",
        "out_q": "float8_e4m3fn",
    },
    "minimax_h3_nvfp4_pre_attention": {
        **dict.fromkeys(("x_global_scale", "w_global_scale", "out_global_scale"), "float32"),
        **dict.fromkeys(("qkv_weight_q", "qkv_weight_sf", "out_q", "out_sf"), "uint8"),
    },
}
# Sizes that follow from others: scales in tiles, all in one axis or in two.
FOLLOWING: dict[str, Callable[[dict[str, int]], int]] = {
    "SF_dim_0": lambda at: 128 if "SF_dim_1" in at else 128 * at["K"] // 16
}
STATED = re.compile(r"\b(\w+)=(\d+)\b")  # sizes in a template's description
# Of experts and some others, by how names of templates begin: sizes, which may follow from others, and dtypes;
# later ones count.
EXPERTS = r"""
moe_fp|trtllm_.*moe|cutlass_|b12x_|cute_dsl_.*moe|prims_ts_ top_k=4 gemm1_out_size=2*intermediate_size
moe_fp|trtllm_.*moe num_experts=16 n_group=4 topk_group=2 num_fused_shared_experts=1
moe_fp num_weight_rows=num_experts+num_fused_shared_experts
moe_fp._block_scale_llama4 top_k=1
moe_fp|trtllm_|cute_dsl_|b12x_ num_packed_hidden=hidden_size//2 num_packed_intermediate=intermediate_size//2
moe_fp|trtllm_|cute_dsl_|b12x_ num_fp4_hidden_blocks=hidden_size//16
moe_fp|trtllm_|cute_dsl_|b12x_ num_fp4_intermediate_blocks=intermediate_size//16
moe_fp|trtllm_ gemm1_bias:float32 gemm2_bias:float32
moe_fp|trtllm_ gemm1_alpha:float32 gemm1_beta:float32 gemm1_clamp_limit:float32
moe_fp|trtllm_|prims_ output1_scale_scalar:float32 output1_scale_gate_scalar:float32 output2_scale_scalar:float32
prims_ output1_scales_scalar:float32 output1_scales_gate_scalar:float32 output2_scales_scalar:float32
moe_fp4|trtllm_fp4 hidden_states:uint8 hidden_states_scale:float8_e4m3fn gemm1_weights:uint8 gemm2_weights:uint8
moe_fp4|trtllm_fp4 gemm1_weights_scale:float8_e4m3fn gemm2_weights_scale:float8_e4m3fn
moe_fp8|trtllm_fp8 hidden_states:float8_e4m3fn gemm1_weights:float8_e4m3fn gemm2_weights:float8_e4m3fn
trtllm_fp8 hidden_states_scale:float32 gemm1_weights_scale:float32 gemm2_weights_scale:float32
trtllm_fp8 num_hidden_blocks=hidden_size//128 num_intermediate_blocks=intermediate_size//128
trtllm_fp8 num_gemm1_out_blocks=gemm1_out_size//128
.*swiglu_step hidden_states_scale:uint8 gemm1_weights_scale:uint8 gemm2_weights_scale:uint8
.*swiglu_step num_hidden_blocks=hidden_size//32 num_intermediate_blocks=intermediate_size//32
trtllm_mxint4 gemm1_weights:uint8 gemm2_weights:uint8
trtllm_mxint4 num_mxint4_hidden_blocks=hidden_size//32 num_mxint4_intermediate_blocks=intermediate_size//32
trtllm_bf16 block_k=64 num_hidden_blocks=hidden_size//64 num_intermediate_blocks=intermediate_size//64
b12x_|cute_dsl_(fused_moe|moe_wrapper)$ w1_weight:uint8 w2_weight:uint8
b12x_|cute_dsl_(fused_moe|moe_wrapper)$ w1_weight_sf:float8_e4m3fn w2_weight_sf:float8_e4m3fn
b12x_|cute_dsl_ one=1 input_global_scale_size=1
cute_dsl_(fused_moe|moe_wrapper)$ x:uint8 x_sf:float8_e4m3fn input_width=hidden_size//2
cute_dsl_ num_mx_hidden_blocks=hidden_size//32 w1_sf_m_tiles=gemm1_out_size//128 w2_sf_m_tiles=hidden_size//128
cute_dsl_ w1_sf_k_tiles=hidden_size//64 w2_sf_k_tiles=intermediate_size//64 w1_sf_dim0=32 w1_sf_dim1=4 w1_sf_dim3=4
cute_dsl_ w1_sf_dim2=gemm1_out_size//128 w1_sf_dim4=hidden_size//128 w2_sf_dim2=hidden_size//128
cute_dsl_ w2_sf_dim4=intermediate_size//128
alphamoe_ hidden_size=512 hidden_blocks=4 gated_size=512 gated_blocks=4 intermediate_size=256 intermediate_blocks=2
alphamoe_ gemm1_out_size=512 num_packed_hidden=256 num_hidden_scale_blocks=32 top_k=4
alphamoe_ num_packed_intermediate=128 num_intermediate_scale_blocks=16
alphamoe_fp8|alphamoe_inter hidden_states:float8_e4m3fn gemm1_weights:float8_e4m3fn gemm2_weights:float8_e4m3fn
alphamoe_fp8|alphamoe_inter hidden_states_scale:float32 gemm1_weights_scale:float32 gemm2_weights_scale:float32
alphamoe_fp8 sorted_token_ids:int32 expert_ids:int32 num_tokens_post_padded:int32 topk_weights:float32
sm90_mixed weight:uint8 raw_scale:uint8 scales:uint8
attention_ts_.*fp16_output q:float16 k_cache:float16 v_cache:float16 paged_kv_cache:float16
attention_ts_.*multi_q seq_len_q=2
dsv41_.*append slot_mapping:int32 cache:uint8
prims_ts_fp8 hidden_states:float8_e4m3fn gemm1_weights_0:float8_e4m3fn gemm1_weights_1:float8_e4m3fn
prims_ts_fp8 gemm2_weights_0:float8_e4m3fn gemm2_weights_1:float8_e4m3fn
prims_ts_fp4 gemm1_weights_0:uint8 gemm1_weights_1:uint8 gemm2_weights_0:uint8 gemm2_weights_1:uint8
prims_ts_fp4.*partitioned(_tp|_block|_major|$) hidden_states:uint8 hidden_states_scale:float8_e4m3fn
prims_ts_fp4.*mxfp8 hidden_states:float8_e4m3fn
prims_ts_ hidden_size=512 packing=1 scale_block=32
prims_ts_fp4 packing=2
prims_ts_fp4.*partitioned(_tp|_block|_major|$) scale_block=16
prims_ts_ hidden_storage_k=hidden_size//2 fc1_shard_rows=intermediate_size fc1_storage_k=hidden_size//packing
prims_ts_ fc2_shard_rows=hidden_size fc2_storage_k=intermediate_size//2//packing
prims_ts_.*tp_n_tp_n fc2_shard_rows=hidden_size//2 fc2_storage_k=intermediate_size//packing
prims_ts_ fc1_block_elements=128 fc2_block_elements=128
prims_ts_bf16 fc1_block_elements=64 fc2_block_elements=64
prims_ts_fp4.*tp_n_tp_k fc2_block_elements=64
prims_ts_ fc1_k_blocks=fc1_storage_k//fc1_block_elements fc2_k_blocks=fc2_storage_k//fc2_block_elements
prims_ts_ fc1_scale_storage=num_local_experts*fc1_shard_rows*hidden_size//scale_block
prims_ts_ fc2_scale_storage=num_local_experts*hidden_size*intermediate_size//2//scale_block
prims_ts_ hidden_scale_storage=16*hidden_size//scale_block
mm_bf16_fp4_cute_dsl$ B:int32
mm_bf16_fp4_cudnn b_descale:float8_e4m3fn
"""
LONGEST = 120  # characters of a name, which may have 128
ROUNDS = 4  # of settling sizes by constraints that name each other
REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
PHASES = {"plan", "run", "init", "ctor", "constructor", "wrapper"}


def import_all(package: Any) -> list[str]:  # noqa: ANN401 - a module
    """Import a package's modules, whose decorators register templates; gives those that can not be imported."""
    lost: list[str] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lost.append):
        try:
            importlib.import_module(found.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package's module does without a GPU
            lost.append(f"{found.name}: {type(error).__name__}")
    return lost


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError once this process has computed for so long, however busy the machine is."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s of a processor")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def arguments(template: Any, init: Any, text: str) -> dict[str, Any]:  # noqa: ANN401 - a template and its function
    """What a template's `init` makes, phases of a call put together; nothing where it raises.

    Args:
        template: whose axes say which sizes there are.
        init: the function.
        text: its completed text, whose wide sizes are an eighth; empty: it is called as it is.
    """
    known = inspect.signature(init).parameters
    needed = [
        name for name, one in known.items() if one.default is inspect.Parameter.empty and one.kind not in REST
    ]
    if any(one.kind in REST for one in known.values()):
        needed += [name for name, axis in template.axes.items() if type(axis).__name__ == "Var"]
    given = {name: SIZES.get(name, OTHER) for name in needed}
    narrow = {name: size // 8 for name, size in wide(text).items() if name in template.axes and name not in given}
    for device in ("cpu",) if text else ("meta", "cpu"):
        try:
            with limited(SECONDS):
                made = init(
                    **given, **narrow, **({"device": device} if {"device", "kwargs"} & known.keys() else {})
                )
        except Exception:  # noqa: BLE001, S112 - it needs values, a GPU, or other sizes
            continue
        parts = made.values() if made.keys() <= PHASES else (made,)
        return {name: value for part in parts for name, value in part.items()}
    return {}


def of_experts(template: Any, sizes: dict[str, int]) -> dict[str, str]:  # noqa: ANN401 - a template
    """Dtypes that EXPERTS has for a template's inputs; its sizes take the place of those given."""
    dtypes: dict[str, str] = {}
    for line in EXPERTS.strip().splitlines():
        names, *entries = line.split()
        for one in entries if re.match(f"({names})", template.name_prefix or "") else ():
            name, equals, text = one.partition("=")
            if not equals:
                name, _, text = one.partition(":")
                dtypes[name] = text
            elif getattr(template.axes.get(name), "value", None) is None:
                with suppress(NameError):  # an axis that this template does not have
                    sizes[name] = int(eval(text, {}, dict(sizes)))  # noqa: S307 - of the table above
    return dtypes


def declared(template: Any) -> dict[str, Any]:  # noqa: ANN401 - a template
    """Arguments of a call that fits what a template declares: sizes, and tensors without memory."""
    import torch

    stated = AXES | dict(STATED.findall(template.description or ""))
    sizes = {
        name: getattr(axis, "value", None) or int(stated.get(name, OTHER)) for name, axis in template.axes.items()
    }
    sizes |= {name: size(sizes) for name, size in FOLLOWING.items() if name in sizes}
    dtypes = of_experts(template, sizes)
    for _ in range(ROUNDS):
        for text in template.constraints or ():
            parts = text.split(" or ")[0].split(" == ")
            with suppress(Exception):  # of tensors' values, which there are not
                if len(parts) == 2 and parts[0].strip() in sizes:
                    sizes[parts[0].strip()] = int(eval(parts[1], {}, dict(sizes)))  # noqa: S307 - the package's
                name, _, choices = text.partition(" in ")
                if choices and name in sizes and sizes[name] not in eval(choices, {}, dict(sizes)):  # noqa: S307
                    sizes[name] = next(iter(eval(choices, {}, dict(sizes))))  # noqa: S307
    given: dict[str, Any] = {}
    for name, one in template.inputs.items():
        parameter = getattr(one, "param", None) or name
        if type(one).__name__ == "Scalar":
            if name in sizes:
                given[parameter] = sizes[name]
            continue
        said = (one.description or "").lower()
        told = next((kind for word, kind in WORDS.items() if word in said), DTYPES.get(name, "bfloat16"))
        told = dtypes.get(name, OF_OP.get(template.op_type, {}).get(name, told))
        dtype = getattr(torch, str(one.dtype or told).removeprefix("torch."))
        made = torch.empty(
            [sizes.get(axis, OTHER) if axis != "1" else 1 for axis in one.dim_names], dtype=dtype, device="meta"
        )
        if one.tuple_idx is None:
            given[parameter] = made
        else:
            given[parameter] = (*given.get(parameter, ()), made)
    return {name: sizes[name] for name in template.axes} | given


def wide(text: str) -> dict[str, int]:
    """Whole numbers above WIDE that functions of a text have as defaults of keywords, by parameter."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                if isinstance(default, ast.Constant) and type(default.value) is int and default.value > WIDE:
                    found[one.arg] = default.value
    return found


def main() -> None:
    """Writes the files, and says how many there are and which modules could not be imported."""
    options = PARSER.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lost = import_all(importlib.import_module(PACKAGE))
    logging: Any = importlib.import_module("flashinfer.api_logging")
    written: dict[str, str] = {}
    mended: dict[str, list[str]] = {}
    registry = vars(logging)["_TRACE_REGISTRY"]
    references = {
        inspect.unwrap(function): one.reference for function, one, _ in registry if one.reference is not None
    }
    for function, template, _ in registry:
        if options.only and template.op_type not in options.only:
            continue
        trace = template.build_fi_trace_fn(f"{function.__module__}.{function.__qualname__}")
        given = {} if template.init is None else arguments(template, template.init, "")
        if not given and not options.as_written:
            given = declared(template)
        made = trace(**given, save_dir=None)
        notes: list[str] = []
        if not options.as_written:
            made, notes = completed(made, template, PACKAGE, references)
            if template.init is not None and not given:  # it needs a kernel, which its completed text may not
                module: dict[str, Any] = {}
                exec(compile(made["init"], "<init>", "exec"), module)  # noqa: S102 - the installed package's own code
                given = arguments(template, module[template.init.__name__], made["init"])
                written_anew = trace(**given, save_dir=None)
                made = {**written_anew, **{part: made[part] for part in ("reference", "init") if part in made}}
        text = json.dumps(made, indent=1)
        if text in written.values():
            continue
        name = made["name"][:LONGEST]
        name = name if name not in written else f"{name}_{len(written)}"
        written[name] = text
        mended[name] = notes
        (options.out / f"{name}.json").write_text(json.dumps({**made, "name": name}, indent=1) + "\n")
    sys.stdout.write(f"{len(written)} definitions in {options.out}\n")
    told = (f"{name}: {', '.join(notes)}\n" for name, notes in sorted(mended.items()) if notes)
    (options.out / "completed.txt").write_text("".join(told), encoding="utf-8")
    sys.stderr.write("".join(f"not imported: {one}\n" for one in lost))


if __name__ == "__main__":
    main()
