"""Gradients: right ones of every form pass, wrong ones are told, and refused on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_api import axes_of, by_oracle
from torch.nn import functional

import traceproof
from traceproof import TraceproofError, api
from traceproof.reasons import Skip, Verdict

pytestmark = pytest.mark.usefixtures("one_thread")
# Forms of which nothing of floating point comes out that is no choice and no code.
WITHOUT = {"quantize_int8", "quantize_fp8", "top_k_sampling", "top_p_sampling", "top_k_top_p_sampling"}
GDN = ["medium-0", "adversarial-slow", "adversarial-saturated", "adversarial-tiny", "edge-default-scale"]
PREFILL = ["small-0", "small-1", "medium-0", "medium-1", "adversarial-ties", "adversarial-long"]
IN_PLACE = {"gemm", "gdn_decode", "gdn_prefill"}  # whose oracles are not to be differentiated by themselves


class Scaled(torch.autograd.Function):
    """Its input, and a gradient that is a factor off."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None  # type: ignore[attr-defined]


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    found: torch.Tensor = Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [one for key, one in api.forms().items() if key not in WITHOUT | IN_PLACE], ids=lambda one: one.key
)
def test_a_right_gradient_of_every_form_passes_and_one_that_is_a_tenth_off_is_refused(form: api.NamedForm) -> None:
    definition = form.definition("bfloat16", axes_of(form))
    right = by_oracle(definition)

    def wrong(*inputs: object) -> object:
        return right(*(scaled(x, 1.1) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs))

    for function, fine in ((right, True), (wrong, False)):
        report = traceproof.check(
            function, definition, sizes=("small",), cases=["small-1"], gradients=True, device="cpu"
        )
        assert report.gradients
        assert bool(report) == fine, str(report)


def test_functions_of_pytorch_have_right_gradients_in_all_cases() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def rounded_before_the_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return found[0].transpose(0, 1)

    def delta(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - tensors and a number
        q, k, v, state, log, a, bias, b = (x.float() for x in given[:8])
        decay = torch.exp(-log.exp() * functional.softplus(a + bias))[:, 0, :, None, None]
        q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
        state = state * decay
        error = (v[:, 0] - (state @ k[..., None])[..., 0]) * b[:, 0].sigmoid()[..., None]
        state = state + error[..., None] * k[:, :, None, :]
        output = (state @ q[..., None])[:, None, ..., 0] * (given[8] or 32**-0.5)
        return output.to(given[2].dtype), state

    for function, of, axes in (
        (delta, "gdn_decode", {"cases": GDN, "num_q_heads": 2, "num_v_heads": 4, "head_size": 32}),
        (norm, "rmsnorm", {"hidden_size": 256}),
        (rounded_before_the_weight, "rmsnorm", {"hidden_size": 256}),
        (
            lambda x: functional.silu(x[..., :96].float()).mul(x[..., 96:]).to(x.dtype),
            "silu_and_mul",
            {"hidden_size": 96},
        ),
        (lambda a, b: a @ b.T, "gemm", {"N": 64, "K": 128}),
        (attend, "single_prefill", {"cases": PREFILL, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}),
    ):
        report = traceproof.check(function, of, gradients=True, device="cpu", sizes=("small", "medium"), **axes)
        assert {row.verdict for row in report.gradients} <= {Verdict.PASS, Verdict.SKIP}, str(report)


class Silu(torch.autograd.Function):
    """silu(gate) * up, whose backward takes silu's slope for its sigmoid."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, -1)
        return (functional.silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors  # type: ignore[attr-defined]
        gate, up = x.float().chunk(2, -1)
        parts = (gradients[0] * up * gate.sigmoid(), gradients[0] * functional.silu(gate))
        return torch.cat(parts, -1).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Silu.apply(x)  # type: ignore[no-untyped-call]
    return found


def checked(function: Callable[..., object], **options: object) -> traceproof.Report:
    return traceproof.check(
        function,
        "silu_and_mul",
        hidden_size=96,
        sizes=("small",),
        device="cpu",
        **options,  # type: ignore[arg-type]
    )


def test_a_wrong_backward_is_told_and_refused_on_request() -> None:
    told = checked(silu)
    assert told
    assert [row.output for row in told.gradients] == ["gradient of input"]
    assert told.gradients[0].bad
    assert "(not demanded)" in str(told)
    refused = checked(silu, gradients=True)
    assert not refused
    assert {row.output for row in refused.failures} == {"gradient of input"}
    assert "again: traceproof.check(silu, 'silu_and_mul', hidden_size=96, sizes=('small',), gradients=True" in str(
        refused
    )
    [case] = traceproof.cases("silu_and_mul", hidden_size=96, cases=["small-1"], device="cpu")
    case.check(silu)
    with pytest.raises(AssertionError, match="gradient of input: numerics"):
        case.check(silu, gradients=True)


def test_what_takes_no_part_in_autograd_has_no_gradient_and_is_refused_on_request() -> None:
    def detached(x: torch.Tensor) -> torch.Tensor:
        return silu(x.detach())

    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError("no backward here")
        return silu(x)

    for function, told in ((detached, "it takes no part in autograd"), (raises, "no backward here")):
        assert not checked(function).gradients
        assert checked(function)
        assert told in str(checked(function, gradients=["input"]))
        assert not checked(function, gradients=["input"])
    with pytest.raises(TraceproofError, match="has the inputs input, not weight"):
        checked(silu, gradients=["weight"])


def test_a_choice_has_no_gradient() -> None:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().view(len(x), 2, -1)
        scale = blocks.abs().amax(-1).clamp_min(1e-10) / 127
        return (blocks / scale[..., None]).round().clamp(-128, 127).to(torch.int8).view(x.shape), scale

    report = traceproof.check(
        quantize, "quantize_int8", gradients=True, device="cpu", sizes=("small",), hidden_size=96, num_blocks=2
    )
    rows = [row for row in report.gradients if row.verdict is Verdict.SKIP]
    assert {row.reason for row in rows} <= {Skip.NO_ORACLE}
