"""SGLang's norms: CUDA kernels that it compiles at their first use, and Triton kernels.

Those of its kernel package are no second opinion: `sgl_kernel.rmsnorm` and its siblings call FlashInfer where it
is installed, and what they call otherwise is FlashInfer's norm.cuh, compiled into the package.
"""

from collections.abc import Mapping

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Module, Outputs, Values, dim, tensor
from traceproof.ops.rmsnorm.ground_truths import FUSED_ADD, NORM
from traceproof.ops.rmsnorm.oracle import OP

SM = ((8, 0), (12, 9))
HALVES = frozenset({torch.float16, torch.bfloat16})
WARP_SIZES = frozenset({64, 128, 256})  # one warp per row
LARGEST = 16384  # channels that a block of 1024 threads holds
LARGEST_FUSED = 8192


def _dtypes(definition: Definition) -> frozenset[torch.dtype]:
    return frozenset(TORCH_DTYPES[spec.dtype] for spec in definition.inputs.values())


def _hidden(definition: Definition) -> int:
    """Channels of a row; 0 if the definition leaves them open."""
    return dim(definition, "hidden_states", -1) or 0


def _plain(definition: Definition) -> bool:
    """Whether the weight is stored as it is used, and all tensors have one dtype."""
    return OP.weight_offset(definition) == 0.0 and len(_dtypes(definition)) == 1


def _compiled(definition: Definition) -> bool:
    """Sizes that the kernel's own check lets through."""
    hidden = _hidden(definition)
    fits = hidden in WARP_SIZES or (
        256 < hidden <= LARGEST and hidden % (256 if hidden <= LARGEST_FUSED else 512) == 0
    )
    return _plain(definition) and _dtypes(definition) <= HALVES and fits


def _compiled_fused(definition: Definition) -> bool:
    hidden = _hidden(definition)
    fits = 0 < hidden <= LARGEST_FUSED and hidden % 16 == 0
    return _plain(definition) and _dtypes(definition) <= HALVES and fits


def _gemma(definition: Definition) -> bool:
    return OP.weight_offset(definition) == 1.0


def _norm(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """Writes where it is told; without that it would overwrite its input."""
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    output = torch.empty_like(hidden)
    api["rmsnorm"](hidden, weight, output, OP.eps(definition))
    return {"output": output}


def _fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """In place: the first argument becomes the output, the second the sum."""
    output, total = tensor(inputs, "hidden_states").clone(), tensor(inputs, "residual").clone()
    api["fused_add_rmsnorm"](output, total, tensor(inputs, "weight"), OP.eps(definition))
    return _asked(definition, {"output": output, "residual_out": total})


def _triton(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    return {"output": api["triton_rmsnorm"](hidden, weight, OP.eps(definition))}


def _triton_gemma(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, weight = tensor(inputs, "hidden_states"), tensor(inputs, "weight")
    return {"output": api["triton_gemma_rmsnorm"](hidden, weight, OP.eps(definition))}


def _triton_gemma_fused_add(api: Api, definition: Definition, inputs: Values) -> Outputs:
    hidden, residual = tensor(inputs, "hidden_states"), tensor(inputs, "residual")
    output, total = api["triton_gemma_fused_add_rmsnorm"](
        hidden, residual, tensor(inputs, "weight"), OP.eps(definition)
    )
    return _asked(definition, {"output": output, "residual_out": total})


def _asked(definition: Definition, outputs: Mapping[str, torch.Tensor]) -> Outputs:
    return {name: outputs[name] for name in definition.outputs}


def _dtype(definition: Definition) -> str:
    """The data's dtype as a module's argument."""
    return str(TORCH_DTYPES[definition.inputs["hidden_states"].dtype])


def _module(definition: Definition, _: tuple[int, int]) -> tuple[Module, ...]:
    return (Module("gen_rmsnorm", (_hidden(definition), _dtype(definition)), compiles=True),)


def _fused_module(definition: Definition, _: tuple[int, int]) -> tuple[Module, ...]:
    """One for all sizes; the product with the weight is not rounded before."""
    return (Module("gen_fused_add_rmsnorm", (_dtype(definition), False), compiles=True),)


ADAPTERS = (
    Adapter("layernorm.norm.rmsnorm", NORM, _norm, ("rmsnorm",), accepts=_compiled, modules=_module, sm=SM),
    Adapter(
        "layernorm.norm.fused_add_rmsnorm",
        FUSED_ADD,
        _fused_add,
        ("fused_add_rmsnorm",),
        accepts=_compiled_fused,
        modules=_fused_module,
        sm=SM,
    ),
    Adapter("layernorm.fused_rmsnorm", NORM, _triton, ("triton_rmsnorm",), accepts=_plain, sm=SM),
    Adapter(
        "layernorm.minimax_m3_rmsnorm.gemma_rmsnorm",
        NORM,
        _triton_gemma,
        ("triton_gemma_rmsnorm",),
        accepts=_gemma,
        sm=SM,
    ),
    Adapter(
        "layernorm.minimax_m3_rmsnorm.gemma_fused_add_rmsnorm",
        FUSED_ADD,
        _triton_gemma_fused_add,
        ("triton_gemma_fused_add_rmsnorm",),
        accepts=_gemma,
        sm=SM,
    ),
)
