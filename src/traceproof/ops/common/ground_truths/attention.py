"""Attention through PyTorch's scaled_dot_product_attention, one sequence at a time.

cuDNN's kernels are left out: they compile a plan a shape, seconds each.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn.attention import SDPBackend

from traceproof.ops.adapter import Api, Definition, Outputs, Values, scalar, tensor


def attend(
    api: Api, q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [n, heads, d], k [m, kv heads, d] and v [m, kv heads, dv] to output and base-2 log-sum-exp.

    The last query sees all keys. A query that sees none gets zeros and -inf.
    """
    k, v = keys
    n, m = q.shape[0], k.shape[0]
    heads = q.shape[1]
    output = q.new_zeros((n, heads, v.shape[-1]))
    lse = torch.full((n, heads), -math.inf, dtype=torch.float32, device=q.device)
    first = max(0, n - m) if causal else 0  # queries before it see nothing
    if n == first or m == 0:
        return output, lse
    share = heads // k.shape[1]
    wide_q = q[first:].transpose(0, 1)[None]
    wide_k = k.transpose(0, 1).repeat_interleave(share, 0)[None]
    wide_v = v.transpose(0, 1).repeat_interleave(share, 0)[None]
    mask = None
    if causal:
        rows = torch.arange(first, n, device=q.device)[:, None] + (m - n)
        mask = torch.arange(m, device=q.device)[None, :] <= rows
    with api["attention_kernels"]([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        attended = api["attention"](wide_q, wide_k, wide_v, attn_mask=mask, scale=scale)
    output[first:] = attended[0].transpose(0, 1)
    logits = (wide_q.float() @ wide_k.float().transpose(-1, -2))[0] * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    lse[first:] = (torch.logsumexp(logits, -1) / math.log(2)).transpose(0, 1)
    return output, lse


def paged_tokens(inputs: Values, page: int) -> Iterator[torch.Tensor]:
    """Each row's token positions in a cache flattened to [pages * page size]."""
    indptr = tensor(inputs, "kv_indptr").tolist()
    indices = tensor(inputs, "kv_indices").long()
    last = inputs.get("kv_last_page_len")
    lengths = last.tolist() if isinstance(last, torch.Tensor) else [page] * (len(indptr) - 1)
    within = torch.arange(page, device=indices.device)
    for row, (start, end) in enumerate(pairwise(indptr)):
        tokens = (indices[start:end, None] * page + within).reshape(-1)
        yield tokens[: max(0, end - start - 1) * page + lengths[row]] if end > start else tokens


def by_row(
    api: Api,
    definition: Definition,
    inputs: Values,
    q: torch.Tensor,
    keys: Iterator[tuple[torch.Tensor, torch.Tensor]],
) -> Outputs:
    """Attend row by row: queries by `qo_indptr`, or one a row without it (decode, not causal)."""
    causal = "qo_indptr" in inputs
    bounds = tensor(inputs, "qo_indptr").tolist() if causal else list(range(q.shape[0] + 1))
    parts = [
        attend(api, q[start:end], row, scale=scalar(inputs, "sm_scale"), causal=causal)
        for (start, end), row in zip(pairwise(bounds), keys, strict=True)
    ]
    outputs = dict(zip(("output", "lse"), map(torch.cat, zip(*parts, strict=True)), strict=True))
    return {name: outputs[name] for name in definition.outputs}
