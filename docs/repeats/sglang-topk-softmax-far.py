"""sgl_kernel's topk_softmax counts logits in 32 bits. Needs torch, sglang-kernel and 15 GiB of a GPU.

Parts, by name, or both: `48` experts, whose workspace of tokens x experts is counted in 32 bits, and `64`, whose kernel
addresses rows in 32 bits: it compares the first token with the last, which are alike, and may end the context.
"""

import sys

import torch
from sgl_kernel import topk_softmax


def routed(tokens, experts):
    """Weights of one expert per token; the first and the last token are alike."""
    logits = torch.zeros(tokens, experts, device="cuda", dtype=torch.bfloat16)
    logits[[0, -1]] = torch.arange(experts, device="cuda", dtype=torch.bfloat16)
    weights = torch.zeros(tokens, 1, device="cuda")
    topk_softmax(weights, torch.zeros(tokens, 1, device="cuda", dtype=torch.int32), logits)
    torch.cuda.synchronize()
    return [float(weights[row]) for row in (0, -1)]


for experts in map(int, sys.argv[1:] or ("48", "64")):
    for tokens in (2**31 // experts, 2**31 // experts + 64):
        try:
            said = "weights of the first and the last: {:.3f} {:.3f}".format(*routed(tokens, experts))
        except RuntimeError as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(
            f"{experts} experts, {tokens} tokens ({tokens * experts - 2**31:+d} beyond 2^31): {said}", flush=True
        )
        if "illegal memory access" in said:
            sys.exit()  # the context is lost
        torch.cuda.empty_cache()
