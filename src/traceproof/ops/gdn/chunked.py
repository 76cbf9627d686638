"""The gated delta rule by chunks: the same recurrence as a few matrix products and a triangular solve."""

import itertools

import torch
from torch.nn.functional import softplus

from traceproof.ops.answers import Subject, Tensors

CHUNK = 64  # tokens, as prefill kernels have it


def chunked(subject: Subject, dtype: torch.dtype) -> Tensors | None:
    """Prefill in chunks, operands of every product in `dtype`, sums in float32; None where it is no prefill.

    Within a chunk the corrections U [C, V] of the tokens solve (I + L) U = rate * (V - decay * K S^T), where L is
    the strictly lower part of rate * (K K^T) * decay between the two tokens.
    """
    if "cu_seqlens" not in subject.inputs:
        return None
    tokens = _tokens(subject)
    given = subject.inputs["state"]
    bounds = subject.tensor("cu_seqlens").tolist()
    heads, size = subject.tensor("v").shape[1:]
    shape = (len(bounds) - 1, heads, size, tokens["k"].shape[-1])
    states = given.clone().float() if isinstance(given, torch.Tensor) else torch.zeros(shape)
    output = torch.zeros_like(tokens["v"])
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for first in range(start, stop, CHUNK):
            part = slice(first, min(first + CHUNK, stop))
            chunk = {name: value[:, part] for name, value in tokens.items()}
            output[:, part], states[row] = _one_chunk(chunk, states[row], dtype)
    scale = float(subject.inputs["scale"] or tokens["k"].shape[-1] ** -0.5)
    outputs = {"output": (output * scale).transpose(0, 1), "new_state": states}
    return subject.rounded(outputs)


def _tokens(subject: Subject) -> Tensors:
    """q, k, v, rate and the logarithm of the decay as float32 [heads, tokens, ...]."""
    heads = subject.tensor("v").shape[1]
    tokens = {}
    for name in ("q", "k", "v"):
        value = subject.tensor(name).float().transpose(0, 1)
        tokens[name] = value.repeat_interleave(heads // len(value), 0)
    step = softplus(subject.tensor("a").float() + subject.tensor("dt_bias").float())
    tokens["logs"] = (-subject.tensor("A_log").float().exp() * step).T[..., None]
    tokens["rate"] = torch.sigmoid(subject.tensor("b").float()).T[..., None]
    return tokens


def _one_chunk(chunk: Tensors, state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [heads, C, V], not scaled, and the next state [heads, V, K]."""
    q, k, v, rate = (chunk[name] for name in ("q", "k", "v", "rate"))

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float() @ y.to(dtype).float()

    total = chunk["logs"].cumsum(1)
    between = (total - total.mT).tril().exp().tril()  # the upper part may overflow before it is cut off
    lower = (rate * between * product(k, k.mT)).tril(-1)
    identity = torch.eye(k.shape[1]).expand_as(lower)
    inverse = torch.linalg.solve_triangular(identity + lower, identity, upper=False, unitriangular=True)
    wanted = product(inverse, rate * v)
    known = product(product(inverse, rate * total.exp() * k), state.mT)
    corrections = wanted - known
    output = total.exp() * product(q, state.mT) + product(between * product(q, k.mT), corrections)
    last = total[:, -1:]
    left = (last - total).exp() * corrections
    return output, last.exp() * state + product(left.mT, k)
