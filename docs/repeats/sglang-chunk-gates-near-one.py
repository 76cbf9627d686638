"""chunk_gated_delta_rule of SGLang 0.5.23 loses pairs of tokens between which nothing decays. Needs torch, sglang and a GPU."""

import sys

import torch
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

TOKENS, SIZE, GATES = 64, 32, (-30.17, -1e-13)  # one chunk, one head; a token forgets nearly all or nothing


def recurrent(q, k, v, g, beta):
    """Outputs [tokens, SIZE] token by token in float64."""
    state, rows = torch.zeros(SIZE, SIZE, dtype=torch.float64), []
    for i in range(TOKENS):
        state = state * g[i].exp()
        state = state + torch.outer(beta[i] * (v[i] - state @ k[i]), k[i])
        rows.append(state @ q[i] * SIZE**-0.5)
    return torch.stack(rows)


wrong = 0
for seed in range(100):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(TOKENS, SIZE).bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g = torch.where(torch.rand(TOKENS) < 0.5, *(torch.tensor(gate) for gate in GATES)) * (0.5 + torch.rand(TOKENS))
    beta = torch.where(torch.rand(TOKENS) < 0.5, torch.tensor(1.0), torch.tensor(2e-9))
    expected = recurrent(*(it.double() for it in (q, k, v, g, beta)))
    on_gpu = [it.cuda()[None, :, None] for it in (q, k, v, g, beta)]
    got, *_ = chunk_gated_delta_rule(
        *on_gpu,
        scale=SIZE**-0.5,
        initial_state=torch.zeros(1, 1, SIZE, SIZE, device="cuda"),
        initial_state_indices=torch.zeros(1, dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.tensor([0, TOKENS], device="cuda"),
    )
    rows = (got[0, :, 0].cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    if rows.max() > 0.1:
        wrong += 1
        print(f"seed {seed}: row {int(rows.argmax())} is off by {float(rows.max()):.2f} of its length")
print(f"{wrong} of 100 seeds")
sys.exit(wrong > 0)
