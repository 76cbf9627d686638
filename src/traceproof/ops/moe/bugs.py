"""Answers of moe: one computation, on altered inputs, forms or choices, with a kernel's roundings in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from traceproof.ops.answers import Answer, Answers, Subject, Tensors, Values
from traceproof.ops.base import tensor
from traceproof.ops.common.quant import BLOCK, Rounding, exact, requantise_fp8, to_bf16, to_fp8
from traceproof.ops.moe import routing_bugs as routing
from traceproof.ops.moe.experts import chosen
from traceproof.ops.moe.form import Form, Scaling, form_of
from traceproof.ops.moe.routing import Choice

MXFP8_BLOCK = 32  # neighbours that share a scale where a kernel keeps activations beside fp4 weights in fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Where a kernel rounds: token, first product, activated product, an expert's result; and its activation."""

    token: Rounding = exact
    first: Rounding = exact
    active: Rounding = exact
    result: Rounding = exact
    activation: Rounding = silu
    backwards: bool = False  # experts and K in the opposite order


PLAIN = Kernel()


def compute(
    subject: Subject,
    inputs: Values | None = None,
    *,
    form: Form | None = None,
    choice: Choice | None = None,
    kernel: Kernel = PLAIN,
) -> Tensors:
    """The outputs in float32 and the definition's dtypes, expert by expert."""
    form = form or form_of(subject.definition)
    inputs = subject.inputs if inputs is None else inputs
    choice = choice or chosen(form, inputs)
    hidden = tensor(inputs, "hidden_states").float()
    if form.scaling == Scaling.FP8_BLOCK:
        hidden = hidden * tensor(inputs, "hidden_states_scale").T.repeat_interleave(BLOCK, 1)
    hidden = kernel.token(hidden)
    local = choice.experts - int(inputs.get("local_expert_offset") or 0)
    output = torch.zeros_like(hidden)
    order = range(form.local)
    for expert in reversed(order) if kernel.backwards else order:
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        if len(tokens):
            weight = choice.weights.float()[tokens, slots][:, None]
            x = hidden[tokens] * weight if form.weight_on_input else hidden[tokens]
            y = _expert(form, inputs, expert, x, kernel)
            output.index_add_(0, tokens, y if form.weight_on_input else y * weight)
    return subject.rounded({"output": output})


def _expert(form: Form, inputs: Values, expert: int, x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        weights = tensor(inputs, name)[expert].float()
        if name + "_scale" in inputs:
            scale = tensor(inputs, name + "_scale")[expert]
            weights = weights * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return rows.flip(1) @ weights.flip(1).T if kernel.backwards else rows @ weights.T

    up, gate = kernel.first(product("gemm1_weights", x)).chunk(2, -1)
    if form.scaling == Scaling.FP8_TENSOR:
        up = up * tensor(inputs, "output1_scales_scalar")[expert]
        gate = gate * tensor(inputs, "output1_scales_gate_scalar")[expert]
    y = product("gemm2_weights", kernel.active(kernel.activation(gate) * up))
    if form.scaling == Scaling.FP8_TENSOR:
        y = y * tensor(inputs, "output2_scales_scalar")[expert]
    return kernel.result(y)


# Right answers


def _requantised(subject: Subject, *, first: bool) -> Tensors | None:
    """As kernels keep activations: fp8 with the scales that go with the form of the weights."""
    kernels = {
        Scaling.FP8_BLOCK: Kernel(
            first=requantise_fp8 if first else to_bf16, active=requantise_fp8, result=to_bf16
        ),
        Scaling.FP8_TENSOR: None if first else Kernel(active=to_fp8, result=to_bf16),
        Scaling.FP4: None
        if first
        else Kernel(
            token=partial(requantise_fp8, block=MXFP8_BLOCK),
            active=partial(requantise_fp8, block=MXFP8_BLOCK),
            result=to_bf16,
        ),
        Scaling.PLAIN: None,
    }
    kernel = kernels[form_of(subject.definition).scaling]
    return None if kernel is None else compute(subject, kernel=kernel)


def _own_routing(subject: Subject) -> Tensors | None:
    choice = routing.in_float32(form_of(subject.definition), subject.inputs)
    return None if choice is None else compute(subject, choice=choice)


RIGHT = (
    Answer("float32 throughout", compute),
    Answer("experts and K in the opposite order", partial(compute, kernel=Kernel(backwards=True))),
    Answer("routing in float32, softmax first", _own_routing),
    Answer(
        "bfloat16 intermediates", partial(compute, kernel=Kernel(first=to_bf16, active=to_bf16, result=to_bf16))
    ),
    Answer("activations kept in fp8", partial(_requantised, first=False)),
    Answer("gemm1's result and activations kept in fp8", partial(_requantised, first=True)),
    Answer("float64", Subject.exact),
)

# Wrong answers


def _altered(name: str, *changed: str, change: Rounding) -> Answer:
    """The right computation on inputs of which some are not what they should be; those absent stay so."""

    def make(subject: Subject) -> Tensors | None:
        present = [one for one in changed if one in subject.inputs]
        if not present:
            return None
        return compute(subject, subject.with_inputs(**{one: change(subject.tensor(one)) for one in present}))

    return Answer(name, make)


def _number(name: str, scalar: str, change: Callable[[float], float]) -> Answer:
    def make(subject: Subject) -> Tensors | None:
        value = subject.inputs.get(scalar)
        if not isinstance(value, int | float):
            return None
        return compute(subject, subject.with_inputs(**{scalar: change(value)}))

    return Answer(name, make)


def _rerouted(name: str, change: routing.Change) -> Answer:
    def make(subject: Subject) -> Tensors | None:
        choice = change(form_of(subject.definition), subject.inputs)
        return None if choice is None else compute(subject, choice=choice)

    return Answer(name, make)


def _weight_elsewhere(subject: Subject) -> Tensors:
    form = form_of(subject.definition)
    return compute(subject, form=replace(form, weight_on_input=not form.weight_on_input))


def _roll(value: torch.Tensor, axis: int, shift: int = 1) -> torch.Tensor:
    """`torch.roll`, which knows no float8."""
    narrow = value.dtype.itemsize == 1
    bits = value.view(torch.uint8) if narrow else value
    return bits.roll(shift, axis).view(value.dtype) if narrow else bits.roll(shift, axis)


def _halves_swapped(value: torch.Tensor) -> torch.Tensor:
    return _roll(value, 1, value.shape[1] // 2)


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(-1, -2).reshape(value.shape)


def _scales_swapped(subject: Subject) -> Tensors | None:
    names = ("output1_scales_scalar", "output1_scales_gate_scalar")
    if names[0] not in subject.inputs:
        return None
    one, other = (subject.tensor(name) for name in names)
    return compute(subject, subject.with_inputs(**{names[0]: other, names[1]: one}))


def _last_columns_dropped(value: torch.Tensor) -> torch.Tensor:
    """A kernel that stops one tile of K early."""
    return torch.cat([value[..., :-BLOCK], torch.zeros_like(value[..., -BLOCK:])], -1)


GEMM1 = ("gemm1_weights", "gemm1_weights_scale")
TENSOR_SCALES = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")

WRONG = (
    _altered("gate and up swapped", *GEMM1, change=_halves_swapped),
    _altered("gemm1's scales transposed", GEMM1[1], change=_transposed),
    _altered("gemm2's scales transposed", "gemm2_weights_scale", change=_transposed),
    _altered("token scales read as [tokens, blocks]", "hidden_states_scale", change=_transposed),
    _altered("gemm1's scales one block off", GEMM1[1], change=partial(_roll, axis=-1)),
    _altered("gemm2's scales one row of blocks off", "gemm2_weights_scale", change=partial(_roll, axis=-2)),
    _altered("token scales one token off", "hidden_states_scale", change=partial(_roll, axis=-1)),
    _altered("scales of tokens ignored", "hidden_states_scale", change=torch.ones_like),
    _altered("scales of gemm1 ignored", GEMM1[1], change=torch.ones_like),
    _altered("scales of gemm2 ignored", "gemm2_weights_scale", change=torch.ones_like),
    _altered("scales of the next expert", *TENSOR_SCALES, change=partial(_roll, axis=0)),
    _altered("scale of the result ignored", TENSOR_SCALES[2], change=torch.ones_like),
    Answer("scales of gate and up swapped", _scales_swapped),
    _altered("weights of the next expert", *GEMM1, change=partial(_roll, axis=0)),
    _altered("last tile of K dropped in gemm1", GEMM1[0], change=_last_columns_dropped),
    _altered("last tile of K dropped in gemm2", "gemm2_weights", change=_last_columns_dropped),
    Answer("gelu for silu", partial(compute, kernel=Kernel(activation=gelu))),
    Answer("sigmoid for silu", partial(compute, kernel=Kernel(activation=torch.sigmoid))),
    Answer("routing weight at the other end", _weight_elsewhere),
    _number("local expert offset plus one", "local_expert_offset", lambda offset: offset + 1),
    _number("local expert offset ignored", "local_expert_offset", lambda _: 0),
    _number("scaling factor dropped", "routed_scaling_factor", lambda _: 1.0),
    *(_rerouted(name, change) for name, change in routing.WRONG.items()),
)

ANSWERS = Answers(RIGHT, WRONG)
