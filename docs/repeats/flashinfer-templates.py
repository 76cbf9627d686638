"""Findings 1 to 38 and 41 to 45 of docs/findings-templates.md, F3 and F4: `python flashinfer-templates.py 1 7 F4 ...`, or all of them.

What is wrong in FlashInfer's trace templates: their references, definitions and `init`s. Needs torch and FlashInfer 0.7.2.post1, and no
GPU. Each prints what it got and what is right.
"""

import inspect
import math
import sys

import flashinfer  # registers them
import torch
from flashinfer.api_logging import _TRACE_REGISTRY

T = {t.name_prefix or t.op_type: (f, t) for f, t, _ in reversed(_TRACE_REGISTRY)}


def dumped(name, **given):
    return T[name][1].build_fi_trace_fn(T[name][0].__qualname__)(save_dir=None, **given)


def template(name):
    return T[name][1]


def axes(name, tensor):
    found = template(name)
    return {**found.inputs, **found.outputs}[tensor].dim_names


def refused(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "nothing"


def dtypes(name, given, called=None):
    """The dtypes of outputs, as the definition has them and as the reference gives them."""
    got = template(name).reference(**(given if called is None else called))
    got = [one.dtype for one in (got if isinstance(got, tuple) else (got,))]
    said = [one["dtype"] for one in dumped(name, **given)["outputs"].values()]
    return f"{name}: the definition says {said}, the reference gives {[str(one) for one in got]} (right: the same)"


def n1():
    module = {}
    exec(dumped("rope")["reference"], module)
    call = module[template("rope").reference.__name__]
    given = (torch.randn(4, 32, 128), torch.randn(4, 8, 128), torch.tensor([0, 4]), torch.zeros(1))
    return f"a dumped reference, called: {refused(lambda: call(*given))} (right: nothing)"


def n2():
    lines = [line.strip() for line in dumped("trtllm_bf16_moe")["reference"].splitlines() if "from ." in line]
    return f"a dumped reference has {lines} (right: no import of the package)"


def n3():
    return dtypes("rope", template("rope").init(nnz=3, device="cpu"))


def n4():
    return dtypes("merge_state", template("merge_state").init(seq_len=3, device="cpu"))


def n5():
    return dtypes("xqa_mla", template("xqa_mla").init(device="cpu"))


def n6():
    given = template("rmsnorm_quant").init(batch_size=2, device="cpu")
    names = list(inspect.signature(template("rmsnorm_quant").reference).parameters)
    own = dict(zip(names, (given["input"], given["weight"], given["scale"]), strict=False))
    told = refused(lambda: template("rmsnorm_quant").reference(**given))
    return f"{dtypes('rmsnorm_quant', given, own)}; with what init gives: {told} (right: nothing)"


def n7():
    x = torch.randn(2, 4096)
    got = template("fused_add_rmsnorm").reference(x, x.clone(), torch.ones(4096))
    return f"outputs {list(template('fused_add_rmsnorm').outputs)}, the reference returns a {type(got).__name__} (right: two)"


def n8():
    got = template("mxfp8_quantize").reference(**template("mxfp8_quantize").init(M=3, device="cpu"))
    return f"scales are {axes('mxfp8_quantize', 'scales')} in the definition, {list(got[1].shape)} of the reference (right: the same)"


def n9():
    given = template("pod_run").init(device="cpu")["run"]["paged_kv_cache_d"]
    what = f"a {type(given).__name__} of {[list(one.shape) for one in given]}"
    return f"the cache is {axes('pod_run', 'paged_kv_cache_d')} in the definition, {what} in init (right: the same)"


def n10():
    given = template("trtllm_ragged_attention_deepseek").init(num_q_tokens=4, device="cpu") | {"enable_pdl": False}
    told = refused(lambda: template("trtllm_ragged_attention_deepseek").reference(**given))
    return f"the reference, given what init gives: {told} (right: nothing)"


def n11():
    a, one = torch.ones(1, 16, 16).to(torch.float8_e4m3fn), torch.ones(1)
    return f"dtype 1, as init gives it: {refused(lambda: template('bmm_fp8').reference(a, a, one, one, 1))} (right: nothing)"


def n12():
    name, sizes = "trtllm_batch_decode_mla_ragged", {"batch_size": 2, "num_tokens": 2, "device": "cpu"}
    told = refused(lambda: template(name).init(**sizes, batch_size_plus_1=5))
    return f"batch_size_plus_1 of 5: {told}; constraints {list(template(name).constraints)} (right: they say it)"


def n13():
    name = "silu_and_mul_scaled_nvfp4_experts_quantize"
    given = template(name).init(B=2, M=4, K_doubled=64, device="cpu")
    return f"mask is {axes(name, 'mask')} in the definition, {list(given['mask'].shape)} of init (right: the same)"


def n14():
    name = "selective_state_update"
    given = template(name).init(batch_size=1, device="cpu")
    before = given["state"].clone()
    template(name).reference(**given)
    changed = not torch.equal(before, given["state"])
    return f"the reference changes state: {changed}; outputs {list(template(name).outputs)} (right: state among them)"


def n15():
    q, v = torch.ones(3, 4, 128).bfloat16(), torch.ones(3, 8, 128).bfloat16()
    gates, biases, state = torch.zeros(3, 8), torch.zeros(8), torch.ones(2, 8, 128, 128)
    bounds = torch.tensor([0, 3, 3])  # the second sequence is empty
    after = template("gdn_prefill").reference(q, q, v, state, biases, gates, biases, gates, bounds, 1.0)[1]
    return f"the state of an empty sequence becomes {after[1].unique().tolist()} (right: 1, as it was)"


def product(rows_of_b):
    """A product of matrices of 1.0, as FP4 codes, two to a byte; A is given as [2, 16]."""
    a, b = torch.full((2, 16), 0x22, dtype=torch.uint8), torch.full((rows_of_b, 16), 0x22, dtype=torch.uint8)
    return template("gemm_fp4").reference(a, b, torch.ones(2, 2), torch.ones(rows_of_b, 2))


def n16():
    same, twice = refused(lambda: product(16)), refused(lambda: product(32))
    told = f"A is {axes('gemm_fp4', 'A')} and B {axes('gemm_fp4', 'B')} in the definition"
    return f"{told}; B with as many rows as A has columns: {same}; with twice as many: {twice} (right: what the definition says)"


def n22():
    return f"32 products of 1.0 with 1.0 in FP4 sum up to {float(product(32)[0, 0])} (right: 32)"


def n23():
    tokens, hidden, inner, experts = 2, 128, 128, 2
    packed = lambda *shape: torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    scales = lambda rows, columns: torch.ones(32, 4, rows // 128, 4, columns // 64, experts)  # as the template has them
    one, chosen = torch.ones(experts), torch.zeros(tokens, 1, dtype=torch.int32)
    weights = {
        "w1_weight": packed(experts, 2 * inner, hidden),
        "w1_weight_sf": scales(2 * inner, hidden),
        "w2_weight": packed(experts, hidden, inner),
        "w2_weight_sf": scales(hidden, inner),
    }
    rest = {"x": packed(tokens, hidden), "x_sf": torch.ones(tokens, hidden // 16), "fc2_input_scale": one[:1]}
    routing = {"token_selected_experts": chosen, "token_final_scales": torch.ones(tokens, 1), "num_experts": experts, "top_k": 1}
    given = weights | rest | routing | {"w1_alpha": one, "w2_alpha": one}
    told = refused(lambda: template("cute_dsl_fused_moe").reference(**given))
    return f"scales of {list(weights['w1_weight_sf'].shape)}, {axes('cute_dsl_fused_moe', 'w1_weight_sf')}: {told} (right: nothing)"


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decoded(packed, scales, block):
    """What fp4 codes with scales for each block stand for; scales are numbers."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.cat([E2M1, -E2M1])[codes] * scales.repeat_interleave(block, -1)


def n24():
    torch.manual_seed(0)
    x, whole = torch.randn(4, 128).bfloat16(), torch.tensor([0.01])
    codes, scales = template("nvfp4_kv_quantize").reference(x, whole)
    back = decoded(codes, scales.float(), 16) * whole
    return f"nvfp4_kv_quantize: decoded, the reference gives {back.std().item():.2g} for a deviation of 1 (right: about 1)"


def n25():
    x = torch.full((1, 32), 11.0).bfloat16()
    codes, scales = template("mxfp4_quantize").reference(x)
    four = decoded(codes, torch.exp2(scales.float() - 127), 32)[0, 0].item()
    values, scales = template("mxfp8_quantize").reference(x * 64)
    eight = (values.float()[0, 0] * torch.exp2(scales.float() - 127)[0, 0]).item()
    return f"32 times 11 in mxfp4: {four} (right: 12 or 8); 32 times 704 in mxfp8: {eight} (right: 704)"


def n26():
    x = torch.tensor([6.0, 0.75, 1.75, 3.5] * 4)[None].bfloat16()
    codes, _ = template("nvfp4_quantize").reference(x, torch.tensor([1.0]))
    found = decoded(codes, torch.ones(1, 1), 16)[0, :4].tolist()
    codes, scales = template("nvfp4_quantize").reference(x * 2.0**40, torch.tensor([1.0]))
    far = f"6 * 2**40 becomes {decoded(codes, scales.float(), 16)[0, 0].item():g} (right: 6 * 448, the largest)"
    return f"6, 0.75, 1.75, 3.5 become {found} (right, ties to even: [6.0, 1.0, 2.0, 4.0]); {far}"


def n27():
    x = torch.tensor([64.0] * 16 + [6 / 64, -3 / 64, 1 / 64, 4 / 64] * 4)[None, None].bfloat16()
    call = template("silu_and_mul_scaled_nvfp4_experts_quantize").reference
    codes, scales = call(x, None, torch.tensor([1.0]))
    found = decoded(codes, scales.float(), 16)[0, 0, :4].tolist()
    return f"6, -3, 1, 4 become {found} (right: the same)"


def n28():
    x, state, ends = torch.zeros(1, 1, 2), torch.ones(1, 1, 2, 2), torch.tensor([0, 1])
    given = {name: x for name in ("q", "k", "v", "beta", "w")}
    found = template("gdn2_prefill").reference(**given, g=x + math.log(0.5), initial_state=state, cu_seqlens=ends, scale=1.0)
    return f"a state of 1 that forgets half (g = log(0.5)) is {found[1].flatten()[0].item():.3f} (right: 0.5)"


def f3():
    v, s = torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)
    got = {name: template(name).reference(v, s, v, s)[1].item() for name in ("merge_state", "merge_state_in_place")}
    return f"where no state has seen a key, the log-sum-exp is {got} (right: -inf, and outputs of 0)"


n17 = f3


def n18():
    names = ("moe_fp8_block_scale_topk_routing_swiglu_step", "mm_bf16_fp4_cudnn")
    return f"constraints of {names}: {[list(template(name).constraints) for name in names]} (right: what their axes' names say)"


def n19():
    found, lost = template("moe_fp4_block_scale_ds_shared_experts"), {"top_k", "n_group", "topk_group"}
    asked = lost & set(inspect.signature(found.reference).parameters)
    return f"the reference asks for {sorted(asked)}, of which {sorted(asked & set(found.inputs))} are inputs (right: all)"


def n20():
    found = {name: template(name).inputs["fc2_input_scale"].optional for name in ("b12x_fused_moe", "b12x_moe_wrapper")}
    source = inspect.getsource(inspect.getmodule(template("b12x_fused_moe").reference))
    line = next(one.strip() for one in source.splitlines() if "fc2_input_scale is required" in one)
    return f"fc2_input_scale is optional: {found}, and the reference says: {line} (right: one of them)"


def n21():
    names = ("chain_speculative_sampling", "sampling_from_probs", "sampling_from_logits", "min_p_sampling", "top_k_top_p_sampling_from_logits")
    sources = {name: dumped(name)["reference"] for name in names}
    draws = [name for name, source in sources.items() if "multinomial" in source or "torch.rand" in source]
    likeliest = [name for name, source in sources.items() if "argmax" in source]
    asked = {name: "generator" in inspect.signature(T[name][0]).parameters for name in names}
    return f"functions that take a generator: {asked}; references that draw: {draws}, that take argmax: {likeliest} (right: all draw)"


def n29():
    one, code = torch.float8_e4m3fn, torch.full((1, 32, 16), 0x22, dtype=torch.uint8)  # all weights and values are 1
    scale = torch.ones(1, 32, 2).to(one)
    given = {"hidden_states": code[0, :1], "hidden_states_scale": scale[0, :1], "gemm1_weights": code, "gemm1_weights_scale": scale}
    given |= {"gemm2_weights": code[..., :8], "gemm2_weights_scale": scale[..., :1], "gemm1_bias": None, "gemm2_bias": None}
    given |= {"routing_logits": torch.zeros(1, 1), "routing_bias": None, "top_k": 1, "local_expert_offset": 0, "routed_scaling_factor": None}
    call = template("moe_fp4_block_scale_default_routing").reference
    found = [float(call(**given, gemm1_clamp_limit=limit)[0, 0]) for limit in (None, torch.tensor([1.0]))]
    return f"without a limit {found[0]:.4g}, with gemm1_clamp_limit 1 {found[1]:.4g} (right: 1.638e+04, 11.7)"


def n30():
    halves = torch.cat([torch.ones(1, 1, 2), -torch.ones(1, 1, 2)], 1)  # up, then gate
    scales = {f"output{name}": torch.ones(1) for name in ("1_scales_scalar", "1_scales_gate_scalar", "2_scales_scalar")}
    given = {"hidden_states": torch.ones(1, 2), "gemm1_weights": halves, "gemm2_weights": torch.ones(1, 2, 1), **scales}
    given |= {"topk_ids": torch.tensor([[0x3F80]], dtype=torch.int32), "num_experts": 1, "local_expert_offset": 0}
    found = float(template("trtllm_fp8_per_tensor_scale_routed_moe").reference(**given)[0, 0])
    return f"up is 2, the gate -2: {found:.4f} (right: 2 * silu(-2), -0.4768)"


def n31():
    weights = {"gemm1_weights": torch.ones(2, 2, 2), "gemm2_weights": torch.ones(2, 2, 1)}
    packed = torch.tensor([[1 << 16 | 0x3F80]], dtype=torch.int32)  # expert 1 with weight 1
    given = {"hidden_states": torch.ones(1, 2), "num_experts": 2, "top_k": 1, "local_expert_offset": 0}
    found = float(template("trtllm_bf16_routed_moe").reference(topk_ids=packed, **given, **weights)[0, 0])
    return f"expert 1 with weight 1, packed: {found:.4f} (right: 2 * silu(2), 3.523)"


def n32():
    said = template("mono_moe").inputs["expert_weights_up"].description
    source = inspect.getsource(inspect.getmodule(template("mono_moe").reference))
    line = next(one.strip() for one in source.splitlines() if "silu_X2 = X2 * torch.sigmoid" in one)
    return f"the definition says {said!r}, the reference's helper, of halves X1 and X2: {line} (right: silu of the first half)"


def n33():
    table = vars(inspect.getmodule(template("mono_moe").reference))["_PRIMS_TS_FP8_BLOCK_PARTITION_TRACES"]
    found = next(iter(table.values())).axes
    kinds = {name: type(found[name]).__name__ for name in ("seq_len", "hidden_scale_storage")}
    return f"axes are {kinds} (right: both Var, as scales are of every token)"


def n34():
    right = torch.arange(12.0).view(3, 4)  # [N, K], in blocks of two columns
    blocks = template("gemm_fp8").reference(torch.eye(4), right.view(3, 2, 2).transpose(0, 1))
    return f"the weight, read out by A = 1: {blocks.T.tolist()} (right: {right.tolist()})"


def n35():
    given = {"input": torch.tensor([[0.0, 1.0]]), "offsets": torch.tensor([7]), "lengths": torch.tensor([2]), "k": 4}
    found = template("top_k_ragged_transform").reference(**given)
    return f"of two tokens the best four: {found.tolist()} (right: [[8, 7, -1, -1]])"


def n36():
    x, weight = torch.ones(1, 16), torch.ones(16)
    _, scale = template("rmsnorm_fp4quant").reference(x, weight, global_scale=torch.tensor([1 / 64]))
    return f"the scale of ones with global_scale 1/64: {float(scale[0, 0])} (right: 64 / 6, nearest 11.0)"


def n37():
    one, scales = torch.ones(1, 2, 4), torch.full((1, 2, 1), 3.0)
    out = torch.zeros(1, 2, 2)
    call = template("grouped_gemm_nt_masked")
    found = call.reference((one, scales), (one, scales), out, torch.tensor([1]))
    kinds = {name: str(spec.dtype) for name, spec in call.inputs.items() if name in {"ab_dtype", "sf_dtype"}}
    return f"four ones by four ones, scales of 3: {float(found[0, 0, 0])}; {kinds} (right: 36, and texts)"


def n38():
    q, v = torch.zeros(2, 1, 64), torch.stack([torch.zeros(1, 64), torch.ones(1, 64)])  # what the second key has is 1
    cache = (torch.zeros(1, 16, 1, 64), torch.zeros(1, 16, 1, 64))
    found, _ = template("pod_run").reference(q, q, v, q[:1], cache)
    default = inspect.signature(flashinfer.PODWithPagedKVCacheWrapper.run).parameters["causal_p"].default
    return f"of two keys the first query sees {float(found[0, 0, 0])}, causal_p is {default} by default (right: 0.5, or True)"


def n41():
    out, codes, scales = torch.zeros(1, 128), torch.zeros(128, 128, dtype=torch.uint8), torch.zeros(128, 16).byte()
    call = template("mm_bf16_fp4_cute_dsl_native_sf2d").reference
    found = call(torch.ones(1, 256), codes + 0x22, scales + 0x38, out=out)
    return f"`out` afterwards: {float(out[0, 0])}, and C is it: {found is out} (right: 0.0, or an output that stands for it)"


def n42():
    q, k = (torch.zeros(0, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    found = template("rope").reference(q, k, torch.tensor([0, 0]), torch.zeros(1), rotary_dim=32)
    return f"of an empty batch, 32 columns rotated: {[tuple(one.shape) for one in found]} (right: (0, 32, 128) and (0, 8, 128))"


def n43():
    import flashinfer.gdn_decode  # registers its templates

    call = next(t for _, t, _ in _TRACE_REGISTRY if "replayssm_g" in t.inputs and "intermediate_states_buffer" in t.inputs)
    last = inspect.getsource(call.reference).strip().splitlines()[-1].strip()
    return f"outputs: {list(call.outputs)}; the reference ends with `{last}` (right: all of them)"


def n44():
    codes, ends = torch.zeros(2, 8, 8, dtype=torch.uint8), torch.tensor([0, 2])
    call = lambda: template("msa_proxy_score_fp4").reference(codes, codes, torch.zeros(512).byte(), torch.zeros(512).byte(), 1.0, 1.0, ends, ends)
    return f"two tokens of 8 heads of 16 codes: {refused(call)} (right: nothing)"


def n45():
    q, cache = torch.zeros(1, 4, 64), (torch.zeros(1, 1, 8, 64), torch.zeros(1, 1, 8, 64))
    return f"4 heads of queries, 8 of keys: {refused(lambda: template('batch_attention_run').reference(q, cache))} (right: nothing)"


def f4():
    got, scale = template("mxfp8_quantize").reference(torch.ones(1, 32))
    back = float(got[0, 0].float() * 2.0 ** (int(scale.flatten()[0]) - 127))
    return f"1.0 comes back from mxfp8 as {back} (right: 1.0)"


for name in sys.argv[1:] or (*map(str, range(1, 39)), *map(str, range(41, 46)), "F4"):
    print(f"{name}: {globals()['n' + name if name.isdigit() else name.lower()]()}")
