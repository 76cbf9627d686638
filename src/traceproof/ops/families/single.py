"""Attention of one request, its keys and values in one piece: causal or not, window, soft cap, sinks, masks.

A definition is causal if its constant says so; a window keeps that many keys before the query's own. A custom mask
[n l] says which keys a query sees; a slope of ALiBi's times the key's place less the query's is added to a logit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.lazy import torch
from traceproof.ops.adapter import SM75, Api, Definition, Given, Outputs
from traceproof.ops.attention_calls import attention
from traceproof.ops.attention_inputs import Planned
from traceproof.ops.attention_op import MUTANTS, Attention
from traceproof.ops.cases import Case
from traceproof.ops.families.attention import SOFTMAX, by_softmax
from traceproof.ops.formula import Formula, Mutant, altered


class Single(Attention):
    """One sequence. In float32 the weights are rounded to bfloat16 before they meet the values, as kernels do."""

    formula: Formula = staticmethod(partial(attention, lost=False, weights="bfloat16"))

    def planned_of(self, definition: Definition, sizes: Sequence[str], seed: int) -> Iterator[Planned]:
        """Only adversarial cases lean to keys: this attention may be trained with.

        Where one key has half the weight, unfused attention in 16 bits loses more of a gradient than is allowed.
        """
        for name, lengths, asked, more in super().planned_of(definition, sizes, seed):
            plain = {} if name.startswith("adversarial") else {"pattern": "plain"}
            yield name, lengths, asked, plain | dict(more)
        yield "adversarial-prompt", [65], 65, {}
        yield "adversarial-lean", [223], 11, {}

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """One sequence of so many keys."""
        del long
        return super().of_size(definition, case, count, long=True)

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """One query, whose output does not grow."""
        del long
        return not any({*(spec.shape or ())} & {*definition.var_axes} for spec in definition.outputs.values())


SHARED: Any = {
    "family": "attention",
    "compiles_late": ("torch",),
    "coupled": True,
    "mutants": (
        *MUTANTS,
        altered("mask not looked at", "custom_mask", change=lambda one: torch.ones_like(one)),
        altered("mask of the query before", "custom_mask", change=lambda mask: mask.roll(1, 0)),
        altered("ALiBi dropped", "alibi_slopes", change=lambda slopes: slopes * 0),
        altered("slopes of the next head", "alibi_slopes", change=lambda slopes: slopes.roll(1)),
        Mutant(
            "queries in the opposite order",
            applies=lambda wide: wide.given("q").dim() > 2 and len(wide.given("q")) > 1,
            outputs=lambda _, found: {"output": found["output"].flip(0)},
        ),
    ),
}
SINGLE_PREFILL = Single(
    "single_prefill",
    rules=(
        Rule(
            name="causal",
            label="causal mask",
            assigned=("causal",),
            described=((r"\bnon-?causal\b|\bnot causal\b", 0), (r"(?<!non-)(?<!not )(?<!optional )\bcausal", 1)),
            named=((r"_causal(?:_|$)", 1),),
            defaults={"prefill.single_prefill_with_kv_cache": ("causal", 0)},
            usual=0,
        ),
    ),
    **SHARED,
)
SINGLE_DECODE = Single("single_decode", **SHARED)
BARE = "q k v [sm_scale] -> output"
BENT = "q k v [sm_scale] [logits_soft_cap] [window_left] [custom_mask] -> output"
SUNK = "q k v [sm_scale] [logits_soft_cap] [window_left] [sinks] [custom_mask] [alibi_slopes] -> output"
PREFILL = "flashinfer.prefill:single_prefill_with_kv_cache"
DECODE = "flashinfer.decode:single_decode_with_kv_cache"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
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


SINGLE_PREFILL.truth("torch", "softmax", SOFTMAX, serves=SUNK, rows=None)(by_softmax)
