"""FlashInfer's norms."""

from dataclasses import replace

from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Module, Outputs, Values, tensor
from traceproof.ops.rmsnorm.ground_truths import FUSED_ADD, NORM
from traceproof.ops.rmsnorm.oracle import OP

MODULES = (Module("gen_norm"),)


def _gemma(definition: Definition) -> str:
    """What the names of the kernels for a weight that is stored minus one begin with."""
    return "gemma_" if OP.weight_offset(definition) else ""


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    return {"output": api[_gemma(definition) + "rmsnorm"](hidden, weight, eps=OP.eps(definition))}


def _fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In place: the first argument becomes the output, the second the sum."""
    output, total = tensor(inputs, "hidden_states").clone(), tensor(inputs, "residual").clone()
    weight = tensor(inputs, "weight")
    api[_gemma(definition) + "fused_add_rmsnorm"](output, total, weight, eps=OP.eps(definition))
    outputs = {"output": output, "residual_out": total}
    return {name: outputs[name] for name in definition.outputs}


def _adapters(plain: str, fused: str, offset: float) -> tuple[Adapter, Adapter]:
    """For weights that are stored less `offset`, by the API keys of the norm and of the fused one."""

    def accepts(definition: Definition) -> bool:
        return OP.weight_offset(definition) == offset

    norm = Adapter(f"norm.{plain}", NORM, _norm, (plain,), accepts=accepts, modules=lambda _, __: MODULES, sm=SM75)
    added = replace(norm, name=f"norm.{fused}", signature=FUSED_ADD, apis=(fused,), call=_fused_add)
    return norm, added


ADAPTERS = (
    *_adapters("rmsnorm", "fused_add_rmsnorm", 0.0),
    *_adapters("gemma_rmsnorm", "gemma_fused_add_rmsnorm", 1.0),
)
