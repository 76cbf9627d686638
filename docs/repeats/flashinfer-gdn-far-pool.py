"""FlashInfer's gated_delta_rule_mtp addresses a contiguous float32 pool in 32 bits. Needs torch and 50 GiB of a GPU.

Two requests are alike, states included; one slot lies beyond 2^32 elements. What comes out must be alike too.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_mtp

SLOTS, HEADS, SIZE, TOKENS = 40_962, 8, 128, 3  # 5.4e9 elements: 32 bits wrap inside of the pool
torch.manual_seed(0)
pool = torch.zeros(SLOTS, HEADS, SIZE, SIZE, device="cuda")
slots = torch.tensor([1, SLOTS - 1], dtype=torch.int32, device="cuda")
pool[slots.long()] = torch.randn(1, HEADS, SIZE, SIZE, device="cuda")


def alike(*shape):
    """The same for both requests."""
    return torch.randn(1, *shape, device="cuda").bfloat16().expand(2, *shape).contiguous()


q, k = (alike(TOKENS, HEADS // 2, SIZE) / SIZE**0.5 for _ in range(2))
output, after = gated_delta_rule_mtp(
    q,
    k,
    alike(TOKENS, HEADS, SIZE),
    initial_state=pool,
    initial_state_indices=slots,
    A_log=torch.randn(HEADS, device="cuda"),
    a=alike(TOKENS, HEADS),
    dt_bias=torch.randn(HEADS, device="cuda"),
    b=alike(TOKENS, HEADS),
    scale=SIZE**-0.5,
    disable_state_update=False,
    use_qk_l2norm=False,
)
torch.cuda.synchronize()
near, far = output.float()
off = float((far - near).norm() / near.norm())
print(f"outputs alike: {torch.equal(near, far)} (off by {off:.2f} of their length)")
print(f"states alike: {torch.equal(*after[slots.long()])}")
