"""FlashInfer's chunk_gated_delta_rule chooses kernels that can not take 4,198,400 tokens.

Needs torch, FlashInfer and 60 GiB of a GPU of SM 9.0. `use_cp="auto"` takes the context-parallel kernels for few
sequences. Their workspace has 4,096 elements per 64 tokens and value head, in one dimension that is a 32-bit integer.
"""

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule

HEADS, SIZE = 8, 128
for tokens in (64 * 65_000, 64 * 65_600):
    torch.manual_seed(0)
    q, k = (torch.randn(tokens, HEADS // 2, SIZE, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    v = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    g = torch.full((tokens, HEADS), 0.99, device="cuda")
    print(
        f"{tokens} tokens: workspace of {(tokens // 64) * HEADS * 64 * 64 - 2**31:+d} elements beyond 2^31",
        flush=True,
    )
    try:
        chunk_gated_delta_rule(
            q,
            k.div_(SIZE**0.5),
            v,
            g=g,
            beta=torch.full_like(g, 0.5),
            initial_state=torch.zeros(1, HEADS, SIZE, SIZE, device="cuda"),
            output_final_state=True,
            cu_seqlens=torch.tensor([0, tokens], device="cuda"),
        )
        torch.cuda.synchronize()
        print("  done", flush=True)
    except ValueError as error:
        print(f"  ValueError: {error}", flush=True)
    del q, k, v, g
    torch.cuda.empty_cache()
