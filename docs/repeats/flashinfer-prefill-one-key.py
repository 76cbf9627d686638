"""FlashInfer's prefill on Hopper does not give back the value of a single key. Needs torch, FlashInfer, nvcc and a GPU.

One key has all the weight, so the output is its value, to the bit. Logits are some -70,000 in base 2; float32 has a number for every
0.0078 there. The kernel rounds the scaled maximum before it subtracts it from the scaled logit (a fused multiply-add, which is not
rounded), so the weight is off 1 by up to 0.27 %. Its sum stays in float32, while the weight is rounded to bfloat16, to 1.
"""

import torch
from flashinfer import single_prefill_with_kv_cache

QUERIES, HEADS, KV_HEADS, WIDTH = 256, 32, 4, 128
torch.manual_seed(0)
q, k = (82.0 * torch.randn(rows, heads, WIDTH).abs() for rows, heads in ((QUERIES, HEADS), (1, KV_HEADS)))
v = torch.randn(1, KV_HEADS, WIDTH)
q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, -k, v))
exact = v.repeat_interleave(HEADS // KV_HEADS, 1).expand(QUERIES, -1, -1)
for backend in ("fa3", "fa2"):
    output = single_prefill_with_kv_cache(q, k, v, causal=False, backend=backend)
    off = ((output.float() - exact.float()) / exact.float()).abs().nan_to_num()
    rows = (off > 0).any(-1).float().mean()
    print(f"{backend}: {rows:.1%} of rows are not the value, {(off > 0).float().mean():.2%} of elements, by up to {off.max():.2%}")
