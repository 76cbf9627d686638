"""Attention of one request, its keys and values in one piece: causal or not, window, soft cap, sinks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from traceproof.dataset.constants import Rule
from traceproof.lazy import torch
from traceproof.ops.adapter import SM75, Api, Definition, Given, Outputs, scalar
from traceproof.ops.attention_inputs import Style
from traceproof.ops.base import Tensors
from traceproof.ops.formula import Form, Mutant, Wanted, Wide, altered, has
from traceproof.ops.lossless import NEVER, full
from traceproof.ops.op import Op

if TYPE_CHECKING:
    from traceproof.draw import Draw


def attend(
    wide: Wide,
    *,
    causal: bool = True,
    shift: int = 0,
    window: int = 0,
    scale: float = 1.0,
    capped: bool = True,
    sinks: bool = True,
    interleaved: bool = False,
    dropped: int = 0,
    weights: str = "",
) -> torch.Tensor:
    """Attention of queries [n h d] over keys [l g d], values [l g e]: [n h e].

    Query i stands at l - n + i. A definition is causal if its constant says so; a window keeps that many keys
    before the query's own; a soft cap bends logits; a sink is one more logit per head, without a value. A custom
    mask [n l] says which keys a query sees; a slope of ALiBi's times the key's place less the query's is added to
    a logit. In float32 the weights are rounded to bfloat16 before they meet the values, as kernels do.

    Of a mutant: `shift` of the diagonal, `window` of its left end, `dropped` keys, `weights` kept in that dtype.
    """
    q, k, v = wide["q"], wide["k"], wide["v"]
    count, heads, length = q.shape[0], q.shape[1], k.shape[0]
    group = torch.arange(heads, device=q.device)
    group = group % k.shape[1] if interleaved else group // (heads // k.shape[1])
    logits = torch.einsum("nhd,lhd->hnl", q, k[:, group])
    logits = logits * (wide.number("sm_scale", 1 / math.sqrt(q.shape[-1])) * scale)
    if "logits_soft_cap" in wide and capped:
        cap = wide.number("logits_soft_cap")
        logits = cap * torch.tanh(logits / cap)
    place = torch.arange(count, device=q.device)[:, None] + (length - count) + shift
    key = torch.arange(length, device=q.device)[None]
    if "alibi_slopes" in wide:
        logits = logits + wide["alibi_slopes"][:, None, None] * (key - place)
    hidden = torch.zeros((count, length), dtype=torch.bool, device=q.device)
    if "custom_mask" in wide:
        hidden |= ~wide["custom_mask"]
    if is_causal(wide) and causal:
        hidden |= key > place
    if "window_left" in wide:
        hidden |= key < place - int(wide.number("window_left")) - window
    hidden |= key >= length - dropped
    logits = logits.masked_fill(hidden, -math.inf)
    top = logits.amax(-1, keepdim=True).clamp_min(-1e30)
    powers = torch.exp(logits - top)
    total = powers.sum(-1)
    if "sinks" in wide and sinks:
        total = total + torch.exp(wide["sinks"][:, None] - top.squeeze(-1))
    low = torch.bfloat16 if wide.dtype is torch.float32 and not weights else wide.dtype
    mixed = torch.einsum("hnl,lhe->nhe", powers.to(low).to(wide.dtype), v[:, group])
    total = torch.where(total == 0, torch.ones_like(total), total)
    return mixed / total.T.unsqueeze(-1)


def is_causal(wide: Wide) -> bool:
    """Whether a query sees only the keys up to its own place."""
    return bool(wide.number("causal", 0.0))


def patterned(draw: Draw, wanted: Wanted) -> torch.Tensor | None:
    """Queries and keys in the case's pattern, if it has one."""
    if "pattern" not in wanted.params:
        return None
    style = Style.of(wanted.case, width=wanted.shape[-1], scale=wanted.shape[-1] ** -0.5)
    return style.tensor(draw, wanted.name, wanted.shape, wanted.dtype, keys=wanted.name == "k")


def seen(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """About half of the keys, and the first."""
    mask = draw.integers(wanted.name, wanted.shape, torch.int32, low=0, high=2) > 0
    mask[:, :1] = True
    return mask


SCALARS = {"sm_scale": 0.125, "logits_soft_cap": 4.0, "window_left": 7}
CASES = {"large": {"scale": 3.0}, "offset": {"offset": 1.0}, "outlier": {"outlier": 20.0}}
# Raw products of queries and keys beyond what masks have been filled with.
EXTREMES = {name: {"pattern": name, "amplitude": 1.0} for name in ("below", "deep", "above")}
MUTANTS = (
    Mutant("scale dropped", scale=2.0),
    Mutant("scale squared", scale=0.5),
    Mutant("heads interleaved", interleaved=True),
    Mutant("last key dropped", dropped=1),
    Mutant("mask dropped", applies=is_causal, causal=False),
    Mutant("diagonal one further", applies=is_causal, shift=1),
    Mutant("diagonal one before", applies=is_causal, shift=-1),
    Mutant("window one longer", applies=has("window_left"), window=1),
    Mutant("window one shorter", applies=has("window_left"), window=-1),
    Mutant("soft cap dropped", applies=has("logits_soft_cap"), capped=False),
    Mutant("sinks dropped", applies=has("sinks"), sinks=False),
    altered("mask not looked at", "custom_mask", change=lambda one: torch.ones_like(one)),
    altered("mask of the query before", "custom_mask", change=lambda mask: mask.roll(1, 0)),
    altered("ALiBi dropped", "alibi_slopes", change=lambda slopes: slopes * 0),
    altered("slopes of the next head", "alibi_slopes", change=lambda slopes: slopes.roll(1)),
)


def prefill(wide: Wide, *, opposite: bool = False, **ways: Any) -> Tensors:  # noqa: ANN401 - those of `attend`
    """All queries of the request."""
    found = attend(wide, **ways)
    return {"output": found.flip(0) if opposite else found}


def decode(wide: Wide, *, mean: bool = False, **ways: Any) -> Tensors:  # noqa: ANN401 - those of `attend`
    """The one query as a request of one."""
    if mean:
        return {"output": wide["v"].mean((0, 1)).expand(wide["q"].shape)}
    return {"output": prefill(wide.changed(q=wide["q"][None]), **ways)["output"][0]}


SHARED: Any = {
    "uneven": "d",
    "family": "attention",
    "compiles_late": ("torch",),
    "coupled": True,
    "scalars": SCALARS,
    "draws": {
        **dict.fromkeys(("q", "k"), patterned),
        "custom_mask": seen,
        "alibi_slopes": lambda draw, wanted: draw.uniform(wanted.name, wanted.shape, low=0.02, high=0.5),
    },
    "adversarial": CASES,
    "extremes": EXTREMES,
    "data": ("q", "k"),
    "apart": False,
    "unusual": {"nan": ("q",), "large": ("v",), "small": ("v",)},
    "lossless": lambda definition: (
        {}
        if "custom_mask" in definition.inputs
        else {**dict.fromkeys(("q", "alibi_slopes"), 0.0), "k": full(0), "v": full(0), "sinks": NEVER}
    ),
    "lossless_sizes": {"n": 1, "l": 64},
}
SINGLE_PREFILL = Op(
    "single_prefill",
    Form(
        "q[n h d] k[l g d] v[l g e] sm_scale? logits_soft_cap? window_left? sinks[h]? custom_mask[n l]?"
        " alibi_slopes[h]? -> output[n h e]",
        prefill,
    ),
    rules=(
        Rule(
            name="causal",
            label="causal mask",
            assigned=("causal",),
            described=((r"\bnon-?causal\b|\bnot causal\b", 0), (r"(?<!non-)(?<!not )\bcausal", 1)),
            named=((r"_causal(?:_|$)", 1),),
            defaults={"prefill.single_prefill_with_kv_cache": ("causal", 0)},
            usual=0,
        ),
    ),
    sizes={"l": (5, 2, 33, 64, 100, 257)},
    mutants=(
        *MUTANTS,
        Mutant("queries in the opposite order", applies=lambda wide: len(wide["q"]) > 1, opposite=True),
    ),
    **SHARED,
)
SINGLE_DECODE = Op(
    "single_decode",
    Form("q[h d] k[l g d] v[l g e] sm_scale? logits_soft_cap? window_left? sinks[h]? -> output[h e]", decode),
    sizes={"l": (17, 1, 64, 300, 33, 1000)},
    mutants=(*MUTANTS, Mutant("one value for all heads", mean=True)),
    **SHARED,
)
BARE = "q k v [sm_scale] -> output"
BENT = "q k v [sm_scale] [logits_soft_cap] [window_left] [custom_mask] -> output"
SUNK = "q k v [sm_scale] [logits_soft_cap] [window_left] [sinks] [custom_mask] [alibi_slopes] -> output"
PREFILL = "flashinfer.prefill:single_prefill_with_kv_cache"
DECODE = "flashinfer.decode:single_decode_with_kv_cache"
SDPA, SOFTMAX = "torch.nn.functional:scaled_dot_product_attention", "torch:softmax"
BY_SDPA: Any = {"serves": BARE, "rows": None}


@SINGLE_PREFILL.truth("flashinfer", "prefill.single_prefill_with_kv_cache", PREFILL, serves=BENT, sm=SM75)
@SINGLE_DECODE.truth("flashinfer", "decode.single_decode_with_kv_cache", DECODE, serves=BENT, rows=None, sm=SM75)
def _flashinfer(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """By keyword what the definition has; only a prefill knows whether it is causal."""
    [attention] = api.values()
    names = ("sm_scale", "logits_soft_cap", "window_left", "custom_mask")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if inputs["q"].dim() > 2:
        given["causal"] = bool(definition.constants.get("causal"))
    return {"output": attention(inputs["q"], inputs["k"], inputs["v"], **given)}


@SINGLE_PREFILL.truth("torch", "functional.scaled_dot_product_attention", SDPA, **BY_SDPA)
@SINGLE_DECODE.truth("torch", "functional.scaled_dot_product_attention", SDPA, **BY_SDPA)
def _pytorch(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The one query of a decode as a request of one."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    queries = q.reshape(-1, *q.shape[-2:])
    mask = None
    if definition.constants.get("causal"):
        place = torch.arange(len(queries), device=q.device)[:, None] + len(k) - len(queries)
        mask = torch.arange(len(k), device=q.device)[None] <= place
    heads = (one.transpose(0, 1).unsqueeze(0) for one in (queries, k, v))
    scale = inputs.get("sm_scale")
    found = api[SDPA](*heads, scale=None if scale is None else float(scale), enable_gqa=True, attn_mask=mask)
    return {"output": found.squeeze(0).transpose(0, 1).reshape(*q.shape[:-1], v.shape[-1])}


@SINGLE_PREFILL.truth("torch", "softmax", SOFTMAX, serves=SUNK, rows=None)
def _pytorch_softmax(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """With a window, a soft cap, sinks, a mask or ALiBi: logits and one softmax over them and the sinks."""
    q, k, v = inputs["q"].float(), inputs["k"].float(), inputs["v"].float()
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scale = inputs.get("sm_scale")
    logits = torch.einsum("nhd,lhd->hnl", q, k) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if inputs.get("logits_soft_cap") is not None:
        cap = scalar(inputs, "logits_soft_cap")
        logits = cap * torch.tanh(logits / cap)
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)[None]
    if inputs.get("alibi_slopes") is not None:
        logits = logits + inputs["alibi_slopes"][:, None, None] * (key - place)
    hidden = key > place if definition.constants.number("causal") else key < 0
    if inputs.get("custom_mask") is not None:
        hidden = hidden | ~inputs["custom_mask"]
    if inputs.get("window_left") is not None:
        hidden = hidden | (key < place - int(scalar(inputs, "window_left")))
    logits = logits.masked_fill(hidden, float("-inf"))
    if inputs.get("sinks") is not None:
        logits = torch.cat([logits, inputs["sinks"][:, None, None].expand(-1, len(q), 1)], -1)
    weights = api[SOFTMAX](logits, -1)[..., : len(k)]
    return {"output": torch.einsum("hnl,lhd->nhd", weights, v).to(inputs["q"].dtype)}
