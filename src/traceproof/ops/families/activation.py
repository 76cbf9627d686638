"""Operations between two projections: gated activations, and the causal convolution with SiLU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, compared_with, draft
from traceproof.models.reading import KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM75, SM80, Api, Definition, Given, Outputs
from traceproof.ops.base import Tensors, rounded
from traceproof.ops.compare import Close, Exact
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, has_not, same
from traceproof.ops.gates import silu
from traceproof.ops.lossless import SURE, full
from traceproof.ops.op import LARGE_AND_SMALL, Op

# activation: silu_and_mul, gelu_and_mul, gelu_tanh_and_mul

SILU, GELU, TANH = "silu", "gelu", "gelu_tanh"


def gelu(gate: torch.Tensor) -> torch.Tensor:
    """Gelu by the error function: `gate / 2 * (1 + erf(gate / sqrt(2)))`."""
    return gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """Gelu's approximation by the hyperbolic tangent."""
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + torch.tanh(inner))


ACTIVATIONS: Mapping[str, Part] = {SILU: silu, GELU: gelu, TANH: gelu_tanh}
Mix = Callable[["torch.Tensor", "torch.Tensor", Part], "torch.Tensor"]  # (gate, other half, activation) -> output


def activation(
    wide: Wide, *, mix: Mix = lambda gate, up, act: act(gate) * up, kind: str = "", interleaved: bool = False
) -> Tensors:
    """`act(x[:, :d]) * x[:, d:]` for x [n, 2 d]; a constant of the definition says which activation."""
    x = wide["input"]
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    return {"output": mix(gate, up, ACTIVATIONS[kind or str(wide.definition.constants.get("activation"))])}


def gates_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw normal rows; `offset` is added to the gates (the first half) alone."""
    scale = float(wanted.params.get("scale", 1.0))
    value = draw.normal(wanted.name, wanted.shape, wanted.dtype, scale=scale)
    if "offset" in wanted.params:
        value[:, : wanted.shape[1] // 2] += float(wanted.params["offset"])
    return value


def of_kind(*kinds: str) -> Callable[[Definition], bool]:
    """A test whether a definition states one of these activations."""
    return lambda definition: definition.constants.get("activation") in kinds


def activation_instead(kind: str) -> Mutant:
    """A mutant with the activation `kind`, for definitions of another one."""
    return Mutant(f"{kind} instead", applies=lambda wide: not of_kind(kind)(wide.definition), kind=kind)


def exact_halves(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw gates in [64, 128), for which act(gate) is gate, and other halves with all bits of the dtype."""
    gate, up = full(0)(draw, wanted).chunk(2, -1)
    return torch.cat([gate.abs() * 2 * SURE, up], -1)


ACTIVATION = Op(
    "activation",
    Form("input[n w] -> output[n h]", activation, constants=("activation",)),
    family="activation",
    rules=(
        Rule(
            name="activation",
            label="activation",
            reader="activation",
            read="the one function of PyTorch that is called: silu or sigmoid, gelu or erf, tanh",
            described=(
                (r"gelu_tanh|gelu\b[^.]*\btanh|tanh\b[^.]*\bgelu", "gelu_tanh"),
                (r"(?<!tanh )\bgelu\b(?![^.]*tanh)", "gelu"),
                (r"\bsilu\b|\bswish\b|\bswiglu\b", "silu"),
            ),
            named=((r"^silu_and_mul", "silu"), (r"^gelu_tanh_and_mul", "gelu_tanh"), (r"^gelu_and_mul", "gelu")),
            config=("hidden_act", "hidden_activation"),
            values={"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
            functions={
                "activation.silu_and_mul": "silu",
                "activation.gelu_and_mul": "gelu",
                "activation.gelu_tanh_and_mul": "gelu_tanh",
            },
        ),
    ),
    sizes={"w": lambda at: 2 * at["h"]},
    draws={"input": gates_drawn},
    lossless={"input": exact_halves},
    adversarial={
        "large": {"scale": 8.0},  # gates at which an activation saturates
        "tiny": {"scale": 1e-3},
        # The two forms of gelu differ most at gates of 2 to 3 of either sign, which are rare.
        "shoulder": {"scale": 0.25, "offset": -2.25},
    },
    gates={"output": Close()},
    mutants=(
        *map(activation_instead, ACTIVATIONS),
        Mutant("halves interleaved", interleaved=True),
        Mutant("the other half activated", mix=lambda gate, up, act: gate * act(up)),
        Mutant("activation dropped", mix=lambda gate, up, _: gate * up),
        Mutant("product dropped", mix=lambda gate, _, act: act(gate)),
        Mutant("sigmoid without its gate", mix=lambda gate, up, _: torch.sigmoid(gate) * up),
        Mutant("added instead of multiplied", mix=lambda gate, up, act: act(gate) + up),
    ),
)
HALVES = frozenset({"float16", "bfloat16"})  # dtypes of 16 bits
TORCH_SILU, TORCH_GELU = "torch.nn.functional:silu", "torch.nn.functional:gelu"
FORMS_OF_GELU = {GELU: "none", TANH: "tanh"}  # activation -> PyTorch's argument `approximate`


def _activated(api: Api, _: Definition, inputs: Given) -> Outputs:
    [function] = api.values()
    return {"output": function(inputs["input"])}


for _kind in ACTIVATIONS:
    for _source, _module in (("flashinfer", "flashinfer.activation"), ("sglang", "sgl_kernel")):
        _place, _packages = f"{_module}:{_kind}_and_mul", ("sgl_kernel",) if _source == "sglang" else ()
        _needs: Any = {"accepts": of_kind(_kind), "dtypes": HALVES, "packages": _packages, "sm": SM75}
        ACTIVATION.truth(_source, _place.replace(":", "."), _place, **_needs)(_activated)


@ACTIVATION.truth("torch", "functional.silu", TORCH_SILU, rows=None, accepts=of_kind(SILU))
@ACTIVATION.truth("torch", "functional.gelu", TORCH_GELU, rows=None, accepts=of_kind(GELU, TANH))
def _pytorch(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [act] = api.values()
    gate, up = inputs["input"].float().chunk(2, -1)
    kind = str(definition.constants.get("activation"))
    options = {"approximate": FORMS_OF_GELU[kind]} if kind != SILU else {}
    return rounded(definition, {"output": act(gate, **options) * up})


# SGLang's activations without a gate, which have no op_type; models name them by their function.
UNGATED = ("ReLU2", "NewGELU", "QuickGELU", "XIELU", "GELU", "ReLU", "SiLU", "GeluAndMulSparse")


def read_gated(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """The function and the width of its half, read from the only projection of two equal halves in `parent`."""
    kinds = {form: kind for kind, form in FORMS_OF_GELU.items()}
    siblings = parent.children() if parent is not None else ()
    parts: list[list[int]] = [list(getattr(one, "output_partition_sizes", ())) for one in siblings]
    widths = {sizes[0] for sizes in parts if len(sizes) == 2 and sizes[0] == sizes[1]}
    return {
        "function": kinds.get(getattr(module, "approximate", ""), SILU),
        "width": widths.pop() if len(widths) == 1 else None,
    }


def activation_call(module: ModelModule, _: Reading) -> KernelCall | str | None:
    """The call that an activation of a model makes, or the reason why there is none."""
    if not module.facts:
        return f"activation {module.class_name} without a gate: no op_type"
    if module.facts["width"] is None:
        return "no single projection of two halves stands beside it, so its width is not known"
    return call_of(module, "activation", kind_of=module.facts["function"], hidden=module.facts["width"])


def activation_drafts(call: KernelCall, _: Choice) -> list[Draft]:
    """Draft of one activation over halves of `hidden` channels (per GPU)."""
    kind, hidden = call["kind_of"], call["hidden"]
    values = {"kind": kind, "hidden": hidden, "both": 2 * hidden}
    return [draft(ACTIVATION.op_type, f"{kind}_and_mul", values)]


ACTIVATION.extraction = Extraction(
    readers=dict.fromkeys(("SiluAndMul", "GeluAndMul"), ("pointwise", read_gated))
    | dict.fromkeys(UNGATED, ("pointwise", lambda _module, _parent: {})),
    calls={"pointwise": activation_call},
    differs={
        "activation": compared_with(
            "pointwise",
            lambda facts, on: {"kind_of": facts["function"], "hidden": facts["width"] // on.parallel.tp},
        )
    },
    drafts={"activation": activation_drafts},
)

# causal_conv1d


def causal_conv(
    wide: Wide,
    *,
    act: Part = silu,
    future: int = 0,  # elements after the current one that are seen
    updated: bool = True,  # whether the new state has x
) -> Tensors:
    """`silu(sum_j weight[j] x[t - width + 1 + j] + bias)` per channel over sequences [b c l].

    With `conv_state` [b c w], the latest elements with the oldest first, x is one element [b c] that follows them,
    and `new_state` is returned too. Mutants change the keywords.
    """
    x, weights = wide["x"], wide["weight"]
    added = wide["bias"] if "bias" in wide else torch.zeros_like(weights[:, 0])
    if "conv_state" in wide:
        state = wide["conv_state"]
        latest = torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
        return {"output": act((latest * weights).sum(-1) + added), "new_state": latest if updated else state}
    width, total = weights.shape[1], torch.zeros_like(x)
    padded = torch.nn.functional.pad(x, (width - 1 - future, future))
    for tap in range(width):
        total = total + weights[:, tap, None] * padded[..., tap : tap + x.shape[-1]]
    return {"output": act(total + added[:, None])}


def without_tap(weight: torch.Tensor, tap: int) -> torch.Tensor:
    """Mutants' weights [c w] with one tap set to 0: 0 is that of the oldest element, -1 of the newest."""
    weight = weight.clone()
    weight[:, tap] = 0
    return weight


CAUSAL_CONV1D = Op(
    "causal_conv1d",
    Form("x[b c l] weight[c w] bias[c]? -> output[b c l]", causal_conv),
    Form("x[b c] conv_state[b c w] weight[c w] bias[c]? -> output[b c] new_state[b c w]", causal_conv),
    family="convolution",
    sizes={"l": (5, 1, 33, 4, 70)},
    adversarial_inputs=("x", "conv_state"),
    # Not weights, which may meet the zeros before a sequence, or nothing.
    unusual={**dict.fromkeys(("nan", "inf"), ("x", "bias")), **LARGE_AND_SMALL},
    lossless={
        "x conv_state": full(8, signed=False),  # so that each sum exceeds 64
        "weight": full(1, most=4, signed=False),
        "bias": full(6, most=8, signed=False),
    },
    gates={"new_state": Exact()},
    mutants=(
        altered("weights in the opposite order", "weight", change=lambda weight: weight.flip(1)),
        altered("oldest element dropped", "weight", change=lambda weight: without_tap(weight, 0)),
        altered("newest element dropped", "weight", change=lambda weight: without_tap(weight, -1)),
        altered("channels shifted", "weight", change=lambda weight: weight.roll(1, 0)),
        altered("bias dropped", "bias", change=lambda bias: bias * 0),
        Mutant("activation dropped", act=same),
        Mutant("sigmoid alone", act=lambda total: torch.sigmoid(total)),
        Mutant("gelu", act=lambda total: torch.nn.functional.gelu(total)),
        Mutant("one element of the future", applies=has_not("conv_state"), future=1),
        Mutant("state not moved on", applies=has("conv_state"), updated=False),
        altered("state read the other way", "conv_state", change=lambda state: state.flip(-1)),
    ),
)
CONV_UPDATE = "sgl_kernel:causal_conv1d_update"
TORCH_CONV = "torch.nn.functional:conv1d"
WHOLE, STEP = "x weight [bias] -> output", "x conv_state weight [bias] -> output new_state"
WITH_SILU, PACKAGE = True, ("sgl_kernel",)


@CAUSAL_CONV1D.truth("sglang", "causal_conv1d_update", CONV_UPDATE, serves=STEP, packages=PACKAGE, sm=SM80)
def _sglang_step(api: Api, _: Definition, inputs: Given) -> Outputs:
    """The call works in place: x becomes the output. Its state has only the last width - 1 elements."""
    output, state, bias = inputs["x"].clone(), inputs["conv_state"], inputs.get("bias")
    latest = state[..., 1:].contiguous()
    api[CONV_UPDATE](output.unsqueeze(-1), latest, inputs["weight"], bias, WITH_SILU, None, None, -1)
    return {"output": output, "new_state": torch.cat([state[..., 1:], inputs["x"].unsqueeze(-1)], -1)}


@CAUSAL_CONV1D.truth("torch", "functional.conv1d", TORCH_CONV, TORCH_SILU, serves=WHOLE, rows=None)
def _pytorch_conv(api: Api, definition: Definition, inputs: Given) -> Outputs:
    x, weight, bias = inputs["x"].float(), inputs["weight"].float(), inputs.get("bias")
    bias = None if bias is None else bias.float()
    total = api[TORCH_CONV](x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))
    return rounded(definition, {"output": api[TORCH_SILU](total[..., : x.shape[-1]])})


def conv_call(module: ModelModule, _: Reading) -> KernelCall | str | None:
    """The call of a causal convolution, or the reason why there is none; None for another projection."""
    facts = module.facts
    if not facts["conv"]:
        return None
    if facts["activation"] not in ("silu", "swish"):
        return f"causal convolution with the activation {facts['activation']}: no form"
    return call_of(module, "conv", channels=facts["rank_n"], width=facts["rank_k"], bias=facts["bias"])


def conv_drafts(call: KernelCall, _: Choice) -> list[Draft]:
    """Drafts of whole sequences, and of one token after a state."""
    kinds = ("conv", "conv_step") if call["bias"] else ("conv_no_bias", "conv_step_no_bias")
    return [draft(CAUSAL_CONV1D.op_type, kind, dict(call.facts)) for kind in kinds]


CAUSAL_CONV1D.extraction = Extraction(
    calls={"linear": conv_call},
    differs={
        "conv": compared_with("conv", lambda facts, on: {**facts, "channels": facts["channels"] // on.parallel.tp})
    },
    drafts={"conv": conv_drafts},
)
