"""SGLang's gated delta rule: addresses of 32 bits, and grids of more than 65,535 blocks.

Needs torch, SGLang and 45 GiB of a GPU. Parts, by name, or all in this order: `decode` (2,048 requests of 32 value heads),
`grid` (a sequence of 65,536 chunks), `long` (one of 268,928 tokens, 32 value heads) and `behind` (128 tokens behind a
sequence of 537,600). The last two compare the last 128 tokens with the same tokens alone, as they forget what lies before.
`long` and `behind` may end with an illegal memory access, after which nothing else runs in this process.
"""

import sys

import torch
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule

TAIL = 128  # tokens that are compared: two chunks
FORGET = -40.0  # logarithm of a decay that leaves nothing


def drawn(batch, tokens, heads, size):
    """Arguments of a call with half as many key heads as value heads (or one)."""
    torch.manual_seed(0)
    q, k = (
        torch.randn(batch, tokens, max(1, heads // 2), size, device="cuda", dtype=torch.bfloat16) for _ in "qk"
    )
    v = torch.randn(batch, tokens, heads, size, device="cuda", dtype=torch.bfloat16)
    g = torch.full((batch, tokens, heads), -0.01, device="cuda")
    return {"q": q, "k": k.div_(size**0.5), "v": v, "g": g, "beta": torch.full_like(g, 0.5), "scale": size**-0.5}


def chunked(given, bounds):
    """Output of chunk_gated_delta_rule from states of zero."""
    heads, size, count = given["v"].shape[2], given["v"].shape[3], len(bounds) - 1
    output, *_ = chunk_gated_delta_rule(
        **given,
        initial_state=torch.zeros(count, heads, size, size, device="cuda"),
        initial_state_indices=torch.arange(count, device="cuda", dtype=torch.int32),
        cu_seqlens=torch.tensor(bounds, device="cuda"),
    )
    torch.cuda.synchronize()
    return output


def decode():
    """The grid's third dimension is requests x value heads."""
    for batch in (2047, 2048):
        state = torch.zeros(batch, 32, 128, 128, device="cuda")
        fused_recurrent_gated_delta_rule(**drawn(batch, 1, 32, 128), initial_state=state, output_final_state=True)
        torch.cuda.synchronize()
        print(f"  {batch} requests: done", flush=True)


def grid():
    """The second dimension of chunk_fwd_kernel_o's grid is chunks."""
    for chunks in (65_535, 65_536):
        chunked(drawn(1, 64 * chunks, 1, 32), [0, 64 * chunks])
        print(f"  {chunks} chunks: done", flush=True)


def tail(before, bounds):
    """Whether the last tokens come out as alone."""
    torch.cuda.empty_cache()
    given = drawn(1, before + TAIL, 32, 128)
    given["g"][:, before] = FORGET
    last = {name: value[:, before:].clone() if name != "scale" else value for name, value in given.items()}
    alone = chunked(last, [0, TAIL]).float()
    far = chunked(given, bounds)[:, before:].float()
    off = float((far - alone).norm() / alone.norm())
    print(f"  {bounds[-1]} tokens: the last {TAIL} are off by {off:.2g} of their length", flush=True)


PARTS = {
    "decode": decode,
    "grid": grid,
    "long": lambda: [tail(size, [0, size + TAIL]) for size in (64 * 4_000, 64 * 4_200)],
    "behind": lambda: [tail(size, [0, size, size + TAIL]) for size in (64 * 4_000, 64 * 8_400)],
}
for name in sys.argv[1:] or PARTS:
    print(name, flush=True)
    try:
        PARTS[name]()
    except RuntimeError as error:
        print(f"  {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
