"""Which of the MoE forms a definition is: read off its inputs, axes and outputs, and its constants."""

from dataclasses import dataclass
from enum import StrEnum

from traceproof.dataset.definition import Definition, DType
from traceproof.ops.base import Unsupported
from traceproof.ops.common.quant import BLOCK
from traceproof.ops.moe.routing import Method, Routing

COMMON = {"hidden_states", "gemm1_weights", "gemm2_weights"}
BLOCK_SCALES = {"hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"}
TENSOR_SCALES = {"output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"}
ROUTING = {"topk_ids", "routing_logits", "routing_bias", "routed_scaling_factor", "local_expert_offset"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A mixture of experts: out = sum over chosen experts of weight * (silu(x @ gate.T) * (x @ up.T)) @ down.T.

    `gemm1_weights` holds up in the first half of its rows and gate in the second. Experts `offset ..
    offset + local` of `experts` are here; the others' share is left out.
    """

    scaling: Scaling
    routing: Routing
    tokens: str  # name of the var axis
    experts: int
    local: int
    hidden: int
    intermediate: int
    has_bias: bool
    has_offset: bool
    # the routing weight multiplies the token before the first product instead of the result (FlashInfer's
    # per-tensor kernel with Llama 4 routing)
    weight_on_input: bool

    @property
    def weight_count(self) -> int:
        """Elements of both weight tensors."""
        return 3 * self.local * self.hidden * self.intermediate


def form_of(definition: Definition) -> Form:
    """Read the form. Raises Unsupported: it is none of the known ones; the text says why."""
    if missing := sorted(COMMON - definition.inputs.keys()):
        raise Unsupported(f"inputs {missing} are missing")
    if list(definition.outputs) != ["output"]:
        raise Unsupported(f"outputs are {list(definition.outputs)}, not just 'output'")
    scaling = _scaling(definition)
    local, rows, hidden = _const_shape(definition, "gemm1_weights", 3)
    second = _const_shape(definition, "gemm2_weights", 3)
    intermediate = second[2]
    if second != (local, hidden, rows // 2) or rows % 2:
        raise Unsupported(f"gemm1_weights is {[local, rows, hidden]}, gemm2_weights {list(second)}: not gated")
    if scaling == Scaling.FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
        raise Unsupported(f"hidden size {hidden} or intermediate size {intermediate} is no multiple of {BLOCK}")
    routing = _routing(definition)
    experts = _expert_count(definition, local)
    _check_routing(routing, experts)
    return Form(
        scaling=scaling,
        routing=routing,
        tokens=_tokens_axis(definition),
        experts=experts,
        local=local,
        hidden=hidden,
        intermediate=intermediate,
        has_bias="routing_bias" in definition.inputs,
        has_offset="local_expert_offset" in definition.inputs,
        weight_on_input=scaling == Scaling.FP8_TENSOR and routing.method == Method.LLAMA4,
    )


def _scaling(definition: Definition) -> Scaling:
    present = definition.inputs.keys() - COMMON - ROUTING
    kind = definition.inputs["gemm1_weights"].dtype
    if present == BLOCK_SCALES and kind == DType.FLOAT8_E4M3FN:
        return Scaling.FP8_BLOCK
    if present == TENSOR_SCALES and kind == DType.FLOAT8_E4M3FN:
        return Scaling.FP8_TENSOR
    if not present and kind == DType.FLOAT32:
        return Scaling.FP4
    if not present and kind in {DType.BFLOAT16, DType.FLOAT16}:
        return Scaling.PLAIN
    raise Unsupported(f"weights are {kind.value} with the inputs {sorted(present)} beside routing and weights")


def _routing(definition: Definition) -> Routing:
    if ("topk_ids" in definition.inputs) == ("routing_logits" in definition.inputs):
        raise Unsupported("the choice of experts needs either routing_logits or topk_ids")
    if "topk_ids" in definition.inputs:
        packed = definition.constants.get("topk_ids") == "packed"
        width = _const_shape(definition, "topk_ids", 2)[1]
        return Routing(method=Method.PACKED if packed else Method.UNIFORM, top_k=width)
    top_k, groups, top_groups = (_number(definition, name) for name in ("top_k", "n_group", "topk_group"))
    if top_k is None:
        raise Unsupported("nobody gives top_k a number, nor does the reference")
    if {"routing_bias", "routed_scaling_factor"} <= definition.inputs.keys():
        if (groups is None) != (top_groups is None):
            raise Unsupported("of n_group and topk_group only one is given")
        return Routing(method=Method.DEEPSEEK, top_k=top_k, groups=groups or 1, top_groups=top_groups or 1)
    if top_k == 1 and ("routing_bias" in definition.inputs or definition.inputs.keys() >= TENSOR_SCALES):
        return Routing(method=Method.LLAMA4, top_k=1)
    if "routing_bias" in definition.inputs:
        raise Unsupported("a routing_bias without routed_scaling_factor is known for top_k 1 only")
    return Routing(method=Method.RENORMALISE, top_k=top_k)


def _check_routing(routing: Routing, experts: int) -> None:
    per_group, rest = divmod(experts, routing.groups)
    if rest or not 0 < routing.top_groups <= routing.groups:
        raise Unsupported(f"{experts} experts in {routing.groups} groups, {routing.top_groups} of them kept")
    if routing.groups > 1 and per_group < 2:  # a group counts its two best
        raise Unsupported("a group needs two experts")
    if not 0 < routing.top_k <= per_group * routing.top_groups:
        raise Unsupported(f"top_k {routing.top_k} of {per_group * routing.top_groups} experts")


def _number(definition: Definition, name: str) -> int | None:
    found = definition.constants.get(name)
    return found if isinstance(found, int) else None


def _const_shape(definition: Definition, name: str, rank: int) -> tuple[int, ...]:
    """Shape of an input, with -1 for the var axis."""
    shape = definition.inputs[name].shape
    if shape is None or len(shape) != rank:
        raise Unsupported(f"{name} has {'no' if shape is None else len(shape)} axes instead of {rank}")
    return tuple(definition.const_axes.get(axis, -1) for axis in shape)


def _expert_count(definition: Definition, local: int) -> int:
    if "routing_logits" in definition.inputs:
        return _const_shape(definition, "routing_logits", 2)[1]
    return definition.const_axes.get("num_experts", local)


def _tokens_axis(definition: Definition) -> str:
    shape = definition.inputs["hidden_states"].shape
    if shape is None or len(shape) != 2 or definition.var_axes != (shape[0],):
        raise Unsupported("the number of tokens must be the one var axis, and the first of hidden_states")
    return shape[0]
