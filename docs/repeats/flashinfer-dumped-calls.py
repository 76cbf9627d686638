"""Findings U1 to U7, U11 and U12 of docs/findings-templates.md: `python flashinfer-dumped-calls.py U2 U3 ...`.

What FlashInfer's trace templates say of functions, and what these do. Needs torch and FlashInfer 0.7.2.post1; all but U1 also nvcc and a
GPU of compute capability 9.0. Each prints what it got and what is right. U6 ends CUDA's context, so it comes last.
"""

import sys

import flashinfer
import flashinfer.comm  # whose templates are not registered before
import torch
from flashinfer.api_logging import _TRACE_REGISTRY

T = {t.name_prefix or t.op_type: (f, t) for f, t, _ in reversed(_TRACE_REGISTRY)}


def told(call):
    """What a call returns, or what it raises: the line that says what the GPU lacks, else the last one."""
    try:
        found = call()
        torch.cuda.synchronize()
        return found
    except Exception as error:  # compilers have errors of their own
        lines = str(error).strip().splitlines() or [""]
        said = next((line for line in lines if "not supported" in line), lines[-1])
        return f"{type(error).__name__}: {said.strip()}"


def shapes(outputs):
    return outputs if isinstance(outputs, str) else [list(one.shape) for one in outputs]


def u1():
    got = T["top_p_renorm_probs"][1].reference(torch.full((1, 4), 0.25), 0.5)
    print(f"U1: the reference keeps {got.tolist()} (right: none or all of equal probabilities at the bound, as the kernel)")
    if torch.cuda.is_available():
        kept = told(lambda: flashinfer.top_p_renorm_probs(torch.full((1, 4), 0.25, device="cuda"), 0.5).tolist())
        print(f"U1: the kernel keeps {kept}")


def u2():
    for name in ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize"):
        function, template = T[name]
        given = template.init(M=1, device="cuda")
        declared, said = template.outputs["scales"].dim_names, shapes(template.reference(**given))[1]
        got = shapes(told(lambda function=function, given=given: function(**given)))
        got = got if isinstance(got, str) else got[1]
        print(f"U2: {name}: scales are {declared} in the template, {said} of its reference, {got} of the function (right: all the same)")


def u3():
    function, template = T["nvfp4_kv_dequantize_paged_hnd"]
    given = template.init(batch_size=1, max_seq_len=16, num_heads=8, device="cuda")
    said = sorted({"kv_layout", "kv_cache_layout"} & set(template.inputs))
    layout = given.pop("kv_layout")
    print(f"U3: inputs of the template that say the layout: {said} (right: one; its init gives kv_layout={layout!r})")
    print(f"U3: called without it: {told(lambda: function(**given))}; with it: {told(lambda: function(**given, kv_layout=layout))}")


def u4():
    function, template = T["selective_state_update"]
    given = template.init(batch_size=1, device="cuda") | {"dt_softplus": True}
    got = told(lambda: function(**given))
    print(f"U4: {got if isinstance(got, str) else 'it returns'} (right: it returns, as its documentation has this form)")


def u5():
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    for name in ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant"):
        got = told(lambda name=name: T[name][0](*([x] if name[0] == "r" else [x, x.clone()]), weight))
        print(f"U5: {name}: {got if isinstance(got, str) else 'it returns'} (right: refused, since this GPU has no such instruction)")


def u7():
    function, template = T["mm_M1_16_K7168_N256"]
    given = template.init(M=1, device="cuda")
    got = told(lambda: function(**given))
    print(f"U7: mat_b of its init has strides {given['mat_b'].stride()}: {got if isinstance(got, str) else 'it returns'}")
    given["mat_b"] = given["mat_b"].mT.contiguous().mT
    print(f"U7: by column: {told(lambda: function(**given))} (right: init gives what the function takes, and it says which GPUs it needs)")


def u6():
    function, template = T["decode_cp_a2a_alltoall"]
    given = template.init(batch_dim=1, cp_size=2, ws_elems_per_rank=1, device="cuda")
    got = told(lambda: function(**given))
    print(f"U6: {got if isinstance(got, str) else 'it returns'} (right: refused, or its init gives a workspace that it can follow)")


def u11():
    function, template = T["mono_moe"]
    got = told(lambda: function(**template.init(seq_len=16, device="cuda")))
    print(f"U11: 16 tokens: {got if isinstance(got, str) else 'it returns'} (right: the template says what it takes)")
    given = template.init(seq_len=2, device="cuda")
    outputs = [told(lambda: function(**given)) for _ in range(20)]
    if isinstance(outputs[0], str):
        return print(f"U11: 2 tokens: {outputs[0]}")
    differ = sum(not torch.equal(outputs[0], one) for one in outputs)
    apart = max(float((outputs[0] - one).abs().max()) for one in outputs)
    print(f"U11: {differ} of 19 further runs on the same inputs differ, by up to {apart:.3g} (right: said, if bits may vary)")


def u12():
    function, template = T["xqa"]
    for tokens in (128, 1024, 8192):
        given = template.init(batch_size=1, max_pages_per_seq=tokens // 16, device="cuda")
        given["v_cache"] += 2
        if isinstance(said := told(lambda: function(**given)), str):
            return print(f"U12: {said}")
        q, k, v, got = (given[name].double() for name in ("q", "k_cache", "v_cache", "output"))
        k, v = (cache.view(-1, *cache.shape[2:]).repeat_interleave(8, 1) for cache in (k, v))  # 128 query heads, 16 of keys
        weights = (torch.einsum("hd,khd->hk", q[0, 0], k) / 128**0.5).softmax(-1)
        right = torch.einsum("hk,khd->hd", weights, v)
        step = 2.0 ** (torch.frexp(right)[1] - 8)  # between neighbours in bfloat16
        off = ((got[0, 0] - right) / step).abs()
        rounded = torch.einsum("hk,khd->hd", weights.bfloat16().double(), v)
        print(
            f"U12: {tokens} keys: off by up to {off.max():.2f} steps of bfloat16, {off.mean():.3f} in the mean "
            f"(right: 0.50 and 0.250; weights rounded to bfloat16 alone cost {((rounded - right) / step).abs().max():.2f})"
        )


for name in sys.argv[1:] or ("U1", "U2", "U3", "U4", "U5", "U7", "U11", "U12", "U6"):
    globals()[name.lower()]()
