"""Mixtures of experts: the weighted sum of what a token's chosen experts compute. `routing` chooses the experts.

Conventions where the schema leaves room, all of them FlashInfer 0.6.13's:

- gemm1's rows are up first, then gate (KernelRunner.h: gatedAct = scaleC * x0 * silu(x1 * scaleGate)).
- fp8 per tensor: output1_scales_scalar multiplies up, output1_scales_gate_scalar gate, output2_scales_scalar the
  result. With top_k 1 routing is Llama 4's: sigmoid of the largest logit, multiplied onto the token before the
  first product (the kernel hands it to gemm1 and leaves it out at the end). A routing_bias is not read.
- Everywhere else the routing weight multiplies the expert's result.
- fp4 with float32 weights: the values are exactly those that fp4 codes and scales stand for. Activations are taken
  unrounded; a kernel that rounds them to mxfp8 first is within the tolerance, one that takes nvfp4 is not.
- topk_ids: packed (expert << 16 | bfloat16 weight) if the reference shifts right by 16; else expert indices that
  weigh 1 / top_k each, as FlashInfer's own trace template has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from traceproof.dataset.constraints import text_of
from traceproof.lazy import torch
from traceproof.models.drafts import Draft, Extraction, Facts, call_of, compared_with, draft, dtype_name
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM89, Api, Definition, Given, Outputs, dim, scalar
from traceproof.ops.base import Tensors, Unsupported, Value, Values
from traceproof.ops.cases import BOUNDARY_ROWS, SEEN, Case, at_boundaries, boundaries
from traceproof.ops.compare import Comparison, Exact, Quantised
from traceproof.ops.families import routing
from traceproof.ops.families.blockscaled import ANY_BYTES, below, between, ones
from traceproof.ops.families.routing import PACKED_SHIFT, ROLES, Method, Routing, choice_of, named, routing_of
from traceproof.ops.formats import (
    BLOCK,
    E2M1,
    E4M3,
    E8M0,
    FP4_BLOCK,
    FP4_VALUES,
    FP8_BITS_RMS,
    MX_BLOCK,
    pack,
    scale_blocks,
    swizzled_size,
    unpack,
    unswizzle,
)
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.lossless import BALANCED, SURE, Exactly, balanced, full, one_hot
from traceproof.ops.op import ADVERSARIAL, LARGE_AND_SMALL, SIZES, Op
from traceproof.stacks.sglang import publish

if TYPE_CHECKING:
    from traceproof.draw import Draw

# Optional inputs with their axes (t: tokens, l: local experts, h: hidden size, *: any); `shapes` has the sizes.

UP_SCALE, GATE_SCALE, DOWN_SCALE = "output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"
GEMM1, GEMM2 = ("gemm1_weights", "gemm1_weights_scale"), ("gemm2_weights", "gemm2_weights_scale")
OF_ACTIVATION = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
BIASES = ("gemm1_bias", "gemm2_bias")
SCALES = "gemm1_weights_scale gemm1_weights_scale_1 gemm2_weights_scale gemm2_weights_scale_1"
# inputs whose first axis is the local experts
OF_EXPERTS = (*GEMM1, *GEMM2, UP_SCALE, GATE_SCALE, DOWN_SCALE, *OF_ACTIVATION, *BIASES)
TENSORS = f"""
{UP_SCALE}[l] {GATE_SCALE}[l] {DOWN_SCALE}[l] gemm1_alpha[l] gemm1_beta[l] gemm1_clamp_limit[l] gemm1_bias[l *]
gemm2_bias[l *] hidden_states_scale[*] gemm1_weights_scale[*] gemm2_weights_scale[*] gemm1_weights_1[l *]
gemm2_weights_1[l *] gemm1_weights_scale_1[*] gemm2_weights_scale_1[*] routing_logits[t *] routing_bias[*]
topk_ids[t *] topk_weights[t *] sorted_token_ids[*] expert_ids[*] num_tokens_post_padded[*] out[t h]
fc2_input_scale[*] per_token_scale[*] input_global_scale[*] expert_map[*] w1_scale_prepared[*]
w2_scale_prepared[*]
"""
NUMBERS = """
routed_scaling_factor local_expert_offset top_k num_experts n_group topk_group routing_method_type
activation_type fp8_quantization_type intermediate_size local_num_experts num_local_experts
num_fused_shared_experts use_shuffled_weight weight_layout do_finalize enable_pdl quant_mode
activation_precision source_format partition_strategy block_m swiglu_alpha swiglu_beta swiglu_limit situ_beta
situ_linear_beta
"""
STATED = {*NUMBERS.split()} - {"routed_scaling_factor", "local_expert_offset"}  # by axes and constants, too
OPTIONAL = re.sub(r"(\w+(\[[^]]*\])?)", r"\1?", f"{TENSORS} {NUMBERS}")


class Scaling(StrEnum):
    """How weights are stored.

    FP8_BLOCK: float8 with float32 scales, 128 x 128 for weights and 1 x 128 for activations.
    FP8_TENSOR: float8, one scale per expert for up, gate and down.
    FP4: float32 that holds already dequantised fp4 values; activations come unquantised.
    PLAIN: 16-bit floats.
    MXFP8, NVFP4, MXFP4, MXINT4: codes, with a scale per block of a row: 32 codes and e8m0, 16 and e4m3, 32 and
        e8m0, 32 and bfloat16; a byte has two codes of four bits, the first in its low half.
    """

    FP8_BLOCK = "fp8_block"
    FP8_TENSOR = "fp8_tensor"
    FP4 = "fp4"
    PLAIN = "plain"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXINT4 = "mxint4"


# Format by the dtypes of weights and of their scales; "": no scales, "tensor": one scale per expert.
STORED: Mapping[tuple[str, str], Scaling] = {
    ("float8_e4m3fn", "float32"): Scaling.FP8_BLOCK,
    ("float8_e4m3fn", "tensor"): Scaling.FP8_TENSOR,
    ("float32", ""): Scaling.FP4,
    ("bfloat16", ""): Scaling.PLAIN,
    ("float16", ""): Scaling.PLAIN,
    **dict.fromkeys((("float8_e4m3fn", kind) for kind in ("uint8", "float8_e8m0fnu")), Scaling.MXFP8),
    ("uint8", "float8_e4m3fn"): Scaling.NVFP4,
    **dict.fromkeys((("uint8", kind) for kind in ("uint8", "float8_e8m0fnu")), Scaling.MXFP4),
    ("uint8", "bfloat16"): Scaling.MXINT4,
}


def two_codes(packed: torch.Tensor) -> torch.Tensor:
    """Values of bytes with two e2m1 codes each, uint8 [..., n] to [..., 2 n]."""
    return E2M1.decode(unpack(packed))


@dataclass(frozen=True, slots=True)
class Codes:
    """A format's decoding of codes and of block scales, its codes per block, and the RMS of random codes."""

    values: Part
    scales: Part
    block: int
    rms: float


CODES: Mapping[Scaling, Codes] = {
    Scaling.FP8_BLOCK: Codes(same, same, BLOCK, FP8_BITS_RMS),
    Scaling.MXFP8: Codes(same, E8M0.decode, MX_BLOCK, FP8_BITS_RMS),
    Scaling.NVFP4: Codes(two_codes, E4M3.decode, FP4_BLOCK, 2.93),
    Scaling.MXFP4: Codes(two_codes, E8M0.decode, MX_BLOCK, 2.93),
    Scaling.MXINT4: Codes(lambda packed: (unpack(packed).to(torch.int8) ^ 8) - 8, same, MX_BLOCK, 4.64),  # -8 to 7
}
FOUR = (Scaling.NVFP4, Scaling.MXFP4, Scaling.MXINT4)  # two codes to a byte
# Format of activations by their dtype, and by whether the weights' scales are e8m0.
TOKENS: Mapping[tuple[str, bool], Scaling] = {
    ("float8_e4m3fn", False): Scaling.FP8_BLOCK,
    ("float8_e4m3fn", True): Scaling.MXFP8,
    ("uint8", False): Scaling.NVFP4,
    ("uint8", True): Scaling.MXFP4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Order of gemm1's rows that a kernel takes: all of up, then all of gate, unless an attribute differs.

    Attributes:
        alternating: rows of up that alternate with as many of gate; 0: all rows of up, then all of gate.
        gate_first: gate comes before up.
        shuffled: up and gate alternate by row; row r of each 32, of gemm2, too, is at r % 4 * 8 + r // 4.
        tiled: scales are in tiles of 128 rows and 4 columns.
        parts: number of tensors that a weight is split into.
    """

    alternating: int = 0
    gate_first: bool = False
    shuffled: bool = False
    tiled: bool = False
    parts: int = 1

    def order(self, rows: int, *, gated: bool, blocks: bool = False) -> torch.Tensor:
        """Stored row of each row of up, then of gate, int64 [rows]; with `blocks` of each row of their scales."""
        stored = torch.arange(rows)
        if gated:
            run = 1 if self.shuffled or (blocks and self.alternating) else self.alternating or rows // 2
            first, second = stored.view(rows // (2 * run), 2, run).unbind(1)
            stored = torch.cat((second, first) if self.gate_first else (first, second)).flatten()
        return stored // 32 * 32 + stored % 4 * 8 + stored % 32 // 4 if self.shuffled else stored


# Layouts by input names that only one kernel's call has; the first whose names are all inputs is taken.
LAYOUTS: Sequence[tuple[Collection[str], Layout]] = (
    (("sorted_token_ids", "output1_scale_scalar"), Layout(gate_first=True)),
    (("sorted_token_ids",), Layout(alternating=8, gate_first=True)),
    (("expert_weights_up",), Layout(gate_first=True)),
    (("gemm1_weights_0",), Layout(shuffled=True, tiled=True, parts=2)),
    (("w1_weight", "w1_alpha"), Layout()),
    (("w1_weight",), Layout(alternating=32)),
)
SWIGLU, GEGLU, RELU2, SWIGLU_STEP, GEGLU_TANH = 3, 4, 6, 7, 8  # FlashInfer's ActivationType


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Formats, routing, sizes and layout of a definition's experts, of which `routing.local` are on this rank."""

    scaling: Scaling
    tokens: Scaling | None  # format of activations; None: floats without scales
    routing: Routing
    hidden: int
    intermediate: int
    activation: int = SWIGLU
    layout: Layout = Layout()
    by_columns: bool = False  # whether gemm2 is cut along its columns, if there are two parts

    @property
    def weight_count(self) -> int:
        """Elements of both weight tensors."""
        return 3 * (self.routing.local + self.routing.shared) * self.hidden * self.intermediate

    @property
    def gated(self) -> bool:
        """Whether gemm1 computes a gate as well as up."""
        return self.activation != RELU2

    @property
    def usual(self) -> bool:
        """Whether the layout is the default one, the activation SwiGLU, and no expert shared."""
        return self.layout == Layout() and self.activation == SWIGLU and not self.routing.shared

    @property
    def weight_on_input(self) -> bool:
        """Whether the routing weight multiplies the token before the first product, not the expert's result."""
        return self.scaling == Scaling.FP8_TENSOR and self.routing.method == Method.LLAMA4


def mixture_of(definition: Definition) -> Mixture:
    """Mixture that a definition's inputs, axes and constants describe; raises Unsupported if it is unknown."""
    inputs, const = named(definition), definition.const_axes
    weight, scale, token_dtype = inputs[GEMM1[0]], inputs.get(GEMM1[1]), inputs["hidden_states"].dtype.value
    per_expert = {UP_SCALE, GATE_SCALE, DOWN_SCALE} <= inputs.keys()
    scale_dtype = scale.dtype.value if scale is not None else "tensor" if per_expert else ""
    scaling = STORED.get((weight.dtype.value, scale_dtype))
    if scaling is None:
        raise Unsupported(f"weights are {weight.dtype.value} with the inputs {list(definition.inputs)}")
    coded_tokens = scaling in CODES and token_dtype in {"float8_e4m3fn", "uint8"}
    needed = {GEMM2[1]} if scaling in CODES else set()
    needed |= {"hidden_states_scale"} if coded_tokens else set()
    if lacking := needed - inputs.keys():
        raise Unsupported(f"inputs lack {sorted(lacking)}")
    activation = const.get("activation_type", SWIGLU)
    if activation not in ACTIVATIONS:
        raise Unsupported(f"activation {activation} is none of {sorted(ACTIVATIONS)}")
    layout = next((one for names, one in LAYOUTS if set(names) <= definition.inputs.keys()), Layout())
    shuffled = scaling in {Scaling.FP8_TENSOR, Scaling.NVFP4} or len(weight.shape or ()) == 4
    if activation == SWIGLU_STEP and shuffled:
        layout = Layout(shuffled=True, tiled=True)
    rows = const.get((weight.shape or ())[-2], 2 * INTERMEDIATE // layout.parts) * layout.parts
    hidden = const.get((next(iter(definition.outputs.values())).shape or ())[-1], -1)
    if layout.parts > 1 and scaling is Scaling.NVFP4 and scale is not None:  # may be e8m0, one per 32 codes
        local, scales = (const.get(spec.shape[0], 0) for spec in (weight, scale) if spec.shape)
        scaling = Scaling.MXFP4 if scales * MX_BLOCK * layout.parts <= local * rows * hidden else scaling
    by_powers = scaling in {Scaling.MXFP8, Scaling.MXFP4}
    mixture = Mixture(
        scaling=scaling,
        tokens=TOKENS.get((token_dtype, by_powers)) if coded_tokens else None,
        routing=routing_of(definition),
        hidden=hidden,
        intermediate=rows // 2 if activation != RELU2 else rows,
        activation=activation,
        layout=layout,
        by_columns=text_of(definition, "partition_strategy") == "tp_n_tp_k",
    )
    if scaling is Scaling.FP8_BLOCK and mixture.intermediate % BLOCK:
        alike = -(-rows // BLOCK) == 2 * -(-mixture.intermediate // BLOCK)
        if mixture.gated and (alike or layout != Layout()):
            raise Unsupported(
                f"nobody states whether a block has rows of up and gate, {mixture.intermediate} each"
            )
    for axis, size in sizes_by(definition, mixture, fixed_tokens(definition, mixture) or 1).items():
        if const.get(axis, size) != size:
            contradiction = f"{axis} is {const[axis]}, and {size} by other axes"
            raise Unsupported(f"{contradiction}: experts are not gated, or stored in another way")
    return mixture


def fixed_tokens(definition: Definition, mixture: Mixture) -> int | None:
    """Number of tokens, if it is const, or the scales of activations are 1-D and of a const size; else None."""
    rows = (next(iter(definition.outputs.values())).shape or ("",))[0]
    if rows in definition.const_axes:
        return definition.const_axes[rows]
    scale = named(definition).get("hidden_states_scale")
    shape = () if scale is None or mixture.tokens is None else scale.shape or ()
    size = definition.const_axes.get(shape[0]) if len(shape) == 1 else None
    return None if size is None else size * CODES[mixture.tokens or mixture.scaling].block // mixture.hidden


def by_blocks_first(definition: Definition, mixture: Mixture) -> bool:
    """Whether scales of activations are [blocks, tokens] instead of [tokens, blocks]."""
    return mixture.tokens is Scaling.FP8_BLOCK and "sorted_token_ids" not in definition.inputs


def tensor_shapes(definition: Definition, mixture: Mixture, tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that a mixture with `tokens` tokens may have, by the names of this file."""
    routing, hidden = mixture.routing, mixture.hidden
    local, rows = routing.local + routing.shared, mixture.intermediate * (2 if mixture.gated else 1)
    shapes: dict[str, tuple[int, ...]] = {
        **dict(weight_shapes(definition, mixture)),
        **dict.fromkeys((UP_SCALE, GATE_SCALE, DOWN_SCALE, *OF_ACTIVATION), (local,)),
        BIASES[0]: (local, rows),
        BIASES[1]: (local, hidden),
        **dict.fromkeys(definition.outputs, (tokens, hidden)),
        "routing_bias": (routing.experts,),
        "routing_logits": (tokens, routing.experts),
        **dict.fromkeys(("topk_ids", "topk_weights"), (tokens, routing.top_k)),
        "hidden_states": (tokens, hidden // 2 if mixture.tokens in FOUR else hidden),
    }
    if mixture.tokens is not None:
        blocks = -(-hidden // CODES[mixture.tokens].block)
        grid = (blocks, tokens) if by_blocks_first(definition, mixture) else (tokens, blocks)
        is_flat = len(named(definition)["hidden_states_scale"].shape or ()) == 1
        shapes["hidden_states_scale"] = (tokens * blocks,) if is_flat else grid
    if routing.method is Method.PLANNED:
        pairs, block = tokens * routing.top_k, definition.const_axes.get("block_m", 8)
        blocks = min(routing.local, pairs) + pairs // block + 1
        shapes |= {"expert_ids": (blocks,), "sorted_token_ids": (blocks * block,)}
    return shapes


def weight_shapes(definition: Definition, mixture: Mixture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the weights' parts and of their scales, which are () if there are none."""
    inputs, parts, local = named(definition), mixture.layout.parts, mixture.routing.local + mixture.routing.shared
    rank = {name: len(spec.shape or ()) for name, spec in inputs.items()}
    up_and_gate = mixture.intermediate * (2 if mixture.gated else 1)
    down_rows, down_columns = (1, parts) if mixture.by_columns else (parts, 1)  # number of parts along them
    for name, rows, columns in (
        (GEMM1[0], up_and_gate // parts, mixture.hidden),
        (GEMM2[0], mixture.hidden // down_rows, mixture.intermediate // down_columns),
    ):
        stored = columns // (2 if mixture.scaling in FOUR else 1)
        inner = definition.const_axes.get((inputs[name].shape or ("",))[-1], 1)  # columns that are split off
        weight = (local, rows, stored) if rank[name] == 3 else (local, stored // inner, rows, inner)
        scale: tuple[int, ...] = ()
        if mixture.scaling in CODES:
            block = CODES[mixture.scaling].block
            grid = (rows, columns // block)
            if mixture.scaling is Scaling.FP8_BLOCK:
                apart = 2 * -(-rows // (2 * block))  # if gate begins a block, too
                stated = definition.const_axes.get((inputs[f"{name}_scale"].shape or ("", ""))[-2])
                halves = name == GEMM1[0] and mixture.gated and stated == apart
                grid = (apart if halves else -(-rows // block), -(-columns // block))
            tiles = (32, 4, -(-rows // 128), 4, -(-grid[1] // 4), local)
            scale = {1: (local * swizzled_size(*grid),), 6: tiles}.get(rank[f"{name}_scale"], (local, *grid))
        for suffix in ("", "_1")[:parts]:
            yield f"{name}{suffix}", weight
            yield f"{name}_scale{suffix}", scale


def sizes_by(definition: Definition, mixture: Mixture, tokens: int = 1) -> dict[str, int]:
    """Axis sizes that follow from the mixture and `tokens`; raises Unsupported if a tensor has another rank."""
    specs, sizes = {**named(definition), **definition.outputs}, {"num_experts": mixture.routing.experts}
    for name, shape in tensor_shapes(definition, mixture, tokens).items():
        axes = (specs[name].shape or ()) if name in specs and shape else ()
        if axes and len(axes) != len(shape):
            raise Unsupported(f"{name} has the shape {axes}")
        sizes |= dict(zip(axes, shape, strict=False))
    return {axis: size for axis, size in sizes.items() if axis in definition.axes}


# The formula.

SLICE = 1 << 22  # weight elements converted at a time, some 32 MiB in float64


Number = Union["torch.Tensor", None]  # of an activation, 0-d; None: the definition has none


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, curve: Part, alpha: Number, beta: Number, limit: Number, **_: Number
) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + beta)`; a limit first clamps gate from above, up from both sides."""
    if limit is not None:
        gate, up = torch.minimum(gate, limit), torch.clamp(up, -limit, limit)
    curved = curve(gate) if alpha is None else curve(alpha * gate) / alpha  # silu(a g) / a = g sigmoid(a g)
    return curved * (up if beta is None else up + beta)


def swiglu_step(
    gate: torch.Tensor, up: torch.Tensor, *, curve: Part, limit: Number, gate_scale: torch.Tensor, **_: Number
) -> torch.Tensor:
    """`silu(gate) * up`; a limit (default: 7 / gate_scale) clamps silu(gate) from above and up from both sides."""
    limit = 7.0 / gate_scale if limit is None else limit
    return torch.minimum(curve(gate), limit * gate_scale) * torch.clamp(up, -limit, limit)


# gate (times its scale) and up, with `curve` (SiLU, or a mutant's), `alpha`, `beta`, `limit`, `gate_scale` -> what
# gemm2 takes
ACTIVATIONS: Mapping[int, Callable[..., torch.Tensor]] = {
    SWIGLU: swiglu,
    GEGLU: lambda gate, up, **_: torch.nn.functional.gelu(gate) * up,
    RELU2: lambda gate, *_, **__: gate.relu() ** 2,
    SWIGLU_STEP: swiglu_step,
    GEGLU_TANH: lambda gate, up, **_: torch.nn.functional.gelu(gate, approximate="tanh") * up,
}
TAKEN = {SWIGLU: OF_ACTIVATION, SWIGLU_STEP: OF_ACTIVATION[2:]}  # inputs [local experts] that an activation takes


def experts_sum(
    wide: Wide,
    *,
    round_tokens: Part = same,
    round_gemm1: Part = same,
    round_activated: Part = same,
    round_result: Part = same,
    backwards: bool = False,
    curve: Part = lambda x: torch.nn.functional.silu(x),  # its gradient is finite where exp(-x) overflows
    activation: int | None = None,
    other_end: bool = False,
    idle: bool = False,
    add_out: bool = True,
    **ways: Any,  # noqa: ANN401 - those of `choice_of`
) -> Tensors:
    """`out = sum over chosen experts of weight * (silu(x @ gate.T) * (x @ up.T)) @ down.T`, [tokens, hidden].

    A kernel may round at four places, and add experts and K `backwards`. Mutants take another `curve` for SiLU or
    another of ACTIVATIONS, apply the routing weight at the `other_end`, leave the local expert with most tokens
    `idle`, do not add the input `out`, or route in other `ways`. In float64 `@roundings` is returned, too
    (`equal_roundings`).
    """
    mixture, choice = mixture_of(wide.definition), choice_of(wide, **ways)
    on_input = mixture.weight_on_input != other_end
    activated = ACTIVATIONS[mixture.activation if activation is None else activation]
    hidden = round_tokens(dequantised_tokens(wide, mixture))
    output = torch.zeros_like(hidden)
    local = choice.experts - int(wide.number("local_expert_offset", 0))
    chosen = local[(local >= 0) & (local < mixture.routing.local + mixture.routing.shared)]
    experts: list[int] = torch.unique(chosen).tolist()
    if idle and experts:
        experts.remove(int(chosen.mode().values))
    products = []
    per_expert = (UP_SCALE, GATE_SCALE, DOWN_SCALE, *BIASES, *OF_ACTIVATION)
    for expert in reversed(experts) if backwards else experts:
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        weight = choice.weights[tokens, slots][:, None]
        up_scale, gate_scale, down_scale, bias1, bias2, alpha, beta, limit = (
            wide[name][expert] if name in wide else None for name in per_expert
        )
        x = hidden[tokens] * weight if on_input else hidden[tokens]
        rows = round_gemm1(Matrix.of(wide, mixture, GEMM1[0], expert).product(x, backwards=backwards))
        rows = rows if bias1 is None else rows + bias1
        up, gate = rows.chunk(2, -1) if mixture.gated else (rows, rows)
        gate_scale = up_scale if gate_scale is None else gate_scale
        gate_scale = torch.ones_like(rows[0, 0]) if gate_scale is None else gate_scale
        numbers = {"alpha": alpha, "beta": beta, "limit": limit, "gate_scale": gate_scale}
        x = activated(gate * gate_scale, up, curve=curve, **numbers)
        x = round_activated(x if up_scale is None or not mixture.gated else x * up_scale)
        gemm2 = Matrix.of(wide, mixture, GEMM2[0], expert)
        y = round_result(gemm2.product(x, backwards=backwards))
        y = y if bias2 is None else y + bias2
        factor = torch.ones_like(weight) if on_input else weight
        factor = factor if down_scale is None else factor * down_scale
        output.index_add_(0, tokens, y * factor)
        products.append((gemm2, tokens, x * factor))
    name = next(iter(wide.definition.outputs))
    outputs = {name: output + wide["out"] if "out" in wide and add_out else output}
    if wide.dtype == torch.float64:
        with torch.no_grad():  # gradients are the output's
            outputs[f"{name}@roundings"] = equal_roundings(products, output)
    return outputs


def dequantised_tokens(wide: Wide, mixture: Mixture) -> torch.Tensor:
    """Activations [tokens, hidden] in the formula's precision."""
    stored = wide.given("hidden_states")
    if mixture.tokens is None:
        return stored.to(wide.dtype)
    codes = CODES[mixture.tokens]
    values = codes.values(stored).to(wide.dtype)
    scales = codes.scales(wide.given("hidden_states_scale")).to(wide.dtype)
    grid = (len(stored), -(-mixture.hidden // codes.block))
    transposed = scales.dim() == 2 and by_blocks_first(wide.definition, mixture)
    return scale_blocks(values, scales.t() if transposed else scales.reshape(grid), height=1, width=codes.block)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's weights [rows, columns], still coded, joined from their parts, all rows of up before gate's."""

    codes: Codes | None
    height: int  # rows that share a scale
    stored: torch.Tensor  # [rows, columns]; two codes of four bits per byte
    scales: torch.Tensor | None  # [rows / height, columns / block]
    dtype: torch.dtype  # of the dequantised rows

    @staticmethod
    def of(wide: Wide, mixture: Mixture, name: str, expert: int) -> Matrix:
        """Weights of an expert from the input `name`: gemm1's or gemm2's."""
        codes, layout, dtype = CODES.get(mixture.scaling), mixture.layout, wide.given(name).dtype
        parts, scales_of_parts = [], []
        for suffix in ("", "_1")[: layout.parts]:
            part = wide.given(f"{name}{suffix}")[expert]
            part = part if part.dim() == 2 else part.transpose(0, 1).flatten(1)
            parts.append(part.view(torch.uint8) if dtype.itemsize == 1 else part)
            if codes is not None:
                blocks = -(-part.shape[1] * (2 if dtype is torch.uint8 else 1) // codes.block)
                scales = wide.given(f"{name}_scale{suffix}")
                scales_of_parts.append(_expert_scales(scales, layout, expert, len(part), blocks))
        axis = int(mixture.by_columns and name == GEMM2[0])
        stored, all_scales = torch.cat(parts, axis), torch.cat(scales_of_parts, axis) if scales_of_parts else None
        gated = mixture.gated and name == GEMM1[0]
        if layout.shuffled or (gated and layout != Layout()):
            stored = stored[layout.order(len(stored), gated=gated).to(stored.device)]
            if all_scales is not None:
                order = layout.order(len(all_scales), gated=gated, blocks=len(all_scales) != len(stored))
                all_scales = all_scales[order.to(all_scales.device)]
        height = BLOCK if mixture.scaling is Scaling.FP8_BLOCK else 1
        if height > 1 and gated and all_scales is not None and len(all_scales) > -(-len(stored) // height):
            halves = (half.repeat_interleave(height, 0)[: len(stored) // 2] for half in all_scales.chunk(2))
            all_scales, height = torch.cat([*halves]), 1  # up and gate have blocks of their own
        return Matrix(codes, height, stored.view(dtype), all_scales, wide.dtype)

    def slices(self) -> Iterator[torch.Tensor]:
        """Successive rows of the weights, dequantised to `dtype`, about SLICE elements at a time."""
        rows = max(SLICE // self.stored.shape[1] // BLOCK, 1) * BLOCK
        for start in range(0, len(self.stored), rows):
            part = self.stored[start : start + rows]
            if self.codes is None or self.scales is None:
                yield part.to(self.dtype)
                continue
            scales = self.codes.scales(self.scales[start // self.height : (start + rows) // self.height])
            values = self.codes.values(part).to(self.dtype)
            yield scale_blocks(values, scales.to(self.dtype), height=self.height, width=self.codes.block)

    def product(self, rows: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
        """`rows @ weights.T`; `backwards` adds the products along K in the opposite order."""
        if backwards:
            return torch.cat([rows.flip(1) @ part.flip(1).t() for part in self.slices()], -1)
        return torch.cat([rows @ part.t() for part in self.slices()], -1)


def _expert_scales(scales: torch.Tensor, layout: Layout, expert: int, rows: int, blocks: int) -> torch.Tensor:
    """An expert's scales [rows of blocks, blocks of a row], as uint8 if their dtype has one byte."""
    scales = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales
    if scales.dim() == 6:  # tensor cores' order: [32 rows, 4 groups, row tiles, 4 columns, column tiles, experts]
        tiles = scales[..., expert].permute(2, 1, 0, 4, 3)
        return tiles.reshape(scales.shape[2] * 128, scales.shape[4] * 4)[:rows, :blocks]
    if layout.tiled:
        size = swizzled_size(rows, blocks)
        return unswizzle(scales.reshape(scales.numel() // size, size)[expert], rows, blocks)
    return scales[expert]


def equal_roundings(
    products: Iterable[tuple[Matrix, torch.Tensor, torch.Tensor]], output: torch.Tensor
) -> torch.Tensor:
    """Effective number of roundings of gemm2's input that the output's slope averages over: float64 [1].

    `products` has per expert gemm2's weights, the tokens' indices, and gemm2's input times the routing weight.
    Rounding element i of that input moves the output by a vector d_i. Of an error sum(r_i d_i) with independent
    r_i, the part along the output has, relative to the size of the whole error, a standard deviation of
    sqrt(sum (d_i . output)^2 / (|output|^2 sum |d_i|^2)). This is 1 / sqrt(n) for n equal orthogonal vectors that
    add up to the output; n is returned, far below the count of elements, as silu(gate) * up has heavy tails.
    """
    along_output = squares = 0.0  # sum (d_i . output)^2 and sum |d_i|^2
    for weights, tokens, x in products:
        output_by_x, norms, start = torch.zeros_like(x), torch.zeros_like(x[:1]), 0
        for part in weights.slices():
            output_by_x += output[tokens, start : start + len(part)] @ part
            norms += (part * part).sum(0, keepdim=True)
            start += len(part)
        along_output += float(((x * output_by_x) ** 2).sum())
        squares += float((x * x * norms).sum())
    count = float((output * output).sum()) * squares / along_output if along_output else 1.0
    return torch.tensor([count], dtype=torch.float64, device=output.device)


# Drawn data take the whole range of their formats; the gate's argument and the output are of order 1.

SPREAD = (0.25, 0.5, 1.0, 2.0, 4.0)  # powers of two that scales of activations are multiplied with, at random
WEIGHT_SPREAD = (0.5, 1.0, 2.0)
MX_SPREAD = (0.125, *SPREAD, 8.0)
MANTISSA = 1.53  # RMS of a number uniform in [1, 2)
SPREAD_RMS = (sum(x * x for x in SPREAD) / len(SPREAD)) ** 0.5
MX_SPREAD_RMS = (sum(x * x for x in MX_SPREAD) / len(MX_SPREAD)) ** 0.5
WEIGHT_SPREAD_RMS = (sum(x * x for x in WEIGHT_SPREAD) / len(WEIGHT_SPREAD)) ** 0.5
FP4_RMS = 3.2  # of uniform e2m1 codes with one 6 among 16
GATE_RMS = 1.5  # of silu's argument: far enough from 0 and from its straight part
ACTIVE_RMS = 1.2  # of silu(gate) * up where both have GATE_RMS
INNER = "inner-boundaries"  # drawing instruction: one channel of an expert, at an end of loops, is not 0
PLAN = ("topk_ids", "topk_weights", "sorted_token_ids", "expert_ids", "num_tokens_post_padded")  # choose experts
QUANT_MODES = {None: "w4a16", Scaling.NVFP4: "w4a4", Scaling.MXFP8: "w4a8"}
FP8_TYPES = {Scaling.FP8_BLOCK: 1, Scaling.MXFP8: 2}  # FlashInfer's Fp8QuantizationType
BIASED, LIMITED = "biased", "limited"  # values of the drawing instruction `extreme`: large biases, or low limits
BOUNDARY = 300.0  # the one channel of a token that is not zero
# One channel of activations in bfloat16, as models have some: above 448 * 6, where nvfp4 without a scale of the
# tensor ends. It is 6 times a power of two, which codes of fp4 hold exactly under a scale of their own.
MASSIVE = 6144.0
FACTOR = 2.5  # routed_scaling_factor, as DeepSeek-V3 has it

# RMS of inputs that are drawn as floats; of codes the bits are drawn.
RMS: Mapping[str, Callable[[Mixture], float]] = {
    "hidden_states": lambda _: 1.0,
    "gemm1_weights": lambda mixture: GATE_RMS / mixture.hidden**0.5,
    "gemm2_weights": lambda mixture: 1 / ACTIVE_RMS / mixture.intermediate**0.5,
}
# Per scale input the powers of two and the base: a scale is base * (a number in [1, 2)) * (one of the powers).
# With one scale per expert a kernel stores silu(gate) * up, times up's scale, in fp8 without a further scale. So
# this product must lie between 1/64, where its precision ends, and 448: up has RMS 2..16, gate 3/4..3.
SPREADS: Mapping[str, tuple[Sequence[float], Callable[[Mixture], float]]] = {
    "hidden_states_scale": (SPREAD, lambda mixture: one_of(mixture.tokens) / SPREAD_RMS),
    "gemm1_weights_scale": (
        WEIGHT_SPREAD,
        lambda mixture: GATE_RMS * one_of(mixture.scaling) / WEIGHT_SPREAD_RMS / mixture.hidden**0.5,
    ),
    "gemm2_weights_scale": (
        WEIGHT_SPREAD,
        lambda mixture: one_of(mixture.scaling) / WEIGHT_SPREAD_RMS / ACTIVE_RMS / mixture.intermediate**0.5,
    ),
    UP_SCALE: (WEIGHT_SPREAD, lambda mixture: _by_tensor(mixture, 4 / mixture.hidden**0.5, FP8_BITS_RMS**2)),
    GATE_SCALE: ((0.5, 1.0), lambda mixture: _by_tensor(mixture, 1.5 / mixture.hidden**0.5, FP8_BITS_RMS**2)),
    DOWN_SCALE: (
        WEIGHT_SPREAD,
        lambda mixture: _by_tensor(mixture, 0.1 / mixture.intermediate**0.5, FP8_BITS_RMS),
    ),
}


def role_of(wanted: Wanted) -> str:
    """The input's key in SPREADS and RMS: its name in this file, without the `_1` of a second part."""
    return ROLES.get(wanted.name, wanted.name).removesuffix("_1")


def one_of(form: Scaling | None) -> float:
    """Base of scales (base * [1, 2)) with which random codes of a format have RMS 1."""
    return 1 / CODES[form or Scaling.FP8_BLOCK].rms / MANTISSA


def _by_tensor(mixture: Mixture, size: float, codes: float) -> float:
    """Base of scales per expert: `size / codes` if float8 has no other scale, 0.75 if blocks have scales, too."""
    return size / codes if mixture.scaling is Scaling.FP8_TENSOR else 0.75


def drawn_data(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Tokens or weights: random bits of float8 or of bytes of codes, float32 exact in fp4, or normal values."""
    mixture, role = mixture_of(wanted.definition), role_of(wanted)
    rms = RMS[role](mixture)
    if wanted.dtype == torch.float8_e4m3fn:
        return draw.bits(wanted.name, wanted.shape, wanted.dtype)
    if wanted.dtype == torch.uint8:
        return draw.bits(wanted.name, wanted.shape, torch.int8).view(torch.uint8)
    if mixture.scaling == Scaling.FP4 and role != "hidden_states":
        return _fp4_weights(draw, wanted, rms)
    made = draw.normal(wanted.name, wanted.shape, wanted.dtype, scale=rms)
    if "massive" in wanted.params and role == "hidden_states" and holds_massive(mixture, wanted.dtype):
        made[:, wanted.shape[-1] // 3] = MASSIVE
    return made


def holds_massive(mixture: Mixture, dtype: torch.dtype) -> bool:
    """Whether no right kernel cuts MASSIVE off, or what gemm1 makes of it, at the end of a scale that is given."""
    return dtype is torch.bfloat16 and mixture.scaling not in {Scaling.NVFP4, Scaling.FP8_TENSOR}


def drawn_scale(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Random scales by SPREADS, as floats or as codes of their format."""
    mixture, role = mixture_of(wanted.definition), role_of(wanted)
    powers, base = SPREADS[role]
    low = base(mixture)
    if role in {GEMM1[1], GEMM2[1]} and mixture.scaling in {Scaling.MXFP8, Scaling.MXFP4}:
        powers, low = MX_SPREAD, low * WEIGHT_SPREAD_RMS / MX_SPREAD_RMS
    table = torch.tensor(powers, dtype=torch.float32, device=draw.device)
    power = table[draw.integers(wanted.name, wanted.shape, torch.int64, low=0, high=len(powers))]
    values = draw.uniform(f"{wanted.name}-mantissa", wanted.shape, low=low, high=2 * low) * power
    return as_scale(values, mixture.tokens if role == "hidden_states_scale" else mixture.scaling, wanted.dtype)


def as_scale(values: torch.Tensor, form: Scaling | None, dtype: torch.dtype) -> torch.Tensor:
    """Scales in `dtype`; if it has one byte, as codes: e4m3 for NVFP4, e8m0 for other formats."""
    if dtype.itemsize == 1:
        return (E4M3 if form is Scaling.NVFP4 else E8M0).encode(values).view(dtype)
    return values.to(dtype)


def drawn_limit(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Clamp limits that some gates and ups exceed; for FP8_TENSOR divided by the base of gate's scales."""
    mixture = mixture_of(wanted.definition)
    low = 1.0 / SPREADS[GATE_SCALE][1](mixture) if mixture.scaling is Scaling.FP8_TENSOR else 1.0
    low *= {BIASED: 8.0, LIMITED: 0.25}.get(wanted.params.get("extreme", ""), 1.0)
    return draw.uniform(wanted.name, wanted.shape, low=low, high=2 * low).to(wanted.dtype)


def _fp4_weights(draw: Draw, wanted: Wanted, rms: float) -> torch.Tensor:
    """float32 weights of about this RMS: e2m1 values times a power of two per 32 neighbours of a row.

    One value in each 16 is +-6, so that a quantiser's amax / 6 is that power again: mxfp4 (blocks of 32, scales
    are powers of two) and nvfp4 (blocks of 16, e4m3 scales) both hold these weights exactly.
    """
    weights = torch.empty(wanted.shape, dtype=torch.float32, device=draw.device)
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=draw.device)
    values = torch.cat([positive, -positive])
    level = 2.0 ** round(math.log2(rms / FP4_RMS / WEIGHT_SPREAD_RMS))
    powers = torch.tensor(WEIGHT_SPREAD, dtype=torch.float32, device=draw.device) * level
    for expert in range(wanted.shape[0]):
        name, blocks = f"{wanted.name}-{expert}", weights[expert].view(-1, FP4_BLOCK)
        codes = draw.bits(name, (blocks.numel(),), torch.int8)
        torch.index_select(values, 0, codes.to(torch.int32) & 15, out=blocks.view(-1))
        place = draw.bits(f"{name}-peak", (len(blocks), 1), torch.int8).to(torch.int64)
        blocks.scatter_(1, place & 15, torch.where(place >= 0, 6.0, -6.0).to(blocks.dtype))
        pairs = blocks.view(-1, 2 * FP4_BLOCK)
        pairs *= powers[draw.integers(f"{name}-scale", (len(pairs), 1), torch.int64, low=0, high=len(powers))]
    return weights


SATURATED = 2 * SURE  # SiLU of +-1, +-2 times it is exactly that value or 0 in float32, where exp(-128) is 0
WHOLE_AGAIN = SATURATED**-2  # makes the product of a gate and an up a whole number again
GATES_AND_UPS = (-2.0, -1.0, 1.0, 2.0)
# Factors of ups (others: 7), so that products have one odd factor: with 7, a block's largest value / 448 is a
# power of two; with 3, the largest / 6 is, and e2m1 holds them all. Without scales, float16 has to hold them.
UPS: Mapping[Scaling, float] = {
    **dict.fromkeys((Scaling.NVFP4, Scaling.MXFP4), 1.5),
    Scaling.MXINT4: 3.0,
    Scaling.PLAIN: 7 / SATURATED,
    Scaling.FP4: 1 / SATURATED,
}
ADDED_UP = (-6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)  # values of gemm2's weights, exact in e2m1


def exact_tokens(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Tokens with one channel that is not 0, so that each gate and up is one weight of `exact_weights`."""
    form, [tokens, stored] = mixture_of(wanted.definition).tokens, wanted.shape
    width = stored * (2 if form in FOUR else 1)
    values = one_hot(draw, replace(wanted, shape=(tokens, width), dtype=torch.float32))
    return as_codes(values * (1.0 if form else SATURATED), form).to(wanted.dtype)


def exact_weights(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Weights for `exact_tokens`: GATES_AND_UPS for gemm1, and numbers of ADDED_UP for gemm2.

    What enters gemm2 is 0 or one number times 1, 2 or 4, which the format that a kernel keeps it in holds exactly
    at the scale that the kernel computes. Shared experts return 0, so that a token has one expert's result.
    """
    mixture, name, (_, *rows, stored) = mixture_of(wanted.definition), wanted.name, wanted.shape
    form, is_gemm1, parts = mixture.scaling, role_of(wanted) == GEMM1[0], mixture.layout.parts
    width = stored * (2 if form in FOUR else 1)
    weights = torch.empty(wanted.shape, dtype=wanted.dtype, device=draw.device)
    table = torch.tensor(GATES_AND_UPS if is_gemm1 else ADDED_UP, device=draw.device)
    if is_gemm1 and form is Scaling.FP4:
        table *= 1.5
    elif not is_gemm1 and form in {Scaling.PLAIN, Scaling.FP4}:
        table *= 1 / SATURATED
    factors = torch.ones(wanted.shape[-2] * parts, 1, device=draw.device)  # of rows
    if is_gemm1 and mixture.gated:
        ups = mixture.layout.order(len(factors), gated=True)[: len(factors) // 2]
        factors[ups] = UPS.get(mixture.scaling, 7.0)
    factors = factors.chunk(parts)[int(name.endswith("_1"))]
    for expert in range(len(weights)):
        places = draw.integers(f"{name}.{expert}", (*rows, width), torch.int32, low=0, high=len(table))
        shared = is_gemm1 and expert >= mixture.routing.local
        weights[expert].copy_(as_codes(table[places] * factors * (not shared), form))
    return weights


def as_codes(values: torch.Tensor, form: Scaling | None) -> torch.Tensor:
    """Values as four-bit codes, two per byte, for formats in FOUR; for others unchanged."""
    if form not in FOUR:
        return values
    return pack(values.to(torch.int8).view(torch.uint8) & 15 if form is Scaling.MXINT4 else E2M1.encode(values))


def exact_scale(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Scales for `exact_weights`: gates become so large that SiLU is exact, and gate * up is whole again."""
    mixture, role = mixture_of(wanted.definition), role_of(wanted)
    of_tokens = role == "hidden_states_scale"
    scale = SATURATED if of_tokens else WHOLE_AGAIN if role == whole_again_by(wanted.definition) else 1.0
    scales = torch.full(wanted.shape, scale, device=draw.device)
    if role == GEMM2[1]:  # by 1, 4 or 16, so that sums need more bits
        scales *= 4.0 ** draw.integers(f"{wanted.name}.exact", wanted.shape, low=0, high=3)
    return as_scale(scales, mixture.tokens if of_tokens else mixture.scaling, wanted.dtype)


def whole_again_by(definition: Definition) -> str:
    """Key of the scales that are WHOLE_AGAIN: up's, if gate has scales of its own; else the result's.

    Formats without scales per expert: gemm2's blocks.
    """
    by_expert = mixture_of(definition).scaling in {Scaling.NVFP4, Scaling.FP8_TENSOR}
    return (UP_SCALE if GATE_SCALE in named(definition) else DOWN_SCALE) if by_expert else GEMM2[1]


def exact_mixture(definition: Definition) -> Mapping[str, Exactly]:
    """Inputs with exact results: a token has one expert's result. {} if no such inputs are known."""
    mixture = mixture_of(definition)
    # e4m3 blocks can not hold WHOLE_AGAIN
    too_small = mixture.scaling is Scaling.NVFP4 and whole_again_by(definition) not in named(definition)
    if mixture.weight_count >= HEAVY or mixture.routing.method in {Method.UNIFORM, Method.EVEN} or too_small:
        return {}
    return {
        "hidden_states": exact_tokens,
        "gemm1_weights gemm1_weights_1 gemm2_weights gemm2_weights_1": exact_weights,
        f"{SCALES} hidden_states_scale {UP_SCALE} {DOWN_SCALE}": exact_scale,
        GATE_SCALE: 1.0,
        "gemm1_alpha": 2.0,
        "gemm1_clamp_limit": 32 * SATURATED,
        "gemm1_bias gemm2_bias out gemm1_beta routing_bias": 0.0,  # as a kernel may round before it adds these
        "routing_logits": routing.one_chosen,
        "routed_scaling_factor": 2.0,
        "topk_ids topk_weights": routing.all_weight_on_first,
    }


def tie(tensors: dict[str, torch.Tensor], params: Mapping[str, Any]) -> None:
    """In a case with the parameter `ties`, make every second expert's tensors equal to those of the one before."""
    for name in tensors.keys() & set(OF_EXPERTS) if params.get("ties") else ():
        tensors[name][1::2] = tensors[name][0::2]


def can_tie(definition: Definition) -> bool:
    """Whether experts can be equal in pairs: even counts, none shared, chosen by logits, one axis of experts."""
    inputs, routing = named(definition), routing_of(definition)
    axes = {(inputs[name].shape or ("",))[0] for name in inputs.keys() & {*OF_EXPERTS}}
    even = routing.experts % 2 == 0 and routing.local % 2 == 0 and not routing.shared
    return even and not routing.by_input and len(axes) == 1


# The op.

HEAVY = 1 << 28  # weight elements; from here on a reference takes seconds per case, so there are few cases
HEAVY_SIZES = {"small": (2,), "medium": (16,), "large": (64,)}
MIXED_ROWS = ("plain", "negative", "equal", "remote", "hot", "plain")  # one pattern of logits per token
START = 3  # `position` (of `placed`) at which the local experts are the first of all
# Bytes per weight element at the reference's peak, without the element. References of the dataset widen the values
# of a weight tensor to float32, widen its scales to the same shape, and multiply into a third tensor.
REFERENCE_BYTES = {Scaling.FP8_BLOCK: 12, Scaling.FP8_TENSOR: 4, Scaling.FP4: 0, Scaling.PLAIN: 4}
STORED_BYTES = {Scaling.FP4: 4, Scaling.PLAIN: 2}  # others 1
ORACLE_BYTES = 1 << 28  # a few slices of weights in float64
PROCESS_BYTES = 400 << 20  # an interpreter with torch loaded
# Sizes of a scaled-down definition: several blocks each, but different numbers of them.
HIDDEN, INTERMEDIATE = 512, 256
LEAST = 8  # experts
CANDIDATES = 2  # experts per chosen one, at least, so that there is a choice
# Worst error of a row's RMS and worst slope of simulated kernels (tests/test_ops_families.py). At the snapshot's
# width (7168 x 2048) FlashInfer's fp8 block kernel, which stores gemm1's result and the activated product in fp8,
# loses 4.9 % and 0.25 %, SGLang's 2.5 % and 0.14 %; at 2048 x 512 and 2 to 16 tokens 6.3 % and 0.7 %; with a scale
# per tensor 3 % and 0.7 %. In narrow experts slopes vary by chance (256 wide, one token: up to 4 %): the oracle
# computes how much (`equal_roundings`), and the limit is for what is beyond. References in float32 lose 0.2 % and
# 0.05 %. fp4: activations in bfloat16 lose 0.5 %, in mxfp8 6 %; in nvfp4 25 %, more than is allowed here.
REQUANTISED = Quantised(
    rms=0.1,
    slope=0.01,
    reason="keeping activations in fp8 costs 3 to 9 % of a row's RMS; roundings do not tilt the slope but by luck",
)
# 16-bit intermediates lose 0.5 % of a row's RMS.
UNQUANTISED = Quantised(rms=0.02, slope=0.01, reason="16-bit intermediates cost 0.5 % of a row's RMS")
FOUR_BITS = Quantised(rms=0.15, slope=0.02, reason="the activated product in nvfp4 costs 9 to 11 % of a row's RMS")


class Experts(Op):
    """Mixture of experts with routing; the module's docstring has the conventions."""

    def check(self, definition: Definition) -> None:
        """Raise Unsupported if no form, format of `Scaling` or `routing.Method` fits the definition."""
        super().check(definition)
        mixture_of(definition)

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """Inputs not read, with reasons: stated by axes, a bias that Llama 4 ignores, or left out."""
        mixture, reasons = mixture_of(definition), dict.fromkeys(STATED, "axes and constants say it")
        if mixture.routing.method is Method.LLAMA4 and not mixture.routing.biased:
            reasons["routing_bias"] = "of routing by the largest logit it is no part"
        read = {"routing_logits", *TAKEN.get(mixture.activation, ())}
        for name, spec in definition.inputs.items():
            if spec.optional and ROLES.get(name, name) not in read:
                reasons[name] = "left out"
        return {name: why for name, why in reasons.items() if name in definition.inputs}

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Cases of each size, then edge and adversarial ones; few for a definition with many weights."""
        mixture, case = mixture_of(definition), partial(self.placed, definition, seed)
        routing, heavy = mixture.routing, mixture.weight_count >= HEAVY
        for size in sizes:
            for index, tokens in enumerate((HEAVY_SIZES if heavy else SIZES)[size]):
                yield case(f"{size}-{index}", tokens, list(SIZES).index(size) + index)
        if not routing.by_input:
            yield case("adversarial-rows", len(MIXED_ROWS), rows=list(MIXED_ROWS))
        # Tokens go to the first and to the last local expert, where loops over experts end.
        yield case("edge-ends", 2, START, rows=["first", "last"])
        if heavy:
            return
        if fixed_tokens(definition, mixture) is None:
            yield case("edge-empty", 0, 0)
        if routing.local < routing.experts and not routing.by_input:
            yield case("edge-remote", 3, rows=["remote"])
        yield case("adversarial-hot", 8, rows=["hot"], massive=True)
        extremes = {BIASED: {*BIASES}, LIMITED: {*TAKEN.get(mixture.activation, ())}}
        given = [one for one, names in extremes.items() if names & named(definition).keys()]
        yield from (case(f"adversarial-{one}", 2, extreme=one) for one in given)
        if routing.method == Method.DEEPSEEK:
            # One sigmoid next to 1, the others small: a wrong constant in it shows in the weights.
            yield case("adversarial-steep", 8, rows=["steep"])
        if can_tie(definition):
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
        """A case of `tokens` tokens, or the fixed number of them; `position` says where the local experts are."""
        mixture = mixture_of(definition)
        last = mixture.routing.experts - mixture.routing.local
        # at the end; in the middle, even; odd, if there is room; at the start
        offsets = (last, last // 4 * 2, min(37, last), 0)
        if "local_expert_offset" in definition.inputs and not definition.inputs["local_expert_offset"].optional:
            params["offset"] = offsets[position % len(offsets)]
        tokens = fixed_tokens(definition, mixture) or tokens
        return self.settled(definition, self.case(definition, name, {"t": tokens}, seed, params))

    def settled(self, definition: Definition, case: Case) -> Case:
        """The case with all sizes that follow from its number of tokens, or from the definition's fixed one."""
        mixture = mixture_of(definition)
        sizes = sizes_by(definition, mixture, fixed_tokens(definition, mixture) or self.rows_of(definition, case))
        other = {axis: size for axis, size in sizes.items() if definition.const_axes.get(axis) != size}
        return replace(case, axes={**case.axes, **other})

    def boundaries(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Cases in which one channel of a token, then one channel of an expert, decides the output.

        Left out where kernels round to fp4, or to fp8 by one scale per expert, and may round that channel away.
        """
        plain, mixture = self.placed(definition, seed, "", BOUNDARY_ROWS), mixture_of(definition)
        hidden = self.names.get("hidden_states", "hidden_states")
        fine_tokens = mixture.tokens is None or mixture.tokens is Scaling.FP8_BLOCK
        fixed = "out" in definition.inputs or fixed_tokens(definition, mixture) is not None
        if mixture.scaling is not Scaling.FP8_TENSOR and fine_tokens and not fixed:
            yield at_boundaries(plain.axes, [hidden], seed, alone={hidden: BOUNDARY}, **plain.params)
        usual = mixture.usual and "gemm1_weights" in definition.inputs
        if mixture.scaling in {Scaling.FP8_BLOCK, Scaling.PLAIN} and usual:
            rows: dict[str, Any] = {INNER: True, "rows": ["first", "last"]}
            yield self.placed(definition, seed, f"adversarial-{INNER}", BOUNDARY_ROWS, **rows)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """A case with sigmoids of 1e-8, among which the bias of up to 16 alone chooses."""
        if routing_of(definition).method == Method.DEEPSEEK:
            yield self.placed(definition, seed, "stress-faint", 8, START, rows=["faint"])

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Drawn inputs, with scalars by the mixture, and None for optional ones that are not needed."""
        values, mixture = super().inputs(definition, case, draw), mixture_of(definition)
        weights = values.get("gemm1_weights")
        if INNER in case.params and isinstance(weights, torch.Tensor):
            keep_boundary_rows(weights)
        numbers: dict[str, Value] = {
            "local_expert_offset": routing.offset_of(case.params),
            "routed_scaling_factor": FACTOR,
            "top_k": mixture.routing.top_k,
            "num_experts": mixture.routing.experts,
            "n_group": mixture.routing.groups,
            "topk_group": mixture.routing.top_groups,
            "intermediate_size": mixture.intermediate,
            "local_num_experts": mixture.routing.local,
            "num_fused_shared_experts": mixture.routing.shared,
            "activation_type": mixture.activation,
            "fp8_quantization_type": FP8_TYPES.get(mixture.scaling, 0),
            "block_m": definition.const_axes.get("block_m", 8),
        }
        # Optional inputs are None but logits, tokens' scales and, with 2, 6, ... tokens, activation numbers.
        needed = {"routing_logits"} if mixture.tokens is None else {"routing_logits", "hidden_states_scale"}
        needed |= {*GEMM1, *GEMM2} if mixture.scaling in CODES else {GEMM1[0], GEMM2[0]}
        needed |= {"hidden_states", *(PLAN if mixture.routing.by_input else ())}
        if self.rows_of(definition, case) % 4 == 2:
            needed |= {*TAKEN.get(mixture.activation, ())}
        for name, spec in definition.inputs.items():
            if spec.shape is None:
                values[name] = numbers.get(name, values[name])
            if spec.optional and ROLES.get(name, name).removesuffix("_1") not in needed:
                values[name] = None
        if "quant_mode" in values:  # its default does not fit all dtypes
            values["quant_mode"] = QUANT_MODES[mixture.tokens]  # type: ignore[assignment]
        return values

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Relative RMS error by row, and slope."""
        mixture = mixture_of(definition)
        coarse = FOUR_BITS if mixture.tokens is Scaling.NVFP4 else REQUANTISED
        kind = UNQUANTISED if mixture.scaling is Scaling.PLAIN else coarse
        # relu's squares (powers of 4) and products of two default limits (7 * 7) have no power-of-two scale.
        limited = mixture.activation == SWIGLU_STEP and OF_ACTIVATION[2] not in named(definition)
        exact = mixture.scaling is Scaling.PLAIN or (mixture.gated and not limited)
        return {next(iter(definition.outputs)): replace(kind, exact=exact)}

    def memory(self, definition: Definition, case: Case) -> int:
        """Peak bytes: the oracle widens a few slices of weights at a time, the reference all of them."""
        mixture, tokens = mixture_of(definition), self.rows_of(definition, case)
        weights = mixture.weight_count * STORED_BYTES.get(mixture.scaling, 1)
        # a token in float64: hidden and output, and for every chosen expert gemm1's and gemm2's rows
        row = 4 * mixture.hidden + mixture.routing.top_k * (4 * mixture.intermediate + mixture.hidden)
        oracle = PROCESS_BYTES + weights + ORACLE_BYTES + tokens * row * 8
        return oracle + self.reference_excess(definition)

    def reference_excess(self, definition: Definition) -> int:
        """Bytes of all weights, which the reference widens, beyond the slices that the oracle does."""
        mixture = mixture_of(definition)
        return max(0, mixture.weight_count * REFERENCE_BYTES.get(mixture.scaling, 12) - ORACLE_BYTES)

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """Axis sizes of a scaled-down definition: matrices of a few blocks, few experts per group.

        Groups, experts per token and the share of local experts stay. Axes whose sizes depend on one number
        (blocks along it, twice the intermediate size) shrink together or, where one of them is fixed, not at all.
        """
        mixture, const, smaller = mixture_of(definition), definition.const_axes, dict[str, int]()
        experts = fewest_experts(mixture.routing)
        local = mixture.routing.local * experts // mixture.routing.experts
        for change in (
            {"hidden": min(mixture.hidden, HIDDEN)},
            {"intermediate": min(mixture.intermediate, INTERMEDIATE)},
            {"routing": replace(mixture.routing, experts=experts, local=local)},
        ):
            changed = replace(mixture, **change)
            sizes = sizes_by(definition, changed)
            sizes = {axis: size for axis, size in sizes.items() if size < const.get(axis, 0)}
            if sizes.keys().isdisjoint(fixed):
                mixture, smaller = changed, smaller | sizes
        return smaller


def keep_boundary_rows(weights: torch.Tensor) -> None:
    """Zero gemm1's weights [experts, 2 * channels, columns] but for one channel, in up and gate, of each.

    Kernels' tiles begin and end at the channels that are kept. The first expert keeps the last of these channels,
    the second one the last but one, and so on; the last expert keeps the first one, the last but one the second.
    """
    channels, experts = weights.shape[1] // 2, len(weights)
    ends = boundaries(channels)
    for expert, rows in enumerate(weights.view(torch.uint8) if weights.dtype.itemsize == 1 else weights):
        if expert < experts // 2:
            channel = ends[-1 - expert % len(ends)]
        else:
            channel = ends[(experts - 1 - expert) % len(ends)]
        kept = torch.tensor([channel, channel + channels], device=weights.device)
        values = rows[kept].clone()
        rows.zero_()[kept] = values


def fewest_experts(routing: Routing) -> int:
    """The smallest number of experts that the groups, the choice in them and the local share allow."""
    group = routing.experts // routing.groups
    candidates = min(CANDIDATES * routing.top_k, group * routing.top_groups)
    for per_group in range(2, group):
        experts = per_group * routing.groups
        local, rest = divmod(experts * routing.local, routing.experts)
        same_share = group % per_group == 0 and not rest and local >= min(2, routing.local)
        if same_share and experts >= LEAST and per_group * routing.top_groups >= candidates:
            return experts
    return routing.experts


def stored(*scalings: Scaling) -> Callable[[Wide], bool]:
    """Condition for `applies`: the weights are stored in one of these formats."""
    return lambda wide: mixture_of(wide.definition).scaling in scalings


def acting(activation: int) -> Callable[[Wide], bool]:
    """Condition for `applies`: the activation is this one."""
    return lambda wide: mixture_of(wide.definition).activation == activation


def roll(value: torch.Tensor, axis: int, shift: int = 1) -> torch.Tensor:
    """`torch.roll` by one axis, for float8, too, which torch does not roll."""
    axis = max(axis, -value.dim())
    narrow = value.dtype.itemsize == 1
    bits = value.view(torch.uint8) if narrow else value
    return bits.roll(shift, axis).view(value.dtype) if narrow else bits.roll(shift, axis)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """A mutant's tensor: values read in the order of the transposed matrix; of one axis, shifted by one."""
    return value.transpose(-1, -2).reshape(value.shape) if value.dim() > 1 else roll(value, -1)


MOE = Experts(
    "moe",
    Form(
        f"hidden_states[t *] gemm1_weights[l *] gemm2_weights[l *] {OPTIONAL} -> output[t h] out_out[t h]",
        experts_sum,
    ),
    family="moe",
    synonyms=routing.SYNONYMS,
    slow=True,
    rules=routing.COUNTS,
    requires=lambda definition: (
        "nobody states activation_type"
        if (kind := definition.inputs.get("activation_type"))
        and not (kind.optional or "activation_type" in definition.const_axes)
        else None
    ),
    draws={
        "hidden_states gemm1_weights gemm1_weights_1 gemm2_weights gemm2_weights_1": drawn_data,
        f"{SCALES} hidden_states_scale {UP_SCALE} {GATE_SCALE} {DOWN_SCALE}": drawn_scale,
        "gemm1_alpha gemm1_beta": between(0.25, 3.0),
        "gemm1_clamp_limit": drawn_limit,
        # small against what they are added to, or large
        "gemm1_bias gemm2_bias": lambda draw, one: draw.normal(
            one.name, one.shape, one.dtype, scale=4.0 if one.params.get("extreme") == BIASED else 0.25
        ),
        "fc2_input_scale": between(1.0, 1.0),  # always 1, as the scale of the result would undo any other
        "topk_weights": between(0.05, 0.55),
        "sorted_token_ids expert_ids num_tokens_post_padded": routing.drawn_plan,
        "routing_logits": routing.drawn_logits,
        "routing_bias": routing.drawn_bias,
        "topk_ids": routing.drawn_ids,
    },
    adjust=tie,
    sizes_in_numbers=STATED,
    lossless=exact_mixture,
    lossless_sizes={"t": 18},  # 18 % 4 is 2, for which `inputs` gives the limits
    positive=("topk_weights", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
    independent_rows=False,
    mutants=(
        altered(
            "gate and up swapped",  # of one or of six axes, shifted by one element
            *GEMM1,
            change=lambda x: roll(x, -2, x.shape[-2] // 2) if 1 < x.dim() < 6 else roll(x, -1),
        ),
        altered(
            "activations end at 2,688",
            "hidden_states",
            change=lambda x: x.clamp(-2688, 2688),
            applies=lambda wide: (
                holds_massive(mixture_of(wide.definition), wide.given("hidden_states").dtype)
                and "gemm1_clamp_limit" not in wide
            ),
        ),
        altered("gemm1's scales transposed", GEMM1[1], change=transposed),
        altered("gemm2's scales transposed", GEMM2[1], change=transposed),
        altered("token scales read as [tokens, blocks]", "hidden_states_scale", change=transposed),
        altered("gemm1's scales one block off", GEMM1[1], change=partial(roll, axis=-1)),
        altered("gemm2's scales one row of blocks off", GEMM2[1], change=partial(roll, axis=-2)),
        altered("token scales one token off", "hidden_states_scale", change=partial(roll, axis=-1)),
        *(
            altered(f"{what} ignored", name, change=ones)
            for what, name in (
                ("scales of tokens", "hidden_states_scale"),
                ("scales of gemm1", GEMM1[1]),
                ("scales of gemm2", GEMM2[1]),
                ("scale of the result", DOWN_SCALE),
            )
        ),
        altered("scales of the next expert", UP_SCALE, GATE_SCALE, DOWN_SCALE, change=partial(roll, axis=0)),
        Mutant(
            "scales of gate and up swapped",
            applies=stored(Scaling.FP8_TENSOR),
            inputs=lambda wide: {UP_SCALE: wide[GATE_SCALE], GATE_SCALE: wide[UP_SCALE]},
        ),
        altered("weights of the next expert", *GEMM1, change=partial(roll, axis=0)),
        *(
            altered(
                f"last tile of K dropped in {name.partition('_')[0]}",
                name,
                change=lambda x: torch.cat([x[..., :-BLOCK], torch.zeros_like(x[..., -BLOCK:])], -1),
            )
            for name in (GEMM1[0], GEMM2[0])
        ),
        Mutant("gelu for silu", curve=lambda gate: torch.nn.functional.gelu(gate)),
        Mutant("sigmoid for silu", curve=lambda gate: torch.sigmoid(gate)),
        Mutant("routing weight at the other end", other_end=True),
        *(altered(f"{name} ignored", name, change=lambda _: None) for name in (*OF_ACTIVATION, *BIASES)),
        *(altered(f"{name} of the next expert", name, change=partial(roll, axis=0)) for name in OF_ACTIVATION),
        Mutant("limit before silu", applies=acting(SWIGLU_STEP), activation=SWIGLU),
        Mutant(
            "limit behind silu",
            applies=lambda wide: OF_ACTIVATION[2] in wide and acting(SWIGLU)(wide),
            activation=SWIGLU_STEP,
        ),
        Mutant("tanh's gelu for silu", applies=acting(SWIGLU), activation=GEGLU_TANH),
        altered(
            "codes' neighbours exchanged",
            GEMM1[0],
            change=lambda packed: packed << 4 | packed >> 4,
            applies=stored(*FOUR),
        ),
        Mutant("what the output holds dropped", applies=has("out"), add_out=False),
        altered("local expert offset plus one", "local_expert_offset", change=lambda offset: offset + 1),
        Mutant(
            "local expert offset ignored",
            applies=lambda wide: wide.number("local_expert_offset", 0) != 0,
            inputs=lambda _: {"local_expert_offset": 0},
        ),
        altered("scaling factor dropped", "routed_scaling_factor", change=lambda _: 1.0),
        Mutant("one local expert idle", idle=True),
        *routing.MISROUTED,
    ),
)

# FlashInfer's TensorRT-LLM mixtures: kernels of SM 10.x, fetched as binaries.

NUMBERED = {Method.DEFAULT: 0, Method.RENORMALISE: 1, Method.DEEPSEEK: 2, Method.LLAMA4: 3, Method.EVEN: 5}
ROUTER = "routing_logits hidden_states gemm1_weights gemm2_weights [routing_bias]"
PER_BLOCK = f"{ROUTER} hidden_states_scale {GEMM1[1]} {GEMM2[1]} [local_expert_offset] [routed_scaling_factor]"
PER_TENSOR = f"{ROUTER} {UP_SCALE} {GATE_SCALE} {DOWN_SCALE}"
in_flashinfer = partial(MOE.truth, "flashinfer", rows="hidden_states", sm=((10, 0), (10, 9)))


MORE = "[num_fused_shared_experts] [top_k] [n_group] [topk_group] [activation_type] [fp8_quantization_type]"
MORE += " [use_shuffled_weight] [gemm1_alpha] [gemm1_beta] [gemm1_clamp_limit]"


def in_whole_blocks(definition: Definition) -> bool:
    """Whether no block of 128 x 128 weights is cut short, if such blocks have scales."""
    scales = definition.inputs.get(GEMM1[1])
    sizes = [dim(definition, name, axis) for name in (GEMM1[0], GEMM2[0]) for axis in (-2, -1)]
    return scales is None or scales.dtype != "float32" or not any((size or 0) % BLOCK for size in sizes)


@in_flashinfer(
    "trtllm_fp8_block_scale_moe", "moe_fp8_block", serves=f"{PER_BLOCK} {MORE} -> output", accepts=in_whole_blocks
)
@in_flashinfer("trtllm_fp8_per_tensor_scale_moe", "moe_fp8_tensor", serves=f"{PER_TENSOR} -> output")
def _trtllm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Groups and the scaling factor belong to DeepSeek's routing; Llama 4's reads no bias."""
    mixture = mixture_of(definition)
    chosen = mixture.routing
    by_block, llama = "moe_fp8_block" in api, chosen.method is Method.LLAMA4
    grouped = by_block and chosen.method is Method.DEEPSEEK
    names = ("hidden_states", GEMM1[0], UP_SCALE, GATE_SCALE, GEMM2[0], DOWN_SCALE)
    more: dict[str, Any] = {"use_routing_scales_on_input": llama}
    if by_block:
        names = ("hidden_states", "hidden_states_scale", *GEMM1, *GEMM2)
        optional = ("activation_type", "fp8_quantization_type", "num_fused_shared_experts", *OF_ACTIVATION)
        more = {name: inputs[name] for name in optional if inputs.get(name) is not None}
        more["use_shuffled_weight"] = False
    [mix] = api.values()
    output = mix(
        inputs["routing_logits"],
        None if llama and not by_block else inputs.get("routing_bias"),
        *(inputs[name] for name in names),
        num_experts=chosen.experts,
        top_k=chosen.top_k,
        n_group=chosen.groups if grouped else None,
        topk_group=chosen.top_groups if grouped else None,
        intermediate_size=mixture.intermediate,
        local_num_experts=chosen.local,
        routing_method_type=NUMBERED[chosen.method],
        local_expert_offset=int(inputs.get("local_expert_offset", 0)),
        routed_scaling_factor=scalar(inputs, "routed_scaling_factor") if grouped else None,
        **more,
    )
    return {"output": output}


CUTLASS, ALPHA = "flashinfer.fused_moe:cutlass_fused_moe", "fused_moe.alphamoe_sm100:alphamoe_{}"
IN_CUTLASS = " | ".join(
    f"{names} [gemm1_bias] [gemm2_bias] [gemm1_alpha] [gemm1_beta] [gemm1_clamp_limit] -> output"
    for names in (
        "hidden_states topk_ids topk_weights gemm1_weights gemm2_weights",
        "input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights",
    )
)


@MOE.truth(
    "flashinfer",
    "cutlass_fused_moe",
    CUTLASS,
    serves=IN_CUTLASS,
    packages=("flashinfer_jit_cache",),  # compiling its module takes many minutes
    sm=((9, 0), (12, 1)),
)
def _cutlass(api: Api, _: Definition, inputs: Given) -> Outputs:
    values = {ROLES.get(name, name): value for name, value in inputs.items()}
    names = ("hidden_states", "topk_ids", "topk_weights", GEMM1[0], GEMM2[0])
    optional = ("fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    more = dict(zip(optional, map(values.get, (*BIASES, *OF_ACTIVATION)), strict=True))
    tensors = (values[name] for name in names)
    returned = api[CUTLASS](*tensors, values["hidden_states"].dtype, quant_scales=[], **more)
    return {"output": returned[0] if isinstance(returned, list | tuple) else returned}


PLANNED = "sorted_token_ids expert_ids num_tokens_post_padded topk_weights top_k block_m routed_scaling_factor out"
MOE.called(
    ALPHA.format("fp8_block_scale_aligned_moe"),
    f"hidden_states hidden_states_scale {' '.join((*GEMM1, *GEMM2))} {PLANNED} -> out_out",
    written="out",
    rows="hidden_states",
    sm=((10, 0), (10, 3)),
)

# SGLang's router and experts, both Triton. Groups of experts are chosen by its PyTorch code (`grouped_topk`):
# where the two best of a group are equal, the router (0.5.22, 0.5.23) adds the third to the best in place of the
# second, and may keep another group. Gate precedes up in SGLang, so the halves are swapped. Weights that its
# kernels can not read (an fp8 scale per expert, fp4 values as float32) become bfloat16.

FOREIGN = -1  # the kernel leaves out an expert of this index
ANY = (
    "hidden_states gemm1_weights gemm2_weights [routing_logits] [routing_bias] [topk_ids] [local_expert_offset]"
    " [routed_scaling_factor] [hidden_states_scale] [gemm1_weights_scale] [gemm2_weights_scale]"
    f" [{UP_SCALE}] [{GATE_SCALE}] [{DOWN_SCALE}]"
)


def sglang_choice(api: Api, definition: Definition, inputs: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 weights, indices among all experts), both [tokens, top_k]."""
    chosen = routing_of(definition)
    if chosen.by_input:
        ids = inputs["topk_ids"]
        if chosen.method is Method.UNIFORM:
            factor = float(inputs.get("routed_scaling_factor") or 1.0)
            return torch.full(ids.shape, factor / chosen.top_k, device=ids.device), ids
        return (ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float(), ids >> PACKED_SHIFT
    logits, top_k = inputs["routing_logits"].float().contiguous(), chosen.top_k
    if chosen.method is Method.RENORMALISE:
        weights, experts = api["router"](logits, None, top_k, scoring_func="softmax")
        return weights, experts
    if chosen.method is Method.LLAMA4:
        no_bias = logits.new_zeros(logits.shape[1])
        weights, experts = api["router"](logits, no_bias, top_k, scoring_func="sigmoid", renormalize=False)
        return weights, experts
    bias = inputs["routing_bias"].float()
    if chosen.groups > 1:
        groups = {"num_expert_group": chosen.groups, "topk_group": chosen.top_groups}
        weights, experts, *_ = api["grouped_topk"](
            inputs["hidden_states"], logits, bias, topk=top_k, renormalize=True, **groups
        )
    else:
        weights, experts = api["router"](logits, bias, top_k, scoring_func="sigmoid")
    return weights * scalar(inputs, "routed_scaling_factor"), experts


def gate_first(weights: torch.Tensor) -> torch.Tensor:
    """Weights [experts, rows, ...] with the halves exchanged: gate before up instead of up before gate."""
    up, gate = weights.chunk(2, dim=1)
    return torch.cat([gate, up], dim=1)


@MOE.truth(
    "sglang",
    "fused_experts_impl",
    "experts",
    "router",
    "grouped_topk",
    serves=f"{ANY} -> output",
    accepts=in_whole_blocks,
    sm=SM89,
)
def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Activations in fp8 are handed over quantised, so that they are not rounded twice."""
    publish()
    mixture = mixture_of(definition)
    weights, experts = sglang_choice(api, definition, inputs)
    local = experts.to(torch.int32) - int(inputs.get("local_expert_offset", 0))
    is_local = (local >= 0) & (local < mixture.routing.local)
    hidden, gemm1, gemm2 = inputs["hidden_states"], inputs[GEMM1[0]], inputs[GEMM2[0]]
    options: dict[str, Any] = {}
    if mixture.scaling is Scaling.FP8_BLOCK:
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
        gemm1 = gate_first(gemm1.view(torch.uint8)).view(torch.float8_e4m3fn)
    else:
        if mixture.scaling is Scaling.FP8_TENSOR:
            up, gate, down = (inputs[name].view(-1, 1, 1) for name in (UP_SCALE, GATE_SCALE, DOWN_SCALE))
            rows = torch.cat([up.expand(-1, mixture.intermediate, 1), gate.expand(-1, mixture.intermediate, 1)], 1)
            gemm1, gemm2 = gemm1.float() * rows, gemm2.float() * down
        hidden, gemm1, gemm2 = hidden.bfloat16(), gate_first(gemm1.bfloat16()), gemm2.bfloat16()
    output = api["experts"](
        hidden,
        gemm1,
        gemm2,
        weights.float().contiguous(),
        torch.where(is_local, local, FOREIGN).contiguous(),
        apply_router_weight_on_input=mixture.weight_on_input,
        **options,
    )
    return {"output": output}


# Around experts: rows of gate and up for a kernel, and what comes behind gemm2, on one rank.


def interleaved(
    wide: Wide, *, layout: Layout = Layout(alternating=8, gate_first=True), with_scales: bool = True
) -> Tensors:
    """gemm1's tensors with eight rows of gate, eight of up, and so on; rows of their scales alternate singly."""
    outputs = {}
    for name, output in ((GEMM1[0], "interleaved_weights"), (GEMM1[1], "interleaved_scales")):
        value, is_scales = wide.given(name), name == GEMM1[1]
        bits = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        stored = bits.clone()
        if with_scales or not is_scales:
            order = layout.order(value.shape[1], gated=True, blocks=is_scales).to(value.device)
            stored[:, order] = bits.roll(bits.shape[1] // 2, 1)  # `order` has up first, the input gate
        outputs[output] = stored.view(value.dtype)
    return outputs


def folded(wide: Wide, *, within: Part = same, blocks: Part = same) -> Tensors:
    """Tiles of 64 rows, 128 columns as rows of 16 bytes: scales of rows 4 * per (groups of 32: 16) apart."""
    scales, per = wide.given("scales"), 128 // int(wide.number("group_size"))
    count, rows, columns = scales.shape
    view = scales.view(count, rows // 64, 16 // per, 4 * per, columns // per, per)
    tiles = blocks(within(view).permute(0, 1, 4, 3, 2, 5))
    return {"interleaved_scales": tiles.flatten(-2)}


COPIED = Exact("rows are copied")
MOE_PREPROCESS = Op(
    "moe_preprocess",
    Form(
        "gemm1_weights[l m h] gemm1_weights_scale[l b a] -> interleaved_weights[l m h] interleaved_scales[l b a]",
        interleaved,
    ),
    family="moe",
    independent_rows=False,
    adversarial={},
    unusual={},
    where="m % 16 == 0; b % 2 == 0",
    gates={"interleaved_weights interleaved_scales": COPIED},
    mutants=(
        Mutant("up first", layout=Layout(alternating=8)),
        Mutant("turns of four rows", layout=Layout(alternating=4, gate_first=True)),
        Mutant("turns of one row", layout=Layout(alternating=1, gate_first=True)),
        Mutant("scales of half after half", with_scales=False),
        altered("rows as they were", *GEMM1, change=lambda value: roll(value, 1)),
    ),
    other_forms=(
        Op(
            "moe_preprocess",
            Form("scales[l r g] group_size -> interleaved_scales[l a b f c]", folded),
            scalars={"group_size": 32},
            sizes_in_numbers=("group_size",),
            sizes={
                "r": lambda at: 64 * (at["l"] % 3 + 1),
                "g": lambda at: 4 * (at["l"] % 2 + 2),
                "a": lambda at: at["r"] // 64,
                "b": lambda at: at["g"] // 4,
                "f": lambda _: 16,
                "c": lambda _: 16,
            },
            independent_rows=False,
            draws={"scales": ANY_BYTES},
            adversarial={},
            unusual={},
            gates={"interleaved_scales": COPIED},
            mutants=(
                Mutant(
                    "neighbouring rows",
                    within=lambda view: view.reshape(view.transpose(2, 3).shape).transpose(2, 3),
                ),
                Mutant("blocks by columns first", blocks=lambda made: made.transpose(1, 2).reshape(made.shape)),
                Mutant("columns in the opposite order", within=lambda view: view.flip(-1)),
                Mutant("blocks by columns alone", blocks=lambda made: made.flip(2)),
                Mutant("rows of the next block", blocks=lambda made: made.roll(1, 1)),
                Mutant("rows as they were", within=lambda view: view.flip(3)),
                Mutant("the first rows for all", within=lambda view: view[:, :, :1].expand(view.shape)),
                altered("scales of the next row", "scales", change=lambda scales: scales.roll(1, 1)),
            ),
        ),
    ),
)
MOE_PREPROCESS.called(ALPHA.format("interleave_gated_weights"), rows=GEMM1[0], sm=SM89)


def finalised(
    wide: Wide,
    *,
    square: Part = lambda row: row.square(),
    skipped: bool = True,
    flipped: bool = False,
    weigh: Part = same,
    eps_by: float = 1.0,
) -> Tensors:
    """`sum over slots of weight * norm(row) * (gain + centre)`, [tokens, hidden]; an absent row adds nothing.

    With `weight_before_norm` the gain multiplies the row before its norm, else after; `flipped` for a mutant.
    """
    gain, rows = wide["norm_weight"] + wide.number("gain_center"), wide["routed_rows"]
    index, count = wide["permuted_idx"].long(), len(rows)
    picked = rows[:, : len(gain)][index.clamp(0, count - 1)]
    if skipped:
        picked = torch.where(((index >= 0) & (index < count))[..., None], picked, 0.0)
    before = bool(wide.number("weight_before_norm")) != flipped
    scaled = picked * gain if before else picked
    root = torch.rsqrt(square(scaled).mean(-1, keepdim=True) + wide.number("eps") * eps_by)
    normed = scaled * root * (1.0 if before else gain)
    return {"output": (normed * weigh(wide["route_weights"])[..., None]).sum(-2)}


ONE_RANK = Form(
    "routed_rows[r p] route_weights[t k] permuted_idx[t k] norm_weight[h] eps gain_center weight_before_norm"
    " workspace? -> output[t h]",
    finalised,
)


FINALISED: dict[str, Any] = {
    "family": "moe",
    "synonyms": {
        "routed_rows": "gemm2_permuted",
        "route_weights": "expert_weights",
        "permuted_idx": "expanded_idx_to_permuted_idx",
    },
    "scalars": {"eps": 1e-5, "gain_center": 1.0, "weight_before_norm": True, "workspace": 0},
    "sizes": {"r": (24, 9, 17)},
    "where": "h <= p",
    "adversarial_inputs": ("routed_rows",),
    "adversarial": {name: ADVERSARIAL[name] for name in ("tiny", "offset")},
    # some rows below 0 or beyond the last one
    "draws": {"permuted_idx": below("routed_rows", more=2, least=-2), "route_weights": between(0.05, 0.55)},
    "unusual": {**LARGE_AND_SMALL, SEEN: ()},
    # rows whose RMS is a power of two, if the width is a multiple of 8; weights of eight bits
    "lossless": lambda definition: (
        {}
        if (dim(definition, "norm_weight", 0) or 1) % len(BALANCED)
        else {"routed_rows": balanced, "route_weights": full(0, most=8), "norm_weight gain_center": 1.0}
    ),
    "mutants": (
        Mutant("eps x 10", eps_by=10.0),
        Mutant("gain at the other end", flipped=True),
        altered("centre dropped", "gain_center", change=lambda _: 0.0),
        Mutant("weights dropped", weigh=lambda weights: torch.ones_like(weights)),
        Mutant("weights of the next slot", weigh=lambda weights: weights.roll(1, -1)),
        Mutant("the nearest row for one that is not there", skipped=False),
        Mutant("half a row under the root", square=lambda x: x[..., : x.shape[-1] // 2].square()),
        altered("rows one off", "permuted_idx", change=lambda index: torch.where(index > 0, index - 1, index)),
    ),
}
TP_MOE_FINALIZE_RMSNORM = Op("tp_moe_finalize_rmsnorm", ONE_RANK, **FINALISED)
MOE_FINALIZE_RMSNORM_ALLREDUCE = Op(
    "moe_finalize_rmsnorm_allreduce",
    ONE_RANK,
    **FINALISED | {"scalars": {**FINALISED["scalars"], "weight_before_norm": 0}},
    unread={"weight_before_norm": "0 has no half", "workspace": "of one rank nothing"},
)


# Mixtures in models, and which of them the dataset has a form for.

OF_GPT_OSS = "gemm1_alpha, gemm1_clamp_limit, bias"
MORE_THAN_SILU = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")  # numbers of an activation
FP8_BLOCK = f"float8_e4m3fn block {BLOCK}x{BLOCK}"
FORMATS, ROUTED = {FP8_BLOCK: "fp8", "bfloat16": "bf16"}, ("deepseek_v3", "renormalise", "softmax")
CLAMPED = {"bfloat16": "moe_bf16_swiglu_oai"}  # gpt-oss's activation, by expert indices and weights
# Sizes of the definition by which a reference is checked. What decides behaviour (groups, top-k, offset) stays.
SMALL_HIDDEN, SMALL_INTERMEDIATE = 256, 128


def _experts(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Facts of SGLang's FusedMoE module: sizes per rank, routing, activation and quantisation."""
    runner, config = module.moe_runner_config, getattr(module, "quant_config", None)
    more = [name for name in MORE_THAN_SILU if getattr(runner, name, None) is not None]
    more += ["bias"] * any(name.endswith("_bias") for name, _ in module.named_parameters(recurse=False))
    dtype = dtype_name(module.w13_weight) if hasattr(module, "w13_weight") else "packed"
    block = getattr(config, "weight_block_size", None)
    if dtype == "float8_e4m3fn" and block:
        dtype = f"float8_e4m3fn block {block[0]}x{block[1]}"
    elif config is not None:
        dtype = f"{dtype} {type(config).__name__}"
    return ({"beside": ", ".join(more)} if more else {}) | {
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
    """Kernel call of a model's experts, routed by the top-k module beside them, or why no form fits."""
    facts = module.facts
    place = (module.parent, module.parent_class)
    routers = [one for one in reading.modules if one.kind == "top_k" and (one.parent, one.parent_class) == place]
    if not routers:
        return "its router has no top-k beside it, so the routing is not known"
    chosen = routers[-1].facts
    _, _, method = routing.read_top_k(chosen)
    if (no_form := routing.formless(chosen)) is not None:
        return f"experts with {no_form}"
    if facts.get("beside", OF_GPT_OSS) != OF_GPT_OSS:
        return f"experts with more than silu: {facts['beside']}, which no form can say"
    if not facts["gated"] or facts["gate"] != "silu":
        return f"experts with activation {facts['gate']}, gated {facts['gated']}: no form"
    if "scheme" in facts:
        return f"experts with weights packed by {facts['scheme']}: no form"
    clamped: Facts = {"clamped": True} if "beside" in facts else {}
    return call_of(
        module,
        "experts",
        *("experts", "local_experts", "hidden", "intermediate", "quantisation"),
        routing=method,
        top_k=chosen["top_k"],
        groups=chosen["groups"] or 1,
        kept_groups=chosen["kept_groups"] or 1,
        **clamped,
    )


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Facts of transformers' experts in `_call`'s terms; quantisation by config.json, as no weights are loaded."""
    tp, ep, config = evidence.parallel.tp, evidence.parallel.ep, evidence.config
    scheme = config.get("quantization_config") or {}
    block, method = scheme.get("weight_block_size"), scheme.get("quant_method")
    if method == "fp8" and block:
        quantisation = f"float8_e4m3fn block {block[0]}x{block[1]}"
    elif scheme:
        quantisation = f"packed {method}"
    else:
        quantisation = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
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
    if kind == FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
        return f"hidden {hidden} or intermediate {intermediate} per rank is no multiple of the block, {BLOCK}"
    clamped = dict(call.facts).get("clamped")
    known = f"moe_{FORMATS[kind]}_{method}" if kind in FORMATS and method in ROUTED else None
    skeleton = CLAMPED.get(kind) if clamped else known
    if skeleton is None:
        what = "gpt-oss's activation" if clamped else f"{method} routing"
        return f"{kind} weights with {what}: the dataset has no such form"
    local, note = call["local_experts"], ""
    if method != "deepseek_v3" and call["experts"] != local:
        note = f" A rank holds {local} of {call['experts']} experts; the form routes over those alone."

    made: Draft | None = None
    for width, inner in ((SMALL_HIDDEN, SMALL_INTERMEDIATE), (hidden, intermediate)):
        sizes = {"hidden": width, "intermediate": inner, "both": 2 * inner}
        blocks = {f"{name}_blocks": size // BLOCK for name, size in sizes.items()}
        values = dict(call.facts) | sizes | blocks | {"note": note}
        made = draft(MOE.op_type, skeleton, values, scaled_down=made)
    assert made is not None
    return made


MOE.extraction = Extraction(
    readers={"FusedMoE": ("experts", _experts), "TopK": ("top_k", routing.facts_of_top_k)},
    calls={"experts": _call},
    differs={"experts": compared_with("experts", _terms, gated=True)},
    drafts={"experts": lambda call, _: [mixture_draft(call)]},
)
