"""Tests of gated delta rule and KDA kernels, parametrised as kernel libraries do it.

An input for `traceproof coverage --tests` and a pattern to copy. The kernels need a GPU; the library's own
PyTorch versions run anywhere. All are held against a loop over tokens that is written here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

Tensors = dict[str, torch.Tensor]
KERNELS = {
    "gdn-chunk": chunk_gated_delta_rule,
    "gdn-recurrent": fused_recurrent_gated_delta_rule,
    "kda-chunk": chunk_kda,
    "kda-recurrent": fused_recurrent_kda,
}
TOLERANCE = {
    torch.float32: 2e-3,
    torch.bfloat16: 4e-2,
}  # of the largest value; kernels use TF32 and bfloat16 products


def loop(x: Tensors, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, in float64: S <- exp(g) S; S <- S + beta k (v - k S); o = q S / sqrt(K).

    q, k [1, T, H, K], v [1, T, HV, V], g [1, T, HV] or [1, T, HV, K], beta [1, T, HV], h0 [N, HV, K, V].
    """
    q, k, v, g, beta, h0 = (x[name].double() for name in ("q", "k", "v", "g", "beta", "h0"))
    groups = v.shape[2] // q.shape[2]
    q, k = (one.repeat_interleave(groups, dim=2) for one in (q, k))
    g = g if g.dim() == q.dim() else g[..., None]
    outputs, states = [], []
    for number, (begin, end) in enumerate(pairwise(ends)):
        state = h0[number]
        for t in range(begin, end):
            state = state * g[0, t].exp()[..., None]
            error = (v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state)) * beta[0, t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[0, t], error)
            outputs.append(torch.einsum("hk,hkv->hv", q[0, t], state) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states)


def draw(kind: str, sizes: tuple[int, int, int, int], ends: list[int], dtype: torch.dtype, device: str) -> Tensors:
    """Inputs on which the state neither dies nor explodes: keys of length one, decay between 0.9 and 1."""
    heads, value_heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(len(ends) + ends[-1])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = ends[-1]
    gates = (1, tokens, value_heads, key_dim) if kind == "kda" else (1, tokens, value_heads)
    x = {
        "q": torch.nn.functional.normalize(normal(1, tokens, heads, key_dim), dim=-1).to(dtype),
        "k": torch.nn.functional.normalize(normal(1, tokens, heads, key_dim), dim=-1).to(dtype),
        "v": normal(1, tokens, value_heads, value_dim).to(dtype),
        "g": -0.1 * torch.rand(*gates, generator=generator),
        "beta": torch.rand(1, tokens, value_heads, generator=generator).to(dtype),
        "h0": 0.1 * normal(len(ends) - 1, value_heads, key_dim, value_dim),
    }
    return {name: value.to(device) for name, value in x.items()}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Every element to a share of the largest value, and nothing that is not a number."""
    assert actual.shape == expected.shape
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    worst = float((actual.double() - expected).abs().max())
    assert worst <= limit, f"{worst:.3e} off, {limit:.3e} allowed"


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    if not torch.cuda.is_available():
        pytest.skip("no_cuda: Triton kernels need a CUDA device")
    return "cuda"


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("gate", [False, True], ids=["no-gate", "gate"])
@pytest.mark.parametrize("beta", ["head"])
@pytest.mark.parametrize("initial_state", [False, True], ids=["no-h0", "h0"])
@pytest.mark.parametrize(("T", "H", "HV", "K", "V"), [(64, 2, 2, 64, 64), (100, 2, 4, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernel(
    name: str,
    dtype: torch.dtype,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    initial_state: bool,
    beta: str,
    gate: bool,
    direction: str,
    layout: str,
    device: str,
) -> None:
    """A Triton kernel gives what the loop gives, and so do its gradients."""
    if gate or beta != "head":
        pytest.skip("not written yet: the gate inside the kernel, a step size an element")
    if direction == "backward" and name.endswith("recurrent"):
        pytest.skip("forward only: the recurrent kernels have no backward pass")
    ends = [0, T // 3, T] if layout == "varlen" else [0, T]
    x = draw(name.partition("-")[0], (H, HV, K, V), ends, dtype, device)
    if not initial_state:
        x["h0"] = torch.zeros_like(x["h0"])
    options: dict[str, Any] = {"cu_seqlens": torch.tensor(ends, device=device)} if layout == "varlen" else {}
    options["initial_state"] = x["h0"] if initial_state else None
    leaves = {key: value.clone().requires_grad_() for key, value in x.items() if key != "h0"}
    output, state = KERNELS[name](**leaves, **options, output_final_state=True)
    expected, last = loop(x, ends)
    close(output, expected, dtype)
    close(state, last, dtype)
    if direction == "backward":
        wide = {key: value.double().requires_grad_() for key, value in x.items()}
        loop(wide, ends)[0].sum().backward()
        output.sum().backward()
        for key, leaf in leaves.items():
            assert leaf.grad is not None
            close(leaf.grad, wide[key].grad, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("initial_state", [False, True], ids=["no-h0", "h0"])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(("T", "H", "K", "V"), [(64, 2, 16, 16), (100, 2, 16, 32)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_naive(
    kind: str,
    T: int,
    H: int,
    K: int,
    V: int,
    form: str,
    initial_state: bool,
    direction: str,
) -> None:
    """The library's own PyTorch versions give what the loop gives."""
    if (kind, form) == ("kda", "chunk") and T % 64:
        pytest.skip("whole chunks only: the library's PyTorch version of chunked KDA asserts it")
    functions = {
        ("gdn", "recurrent"): naive_recurrent_gated_delta_rule,
        ("gdn", "chunk"): naive_chunk_gated_delta_rule,
        ("kda", "recurrent"): naive_recurrent_kda,
        ("kda", "chunk"): naive_chunk_kda,
    }
    x = draw(kind, (H, H, K, V), [0, T], torch.float32, "cpu")
    h0 = x.pop("h0") if initial_state else 0 * x.pop("h0")
    leaves = {key: value.requires_grad_() for key, value in x.items()}
    state = h0 if initial_state else None
    output, last = functions[kind, form](**leaves, initial_state=state, output_final_state=True)
    expected, expected_last = loop({**x, "h0": h0}, [0, T])
    close(output, expected.detach(), torch.float32)
    close(last, expected_last.detach(), torch.float32)
    if direction == "backward":
        output.sum().backward()
        assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves.values() if leaf.grad is not None)
