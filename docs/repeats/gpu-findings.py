"""Findings of docs/findings.md that the newest releases show, each in a few lines: `python gpu-findings.py G6 G8 ...`.

Needs torch, a GPU of compute capability 9.0, and FlashInfer (G6, G7, G8, G10, G11, G24, G25, G26; nvcc too), SGLang (G5) or sglang-kernel (G9).
Each prints what it got and what is right. G24 and G26 compile for four minutes; G25 ends CUDA's context; G7 never returns: it is stopped after 60 seconds.
"""

import signal
import sys

import torch

torch.manual_seed(0)


def g5():
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    def call(bounds):
        states = torch.zeros(len(bounds) - 1, 1, 32, 32, device="cuda")
        slots = torch.arange(len(states), dtype=torch.int32, device="cuda")
        bounds = torch.tensor(bounds, device="cuda")
        output, *_ = chunk_gated_delta_rule(
            *given, scale=1.0, initial_state=states, initial_state_indices=slots, cu_seqlens=bounds
        )
        return output.float()

    q, k, v = (torch.randn(1, 128, 1, 32, device="cuda").bfloat16() / 6 for _ in range(3))
    given = (q, k, v, torch.zeros(1, 128, 1, device="cuda"), torch.ones(1, 128, 1, device="cuda"))
    right, got = call([0, 64, 128]), call([0, 64, 64, 128])
    off = float((got - right)[0, 64:].norm() / right[0, 64:].norm())
    print(f"G5: behind an empty sequence, off by {off:.2f} of its length (right: 0)")


def g6():
    from flashinfer.sampling import top_p_sampling_from_probs

    probs = torch.full((4, 1000), 0.0005, device="cuda")
    probs[:, 7] = 1 - 0.0005 * 999
    drawn = top_p_sampling_from_probs(probs, torch.zeros(4, device="cuda"))
    print(f"G6: tokens {drawn.tolist()} for p = 0 (right: the likeliest, 7)")


def gdn_prefill(bounds, gates, rates):
    """Output and states after prefill with states that were drawn."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    tokens, states = bounds[-1], torch.randn(len(bounds) - 1, 8, 128, 128, device="cuda")
    q, k, v = (torch.randn(tokens, heads, 128, device="cuda").bfloat16() / 11 for heads in (4, 4, 8))
    g, beta = (torch.full((tokens, 8), value, device="cuda") for value in (gates, rates))
    bounds = torch.tensor(bounds, dtype=torch.int64, device="cuda")
    given = {"initial_state": states, "output_final_state": True, "cu_seqlens": bounds}
    output, after = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0, **given)
    torch.cuda.synchronize()
    return output, after


def g7():
    gdn_prefill([0, 64, 128], 1.0, 1.0)
    print("G7: the kernel is built; now a sequence is empty (right: returns at once)", flush=True)
    signal.alarm(60)
    gdn_prefill([0, 0, 128], 1.0, 1.0)
    signal.alarm(0)
    print("G7: returned")


def g8():
    _, after = gdn_prefill([0, 1], 0.0, 0.0)
    print(f"G8: states of up to {float(after.abs().max()):.2g} where all was erased (right: 0)")


def g9():
    from sgl_kernel import rotary_embedding

    tokens, heads, size, width = 4096, 4, 64, 32
    angles = torch.rand(tokens, width // 2, device="cuda") * 6.28
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q = torch.randn(tokens, heads, size, device="cuda").bfloat16()
    one, other, rest = q.float().split([width // 2, width // 2, size - width], -1)
    right = torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1).bfloat16()
    got, positions = q.view(tokens, -1).clone(), torch.arange(tokens, device="cuda")
    rotary_embedding(positions, got, got.clone(), size, torch.cat([cos, sin], -1).squeeze(1), True)
    print(f"G9: {float((got.view_as(right) != right).float().mean()):.1%} of elements are not rounded right (right: some 0 %)")


def product(batch):
    """fp8 matrices of 64 x 64 whose product is 2^-12 everywhere: a small product, 31 of 1, and 31 of -1."""
    from flashinfer.gemm import bmm_fp8

    row = torch.tensor([2.0**-6] + [1.0] * 31 + [-1.0] * 31 + [0.0], device="cuda")
    column = row.abs().sign() * torch.where(row == 2.0**-6, 2.0**-6, 1.0)
    a = row.expand(batch, 64, 64).contiguous().to(torch.float8_e4m3fn)
    b = column.expand(batch, 64, 64).contiguous().to(torch.float8_e4m3fn).mT
    one = torch.ones(1, device="cuda")
    return bmm_fp8(a, b, one, one, torch.bfloat16)


def g10():
    print(f"G10: a product is {float(product(1)[0, 0, 0]):.3g} (right: {2.0**-12:.3g}, as float32 sums give)")


def g11():
    try:
        print(f"G11: {tuple(product(0).shape)} (right)")
    except RuntimeError as error:
        print(f"G11: {error} (right: an empty output)")


def g24():
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    m, n, k = 16, 256, 512
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    rows, blocks = (torch.rand(count, k // 128, device="cuda") + 0.5 for count in (m, n // 128))
    weights = b.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    right = (a.float() * rows.repeat_interleave(128, 1)) @ weights.T
    for what, scales in (("[M, K / 128], as documented", rows), ("[K / 128, M]", rows.t().contiguous())):
        off = float((fp8_blockscale_gemm_sm90(a, b, scales, blocks).float() - right).norm() / right.norm())
        print(f"G24: with scales of rows as {what}, off by {off:.4f} of the product's length (right: below 0.004)")


def g25():
    from flashinfer.rope import rope_quantize_fp8

    for width in (32, 24):
        q, k = (torch.randn(4, heads, 64, device="cuda").bfloat16() for heads in (8, 2))
        q_rest, k_rest = (torch.randn(4, heads, width, device="cuda").bfloat16() for heads in (8, 2))
        positions = torch.arange(4, dtype=torch.int32, device="cuda")
        try:
            rope_quantize_fp8(q, k, q_rest, k_rest, torch.rand(8, 64, device="cuda"), positions)
            torch.cuda.synchronize()
            print(f"G25: {width} columns that are not rotated: it returns (right)")
        except RuntimeError as error:
            print(f"G25: {width} columns that are not rotated: {str(error).splitlines()[0]} (right: it returns, or refuses)")


def exponent(x):
    return torch.where(x == 0, -200.0, (torch.frexp(x)[1] - 1).double())


def tensor_core(a, b):
    """Sums of products of rows a [M, K] and b [N, K], as fp8 tensor cores of SM 9.0 are said to give them.

    32 products are added to the sum so far; each, and the new sum, is cut 13 bits below the largest exponent.
    """
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for x, y in zip(a[:, None].split(32, -1), b[None].split(32, -1)):
        terms = torch.cat([x * y, total[..., None]], -1)
        largest = torch.cat([exponent(x) + exponent(y), exponent(total)[..., None]], -1).amax(-1)
        total = (terms / 2.0 ** (largest[..., None] - 13)).trunc().sum(-1) * 2.0 ** (largest - 13)
        total = (total / 2.0 ** (exponent(total) - 13)).trunc() * 2.0 ** (exponent(total) - 13)
    return total


def g26():
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    def product(a, b, rows, blocks):
        by_blocks_first = rows.t().contiguous()  # see G24
        given = (one.cuda() for one in (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), by_blocks_first, blocks))
        return fp8_blockscale_gemm_sm90(*given).cpu()

    m, n, k = 16, 256, 512
    a, b = torch.zeros(m, k), torch.zeros(n, k)
    a[:, :63], b[:, :63] = torch.tensor([2.0**-6] + [1.0] * 31 + [-1.0] * 31), torch.tensor([2.0**-6] + [1.0] * 62)
    got = product(a, b, torch.ones(m, k // 128), torch.ones(n // 128, k // 128))
    print(f"G26: a product is {float(got[0, 0]):.3g} (right: {2.0**-12:.3g}, as float32 sums give)")
    a, b = (torch.randn(rows, k).to(torch.float8_e4m3fn).double() for rows in (m, n))
    rows, blocks = (torch.rand(count, k // 128) + 0.5 for count in (m, n // 128))
    got, modelled = product(a, b, rows, blocks), torch.zeros(m, n)
    for at, (x, y) in enumerate(zip(a.split(128, 1), b.split(128, 1))):
        scale = rows[:, at, None] * blocks[:, at].repeat_interleave(128)
        modelled = (modelled.double() + tensor_core(x, y) * scale.double()).float()
    print(f"G26: {int((got == modelled.bfloat16()).sum())} of {got.numel()} outputs are those of `tensor_core` to the bit")


for name in sys.argv[1:] or ("G5", "G6", "G8", "G9", "G10", "G11", "G24", "G26", "G7", "G25"):
    globals()[name.lower()]()
