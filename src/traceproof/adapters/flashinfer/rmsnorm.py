"""FlashInfer's norms."""

from __future__ import annotations

from traceproof.adapters.base import Adapter, Api, Outputs, names, tensor
from traceproof.dataset.definition import Definition
from traceproof.jit import Module
from traceproof.ops.base import Values
from traceproof.ops.rmsnorm import OP

MODULES = (Module("gen_norm"),)


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    return {"output": api["rmsnorm"](hidden, weight, eps=OP.eps(definition))}


def _fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In place: the first argument becomes the output, the second the sum."""
    output, total = tensor(inputs, "hidden_states").clone(), tensor(inputs, "residual").clone()
    api["fused_add_rmsnorm"](output, total, tensor(inputs, "weight"), eps=OP.eps(definition))
    outputs = {"output": output, "residual_out": total}
    return {name: outputs[name] for name in definition.outputs}


def _gemma(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    return {"output": api["gemma_rmsnorm"](hidden, weight, eps=OP.eps(definition))}


def _gemma_fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In place, as the plain one."""
    output, total = tensor(inputs, "hidden_states").clone(), tensor(inputs, "residual").clone()
    api["gemma_fused_add_rmsnorm"](output, total, tensor(inputs, "weight"), eps=OP.eps(definition))
    outputs = {"output": output, "residual_out": total}
    return {name: outputs[name] for name in definition.outputs}


def _is_plain(definition: Definition) -> bool:
    return OP.weight_offset(definition) == 0.0


def _is_gemma(definition: Definition) -> bool:
    return OP.weight_offset(definition) == 1.0


ADAPTERS = (
    Adapter(
        name="norm.rmsnorm",
        inputs=names("hidden_states weight"),
        outputs=names("output"),
        accepts=_is_plain,
        apis=("rmsnorm",),
        call=_norm,
        modules=lambda _, __: MODULES,
        sm=((7, 5), (12, 9)),
        rows="hidden_states",
    ),
    Adapter(
        name="norm.fused_add_rmsnorm",
        inputs=names("hidden_states residual weight"),
        outputs=names("output residual_out"),
        accepts=_is_plain,
        apis=("fused_add_rmsnorm",),
        call=_fused_add,
        modules=lambda _, __: MODULES,
        sm=((7, 5), (12, 9)),
        rows="hidden_states",
    ),
    Adapter(
        name="norm.gemma_rmsnorm",
        inputs=names("hidden_states weight"),
        outputs=names("output"),
        accepts=_is_gemma,
        apis=("gemma_rmsnorm",),
        call=_gemma,
        modules=lambda _, __: MODULES,
        sm=((7, 5), (12, 9)),
        rows="hidden_states",
    ),
    Adapter(
        name="norm.gemma_fused_add_rmsnorm",
        inputs=names("hidden_states residual weight"),
        outputs=names("output residual_out"),
        accepts=_is_gemma,
        apis=("gemma_fused_add_rmsnorm",),
        call=_gemma_fused_add,
        modules=lambda _, __: MODULES,
        sm=((7, 5), (12, 9)),
        rows="hidden_states",
    ),
)
