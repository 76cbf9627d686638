"""Kernels that leave out an element, or read beside it, at an end of a loop: refused; right ones: accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import traceproof

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
Kernel = Callable[..., Any]
ENDS = ["adversarial-boundaries", "adversarial-inner-boundaries", "small-0"]
SSU = {"nheads": 4, "head_dim": 64, "dstate": 128, "ngroups": 2}
GDN = {"num_q_heads": 2, "num_v_heads": 4, "head_size": 128}
ROPE = {"head_size": 128, "rotary_dim": 64}
EXPERTS = {"top_k": 2, "num_local_experts": 4, "hidden_size": 256, "intermediate_size": 256}


def without(x: torch.Tensor, place: int | None) -> torch.Tensor:
    """A tensor with zeros at a place of its last axis; None: as it is."""
    if place is None:
        return x
    x = x.clone()
    x[..., place] = 0
    return x


def update(place: int | None = None, slot: int = 0) -> Kernel:
    """Mamba2's step, less a channel of the state, or with another slot than the last."""

    def kernel(*given: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or some
        state, x, dt, A, B, C, D, bias, index = given
        index = torch.where(index == len(state) - 1, index - slot, index).long()
        b, c = (one.float().repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (B, C))
        step = functional.softplus(dt.float() + bias.float())
        now = state[index].float() * torch.exp(step[..., None] * A) + (step * x)[..., None] * b[:, :, None]
        y = (now * without(c, place)[:, :, None]).sum(-1) + D * x
        cache = state.clone()
        cache[index] = now.to(state.dtype)
        return y.to(x.dtype), cache

    return kernel


def delta(place: int | None = None, *, known: bool = True) -> Kernel:
    """A step of the gated delta rule, less a channel of the sum that a query, or a key, makes with the state."""

    def kernel(*given: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or some
        q, k, v, state, log, a, bias, b, scale = given
        shared = v.shape[2] // k.shape[2]
        keys, queries = (x[:, 0].float().repeat_interleave(shared, 1) for x in (k, q))
        state = torch.zeros(len(q), *v.shape[2:], k.shape[-1]) if state is None else state
        decay = torch.exp(-log.exp() * functional.softplus(a.float() + bias))[:, 0, :, None, None]
        now = state * decay
        error = v[:, 0].float() - (now @ without(keys, place if known else None)[..., None])[..., 0]
        now = now + (error * b[:, 0, :, None].float().sigmoid())[..., None] * keys[:, :, None]
        y = (now @ without(queries, None if known else place)[..., None])[:, None, ..., 0]
        return (y * (float(scale) or k.shape[-1] ** -0.5)).to(v.dtype), now

    return kernel


def rope(beside: int = 0) -> Kernel:
    """Rotation of halves; tokens at multiples of 64, or (-1) at the last position, read the row before."""

    def kernel(*given: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or some
        q, k, cache, positions = given
        at = positions.long()
        if beside:
            wrong = at == len(cache) - 1 if beside < 0 else (at % beside == 0) & (at > 0)
            at = torch.where(wrong, at - 1, at)
        half = cache.shape[1] // 2
        cos, sin = (part[:, None] for part in torch.split(cache[at], half, -1))
        found = []
        for x in (q.float(), k.float()):
            one, two, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
            found.append(torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1).to(q.dtype))
        return tuple(found)

    return kernel


def experts(token: int | None = None, inner: int | None = None, idle: int | None = None) -> Kernel:
    """Experts in float32, less a channel of tokens, or one of the activated product, or one expert."""

    def kernel(*given: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or some
        logits, hidden, first, second = given
        weights, chosen = logits.float().softmax(-1).topk(EXPERTS["top_k"], -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in range(len(first)):
            if idle is not None and expert == idle % len(first):
                continue
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            up, gate = (without(hidden[rows].float(), token) @ first[expert].float().T).chunk(2, -1)
            y = without(functional.silu(gate) * up, inner) @ second[expert].float().T
            out.index_add_(0, rows, y * weights[rows, slots, None])
        return out.to(hidden.dtype)

    return kernel


FAULTS: list[tuple[str, dict[str, int], Kernel, list[Kernel]]] = [
    ("mamba_ssu", SSU, update(), [update(-1), update(0), update(63), update(64), update(slot=1)]),
    (
        "gdn_decode",
        GDN,
        delta(),
        [delta(-1), delta(0), delta(64), delta(-1, known=False), delta(63, known=False), delta(0, known=False)],
    ),
    ("rope_neox", ROPE, rope(), [rope(64), rope(1024), rope(-1)]),
    (
        "moe_bf16",
        EXPERTS,
        experts(),
        [*(experts(token=at) for at in (-1, 0, 63)), *(experts(inner=at) for at in (-1, 0, 64)), experts(idle=-1)],
    ),
]


@pytest.mark.parametrize(("form", "axes", "right", "wrong"), FAULTS, ids=[one[0] for one in FAULTS])
def test_ends_decide(form: str, axes: dict[str, int], right: Kernel, wrong: list[Kernel]) -> None:
    definition = traceproof.definition(form, **axes)  # type: ignore[arg-type]
    there = {case.id for case in traceproof.cases(definition, device="cpu", unavailable=True)}
    cases = [one for one in ENDS if one in there]
    assert cases[0] == "adversarial-boundaries"
    report = traceproof.check(right, definition, cases=cases, device="cpu")
    assert report, str(report)
    for place, kernel in enumerate(wrong):
        report = traceproof.check(kernel, definition, cases=cases, device="cpu")
        assert any("boundaries" in str(row.case) for row in report.failures), (place, str(report))
