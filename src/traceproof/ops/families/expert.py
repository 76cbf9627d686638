"""Mixtures of experts: what a token's chosen experts compute, weighed and added. How they are chosen: `routing`.

Readings where the schema leaves room, all FlashInfer 0.6.13's:

- gemm1's rows are up first, then gate (KernelRunner.h: gatedAct = scaleC * x0 * silu(x1 * scaleGate)).
- fp8 per tensor: output1_scales_scalar multiplies up, output1_scales_gate_scalar gate, output2_scales_scalar the
  result. With top_k 1 routing is Llama 4's: sigmoid of the largest logit, multiplied onto the token before the
  first product (the kernel hands it to gemm1 and leaves it out at the end). A routing_bias is not read.
- Everywhere else the routing weight multiplies the expert's result.
- fp4 with float32 weights: the values are exactly what fp4 codes and scales stand for. Activations are what the
  schema holds; a kernel that rounds them to fp4 first loses what the comparison allows.
- topk_ids: packed (expert << 16 | bfloat16 weight) if the reference shifts right by 16; else expert indices that
  weigh 1 / top_k each, as FlashInfer's own trace template has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.models.drafts import Draft, Extraction, Facts, call_of, draft, dtype_name, held_against
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM89, Api, Definition, Given, Outputs, scalar
from traceproof.ops.base import Tensors, Unsupported, Values
from traceproof.ops.cases import BOUNDARY_ROWS, Case, at_boundaries, boundaries
from traceproof.ops.compare import Comparison, Quantised
from traceproof.ops.families import routing
from traceproof.ops.families.routing import PACKED_SHIFT, Method, Routing, choice_of, routing_of
from traceproof.ops.formats import (
    BLOCK,
    FP4_BLOCK,
    FP4_VALUES,
    FP8_BITS_RMS,
    Rounding,
    exact,
    scale_blocks,
)
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered
from traceproof.ops.lossless import SURE, Exactly, whole
from traceproof.ops.op import SIZES, Op
from traceproof.stacks.sglang import publish

if TYPE_CHECKING:
    from traceproof.draw import Draw

# The forms. t: tokens, h: hidden, l: local experts, e: experts, k: of a token, m: rows of gemm1, i: intermediate
# columns; a, b, c: blocks along h, m, i.

WEIGHTS = "hidden_states[t h] gemm1_weights[l m h] gemm2_weights[l h i]"
ROUTED = "routing_bias[e]? routed_scaling_factor? local_expert_offset?"
CHOOSERS = (f"routing_logits[t e] {ROUTED}", f"topk_ids[t k] {ROUTED}")
BLOCK_SCALES = "hidden_states_scale[a t] gemm1_weights_scale[l b a] gemm2_weights_scale[l a c]"
UP_SCALE, GATE_SCALE, DOWN_SCALE = "output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"
SCALES = ("", BLOCK_SCALES, f"{UP_SCALE}[l] {GATE_SCALE}[l] {DOWN_SCALE}[l]")
GEMM1, GEMM2 = ("gemm1_weights", "gemm1_weights_scale"), ("gemm2_weights", "gemm2_weights_scale")
OF_EXPERTS = (*GEMM1, *GEMM2, UP_SCALE, GATE_SCALE, DOWN_SCALE)  # inputs whose first axis is the local experts


class Scaling(StrEnum):
    """How weights are stored.

    FP8_BLOCK: float8 with float32 scales, 128 x 128 for weights and 1 x 128 for activations.
    FP8_TENSOR: float8, one scale per expert for up, gate and down.
    FP4: float32 that holds already dequantised fp4 values; activations come unquantised.
    PLAIN: 16-bit floats.
    """

    FP8_BLOCK = "fp8_block"
    FP8_TENSOR = "fp8_tensor"
    FP4 = "fp4"
    PLAIN = "plain"


# By the dtype of weights and what scales them.
STORED: Mapping[tuple[str, str], Scaling] = {
    ("float8_e4m3fn", "gemm1_weights_scale"): Scaling.FP8_BLOCK,
    ("float8_e4m3fn", UP_SCALE): Scaling.FP8_TENSOR,
    ("float32", ""): Scaling.FP4,
    ("bfloat16", ""): Scaling.PLAIN,
    ("float16", ""): Scaling.PLAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a definition's experts are. Experts `offset .. offset + local` are here."""

    scaling: Scaling
    routing: Routing
    hidden: int
    intermediate: int

    @property
    def weight_count(self) -> int:
        """Elements of both weight tensors."""
        return 3 * self.routing.local * self.hidden * self.intermediate

    @property
    def weight_on_input(self) -> bool:
        """Whether the routing weight multiplies the token before the first product, not the expert's result."""
        return self.scaling == Scaling.FP8_TENSOR and self.routing.method == Method.LLAMA4


def mixture_of(definition: Definition) -> Mixture:
    """Read off inputs, axes and constants of a definition of one of the forms. Raises Unsupported: it is none."""
    first, second = (
        [definition.const_axes.get(axis, -1) for axis in definition.inputs[name].shape or ()]
        for name in ("gemm1_weights", "gemm2_weights")
    )
    local, rows, hidden = first
    intermediate = second[2]
    if second != [local, hidden, rows // 2] or rows % 2:
        raise Unsupported(f"gemm1_weights is {first}, gemm2_weights {second}: not gated")
    kind = definition.inputs["gemm1_weights"].dtype
    scale = next((name for name in (GEMM1[1], UP_SCALE) if name in definition.inputs), "")
    scaling = STORED.get((kind, scale))
    if scaling is None:
        raise Unsupported(f"weights are {kind} with the inputs {list(definition.inputs)}")
    if scaling == Scaling.FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
        raise Unsupported(f"hidden size {hidden} or intermediate size {intermediate} is no multiple of {BLOCK}")
    return Mixture(scaling=scaling, routing=routing_of(definition), hidden=hidden, intermediate=intermediate)


# The formula.

SLICE = 1 << 22  # weight elements widened at a time: 32 MiB in float64, and a multiple of any block row


def silu(x: torch.Tensor) -> torch.Tensor:
    """Times its own sigmoid."""
    return torch.nn.functional.silu(x)


def mixture(
    wide: Wide,
    *,
    token: Rounding = exact,
    first: Rounding = exact,
    active: Rounding = exact,
    result: Rounding = exact,
    activation: Part = silu,
    backwards: bool = False,
    other_end: bool = False,
    idle: bool = False,
    **ways: Any,  # noqa: ANN401 - those of `choice_of`
) -> Tensors:
    """`out = sum over chosen experts of weight * (silu(x @ gate.T) * (x @ up.T)) @ down.T`, expert by expert.

    A kernel rounds the token, the first product, the activated product and an expert's result; it may take experts
    and K `backwards`. Of a mutant: another `activation`, the routing weight at the `other_end`, the local expert
    with the most tokens `idle`; `ways` to route.
    """
    found, choice = mixture_of(wide.definition), choice_of(wide, **ways)
    on_input = found.weight_on_input != other_end
    hidden = wide["hidden_states"]
    if found.scaling == Scaling.FP8_BLOCK:
        hidden = scale_blocks(hidden, wide["hidden_states_scale"].t(), height=1)
    hidden = token(hidden)
    output = torch.zeros_like(hidden)
    local = choice.experts - int(wide.number("local_expert_offset", 0))
    here = local[(local >= 0) & (local < found.routing.local)]
    experts: list[int] = torch.unique(here).tolist()
    if idle and experts:
        experts.remove(int(here.mode().values))
    steps = []
    for expert in reversed(experts) if backwards else experts:
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        weights = choice.weights[tokens, slots][:, None]
        inner, outer = (weights, torch.ones_like(weights)) if on_input else (torch.ones_like(weights), weights)
        both = first(_product(wide, GEMM1[0], expert, hidden[tokens] * inner, backwards=backwards))
        up, gate = both.chunk(2, -1)
        if found.scaling == Scaling.FP8_TENSOR:
            up, gate = up * wide[UP_SCALE][expert], gate * wide[GATE_SCALE][expert]
            outer = outer * wide[DOWN_SCALE][expert]
        x = active(activation(gate) * up)
        y = result(_product(wide, GEMM2[0], expert, x, backwards=backwards))
        output.index_add_(0, tokens, y * outer)
        steps.append((expert, tokens, x * outer))
    if wide.dtype != torch.float64:
        return {"output": output}
    return {"output": output, "output@roundings": equal_roundings(wide, steps, output)}


def _product(wide: Wide, name: str, expert: int, rows: torch.Tensor, *, backwards: bool) -> torch.Tensor:
    """Rows by an expert's weights."""
    if backwards:
        return torch.cat([rows.flip(1) @ part.flip(1).t() for part in _slices(wide, name, expert)], -1)
    return torch.cat([rows @ part.t() for part in _slices(wide, name, expert)], -1)


def _slices(wide: Wide, name: str, expert: int) -> Iterator[torch.Tensor]:
    """Rows of an expert's weights, widened, with their block scales if there are any, a slice at a time."""
    weights = wide.given(name)[expert]
    scales = wide.given(f"{name}_scale")[expert] if f"{name}_scale" in wide else None
    rows = max(SLICE // weights.shape[1] // BLOCK, 1) * BLOCK
    for start in range(0, weights.shape[0], rows):
        part = weights[start : start + rows].to(wide.dtype)
        if scales is not None:
            part = scale_blocks(part, scales[start // BLOCK : (start + rows) // BLOCK], height=BLOCK)
        yield part


def equal_roundings(
    wide: Wide, steps: Iterable[tuple[int, torch.Tensor, torch.Tensor]], output: torch.Tensor
) -> torch.Tensor:
    """How many equal roundings of what enters gemm2 the output's slope averages over: float64 [1].

    `steps` are an expert, its tokens and what enters, times its weight. Rounding element i of it moves the output
    by a vector d_i. An error sum(r_i d_i), the r_i independent, has a part along the output whose deviation,
    against the size of the whole error, is sqrt(sum (d_i . output)^2 / (|output|^2 sum |d_i|^2)). Were it n equal
    orthogonal vectors that add up to the output, this would be 1 / sqrt(n): n is what this gives. It is far below
    the number of elements, since silu(gate) * up has heavy tails.
    """
    along = across = 0.0
    for expert, tokens, step in steps:
        pulled, norms, start = torch.zeros_like(step), torch.zeros_like(step[:1]), 0
        for part in _slices(wide, GEMM2[0], expert):
            pulled += output[tokens, start : start + len(part)] @ part
            norms += (part * part).sum(0, keepdim=True)
            start += len(part)
        along += float(((step * pulled) ** 2).sum())
        across += float((step * step * norms).sum())
    energy = float((output * output).sum())
    return torch.tensor([energy * across / along if along else 1.0], dtype=torch.float64, device=output.device)


# Data over their whole range, and of such size that the gate's argument and the output are of order 1.

SPREAD = (0.25, 0.5, 1.0, 2.0, 4.0)  # of activation scales; the powers of two that a scale is multiplied with
WEIGHT_SPREAD = (0.5, 1.0, 2.0)
MANTISSA = 1.53  # RMS of a number uniform in [1, 2)
SPREAD_RMS = (sum(x * x for x in SPREAD) / len(SPREAD)) ** 0.5
WEIGHT_SPREAD_RMS = (sum(x * x for x in WEIGHT_SPREAD) / len(WEIGHT_SPREAD)) ** 0.5
ONE = 1 / FP8_BITS_RMS / MANTISSA  # a scale of this size gives RMS 1
FP4_RMS = 3.2  # of uniform e2m1 codes with one 6 among 16
GATE_RMS = 1.5  # of silu's argument: far enough from 0 and from its straight part
ACTIVE_RMS = 1.2  # of silu(gate) * up where both have GATE_RMS
INNER = "inner-boundaries"  # a drawing instruction: one channel of each expert is not zero, at an end of loops
BOUNDARY = 300.0  # the one channel of a token that is not zero
FACTOR = 2.5  # routed_scaling_factor, as DeepSeek-V3 has it

# RMS of data that are not float8, whose bits are drawn.
RMS: Mapping[str, Callable[[Mixture], float]] = {
    "hidden_states": lambda _: 1.0,
    "gemm1_weights": lambda found: GATE_RMS / found.hidden**0.5,
    "gemm2_weights": lambda found: 1 / ACTIVE_RMS / found.intermediate**0.5,
}
# Of scales the powers of two, and what a number in [1, 2) and one of them are multiplied with. With one scale per
# expert a kernel stores silu(gate) * up in fp8 without a further scale (that of up is in it), so that product must
# lie between 1/64, where its precision ends, and 448: up has RMS 2..16, gate 3/4..3.
SPREADS: Mapping[str, tuple[Sequence[float], Callable[[Mixture], float]]] = {
    "hidden_states_scale": (SPREAD, lambda _: ONE / SPREAD_RMS),
    "gemm1_weights_scale": (
        WEIGHT_SPREAD,
        lambda found: GATE_RMS * ONE / WEIGHT_SPREAD_RMS / found.hidden**0.5,
    ),
    "gemm2_weights_scale": (
        WEIGHT_SPREAD,
        lambda found: ONE / WEIGHT_SPREAD_RMS / ACTIVE_RMS / found.intermediate**0.5,
    ),
    UP_SCALE: (WEIGHT_SPREAD, lambda found: 4 / (found.hidden**0.5 * FP8_BITS_RMS**2)),
    GATE_SCALE: ((0.5, 1.0), lambda found: 1.5 / (found.hidden**0.5 * FP8_BITS_RMS**2)),
    DOWN_SCALE: (WEIGHT_SPREAD, lambda found: 0.1 / found.intermediate**0.5 / FP8_BITS_RMS),
}


def drawn_data(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Any bits of float8, weights that fp4 holds exactly, or normal values."""
    found = mixture_of(wanted.definition)
    rms = RMS[wanted.name](found)
    if wanted.dtype == torch.float8_e4m3fn:
        return draw.bits(wanted.name, wanted.shape, wanted.dtype)
    if found.scaling == Scaling.FP4 and wanted.name != "hidden_states":
        return _fp4_weights(draw, wanted, rms)
    return draw.normal(wanted.name, wanted.shape, wanted.dtype, scale=rms)


def drawn_scale(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """float32 scales as SPREADS has them."""
    powers, base = SPREADS[wanted.name]
    low = base(mixture_of(wanted.definition))
    table = torch.tensor(powers, dtype=torch.float32, device=draw.device)
    power = table[draw.integers(wanted.name, wanted.shape, torch.int64, low=0, high=len(powers))]
    return draw.uniform(f"{wanted.name}-mantissa", wanted.shape, low=low, high=2 * low) * power


def _fp4_weights(draw: Draw, wanted: Wanted, rms: float) -> torch.Tensor:
    """float32 weights of the RMS given: e2m1 codes times a power of two for each 32 neighbours of a row.

    One value of each 16 is +-6, so that amax / 6 gives the scale back: mxfp4 (32, a power of two) and nvfp4 (16,
    an e4m3 number) both hold these weights exactly.
    """
    out = torch.empty(wanted.shape, dtype=torch.float32, device=draw.device)
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=draw.device)
    table = torch.cat([positive, -positive])
    whole = 2.0 ** round(math.log2(rms / FP4_RMS / WEIGHT_SPREAD_RMS))
    powers = torch.tensor(WEIGHT_SPREAD, dtype=torch.float32, device=draw.device) * whole
    for expert in range(wanted.shape[0]):
        name, blocks = f"{wanted.name}-{expert}", out[expert].view(-1, FP4_BLOCK)
        codes = draw.bits(name, (blocks.numel(),), torch.int8)
        torch.index_select(table, 0, codes.to(torch.int32) & 15, out=blocks.view(-1))
        place = draw.bits(f"{name}-peak", (len(blocks), 1), torch.int8).to(torch.int64)
        blocks.scatter_(1, place & 15, torch.where(place >= 0, 6.0, -6.0).to(blocks.dtype))
        pairs = blocks.view(-1, 2 * FP4_BLOCK)
        pairs *= powers[draw.integers(f"{name}-scale", (len(pairs), 1), torch.int64, low=0, high=len(powers))]
    return out


def exact_data(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Whole numbers for which a token's gates are 64 or 128, which silu leaves as they are, and ups have few bits.

    Gates come from the first channel alone, ups from all others. Intermediates in 16 bits are exact, too.
    """
    if wanted.name == "hidden_states":
        made = whole(1)(draw, wanted).float()
        made[:, 0] = SURE
        return made.to(wanted.dtype)
    made = torch.empty(wanted.shape, dtype=wanted.dtype, device=draw.device)
    sparse = torch.tensor([-1.0, 1.0] + 14 * [0.0], device=draw.device)
    for expert in range(len(made)):
        drawn = draw.integers(f"{wanted.name}.{expert}", made.shape[1:], torch.int32, low=0, high=len(sparse))
        if wanted.name == GEMM1[0]:
            part, up = sparse[drawn], made.shape[1] // 2
            part[:up, 0], part[up:, 0], part[up:, 1:] = 0.0, 1.0 + drawn[up:, 0] % 2, 0.0
        else:
            part = (drawn % 3 - 1).float()
        made[expert] = part.to(wanted.dtype)
    return made


def exact_mixture(definition: Definition) -> Mapping[str, Exactly]:
    """One expert with all the weight. A reference is exact then; kernels requantise."""
    found = mixture_of(definition)
    method = found.routing.method
    if found.weight_count >= HEAVY or method is Method.UNIFORM:  # results of several experts may be rounded each
        return {}
    return {
        **dict.fromkeys(("hidden_states", GEMM1[0], GEMM2[0]), exact_data),
        "hidden_states_scale": 2.0**20,
        GEMM1[1]: 2.0**-20,
        **dict.fromkeys((GATE_SCALE, DOWN_SCALE), 1.0),
        **dict.fromkeys((GEMM2[1], UP_SCALE), 1 / SURE),
        "routing_logits": routing.one_chosen,
        "routing_bias": 0.0,
        "routed_scaling_factor": 2.0,
        "topk_ids": routing.first_alone,
    }


def tie(tensors: dict[str, torch.Tensor], params: Mapping[str, Any]) -> None:
    """Make every second expert a double of the one before it, in a case of ties."""
    for name in tensors.keys() & set(OF_EXPERTS) if params.get("ties") else ():
        tensors[name][1::2] = tensors[name][0::2]


# The op.

HEAVY = 1 << 28  # weight elements; from here a reference takes seconds a case, so there are few cases
HEAVY_SIZES = {"small": (2,), "medium": (16,), "large": (64,)}
MIXED_ROWS = ("plain", "negative", "equal", "remote", "hot", "plain")  # one pattern of logits a token
START = 3  # the position at which local experts lie at the start
# Bytes a weight element takes at the reference's peak, beside the element itself. References of the dataset widen
# the values of a weight tensor to float32, widen its scales to the same shape, and multiply into a third tensor.
REFERENCE_BYTES = {Scaling.FP8_BLOCK: 12, Scaling.FP8_TENSOR: 4, Scaling.FP4: 0, Scaling.PLAIN: 4}
STORED_BYTES = {Scaling.FP8_BLOCK: 1, Scaling.FP8_TENSOR: 1, Scaling.FP4: 4, Scaling.PLAIN: 2}
ORACLE_BYTES = 1 << 28  # a few slices of weights in float64
PROCESS_BYTES = 400 << 20  # an interpreter with torch loaded
# Of a scaled-down definition: several blocks of each size, and not the same number of them.
HIDDEN, INTERMEDIATE = 512, 256
LEAST = 8  # experts
CANDIDATES = 2  # for each expert that a token goes to, so that there is a choice
# Measured on simulated kernels (tests/test_ops_moe.py): worst row RMS and worst slope. At the snapshot width
# (7168 x 2048) FlashInfer's fp8 block kernel, which stores gemm1's result and the activated product in fp8, loses
# 4.9 % and 0.25 %, SGLang's 2.5 % and 0.14 %; at 2048 x 512 and 2 to 16 tokens 6.3 % and 0.7 %. Per tensor 3 % and
# 0.7 %. Slopes are luck in narrow experts (256 wide, one token: up to 4 %): the oracle tells how much there is
# (`equal_roundings`), and the limit is for what goes beyond it. References in float32 lose 0.2 % and 0.05 %.
# fp4: activations in bfloat16 lose 0.5 %, in mxfp8 6 %; in nvfp4 25 %, more than is allowed here.
REQUANTISED = Quantised(
    rms=0.1,
    slope=0.01,
    reason="keeping activations in fp8 costs 3 to 9 % of a row's RMS; roundings do not tilt the slope but by luck",
)
# 16-bit intermediates lose 0.5 % of a row's RMS.
UNQUANTISED = Quantised(rms=0.02, slope=0.01, reason="16-bit intermediates cost 0.5 % of a row's RMS")


class Experts(Op):
    """Mixture of experts with routing; see the module's text for the readings taken."""

    def check(self, definition: Definition) -> None:
        """Known: the forms, with `Scaling` and `routing.Method`."""
        super().check(definition)
        mixture_of(definition)

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """The bias, where the largest logit chooses."""
        biased = "routing_bias" in definition.inputs and routing_of(definition).method is Method.LLAMA4
        return {"routing_bias": "of routing by the largest logit it is no part"} if biased else {}

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's sizes, then edge and adversarial ones; few for a definition with many weights."""
        found, case = mixture_of(definition), partial(self.placed, definition, seed)
        routed, heavy = found.routing, found.weight_count >= HEAVY
        lengths = HEAVY_SIZES if heavy else SIZES
        for size in sizes:
            for index, tokens in enumerate(lengths[size]):
                yield case(f"{size}-{index}", tokens, list(SIZES).index(size) + index)
        if not routed.given:
            yield case("adversarial-rows", len(MIXED_ROWS), rows=list(MIXED_ROWS))
        # The first and the last local expert have work: loops over experts end there.
        yield case("edge-ends", 2, START, rows=["first", "last"])
        if heavy:
            return
        yield case("edge-empty", 0, 0)
        if routed.local < routed.experts and not routed.given:
            yield case("edge-remote", 3, rows=["remote"])
        yield case("adversarial-hot", 8, rows=["hot"])
        if routed.method == Method.DEEPSEEK:
            # One sigmoid next to 1, the others small: a wrong constant in it shows in the weights.
            yield case("adversarial-steep", 8, rows=["steep"])
        if routed.experts % 2 == 0 and routed.local % 2 == 0 and not routed.given:
            yield case("adversarial-ties", 6, ties=True)

    def placed(
        self,
        definition: Definition,
        seed: int,
        name: str,
        tokens: int,
        position: int = 1,
        **params: Any,  # noqa: ANN401 - JSON
    ) -> Case:
        """A case of so many tokens; where local experts lie turns with `position`."""
        found = routing_of(definition)
        room = found.experts - found.local
        places = (
            room,
            room // 2 - room // 2 % 2,
            min(37, room),
            0,
        )  # at the end, in the middle, uneven, at the start
        if "local_expert_offset" in definition.inputs:
            params["offset"] = places[position % len(places)]
        return self.case(definition, name, {"t": tokens}, seed, params)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """One channel of a token decides what it gives, then one channel of an expert does.

        Where kernels round to fp4, or to fp8 by one scale per expert, what is left alone may be rounded away.
        """
        plain, scaling = self.placed(definition, seed, "", BOUNDARY_ROWS), mixture_of(definition).scaling
        if scaling is not Scaling.FP8_TENSOR:
            alone = {"hidden_states": BOUNDARY}
            yield at_boundaries(plain.axes, ["hidden_states"], seed, alone=alone, **plain.params)
        if scaling in {Scaling.FP8_BLOCK, Scaling.PLAIN}:
            rows: dict[str, Any] = {INNER: True, "rows": ["first", "last"]}
            yield self.placed(definition, seed, f"adversarial-{INNER}", BOUNDARY_ROWS, **rows)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Sigmoids of 1e-8, among which a bias of up to 16 chooses alone."""
        if routing_of(definition).method == Method.DEEPSEEK:
            yield self.placed(definition, seed, "stress-faint", 8, START, rows=["faint"])

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Routing without luck, quantised data over their whole range."""
        values = super().inputs(definition, case, draw)
        first = values["gemm1_weights"]
        if INNER in case.params and isinstance(first, torch.Tensor):
            ends = boundaries(first.shape[1] // 2)
            for expert, rows in enumerate(first.view(torch.uint8) if first.dtype.itemsize == 1 else first):
                turn = min(expert, len(first) - 1 - expert) % len(ends)
                place = ends[turn if expert >= len(first) // 2 else -1 - turn]  # of the last expert the first
                kept = torch.tensor([place, place + len(rows) // 2], device=draw.device)
                one = rows[kept].clone()
                rows.zero_()[kept] = one
        own = {"local_expert_offset": routing.offset_of(case.params), "routed_scaling_factor": FACTOR}
        return {name: own.get(name, value) for name, value in values.items()}

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Relative RMS error by row and slope."""
        plain = mixture_of(definition).scaling is Scaling.PLAIN
        return {"output": UNQUANTISED if plain else REQUANTISED}

    def memory(self, definition: Definition, case: Case) -> int:
        """Peak bytes of the larger of the reference, which widens all weights, and the oracle."""
        found = mixture_of(definition)
        widened = found.weight_count * REFERENCE_BYTES[found.scaling]
        return self.oracle_memory(definition, case) + max(0, widened - ORACLE_BYTES)

    def oracle_memory(self, definition: Definition, case: Case) -> int:
        """Peak bytes of the oracle, which widens a few slices of weights at a time, and of the interpreter."""
        found, tokens = mixture_of(definition), case.axes[definition.var_axes[0]]
        weights = found.weight_count * STORED_BYTES[found.scaling]
        # a token in float64: hidden and output, and for every chosen expert gemm1's and gemm2's rows
        row = 4 * found.hidden + found.routing.top_k * (4 * found.intermediate + found.hidden)
        return PROCESS_BYTES + weights + ORACLE_BYTES + tokens * row * 8

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """Matrices of a few blocks, few experts per group.

        Groups, experts per token and the share of the experts that is local stay. What one size decides (blocks
        along it, twice the intermediate size) shrinks with it or, where one of these axes is fixed, not at all.
        """
        found, axes = mixture_of(definition), self.form(definition).axes(definition)
        experts = self._fewer(found.routing)
        local = found.routing.local * experts // found.routing.experts
        wide, both = INTERMEDIATE, 2 * INTERMEDIATE
        groups = (
            {"h": HIDDEN, "a": HIDDEN // BLOCK} if found.hidden > HIDDEN else {},
            {"i": wide, "m": both, "c": wide // BLOCK, "b": both // BLOCK} if found.intermediate > wide else {},
            {"l": local, "e": experts},
        )
        smaller = [{axes[one]: size for one, size in group.items() if one in axes} for group in groups]
        if definition.const_axes.get("num_experts") == found.routing.experts:
            smaller[-1]["num_experts"] = experts  # where tokens come with their experts, no shape has it
        return {axis: size for group in smaller if group.keys().isdisjoint(fixed) for axis, size in group.items()}

    @staticmethod
    def _fewer(found: Routing) -> int:
        """The smallest number of experts that groups, the choice in them and the local share allow."""
        group = found.experts // found.groups
        enough = min(CANDIDATES * found.top_k, group * found.top_groups)
        for per_group in range(2, group):
            experts = per_group * found.groups
            local, rest = divmod(experts * found.local, found.experts)
            whole = group % per_group == 0 and not rest and local >= min(2, found.local)
            if whole and experts >= LEAST and per_group * found.top_groups >= enough:
                return experts
        return found.experts


def stored(*scalings: Scaling) -> Callable[[Wide], bool]:
    """Whether weights are stored in one of these ways."""
    return lambda wide: mixture_of(wide.definition).scaling in scalings


def roll(value: torch.Tensor, axis: int, shift: int = 1) -> torch.Tensor:
    """`torch.roll`, which knows no float8."""
    narrow = value.dtype.itemsize == 1
    bits = value.view(torch.uint8) if narrow else value
    return bits.roll(shift, axis).view(value.dtype) if narrow else bits.roll(shift, axis)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """The numbers read in the order of the transposed matrix."""
    return value.transpose(-1, -2).reshape(value.shape)


def last_columns_dropped(value: torch.Tensor) -> torch.Tensor:
    """A kernel that stops one tile of K early."""
    return torch.cat([value[..., :-BLOCK], torch.zeros_like(value[..., -BLOCK:])], -1)


def ones(value: torch.Tensor) -> torch.Tensor:
    """Scales that are ignored."""
    return torch.ones_like(value)


MOE = Experts(
    "moe",
    *(Form(f"{WEIGHTS} {scales} {chooser} -> output[t h]", mixture) for scales in SCALES for chooser in CHOOSERS),
    family="moe",
    long=True,
    rules=routing.COUNTS,
    draws={
        **dict.fromkeys(RMS, drawn_data),
        **dict.fromkeys(SPREADS, drawn_scale),
        "routing_logits": routing.drawn_logits,
        "routing_bias": routing.drawn_bias,
        "topk_ids": routing.drawn_ids,
    },
    adjust=tie,
    lossless=exact_mixture,
    apart=False,
    mutants=(
        altered("gate and up swapped", *GEMM1, change=lambda value: roll(value, 1, value.shape[1] // 2)),
        altered("gemm1's scales transposed", GEMM1[1], change=transposed),
        altered("gemm2's scales transposed", GEMM2[1], change=transposed),
        altered("token scales read as [tokens, blocks]", "hidden_states_scale", change=transposed),
        altered("gemm1's scales one block off", GEMM1[1], change=partial(roll, axis=-1)),
        altered("gemm2's scales one row of blocks off", GEMM2[1], change=partial(roll, axis=-2)),
        altered("token scales one token off", "hidden_states_scale", change=partial(roll, axis=-1)),
        altered("scales of tokens ignored", "hidden_states_scale", change=ones),
        altered("scales of gemm1 ignored", GEMM1[1], change=ones),
        altered("scales of gemm2 ignored", GEMM2[1], change=ones),
        altered("scales of the next expert", UP_SCALE, GATE_SCALE, DOWN_SCALE, change=partial(roll, axis=0)),
        altered("scale of the result ignored", DOWN_SCALE, change=ones),
        Mutant(
            "scales of gate and up swapped",
            applies=stored(Scaling.FP8_TENSOR),
            inputs=lambda wide: {UP_SCALE: wide[GATE_SCALE], GATE_SCALE: wide[UP_SCALE]},
        ),
        altered("weights of the next expert", *GEMM1, change=partial(roll, axis=0)),
        altered("last tile of K dropped in gemm1", GEMM1[0], change=last_columns_dropped),
        altered("last tile of K dropped in gemm2", GEMM2[0], change=last_columns_dropped),
        Mutant("gelu for silu", activation=lambda gate: torch.nn.functional.gelu(gate)),
        Mutant("sigmoid for silu", activation=lambda gate: torch.sigmoid(gate)),
        Mutant("routing weight at the other end", other_end=True),
        altered("local expert offset plus one", "local_expert_offset", change=lambda offset: offset + 1),
        altered("local expert offset ignored", "local_expert_offset", change=lambda _: 0),
        altered("scaling factor dropped", "routed_scaling_factor", change=lambda _: 1.0),
        Mutant("one local expert idle", idle=True),
        *routing.MISROUTED,
    ),
)

# FlashInfer's TensorRT-LLM mixtures: kernels of SM 10.x, fetched as binaries.

ROUTING_METHOD_TYPE = {Method.DEEPSEEK: 2, Method.RENORMALISE: 1, Method.LLAMA4: 3}
ROUTER = "routing_logits hidden_states gemm1_weights gemm2_weights [routing_bias]"
PER_BLOCK = f"{ROUTER} hidden_states_scale {GEMM1[1]} {GEMM2[1]} [local_expert_offset] [routed_scaling_factor]"
PER_TENSOR = f"{ROUTER} {UP_SCALE} {GATE_SCALE} {DOWN_SCALE}"
in_flashinfer = partial(MOE.truth, "flashinfer", rows="hidden_states", sm=((10, 0), (10, 9)))


def sizes_of(found: Mixture) -> dict[str, Any]:
    """What both calls are told of the sizes; groups in DeepSeek's routing alone."""
    chosen, grouped = found.routing, found.routing.method is Method.DEEPSEEK
    return {
        "num_experts": chosen.experts,
        "top_k": chosen.top_k,
        "n_group": chosen.groups if grouped else None,
        "topk_group": chosen.top_groups if grouped else None,
        "intermediate_size": found.intermediate,
        "local_num_experts": chosen.local,
        "routing_method_type": ROUTING_METHOD_TYPE[chosen.method],
    }


@in_flashinfer("trtllm_fp8_block_scale_moe", "moe_fp8_block", serves=f"{PER_BLOCK} -> output")
def _flashinfer_per_block(api: Api, definition: Definition, inputs: Given) -> Outputs:
    found = mixture_of(definition)
    grouped = found.routing.method is Method.DEEPSEEK
    names = ("hidden_states", "hidden_states_scale", *GEMM1, *GEMM2)
    output = api["moe_fp8_block"](
        inputs["routing_logits"],
        inputs.get("routing_bias"),
        *(inputs[name] for name in names),
        **sizes_of(found),
        local_expert_offset=int(scalar(inputs, "local_expert_offset")) if "local_expert_offset" in inputs else 0,
        routed_scaling_factor=scalar(inputs, "routed_scaling_factor") if grouped else None,
        use_shuffled_weight=False,
    )
    return {"output": output}


@in_flashinfer("trtllm_fp8_per_tensor_scale_moe", "moe_fp8_tensor", serves=f"{PER_TENSOR} -> output")
def _flashinfer_per_tensor(api: Api, definition: Definition, inputs: Given) -> Outputs:
    found = mixture_of(definition)
    llama = found.routing.method is Method.LLAMA4
    names = ("hidden_states", GEMM1[0], UP_SCALE, GATE_SCALE, GEMM2[0], DOWN_SCALE)
    output = api["moe_fp8_tensor"](
        inputs["routing_logits"],
        None if llama else inputs.get("routing_bias"),
        *(inputs[name] for name in names),
        **(sizes_of(found) | {"n_group": None, "topk_group": None}),
        local_expert_offset=0,
        routed_scaling_factor=None,
        use_routing_scales_on_input=llama,
    )
    return {"output": output}


# SGLang's router and experts, both Triton. Groups of experts are chosen in native form: where the two best of a
# group are equal, the router (0.5.22, 0.5.23) adds the third to the best in place of the second, and may keep
# another group. It holds gate before up, so the halves are swapped. Weights that its kernels can not read (an fp8
# scale per expert, fp4 values as float32) become bfloat16.

FOREIGN = -1  # the kernel leaves out an expert of this index
ANY = (
    "hidden_states gemm1_weights gemm2_weights [routing_logits] [routing_bias] [topk_ids] [local_expert_offset]"
    " [routed_scaling_factor] [hidden_states_scale] [gemm1_weights_scale] [gemm2_weights_scale]"
    f" [{UP_SCALE}] [{GATE_SCALE}] [{DOWN_SCALE}]"
)


def sglang_choice(api: Api, definition: Definition, inputs: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and global experts, [tokens, top_k]."""
    chosen = routing_of(definition)
    if chosen.given:
        ids = inputs["topk_ids"]
        if chosen.method is Method.UNIFORM:
            return torch.full(ids.shape, 1 / chosen.top_k, device=ids.device), ids
        return (ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float(), ids >> PACKED_SHIFT
    logits = inputs["routing_logits"].float().contiguous()
    if chosen.method is Method.RENORMALISE:
        weights, experts = api["router"](logits, None, chosen.top_k, scoring_func="softmax")
        return weights, experts
    if chosen.method is Method.LLAMA4:
        none = logits.new_zeros(logits.shape[1])
        weights, experts = api["router"](logits, none, chosen.top_k, scoring_func="sigmoid", renormalize=False)
        return weights, experts
    bias = inputs["routing_bias"].float()
    if chosen.groups > 1:
        weights, experts = api["grouped_topk"](
            inputs["hidden_states"],
            logits,
            bias,
            topk=chosen.top_k,
            renormalize=True,
            num_expert_group=chosen.groups,
            topk_group=chosen.top_groups,
        )[:2]
    else:
        weights, experts = api["router"](logits, bias, chosen.top_k, scoring_func="sigmoid")
    return weights * scalar(inputs, "routed_scaling_factor"), experts


def gate_first(weights: torch.Tensor) -> torch.Tensor:
    """Up before gate to gate before up, along the rows of every expert."""
    up, gate = weights.chunk(2, dim=1)
    return torch.cat([gate, up], dim=1)


@MOE.truth("sglang", "fused_experts_impl", "experts", "router", "grouped_topk", serves=f"{ANY} -> output", sm=SM89)
def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Activations in fp8 are handed over quantised, so that they are not rounded twice."""
    publish()
    found = mixture_of(definition)
    weights, experts = sglang_choice(api, definition, inputs)
    offset = int(scalar(inputs, "local_expert_offset")) if "local_expert_offset" in inputs else 0
    local = experts.to(torch.int32) - offset
    here = (local >= 0) & (local < found.routing.local)
    hidden, first, second = inputs["hidden_states"], inputs[GEMM1[0]], inputs[GEMM2[0]]
    options: dict[str, Any] = {}
    if found.scaling is Scaling.FP8_BLOCK:
        scales = inputs["hidden_states_scale"].t().contiguous()
        options = {
            "use_fp8_w8a8": True,
            "block_shape": [BLOCK, BLOCK],
            "w1_scale": gate_first(inputs[GEMM1[1]]),
            "w2_scale": inputs[GEMM2[1]],
            "a1_q": hidden,
            "a1_scale": scales,
        }
        hidden = (hidden.float() * scales.repeat_interleave(BLOCK, dim=1)).to(torch.bfloat16)
        first = gate_first(first.view(torch.uint8)).view(torch.float8_e4m3fn)
    else:
        if found.scaling is Scaling.FP8_TENSOR:
            up, gate, down = (inputs[name].view(-1, 1, 1) for name in (UP_SCALE, GATE_SCALE, DOWN_SCALE))
            rows = torch.cat([up.expand(-1, found.intermediate, 1), gate.expand(-1, found.intermediate, 1)], 1)
            first, second = first.float() * rows, second.float() * down
        hidden, first, second = hidden.bfloat16(), gate_first(first.bfloat16()), second.bfloat16()
    output = api["experts"](
        hidden,
        first,
        second,
        weights.float().contiguous(),
        torch.where(here, local, FOREIGN).contiguous(),
        apply_router_weight_on_input=found.weight_on_input,
        **options,
    )
    return {"output": output}


# Mixtures in models, and which of them the dataset has a form for.

BESIDE = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")  # numbers of an activation that is more than silu
FP8_BLOCK = f"float8_e4m3fn block {BLOCK}x{BLOCK}"
SKELETONS = {
    (FP8_BLOCK, "deepseek_v3"): "moe_fp8_ds_routing",
    (FP8_BLOCK, "renormalise"): "moe_fp8_renorm",
    ("bfloat16", "renormalise"): "moe_bf16_renorm",
}
# Of a definition to check a reference by. What decides behaviour (groups, top-k, offset) stays.
SMALL_HIDDEN, SMALL_INTERMEDIATE = 256, 128


def _experts(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    runner, config = module.moe_runner_config, getattr(module, "quant_config", None)
    beside = [name for name in BESIDE if getattr(runner, name, None) is not None]
    beside += ["bias"] * any(name.endswith("_bias") for name, _ in module.named_parameters(recurse=False))
    own: Facts = {"beside": ", ".join(beside)} if beside else {}
    dtype = dtype_name(module.w13_weight) if hasattr(module, "w13_weight") else "packed"
    block = getattr(config, "weight_block_size", None)
    if dtype == "float8_e4m3fn" and block:
        dtype = f"float8_e4m3fn block {block[0]}x{block[1]}"
    elif config is not None:
        dtype = f"{dtype} {type(config).__name__}"
    return own | {
        "experts": module.num_experts,
        "local_experts": module.num_local_experts,
        "shared_fused": module.num_fused_shared_experts,
        "top_k": module.top_k,
        "hidden": module.hidden_size,
        "intermediate": module.intermediate_size_per_partition,
        "routing": getattr(module.routing_method_type, "name", None),
        "gate": runner.activation,
        "gated": runner.is_gated,
        "scaling_factor": runner.routed_scaling_factor,
        "quantisation": dtype,
    }


def _call(module: ModelModule, reading: Reading) -> KernelCall | str:
    facts = module.facts
    beside = (module.parent, module.parent_class)
    routers = [one for one in reading.modules if one.kind == "top_k" and (one.parent, one.parent_class) == beside]
    if not routers:
        return "its router has no top-k beside it, so the routing is not known"
    chosen = routers[-1].facts
    _, _, method = routing.read_top_k(chosen)
    # What of these experts, or of their router, no form can say.
    without = routing.formless(chosen)
    if without is None and "beside" in facts:
        without = f"more than silu: {facts['beside']}, which no form can say"
    if without is None and (not facts["gated"] or facts["gate"] != "silu"):
        without = f"activation {facts['gate']}, gated {facts['gated']}: no form"
    if without is None and "scheme" in facts:
        without = f"weights packed by {facts['scheme']}: no form"
    if without is not None:
        return f"experts with {without}"
    return call_of(
        module,
        "experts",
        *("experts", "local_experts", "hidden", "intermediate", "quantisation"),
        routing=method,
        top_k=chosen["top_k"],
        groups=chosen["groups"] or 1,
        kept_groups=chosen["kept_groups"] or 1,
    )


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Quantisation by config.json: transformers' model holds no weights, so none that are quantised."""
    tp, ep, config = evidence.parallel.tp, evidence.parallel.ep, evidence.config
    given = config.get("quantization_config") or {}
    block, method = given.get("weight_block_size"), given.get("quant_method")
    quantisation = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if given:
        quantisation = f"packed {method}"
    if method == "fp8" and block:
        quantisation = f"float8_e4m3fn block {block[0]}x{block[1]}"
    return {
        "experts": facts["experts"],
        "local_experts": facts["experts"] // ep,
        "hidden": facts["hidden"],
        "intermediate": facts["intermediate"] // max(1, tp // ep),
        "gated": facts["gated"],
        "routing": routing.method_of(facts.get("scoring"), facts.get("renormalise"), facts.get("groups", 1) > 1),
        "quantisation": quantisation,
        **{name: facts.get(name) for name in ("top_k", "groups", "kept_groups")},
    }


def mixture_draft(call: KernelCall) -> Draft | str:
    """The definition of a mixture, or why the dataset has no form for it."""
    kind, method = call["quantisation"], call["routing"]
    hidden, intermediate = call["hidden"], call["intermediate"]
    if method == "softmax":
        return "softmax weights that are not renormalised over the chosen experts: the dataset has no such form"
    if kind == FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
        return f"hidden {hidden} or intermediate {intermediate} per rank is no multiple of the block, {BLOCK}"
    skeleton = SKELETONS.get((kind, method))
    if skeleton is None:
        return f"{kind} weights with {method} routing: the dataset has no such form"
    local, note = call["local_experts"], ""
    if method == "renormalise" and call["experts"] != local:
        note = f" A rank holds {local} of {call['experts']} experts; the form routes over those alone."

    def drafted(hidden: int, intermediate: int, smaller: Draft | None) -> Draft:
        sizes = {"hidden": hidden, "intermediate": intermediate, "both": 2 * intermediate}
        blocks = {f"{name}_blocks": size // BLOCK for name, size in sizes.items()}
        return draft(
            MOE.op_type, skeleton, dict(call.facts) | sizes | blocks | {"note": note}, scaled_down=smaller
        )

    return drafted(hidden, intermediate, drafted(SMALL_HIDDEN, SMALL_INTERMEDIATE, None))


MOE.extraction = Extraction(
    readers={"FusedMoE": ("experts", _experts), "TopK": ("top_k", routing.facts_of_top_k)},
    calls={"experts": _call, "top_k": routing.why_no_call},
    differs={"experts": held_against("experts", _terms, gated=True)},
    drafts={"experts": lambda call, _: [mixture_draft(call)]},
)
